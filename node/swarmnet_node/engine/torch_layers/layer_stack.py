"""Loads the layers of a stage as one decoder stack, on one device or spread over several."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from swarmnet_node.engine.torch_layers.attention import IMPLEMENTATION
from swarmnet_protocols.models.partial_model import with_blocks

if TYPE_CHECKING:
    pass


def load_stack(
    load_span: Callable[..., Any], config: Any, start: int, devices: Sequence[torch.device]
) -> Any:
    """Load the blocks from ``start`` on as one decoder stack. ``devices`` has the device of each
    block.

    ``load_span`` loads a span of blocks onto one device: ``LocalModel.load_span`` with its other
    arguments bound.
    """
    spans: list[Any] = []
    at = start
    for device, blocks in groupby(devices):
        until = at + len(list(blocks))
        spans.append(load_span(at, until, device=device))
        at = until
    return _joined(spans, config, start, at)


def bring_inputs(model: Any, devices: Sequence[torch.device]) -> None:
    """Make each layer move its inputs to its own device, if there are several."""
    if len(set(devices)) > 1:
        for layer, device in zip(model.layers, devices, strict=True):
            layer.register_forward_pre_hook(partial(_bring_inputs, device), with_kwargs=True)


def _bring_inputs(device: torch.device, _: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Move the inputs of a layer, hidden states and rotary angles, to its device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))


def _joined(spans: Sequence[Any], config: Any, start: int, end: int) -> Any:
    """Return one decoder stack with the layers of all spans, each on its device.

    The other modules come from the first span.
    """
    whole, *others = spans
    for span in others:
        for module in span.layers.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx += len(whole.layers)
        whole.layers.extend(span.layers)
    if others:
        whole.config = with_blocks(config, start, end)
        for module in whole.layers.modules():
            if hasattr(module, "config"):  # each layer has its own span's config
                module.config._attn_implementation = IMPLEMENTATION
    return whole
