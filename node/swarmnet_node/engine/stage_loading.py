"""Loads the blocks of a node as a stage, in C where C has a step for them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swarmnet_node.engine.exact_stage import ExactStage
from swarmnet_node.engine.stage import Stage

if TYPE_CHECKING:
    import torch

    from swarmnet_node.engine.kernels.backend import Backend
    from swarmnet_protocols.models import LocalModel
    from swarmnet_protocols.models.checkpoints.expert_weights import ChosenExperts
    from swarmnet_protocols.quantization.formats import Precision

_ACTIVATIONS = {"float32": "", "bfloat16": "/bf16", "float16": "/f16"}
"""The part of a precision that names the activations."""


def load_stage(  # noqa: PLR0913 - a model's part, and how to compute it
    model: "LocalModel",
    start: int,
    end: int,
    *,
    dtype: "torch.dtype",
    device: "torch.device",
    backend: "Backend | None" = None,
    packed: bool = False,
    quantized: "Precision | None" = None,
    devices: "Sequence[torch.device]" = (),
    experts: "ChosenExperts | None" = None,
) -> "Stage":
    """Load blocks [start, end).

    ``packed``, ``quantized`` and ``experts`` are as in ``LocalModel.load_span``. ``devices``:
    the device of each block; by default all are on ``device``. ``backend``: by default torch.
    Raises ``ConfigError`` for a family whose layers have other state than keys, values and
    recurrent states.
    """
    precision = precision_of(model, quantized, dtype)
    is_packed = packed and not experts
    is_float32 = device.type == "cpu" and not _ACTIVATIONS[str(dtype).removeprefix("torch.")]
    if is_packed and is_float32 and backend is not None:
        found = ExactStage.loaded(model, start, end, backend, quantized, precision)
        if found is not None:
            return found
    from swarmnet_node.engine.torch_layers.torch_stage import TORCH, TorchStage

    return TorchStage.loaded(
        model,
        start,
        end,
        dtype=dtype,
        devices=tuple(devices) or (device,) * (end - start),
        backend=backend or TORCH,
        packed=packed,
        quantized=quantized,
        experts=experts,
        precision=precision,
    )


def precision_of(model: "LocalModel", quantized: "Precision | None", dtype: Any) -> str:
    """Return the precision of weights and activations, as a host announces it."""
    name = str(dtype).removeprefix("torch.")
    return (model.precision if quantized is None else quantized.name) + _ACTIVATIONS[name]
