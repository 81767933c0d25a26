"""The blocks that one node hosts.

A stage computes forwards of packed batches with KV caches, and passes of whole sequences without.
There are two kinds, and ``stage_loading.py`` chooses:

- ``ExactStage`` (``exact_stage.py``): C computes all layers together, with the same bits on every
  processor. It needs neither torch nor transformers, except for adapters and gradients.
- ``TorchStage`` (``torch_layers/torch_stage.py``): every family, dtype and device.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swarmnet_node.engine.caches.kv_cache import KVGeometry, Prefix, SequenceCache
from swarmnet_protocols.models.sizes import LayerWidths
from swarmnet_protocols.routing import host_info

if TYPE_CHECKING:
    import torch

    from swarmnet_node.engine.routed_experts import RoutedExperts
    from swarmnet_node.engine.torch_layers.adapters import StageAdapter
    from swarmnet_node.engine.torch_layers.autograd_graphs import AutogradGraph
    from swarmnet_protocols.arrays import Array
    from swarmnet_protocols.quantization.packed_experts import ExpertsModule


class Stage(ABC):
    """Blocks [start, end) of a model, ready to run. Not thread-safe: one thread does all
    forwards.

    Hidden states [n, hidden size] go in as arrays or tensors, and come out as the kind that the
    stage computes with.
    """

    hidden_size: int
    precision: str
    """The precision of weights and activations, as in ``HostRecord``."""
    blocks: int
    first: int
    """Number of the first layer, counted in the loaded stage. A stage that is a part of the loaded
    one may begin later than at 0."""
    weight_bytes: int
    widths: LayerWidths
    geometry: KVGeometry
    dtype: Any
    device: "torch.device"
    devices: "tuple[torch.device, ...]"
    """The device of each layer."""
    experts: "RoutedExperts"

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """True if sessions get the same bits on every processor: C computes all of their
        positions."""

    @property
    def arithmetic(self) -> str:
        """The arithmetic of all positions of sessions, as in ``HostRecord``."""
        return host_info.EXACT if self.is_exact else host_info.TORCH

    @property
    def is_on_accelerator(self) -> bool:
        """True if weights and caches are in other memory than the machine's own."""
        return bool(self.device.type != "cpu")

    @abstractmethod
    def preallocate(self, cache_bytes: int) -> None:
        """Allocate an arena of ``cache_bytes`` for the KV caches of all later sequences.

        For accelerators. No sequence may exist yet.
        """

    @abstractmethod
    def add_experts(self, layer: int, loaded: "ExpertsModule") -> None:
        """Add the experts of ``loaded``, a module of the same layer, to the stage.

        May be called from another thread.
        """

    @abstractmethod
    def part(self, start: int, end: int) -> "Stage":
        """Return a stage of blocks [start, end) of this one, on the same weights."""

    @abstractmethod
    def load_adapter(self, tensors: "Mapping[str, torch.Tensor]", start: int) -> "StageAdapter":
        """Make an adapter for this stage and its parts, from tensors by name.

        ``start``: the block of the first layer of the loaded stage. Raises ``ProtocolViolation``
        for tensors that do not fit.
        """

    def new_sequence(self, adapter: "StageAdapter | None" = None) -> SequenceCache:
        """Return the KV cache of a new sequence, with the adapter's prefix if any. Allocates
        nothing yet."""
        lora = adapter.lora if adapter is not None and not adapter.lora.is_empty else None
        return SequenceCache(self.geometry, lora, self._prefix(adapter))

    def _prefix(self, adapter: "StageAdapter | None") -> list[Prefix]:
        """Return the adapter's prefix for each layer of this stage. Empty without a prefix."""
        own = adapter.prefix[self.first : self.first + self.blocks] if adapter else ()
        return [prefix for prefix in own if prefix is not None]

    def forward(self, rows: "Sequence[tuple[SequenceCache, Any]]") -> list[Any]:
        """Compute new positions of several sequences in one forward.

        A row is a sequence and its inputs [n, hidden size], with n at least 1. Returns [n, hidden
        size] on the CPU for each row, and makes each sequence n positions longer. If it raises, no
        sequence has changed its length.
        """
        if len({id(sequence) for sequence, _ in rows}) < len(rows):
            raise ValueError("a sequence occurs twice in one batch")
        for sequence, inputs in rows:
            if sequence.geometry != self.geometry:
                raise ValueError("a sequence of another stage")
            if inputs.ndim != 2 or inputs.shape[0] < 1 or inputs.shape[1] != self.hidden_size:
                raise ValueError(f"inputs of shape {tuple(inputs.shape)}, expected [n, {self.hidden_size}]")
        if not rows:
            return []
        for sequence, inputs in rows:
            sequence.reserve(sequence.length + len(inputs))
        outputs = self._forward_rows(rows)
        for sequence, inputs in rows:
            sequence.length += len(inputs)
        return outputs

    @abstractmethod
    def _forward_rows(self, rows: "Sequence[tuple[SequenceCache, Any]]") -> list[Any]:
        """Run ``forward`` for sequences that have room. The caller counts the new positions."""

    @abstractmethod
    def catch_up(self, sequence: SequenceCache, positions: int) -> None:
        """Compute up to ``positions`` positions of a sequence again.

        Its recurrent states are ``behind`` by this or more.
        """

    @abstractmethod
    def run_sequences(self, inputs: Any, counts: Sequence[int], adapter: "StageAdapter | None" = None) -> Any:
        """Compute whole sequences, ``counts[i]`` positions of the i-th: [P, D] in and out. No cache
        remains. Outputs of an exact stage have the bits of ``forward``."""

    @abstractmethod
    def record_sequences(
        self, inputs: "Array | torch.Tensor", counts: Sequence[int], adapter: "StageAdapter | None" = None
    ) -> "tuple[torch.Tensor, AutogradGraph]":
        """Return the outputs of ``run_sequences``, and the graph for ``gradients``."""

    @abstractmethod
    def gradients(
        self, graph: "AutogradGraph", grad_outputs: "Array | torch.Tensor"
    ) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        """Return the gradients at the inputs of ``record_sequences`` and at the adapter's tensors.

        ``grad_outputs``: the gradients at its outputs [P, D]. A graph can be used once. Weights get
        no gradients.
        """
