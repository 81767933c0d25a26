"""One machine's blocks of a model: forwards of a packed batch with caches, and passes of whole sequences without."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from swarmnet_node.engine.adapters import Additions, LayerForm, StageAdapter, adapt, linear_modules
from swarmnet_node.engine.attention import (
    IMPLEMENTATION,
    Batch,
    GeometryProbe,
    PackedBatch,
    Rule,
    SequenceBatch,
    register,
)
from swarmnet_node.engine.autograd_graphs import AutogradGraph, record
from swarmnet_node.engine.kernels import decode
from swarmnet_node.engine.kernels.fused_layers import PRODUCTS, FusedLayers, fits
from swarmnet_node.engine.kv_cache import KVGeometry, Prefix, SequenceCache
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.models.partial_model import with_blocks

FUSION_TRIAL_POSITIONS = 5
FUSION_TOLERANCE_EPS = 100
NATIVE_POSITIONS = 128
"""Native code reads weights as fast as memory gives them; the more positions there are, the more arithmetic counts, which torch does as well."""


class Stage:
    """Blocks [start, end) of a model, ready to run. Not thread-safe: one thread does all forwards."""

    def __init__(self, model: Any, hidden_size: int, native: decode.Native | None = None) -> None:
        """``model`` is a decoder stack as ``LocalModel.load_span`` gives it; it belongs to the stage from now on.

        ``native`` computes a few positions at once where it can.
        """
        register()
        self._model = model
        self._model.config._attn_implementation = IMPLEMENTATION
        weight = next(model.parameters())
        self.hidden_size = hidden_size
        self.dtype = weight.dtype
        self.device = weight.device
        self.blocks = len(self._model.layers)
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._first = 0
        self._fused: FusedLayers | None = None
        self._native: decode.NativeLayers | None = None
        self._parts: dict[tuple[int, int], Stage] = {}
        probe = self._probe()
        self.geometry = KVGeometry(tuple(shape for shape, _ in probe.layers), self.dtype, self.device)
        linears = [linear_modules(layer) for layer in model.layers]
        self._fuse([rule for _, rule in probe.layers], native)
        self._forms = tuple(
            LayerForm(paths, PRODUCTS if self.is_fused else {path: (path,) for path in paths}, shape)
            for paths, shape in zip(linears, self.geometry.layers, strict=True)
        )

    @classmethod
    def load(
        cls,
        model: LocalModel,
        start: int,
        end: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        native: decode.Native | None = None,
    ) -> "Stage":
        """Load blocks [start, end); raises ``ConfigError`` for a family whose layers keep more than keys and values."""
        return cls(
            model.load_span(start, end, dtype=dtype, device=device), model.manifest.hidden_size, native
        )

    @property
    def is_fused(self) -> bool:
        """Whether our own layers stand in for those of transformers."""
        return self._fused is not None

    @property
    def is_native(self) -> bool:
        """Whether a few positions at once are computed by native code."""
        return self._native is not None

    def part(self, start: int, end: int) -> "Stage":
        """Blocks [start, end) of this stage, counted from its first, as a stage that shares its weights."""
        if (start, end) == (0, self.blocks):
            return self
        if (start, end) not in self._parts:
            part = copy.copy(self)
            part._parts = {}
            part._model = copy.copy(self._model)
            part._model._modules = dict(self._model._modules)
            part._model.layers = torch.nn.ModuleList(list(self._model.layers)[start:end])
            part._model.config = with_blocks(self._model.config, start, end)
            part._model.config._attn_implementation = IMPLEMENTATION
            part.blocks = end - start
            part.geometry = replace(self.geometry, layers=self.geometry.layers[start:end])
            part._first = self._first + start
            part._fused = self._fused and self._fused.part(start, end)
            part._native = self._native and self._native.part(start, end, part.geometry)
            self._parts[start, end] = part
        return self._parts[start, end]

    def load_adapter(self, tensors: Mapping[str, torch.Tensor], start: int) -> StageAdapter:
        """An adapter for this stage and its parts, from tensors by name; the first layer of the whole stage is block ``start``.

        Raises ``ProtocolViolation`` for tensors that do not fit.
        """
        return adapt(tensors, start, self._forms, torch.empty(0, dtype=self.dtype, device=self.device))

    def new_sequence(self, adapter: StageAdapter | None = None) -> SequenceCache:
        """A cache for one sequence, empty but for the adapter's prefix; it allocates nothing yet."""
        return SequenceCache(self.geometry, adapter, self._prefix(adapter))

    @torch.inference_mode()
    def forward(self, rows: Sequence[tuple[SequenceCache, torch.Tensor]]) -> list[torch.Tensor]:
        """Run new positions of several lanes through the blocks in one forward.

        A row is a lane and its inputs [n, hidden size], n at least 1. Returns [n, hidden size] for each row, in the memory of
        the CPU, and every lane is n positions longer. When it raises, no lane has changed its length.
        """
        if len({id(sequence) for sequence, _ in rows}) < len(rows):
            raise ValueError("a lane occurs twice in one batch")
        for _, inputs in rows:
            if inputs.dim() != 2 or inputs.shape[0] < 1 or inputs.shape[1] != self.hidden_size:
                raise ValueError(f"inputs of shape {tuple(inputs.shape)}, expected [n, {self.hidden_size}]")
        if not rows:
            return []
        counts = [inputs.shape[0] for _, inputs in rows]
        for (sequence, _), count in zip(rows, counts, strict=True):
            sequence.reserve(sequence.length + count)
        packed = torch.cat([inputs.to(self.device, self.dtype) for _, inputs in rows])
        sequences = [sequence for sequence, _ in rows]
        if self._native is not None and len(packed) <= NATIVE_POSITIONS:
            outputs = self._native(packed, sequences, counts)
        else:
            outputs = self._forward_packed(packed, sequences, counts)
        for (sequence, _), count in zip(rows, counts, strict=True):
            sequence.length += count
        return list(torch.split(outputs, counts))

    @torch.inference_mode()
    def run_sequences(
        self, inputs: torch.Tensor, counts: Sequence[int], adapter: StageAdapter | None = None
    ) -> torch.Tensor:
        """Run whole sequences, ``counts[i]`` positions of the i-th, laid one after another, without caches: [P, D] in and out."""
        return self._run_sequences(inputs.to(self.device, self.dtype), counts, adapter).cpu()

    def record_sequences(
        self, inputs: torch.Tensor, counts: Sequence[int], adapter: StageAdapter | None = None
    ) -> tuple[torch.Tensor, AutogradGraph]:
        """What ``run_sequences`` gives, and the graph from which its backward can be computed."""
        leaves = (
            {name: tensor.detach().requires_grad_() for name, tensor in adapter.tensors.items()}
            if adapter
            else {}
        )

        def forward(leaf: torch.Tensor) -> torch.Tensor:
            own = self.load_adapter(leaves, adapter.start) if adapter else None
            return self._run_sequences(leaf, counts, own)

        weights = (*self._model.parameters(), *self._model.buffers())
        leaf = inputs.to(self.device, self.dtype).detach().requires_grad_()
        outputs, graph = record(forward, leaf, leaves, weights)
        return outputs.cpu(), graph

    def gradients(
        self, graph: AutogradGraph, grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What ``grad_outputs`` [P, D] of ``record_sequences`` come to at its inputs, [P, D], and at the adapter's tensors.

        It uses the graph up. The weights gather no gradients.
        """
        gradients, own = graph.gradients(grad_outputs.to(self.device, self.dtype))
        return gradients.cpu(), {name: tensor.cpu() for name, tensor in own.items()}

    def _run_sequences(
        self, inputs: torch.Tensor, counts: Sequence[int], adapter: StageAdapter | None
    ) -> torch.Tensor:
        first = adapter.prefix_positions if adapter else 0
        positions = torch.cat([torch.arange(first, first + count) for count in counts]).to(self.device)
        batch = SequenceBatch(counts, self._prefix(adapter), first_layer=self._first)
        additions = Additions([adapter], [len(inputs)])
        return self._run(inputs, positions, batch, additions or None)

    def _prefix(self, adapter: StageAdapter | None) -> list[Prefix]:
        """What lanes begin with in each of our layers, or nothing."""
        own = adapter.prefix[self._first : self._first + self.blocks] if adapter else ()
        return [prefix for prefix in own if prefix is not None]

    def _forward_packed(
        self, packed: torch.Tensor, sequences: Sequence[SequenceCache], counts: list[int]
    ) -> torch.Tensor:
        positions = torch.cat(
            [
                torch.arange(sequence.length, sequence.length + n)
                for sequence, n in zip(sequences, counts, strict=True)
            ]
        )
        batch = PackedBatch(sequences, counts, first_layer=self._first)
        additions = Additions([sequence.adapter for sequence in sequences], counts)
        return self._run(packed, positions.to(self.device), batch, additions or None).cpu()

    def _run(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        batch: Batch,
        additions: Additions | None = None,
    ) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(inputs, positions, batch, additions)
        with additions.hooked(self._model.layers, self._first) if additions else nullcontext():
            outputs: torch.Tensor = self._model(
                inputs_embeds=inputs[None], position_ids=positions[None], use_cache=False, packed=batch
            ).last_hidden_state
        return outputs[0]

    @torch.inference_mode()
    def _probe(self) -> GeometryProbe:
        probe = GeometryProbe()
        zeros = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
        self._run(zeros, torch.zeros(1, dtype=torch.long, device=self.device), probe)
        if probe.indices != list(range(self.blocks)):
            raise ConfigError(
                f"{type(self._model).__name__} has layers that keep more than keys and values",
                hint="use a model in which every layer has ordinary attention",
            )
        return probe

    def _fuse(self, rules: Sequence[Rule], native: decode.Native | None) -> None:
        """Use fused layers, and native ones, if they give what transformers' layers give."""
        if not fits(self._model):
            return
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(FUSION_TRIAL_POSITIONS, self.hidden_size, generator=generator)
        [expected] = self.forward([(self.new_sequence(), inputs)])
        self._fused = FusedLayers(self._model, rules)
        [outputs] = self.forward([(self.new_sequence(), inputs)])
        if not self._agree(outputs, expected):
            self._fused = None
        elif native is not None and decode.fits(self._fused, self.geometry):
            self._native = decode.NativeLayers(native, self._fused, self.geometry)
            sequence = self.new_sequence()
            outputs = torch.cat([self.forward([(sequence, part)])[0] for part in torch.split(inputs, 2)])
            if not self._agree(outputs, expected):
                self._native = None

    def _agree(self, outputs: torch.Tensor, expected: torch.Tensor) -> bool:
        # Rounding differs by some units in the last place; another function differs by about its own size.
        error = (outputs - expected).float().norm() / expected.float().norm()
        return bool(error < FUSION_TOLERANCE_EPS * torch.finfo(self.dtype).eps)
