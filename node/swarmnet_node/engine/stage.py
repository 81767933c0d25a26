"""The blocks that one node hosts.

A stage computes forwards of packed batches with KV caches, and passes of whole sequences without.
It computes a forward in one of three ways, chosen by trials when it is loaded (``trials.py``):

1. transformers' own layers, with the packed attention, recurrent states and LoRA of this package.
   This works for every family whose layers have no other state.
2. ``LlamaLayers``, for families of the Llama shape.
3. The backend's decode step, if the backend has one for these layers: for few positions, or with
   packed weights for any number.

The caller chooses the backend. On an accelerator, :meth:`Stage.preallocate` puts the KV caches into
an arena. Attention of a batch is then one call, and decode steps are recorded
(``decode_graphs.py``).
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from swarmnet_node.engine import trials
from swarmnet_node.engine.adapters import BatchLora, LayerTargets, StageAdapter, linear_modules, load_adapter
from swarmnet_node.engine.attention import (
    IMPLEMENTATION,
    Batch,
    PackedBatch,
    RangedBatch,
    SequenceBatch,
    register,
)
from swarmnet_node.engine.autograd_graphs import AutogradGraph, record_forward
from swarmnet_node.engine.caches.cache_arena import CacheArena
from swarmnet_node.engine.caches.kv_cache import GROWTH_POSITIONS, KVGeometry, Prefix, SequenceCache
from swarmnet_node.engine.caches.recurrent_state import BatchStates, split_mixers
from swarmnet_node.engine.decode_graphs import DecodeGraphs
from swarmnet_node.engine.kernels.backend import Backend, DecodeRow
from swarmnet_node.engine.kernels.ranged_attention import is_worth_padding
from swarmnet_node.engine.kernels.torch_backend import TorchBackend
from swarmnet_node.engine.layer_stack import bring_inputs, load_stack
from swarmnet_node.engine.routed_experts import RoutedExperts
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.models.partial_model import LayerWidths, weight_bytes, with_blocks
from swarmnet_protocols.quantization.packed_experts import ExpertsModule, add_experts
from swarmnet_protocols.quantization.quantize import Precision

if TYPE_CHECKING:
    from swarmnet_protocols.models.checkpoints.expert_weights import ChosenExperts


TORCH: Backend = TorchBackend()
_ACTIVATIONS = {torch.float32: "", torch.bfloat16: "/bf16", torch.float16: "/f16"}
"""The part of a precision that names the activations."""
REBUILT_POSITIONS = 512
"""Most positions of one forward when states are computed again."""


class Stage:
    """Blocks [start, end) of a model, ready to run. Not thread-safe: one thread does all
    forwards."""

    def __init__(
        self,
        model: Any,
        hidden_size: int,
        backend: Backend = TORCH,
        *,
        precision: str = "",
        devices: Sequence[torch.device] = (),
    ) -> None:
        """``model`` comes from ``LocalModel.load_span``. The stage owns it and changes it.

        - ``precision``: the precision of weights and activations, as in ``HostRecord``.
        - ``devices``: the device of each layer, if there are several. Hidden states then move from
          device to device; they enter and leave on the first.
        """
        register()
        self._model = model
        self._model.config._attn_implementation = IMPLEMENTATION
        weight = next(model.parameters())
        self.devices = tuple(devices) or (weight.device,) * len(model.layers)
        bring_inputs(model, self.devices)
        self.hidden_size = hidden_size
        self.precision = precision
        trials.check_ends(model, hidden_size)
        self.experts = RoutedExperts(model)
        self.widths = LayerWidths.of(model.config)
        self.dtype = weight.dtype
        self.device = weight.device
        self.blocks = len(model.layers)
        self.weight_bytes = weight_bytes(model)
        self.first = 0
        """Number of the first layer, counted in the loaded stage. A stage that is a part of the
        loaded one may begin later than at 0."""
        self.method = trials.ForwardMethod()
        """How the stage computes a forward: the fastest method that trials found right."""
        self._backend = backend
        self._graphs: DecodeGraphs | None = None
        self._parts: dict[tuple[int, int], Stage] = {}
        with self.experts.missing_as_zeros():
            probed = trials.probe(model, hidden_size)
            self.geometry = KVGeometry(
                probed.shapes, self.dtype, self.device, states=probed.states, devices=self.devices
            )
            split_mixers(probed.mixers)
            linears = [linear_modules(layer, leave_out=probed.mixers) for layer in model.layers]
            if not probed.is_plain:
                trials.check_states(self._attempt, self.run_sequences, model, hidden_size)
            self._rules = probed.rules
            self.method = trials.choose_method(self._attempt, model, probed.rules, backend, self.devices)
        if self.method.llama_layers is None:
            products: list[dict[str, tuple[str, ...]]] = [
                {path: (path,) for path in paths} for paths in linears
            ]
        else:
            products = [
                {name: tuple(path for path, _ in modules) for name, modules in layer.modules.items()}
                for layer in self.method.layers
            ]
        self._targets = tuple(
            LayerTargets(*each) for each in zip(linears, products, probed.shapes, self.devices, strict=True)
        )

    @classmethod
    def load(  # noqa: PLR0913 - a model's part, and how to compute it
        cls,
        model: LocalModel,
        start: int,
        end: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend = TORCH,
        packed: bool = False,
        quantized: Precision | None = None,
        devices: Sequence[torch.device] = (),
        experts: "ChosenExperts | None" = None,
    ) -> "Stage":
        """Load blocks [start, end).

        ``packed``, ``quantized`` and ``experts`` are as in ``LocalModel.load_span``. ``devices``:
        the device of each block; by default all are on ``device``. Raises ``ConfigError`` for a
        family whose layers have other state than keys, values and recurrent states.
        """
        devices = devices or [device] * (end - start)
        load_span = partial(model.load_span, dtype=dtype, packed=packed, quantized=quantized, experts=experts)
        stack = load_stack(load_span, model.config, start, devices)
        return cls(
            stack,
            model.manifest.hidden_size,
            backend,
            precision=precision_of(model, quantized, dtype),
            devices=devices,
        )

    @property
    def is_on_accelerator(self) -> bool:
        """Whether weights and caches are in other memory than the machine's own."""
        return bool(self.device.type != "cpu")

    @property
    def is_exact(self) -> bool:
        """Whether sessions get the same bits on every processor: C computes all of their
        positions."""
        step = self.method.decode_step
        return step is not None and step.max_positions == sys.maxsize

    @property
    def has_recordings(self) -> bool:
        """Whether decode steps are recorded."""
        return self._graphs is not None and not self._graphs.failure

    @torch.inference_mode()
    def preallocate(self, cache_bytes: int) -> None:
        """Allocate an arena of ``cache_bytes`` for the KV caches of all later sequences.

        For accelerators. No sequence may exist yet.
        """
        bare = replace(self.geometry, arena=None)
        if bare.states is not None or trials.NO_ATTENTION in bare.layers:
            return  # such caches hold more than keys and values
        positions = cache_bytes // bare.bytes_per_position // GROWTH_POSITIONS * GROWTH_POSITIONS
        arena = CacheArena(bare.layers, self.dtype, self.devices, max(positions, GROWTH_POSITIONS))
        self.geometry = replace(bare, arena=arena)
        self._parts.clear()
        # The decode step reads only contiguous caches.
        method = replace(self.method, decode_step=None)
        self.method = trials.choose_fused(self._attempt, method, arena, self._rules, self._backend)
        # A recording has one device, so steps that move between devices are not recorded.
        is_on_one_device = len(set(self.devices)) == 1
        recorder = self._backend.recorder(self.device) if is_on_one_device else None
        if recorder is not None:
            self._graphs = DecodeGraphs(
                self._run,
                recorder,
                self._backend,
                arena,
                torch.empty(self.hidden_size, dtype=self.dtype, device=self.device),
                is_fused=self.method.is_fused,
            )

    def add_experts(self, layer: int, loaded: ExpertsModule) -> None:
        """Add the experts of ``loaded``, a module of the same layer, to the stage.

        May be called from another thread.
        """
        add_experts(self.experts.modules[layer], loaded)
        self.weight_bytes = weight_bytes(self._model)

    def part(self, start: int, end: int) -> "Stage":
        """Return a stage of blocks [start, end) of this one, on the same weights."""
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
            part.experts = RoutedExperts(part._model)
            part.weight_bytes = weight_bytes(part._model)
            part.first = self.first + start
            states = self.geometry.states
            part.devices = self.devices[start:end]
            part.geometry = replace(
                self.geometry,
                layers=self.geometry.layers[start:end],
                devices=part.devices,
                first=part.first,
                states=states and states.part(part.first, part.first + part.blocks),
            )
            part._graphs = None  # there may be many parts
            part.method = self.method.part(start, end, self._backend)
            self._parts[start, end] = part
        return self._parts[start, end]

    def load_adapter(self, tensors: Mapping[str, torch.Tensor], start: int) -> StageAdapter:
        """Make an adapter for this stage and its parts, from tensors by name.

        ``start``: the block of the first layer of the loaded stage. Raises ``ProtocolViolation``
        for tensors that do not fit.
        """
        adapter = load_adapter(tensors, start, self._targets, self.dtype)
        if adapter.prefix_positions and self.geometry.states is not None:
            raise ProtocolViolation("a prefix for layers with recurrent states")
        return adapter

    def new_sequence(self, adapter: StageAdapter | None = None) -> SequenceCache:
        """Return the KV cache of a new sequence, with the adapter's prefix if any. Allocates
        nothing yet."""
        lora = adapter.lora if adapter is not None and not adapter.lora.is_empty else None
        return SequenceCache(self.geometry, lora, self._prefix(adapter))

    @torch.inference_mode()
    def forward(self, rows: Sequence[tuple[SequenceCache, torch.Tensor]]) -> list[torch.Tensor]:
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
            if inputs.dim() != 2 or inputs.shape[0] < 1 or inputs.shape[1] != self.hidden_size:
                raise ValueError(f"inputs of shape {tuple(inputs.shape)}, expected [n, {self.hidden_size}]")
        if not rows:
            return []
        for sequence, inputs in rows:
            sequence.reserve(sequence.length + len(inputs))
        if self.geometry.arena is None:
            return self._forward_rows(rows)
        in_order = sorted(rows, key=lambda row: row[0].start)
        outputs = self._forward_rows(in_order)
        found = {id(sequence): each for (sequence, _), each in zip(in_order, outputs, strict=True)}
        return [found[id(sequence)] for sequence, _ in rows]

    def _forward_rows(self, rows: Sequence[tuple[SequenceCache, torch.Tensor]]) -> list[torch.Tensor]:
        """Run ``forward`` for sequences that have room."""
        counts = [inputs.shape[0] for _, inputs in rows]
        for sequence, _ in rows:
            self.catch_up(sequence, sequence.behind)
        packed = torch.cat([inputs for _, inputs in rows]).to(self.device, self.dtype)
        sequences = [sequence for sequence, _ in rows]
        decode_step = self.method.decode_step
        if decode_step is not None and len(packed) <= decode_step.max_positions:
            outputs = decode_step(
                packed,
                [
                    DecodeRow(sequence.length, count, sequence.layers, sequence.lora)
                    for sequence, count in zip(sequences, counts, strict=True)
                ],
            )
        else:
            outputs = self._forward_packed(packed, sequences, counts)
        for (sequence, _), count in zip(rows, counts, strict=True):
            sequence.length += count
        return list(torch.split(outputs, counts))

    def _attempt(self, method: trials.ForwardMethod, steps: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute random positions of new sequences with ``method``, as a ``trials.Attempt``."""
        stage = copy.copy(self)
        stage.method = method
        counts = list(zip(*steps, strict=True))
        sequences = [stage.new_sequence() for _ in counts]
        inputs = trials.random_inputs(len(counts), sum(counts[0]), self.hidden_size)
        parts = [torch.split(each, list(sizes)) for each, sizes in zip(inputs, counts, strict=True)]
        outputs = [
            stage.forward(list(zip(sequences, rows, strict=True))) for rows in zip(*parts, strict=True)
        ]
        return torch.cat([each for step in outputs for each in step])

    @torch.inference_mode()
    def catch_up(self, sequence: SequenceCache, positions: int) -> None:
        """Compute up to ``positions`` positions of a sequence again.

        Its recurrent states are ``behind`` by this or more.
        """
        states, length = sequence.states, sequence.length
        if states is None:
            return
        states.restore(length)
        until = min(length, states.length + positions)
        try:
            while states.length < until:
                sequence.length = states.length
                inputs = sequence.inputs[states.length : min(until, states.length + REBUILT_POSITIONS)]
                self._forward_packed(inputs, [sequence], [len(inputs)])
        finally:
            sequence.length = length

    @torch.inference_mode()
    def run_sequences(
        self, inputs: torch.Tensor, counts: Sequence[int], adapter: StageAdapter | None = None
    ) -> torch.Tensor:
        """Compute whole sequences without caches, ``counts[i]`` positions of the i-th: [P, D] in
        and out."""
        return self._run_sequences(inputs.to(self.device, self.dtype), counts, adapter).cpu()

    def record_sequences(
        self, inputs: torch.Tensor, counts: Sequence[int], adapter: StageAdapter | None = None
    ) -> tuple[torch.Tensor, AutogradGraph]:
        """Return the outputs of ``run_sequences``, and the graph for ``gradients``."""
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
        outputs, graph = record_forward(forward, leaf, leaves, weights)
        return outputs.cpu(), graph

    def gradients(
        self, graph: AutogradGraph, grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the gradients at the inputs of ``record_sequences`` and at the adapter's tensors.

        ``grad_outputs``: the gradients at its outputs [P, D]. A graph can be used once. Weights get
        no gradients.
        """
        gradients, own = graph.gradients(grad_outputs.to(self.device, self.dtype))
        return gradients.cpu(), {name: tensor.cpu() for name, tensor in own.items()}

    def _run_sequences(
        self, inputs: torch.Tensor, counts: Sequence[int], adapter: StageAdapter | None
    ) -> torch.Tensor:
        first = adapter.prefix_positions if adapter else 0
        positions = torch.cat([torch.arange(first, first + count) for count in counts]).to(self.device)
        batch = SequenceBatch(counts, self._backend, self._prefix(adapter), first_layer=self.first)
        lora = BatchLora([adapter.lora if adapter else None], [len(inputs)], self._backend)
        return self._run(inputs, positions, batch, lora or None, self._states(counts))

    def _prefix(self, adapter: StageAdapter | None) -> list[Prefix]:
        """Return the adapter's prefix for each layer of this stage. Empty without a prefix."""
        own = adapter.prefix[self.first : self.first + self.blocks] if adapter else ()
        return [prefix for prefix in own if prefix is not None]

    def _forward_packed(
        self, packed: torch.Tensor, sequences: Sequence[SequenceCache], counts: list[int]
    ) -> torch.Tensor:
        if self._graphs is not None and max(counts) == 1:
            outputs = self._graphs.step(packed, sequences)
            if outputs is not None:
                return outputs.cpu()
        positions = torch.cat(
            [
                torch.arange(sequence.length, sequence.length + n)
                for sequence, n in zip(sequences, counts, strict=True)
            ]
        )
        batch = self._batch(sequences, counts)
        lora = BatchLora([sequence.lora for sequence in sequences], counts, self._backend)
        batch_states = self._states(counts, sequences)
        outputs = self._run(packed, positions.to(self.device), batch, lora or None, batch_states).cpu()
        for sequence, inputs in zip(sequences, torch.split(packed, counts), strict=True):
            if sequence.states is not None:
                sequence.inputs[sequence.length : sequence.length + len(inputs)] = inputs
                sequence.states.advance(len(inputs))
        return outputs

    def _states(self, counts: Sequence[int], sequences: Sequence[SequenceCache] = ()) -> BatchStates | None:
        """Return the recurrent states of a batch. None if the stage has none.

        The states count as torn until the batch is computed.
        """
        if self.geometry.states is None:
            return None
        states = [sequence.states for sequence in sequences if sequence.states is not None]
        batch = BatchStates(counts, states)
        for each in states:
            each.is_torn = True
        return batch

    def _batch(self, sequences: Sequence[SequenceCache], counts: list[int]) -> Batch:
        """Return the batch for these rows.

        It attends to all rows in one call if that is possible and not slower, otherwise row by row.
        """
        arena = self.geometry.arena
        if arena is not None:
            lengths = [sequence.length + 1 for sequence in sequences]
            if self.method.is_fused or (max(counts) == 1 and is_worth_padding(lengths)):
                return RangedBatch.of(arena, self._backend, sequences, counts)
        return PackedBatch(sequences, counts, self._backend, first_layer=self.first)

    def _run(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        batch: Batch,
        lora: BatchLora | None = None,
        states: BatchStates | None = None,
    ) -> torch.Tensor:
        if self.method.llama_layers is not None:
            return self.method.llama_layers(inputs, positions, batch, lora).to(self.device)
        with lora.hooked(self._model.layers, self.first) if lora else nullcontext():
            outputs: torch.Tensor = self._model(
                inputs_embeds=inputs[None],
                position_ids=positions[None],
                past_key_values=states,
                use_cache=False,
                packed=batch,
            ).last_hidden_state
        return outputs[0].to(self.device)


def precision_of(model: LocalModel, quantized: Precision | None, dtype: torch.dtype) -> str:
    """Return the precision of weights and activations, as a host announces it."""
    return (model.precision if quantized is None else quantized.name) + _ACTIVATIONS[dtype]
