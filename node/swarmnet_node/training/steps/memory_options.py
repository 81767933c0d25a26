"""Options for the memory of a worker while it trains. None changes what workers exchange."""

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["auto", "float32", "bfloat16"]
OptimizerStates = Literal["float32", "8bit", "cpu"]


@dataclass(frozen=True)
class MemoryOptions:
    """The options of ``train join`` about memory."""

    precision: Precision = "auto"
    """Format of the weights and activations of forward and backward passes. ``auto``: bfloat16 on
    CUDA, otherwise float32. The optimizer always updates float32 weights."""
    recompute: bool = False
    """Keep only the inputs of blocks during the forward pass, and compute the rest again during the
    backward pass (gradient checkpointing)."""
    optimizer_states: OptimizerStates = "float32"
    """``8bit``: AdamW's moments take a byte each. ``cpu``: float32 weights, their gradients and the
    moments are in the memory of the CPU, and the device has only the weights that it computes with
    (ZeRO-Offload, Ren et al. 2021, section 4)."""

    def computes_in_bfloat16(self, device_type: str) -> bool:
        """Return whether passes on a device of this type compute in bfloat16."""
        return self.precision == "bfloat16" or (self.precision == "auto" and device_type == "cuda")


PRECISIONS: tuple[str, ...] = get_args(Precision)
OPTIMIZER_STATES: tuple[str, ...] = get_args(OptimizerStates)
AUTOMATIC = MemoryOptions()
"""The options unless the user chose others."""
AS_STORED = MemoryOptions("float32")
"""The options of a job with forward passes only: its method decides the format of weights."""
