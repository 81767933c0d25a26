"""The model that a node has read, and the parts of it that the node loads."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.machine.devices import CPU, is_out_of_memory

if TYPE_CHECKING:
    import torch

    from swarmnet_node.engine.device_memory import DeviceLayout
    from swarmnet_node.engine.kernels.backend import Backend
    from swarmnet_node.engine.stage import Stage
    from swarmnet_node.experts.trunk import CacheOptions
    from swarmnet_protocols.directory.expert_announcements import BlockExperts
    from swarmnet_protocols.models import LocalModel
    from swarmnet_protocols.quantization.formats import Precision
    from swarmnet_protocols.quantization.packed_experts import ExpertsModule


@dataclass(frozen=True)
class LoadedModel:
    """The model, and the blocks to host: named in the options, or as many as fit into the
    limits."""

    model: "LocalModel"
    dtype: Any
    """float32 of numpy, or a dtype of torch."""
    devices: "tuple[torch.device, ...]"
    """One device, or several GPUs that share the blocks."""
    backend: "Backend"
    blocks: tuple[int, int] | None
    num_blocks: int
    layout: "DeviceLayout | None"
    """The blocks on each accelerator, as its memory allows. None on a CPU."""
    is_packed: bool
    """True if quantised weights stay as the checkpoint stores them."""
    quantized: "Precision | None"
    """The precision that weights of 16 and 32 bits are rounded to. None keeps them."""
    preloaded: "list[Stage]"
    """The stage, if it was loaded while the node connected. ``load`` uses it once: after a pause,
    blocks are loaded again."""
    experts: "BlockExperts | None"
    """The routed experts that the options name. Empty if the node is still to choose them. None for
    all experts of its blocks."""
    has_blocks: bool
    """True if the node hosts blocks, not only experts."""
    cache: "CacheOptions | None" = None
    """The experts of its blocks that stay on disk until needed. None if all are in memory."""

    def load(self, start: int, end: int) -> "Stage":
        """Load blocks [start, end). Raises ``OutOfResources`` if a device has no room."""
        from swarmnet_node.engine.stage_loading import load_stage

        if self.preloaded:
            return self.preloaded.pop()
        try:
            stage = load_stage(
                self.model,
                start,
                end,
                dtype=self.dtype,
                device=self.devices[0],
                backend=self.backend,
                packed=self.is_packed,
                devices=() if self.layout is None else self.layout.devices(end - start),
                quantized=self.quantized,
                experts=self.experts
                and {block: self.experts[block] for block in range(start, end) if block in self.experts},
            )
            if self.layout is not None:
                stage.preallocate(self.layout.cache_bytes)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfResources(
                f"blocks {start}:{end} do not fit into the memory of {', '.join(map(str, self.devices))}",
                hint="host fewer blocks: --num-blocks, or allow more: --max-gpu-mem",
            ) from error
        return stage

    def on_cpu(self) -> "LoadedModel":
        """Return the model with blocks in the machine's memory, whatever the node computes on."""
        if self.devices[0].type == "cpu":
            return self
        return replace(self, devices=(CPU,), layout=None, preloaded=[])

    def load_experts(self, block: int, experts: "Collection[int]") -> "ExpertsModule":
        """Load some experts of a block, on any thread."""
        module: Any = self.model.load_experts(
            block, experts, dtype=self.dtype, device=self.devices[0], quantized=self.quantized
        )
        loaded: ExpertsModule = module
        return loaded
