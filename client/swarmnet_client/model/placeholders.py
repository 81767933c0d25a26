"""Placeholders for a model's blocks: names and shapes of their weights, without memory.

The weights are on the hosts. PEFT and other code that looks at names and shapes sees the whole
model.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from swarmnet_protocols.errors import ConfigError

Apply = Callable[[torch.Tensor], torch.Tensor]


class RemoteWeight(nn.Parameter):
    """A weight that only hosts have. It stores a single NaN, whatever its shape, so that computing
    with it shows.

    Reading its values, or setting others, raises ``ConfigError``.
    """

    def __new__(cls, like: torch.Tensor, device: torch.device) -> "RemoteWeight":
        value = torch.full((), math.nan, dtype=like.dtype, device=device)
        made: RemoteWeight = super().__new__(cls, value.expand(like.shape), requires_grad=False)
        return made

    @property
    def data(self) -> torch.Tensor:
        raise ConfigError(
            "the blocks' weights are on the swarm's hosts: this machine cannot read, copy, change or merge them",
            hint="use LoRA that does not need them (no DoRA, init_lora_weights=True); merge on the plain model, from a saved "
            "adapter",
        )

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if any(value.stride()):
            _ = self.data
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def applied(self, function: Apply) -> torch.Tensor:
        """Return the result of ``function`` (a change of type or device) on this weight, again
        without memory."""
        return function(self.detach().as_strided((), ())).expand(self.shape)


class Placeholder(nn.Module):
    """Takes the place of one block. Block 0 passes hidden states to ``swarm_call``, which runs all
    blocks; the others return them."""

    is_tuple = False
    """True if the family's layers return a tuple that starts with the hidden states."""

    def __init__(self, layer: nn.Module, block: int, device: torch.device) -> None:
        """Takes over the modules and attributes of ``layer``, which is on the meta device, and
        gives up its tensors."""
        super().__init__()
        self.__dict__.update(layer.__dict__)
        self.block = block
        for module in self.modules():
            module._buffers.clear()
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = RemoteWeight(parameter, device)
        self._native = [
            (path, module._modules, dict(module._modules)) for path, module in self.named_modules()
        ]
        self._weights = list(self.parameters())
        self.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_do_not_miss)  # type: ignore[no-untyped-call]

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, swarm_call: Apply, **__: Any
    ) -> torch.Tensor | tuple[torch.Tensor]:
        outputs = swarm_call(hidden_states) if self.block == 0 else hidden_states
        return (outputs,) if self.is_tuple else outputs

    @property
    def is_frozen(self) -> bool:
        """True if none of the block's own weights requires gradients."""
        return not any(weight.requires_grad for weight in self._weights)

    def replaced(self) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
        """Yield the modules that were put into the block, by PEFT for example: path, module, and
        the module that was there before."""
        for path, now, before in self._native:
            if now != before:
                for name, module in now.items():
                    if module is not None and module is not before.get(name):
                        yield f"{path}.{name}".lstrip("."), module, before.get(name)

    def _apply(self, fn: Apply, recurse: bool = True) -> "Placeholder":
        def apply(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.applied(fn) if isinstance(tensor, RemoteWeight) else fn(tensor)

        applied: Placeholder = super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        return applied


def stand_ins(layers: nn.ModuleList, device: torch.device) -> nn.ModuleList:
    """Return placeholders for the decoder layers of a model, which are on the meta device."""
    return nn.ModuleList(Placeholder(layer, block, device) for block, layer in enumerate(layers)).eval()


@torch.inference_mode()
def match_layers(model: Any) -> None:
    """Find out by a trial whether the layers of a model's family return a tuple, and have its
    placeholders do the same."""
    stack = model.base_model
    inputs = torch.zeros(1, 2, model.config.hidden_size, dtype=model.dtype, device=model.device)
    try:
        outputs = stack(inputs_embeds=inputs, use_cache=False, swarm_call=lambda states: states)
        is_tuple = outputs.last_hidden_state.shape != inputs.shape
    except (IndexError, RuntimeError):  # the model unpacked a tensor in place of a tuple
        is_tuple = True
    for layer in stack.layers:
        layer.is_tuple = is_tuple


def _remote_names(module: nn.Module) -> list[str]:
    return [
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if isinstance(parameter, RemoteWeight)
    ]


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave weights of hosts out of a state dict."""
    for name in _remote_names(module):
        state_dict.pop(prefix + name)


def _do_not_miss(module: nn.Module, incompatible: Any) -> None:
    """Do not report weights of hosts as missing from a loaded state dict."""
    suffixes = tuple(f".layers.{module.block}.{name}" for name in _remote_names(module))
    incompatible.missing_keys[:] = [
        key for key in incompatible.missing_keys if not f".{key}".endswith(suffixes)
    ]
