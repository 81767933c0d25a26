"""A stage in torch: every family, dtype and device.

It computes a forward in one of three ways, chosen by trials when it is loaded (``trials.py``):

1. transformers' own layers, with the packed attention, recurrent states and LoRA of this package.
   This works for every family whose layers have no other state.
2. ``LlamaLayers``, for families of the Llama shape.
3. The backend's decode step, if the backend has one for these layers.

The caller chooses the backend. On an accelerator, :meth:`Stage.preallocate` puts the KV caches into
an arena. Attention of a batch is then one call, and decode steps are recorded
(``decode_graphs.py``).
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from swarmnet_node.engine.caches.cache_arena import CacheArena
from swarmnet_node.engine.caches.kv_cache import GROWTH_POSITIONS, KVGeometry, SequenceCache
from swarmnet_node.engine.caches.recurrent_state import BatchStates, split_mixers
from swarmnet_node.engine.kernels.backend import Backend, DecoderLayer, DecodeRow
from swarmnet_node.engine.kernels.ranged_attention import is_worth_padding
from swarmnet_node.engine.kernels.torch_backend import TorchBackend
from swarmnet_node.engine.routed_experts import RoutedExperts
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.torch_layers import trials
from swarmnet_node.engine.torch_layers.adapters import (
    BatchLora,
    LayerTargets,
    StageAdapter,
    linear_modules,
    load_adapter,
)
from swarmnet_node.engine.torch_layers.attention import (
    IMPLEMENTATION,
    Batch,
    PackedBatch,
    RangedBatch,
    SequenceBatch,
    register,
)
from swarmnet_node.engine.torch_layers.autograd_graphs import AutogradGraph, record_forward
from swarmnet_node.engine.torch_layers.decode_graphs import DecodeGraphs
from swarmnet_node.engine.torch_layers.layer_stack import bring_inputs, load_stack
from swarmnet_node.engine.torch_layers.llama_layers import LlamaLayers, Rotary
from swarmnet_protocols.arrays import as_tensor
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.machine.devices import torch_device, torch_dtype
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.models.partial_model import weight_bytes, with_blocks
from swarmnet_protocols.models.sizes import LayerWidths
from swarmnet_protocols.quantization.formats import Precision
from swarmnet_protocols.quantization.packed_experts import ExpertsModule, add_experts

if TYPE_CHECKING:
    from swarmnet_protocols.models.checkpoints.expert_weights import ChosenExperts


TORCH: Backend = TorchBackend()
REBUILT_POSITIONS = 512
"""Most positions of one forward when states are computed again."""


class TorchStage(Stage):
    """``Stage`` in torch."""

    dtype: torch.dtype
    device: torch.device
    devices: tuple[torch.device, ...]

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
        self.method = trials.ForwardMethod()
        """The method of a forward: the fastest that trials found right."""
        self._backend = backend
        self._graphs: DecodeGraphs | None = None
        self._parts: dict[tuple[int, int], TorchStage] = {}
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
            products = [_products_of(layer) for layer in self.method.layers]
        self._targets = tuple(
            LayerTargets(*each) for each in zip(linears, products, probed.shapes, self.devices, strict=True)
        )

    @classmethod
    def loaded(  # noqa: PLR0913 - a model's part, and how to compute it
        cls,
        model: LocalModel,
        start: int,
        end: int,
        *,
        dtype: Any,
        devices: Sequence[Any],
        backend: Backend,
        packed: bool,
        quantized: Precision | None,
        experts: "ChosenExperts | None",
        precision: str,
    ) -> "TorchStage":
        """Load blocks [start, end), as ``load_stage``. ``devices``: the device of each block."""
        places, dtype = [torch_device(each) for each in devices], torch_dtype(dtype)
        load_span = partial(model.load_span, dtype=dtype, packed=packed, quantized=quantized, experts=experts)
        stack = load_stack(load_span, model.config, start, places)
        return cls(
            stack,
            model.manifest.hidden_size,
            backend,
            precision=precision,
            devices=places,
        )

    @classmethod
    def of_layers(
        cls,
        original: Stage,
        layers: Sequence[DecoderLayer],
        linears: Mapping[str, tuple[int, int]],
        backend: Backend,
    ) -> "TorchStage":
        """Make a stage with the weights of ``original``, in float32 on the CPU, without a model of
        transformers.

        ``layers`` are its layers, and ``linears`` the linear modules of each, as in
        ``LayerTargets``.
        """
        stage = cls.__new__(cls)
        device = torch.device("cpu")
        stage._model = None
        stage.devices, stage.device, stage.dtype = (device,) * len(layers), device, torch.float32
        stage.hidden_size, stage.precision = original.hidden_size, original.precision
        stage.experts, stage.widths = original.experts, original.widths
        stage.blocks, stage.first, stage.weight_bytes = original.blocks, original.first, 0
        stage._backend, stage._graphs, stage._parts = backend, None, {}
        stage.geometry = KVGeometry(original.geometry.layers, torch.float32, device)
        stage._rules = tuple(layer.rule for layer in layers)
        own = [layer.mapped(as_tensor) for layer in layers]
        llama_layers = LlamaLayers(own, _rotary_of(own[0]), backend, stage.devices)
        stage.method = trials.ForwardMethod(own, llama_layers)
        stage._targets = tuple(
            LayerTargets(linears, _products_of(layer), shape, device)
            for layer, shape in zip(layers, stage.geometry.layers, strict=True)
        )
        return stage

    @property
    def is_exact(self) -> bool:
        return self.method.decode_step is not None

    @property
    def has_recordings(self) -> bool:
        """True if decode steps are recorded."""
        return self._graphs is not None and not self._graphs.failure

    @torch.inference_mode()
    def preallocate(self, cache_bytes: int) -> None:
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
        add_experts(self.experts.modules[layer], loaded)
        self.weight_bytes = weight_bytes(self._model)

    def part(self, start: int, end: int) -> "TorchStage":
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
        adapter = load_adapter(tensors, start, self._targets, self.dtype)
        if adapter.prefix_positions and self.geometry.states is not None:
            raise ProtocolViolation("a prefix for layers with recurrent states")
        return adapter

    @torch.inference_mode()
    def _forward_rows(self, rows: Sequence[tuple[SequenceCache, Any]]) -> list[torch.Tensor]:
        if self.geometry.arena is not None:
            in_order = sorted(rows, key=lambda row: row[0].start)
            found = {
                id(sequence): each
                for (sequence, _), each in zip(in_order, self._in_order(in_order), strict=True)
            }
            return [found[id(sequence)] for sequence, _ in rows]
        return self._in_order(rows)

    def _in_order(self, rows: Sequence[tuple[SequenceCache, Any]]) -> list[torch.Tensor]:
        """Compute rows that are in the order of the arena, if there is one."""
        counts = [inputs.shape[0] for _, inputs in rows]
        for sequence, _ in rows:
            self.catch_up(sequence, sequence.behind)
        packed = torch.cat([as_tensor(inputs) for _, inputs in rows]).to(self.device, self.dtype)
        sequences = [sequence for sequence, _ in rows]
        decode_step = self.method.decode_step
        if decode_step is not None:
            steps = [
                DecodeRow(sequence.length, count, sequence.layers, sequence.lora)
                for sequence, count in zip(sequences, counts, strict=True)
            ]
            outputs = as_tensor(decode_step(packed.numpy(), steps))
        else:
            outputs = self._forward_packed(packed, sequences, counts)
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
        self, inputs: Any, counts: Sequence[int], adapter: StageAdapter | None = None
    ) -> torch.Tensor:
        taken = self._taken(inputs)
        if not self.is_exact:
            return self._run_sequences(taken, counts, adapter).cpu()
        for block in range(self.blocks):  # one after another, so that only one has caches at a time
            part = self.part(block, block + 1)
            rows = [(part.new_sequence(adapter), each) for each in torch.split(taken, list(counts))]
            taken = torch.cat(part.forward(rows))
        return taken

    def _taken(self, values: Any) -> torch.Tensor:
        return as_tensor(values).to(self.device, self.dtype)

    def record_sequences(
        self, inputs: Any, counts: Sequence[int], adapter: StageAdapter | None = None
    ) -> tuple[torch.Tensor, AutogradGraph]:
        leaves = (
            {name: tensor.detach().requires_grad_() for name, tensor in adapter.tensors.items()}
            if adapter
            else {}
        )

        def forward(leaf: torch.Tensor) -> torch.Tensor:
            own = self.load_adapter(leaves, adapter.start) if adapter else None
            return self._run_sequences(leaf, counts, own)

        layers = self.method.llama_layers
        weights = layers.tensors() if self._model is None and layers is not None else _tensors_of(self._model)
        leaf = self._taken(inputs).detach().requires_grad_()
        outputs, graph = record_forward(forward, leaf, leaves, weights)
        return outputs.cpu(), graph

    def gradients(
        self, graph: AutogradGraph, grad_outputs: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        gradients, own = graph.gradients(self._taken(grad_outputs))
        return gradients.cpu(), {name: tensor.cpu() for name, tensor in own.items()}

    def _run_sequences(
        self, inputs: torch.Tensor, counts: Sequence[int], adapter: StageAdapter | None
    ) -> torch.Tensor:
        first = adapter.prefix_positions if adapter else 0
        positions = torch.cat([torch.arange(first, first + count) for count in counts]).to(self.device)
        batch = SequenceBatch(counts, self._backend, self._prefix(adapter), first_layer=self.first)
        lora = BatchLora([adapter.lora if adapter else None], [len(inputs)], self._backend)
        return self._run(inputs, positions, batch, lora or None, self._states(counts))

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


def _products_of(layer: DecoderLayer) -> dict[str, tuple[str, ...]]:
    """Return the linear modules whose outputs each product of a layer concatenates."""
    return {name: tuple(path for path, _ in modules) for name, modules in layer.modules.items()}


def _rotary_of(layer: DecoderLayer) -> Rotary:
    rotary = layer.shape.rotary
    assert rotary is not None  # noqa: S101 - the layers have the Llama shape
    frequencies = torch.tensor(rotary.frequencies)

    def angles(like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = positions[..., None] * frequencies
        both = torch.cat((turned, turned), -1)
        return (both.cos() * rotary.scale).to(like), (both.sin() * rotary.scale).to(like)

    return angles


def _tensors_of(model: Any) -> tuple[torch.Tensor, ...]:
    return (*model.parameters(), *model.buffers())
