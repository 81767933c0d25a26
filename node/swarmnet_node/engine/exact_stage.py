"""A stage that C computes: layers of the Llama shape with packed weights, in float32.

Its arrays are numpy's. The first adapter or gradient makes a ``TorchStage`` of the same weights,
and imports torch.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from swarmnet_node.engine.caches.kv_cache import KVGeometry, LayerShape, SequenceCache
from swarmnet_node.engine.kernels.backend import (
    AttentionRule,
    Backend,
    DecoderLayer,
    DecodeRow,
    DecodeStep,
    Linear,
    Norm,
)
from swarmnet_node.engine.kernels.block_shapes import BlockShape, block_shapes
from swarmnet_node.engine.routed_experts import RoutedExperts
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.arrays import Array, as_float32
from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.machine import threads
from swarmnet_protocols.machine.devices import CPU
from swarmnet_protocols.models.llama_shape import LlamaShape
from swarmnet_protocols.models.sizes import LayerWidths
from swarmnet_protocols.quantization.packed_tensor import PackedTensor

if TYPE_CHECKING:
    import torch

    from swarmnet_node.engine.torch_layers.adapters import StageAdapter
    from swarmnet_node.engine.torch_layers.autograd_graphs import AutogradGraph
    from swarmnet_node.engine.torch_layers.torch_stage import TorchStage
    from swarmnet_protocols.models import LocalModel
    from swarmnet_protocols.quantization.formats import Precision
    from swarmnet_protocols.quantization.packed_experts import ExpertsModule

Weights = Mapping[str, PackedTensor | Array]
"""Weights by their names in transformers' decoder stack."""


class ExactStage(Stage):
    """``Stage`` in C."""

    dtype = np.dtype(np.float32)
    device = CPU
    is_exact = True

    def __init__(
        self,
        shape: LlamaShape,
        layers: Sequence[DecoderLayer],
        backend: Backend,
        step: DecodeStep,
        *,
        precision: str,
        first: int = 0,
    ) -> None:
        """``step`` computes ``layers``, which are numbered from ``first``."""
        self.hidden_size = shape.hidden_size
        self.precision = precision
        self.blocks = len(layers)
        self.first = first
        self.devices = (CPU,) * len(layers)
        self.weight_bytes = sum(int(each.nbytes) for layer in layers for each in layer.weights)
        self.widths = LayerWidths.of(shape)
        caches = LayerShape(shape.num_key_value_heads, shape.head_dim, shape.head_dim)
        self.geometry = KVGeometry((caches,) * len(layers), self.dtype, CPU)
        self.experts = RoutedExperts()
        self._shape = shape
        self._layers = layers
        self._backend = backend
        self._step = step
        self._parts: dict[tuple[int, int], ExactStage] = {}

    @classmethod
    def loaded(
        cls,
        model: "LocalModel",
        start: int,
        end: int,
        backend: Backend,
        quantized: "Precision | None",
        precision: str,
    ) -> "ExactStage | None":
        """Load blocks [start, end). None if C has no step for their shape, or there is no C.

        Raises ``IntegrityError`` for weights that do not fit the sizes of the model.
        """
        shape = model.llama_shape
        if shape is None or not backend.is_exact or shape.head_dim % 2:
            return None
        blocks = block_shapes(shape, [shape.head_dim], [False])
        if blocks is None:
            return None
        weights = model.load_layers(start, end, device=CPU, quantized=quantized)
        layers = [_layer(shape, blocks[0], weights, index) for index in range(end - start)]
        step = backend.decode_step(layers)
        if step is None:
            raise IntegrityError(f"the weights of {model.name} do not have the sizes in its config")
        return cls(shape, layers, backend, step, precision=precision)

    def preallocate(self, cache_bytes: int) -> None:
        """Do nothing: only accelerators have an arena."""

    def add_experts(self, layer: int, loaded: "ExpertsModule") -> None:
        """Raises ``LookupError``: the layers have no routed experts."""
        raise LookupError(f"layer {layer} has no routed experts")

    def part(self, start: int, end: int) -> "ExactStage":
        if (start, end) == (0, self.blocks):
            return self
        if (start, end) not in self._parts:
            layers = self._layers[start:end]
            step = self._backend.decode_step(layers)
            assert step is not None  # noqa: S101 - all layers have the same shape
            self._parts[start, end] = ExactStage(
                self._shape, layers, self._backend, step, precision=self.precision, first=self.first + start
            )
        return self._parts[start, end]

    def load_adapter(self, tensors: "Mapping[str, torch.Tensor]", start: int) -> "StageAdapter":
        return self._torch.load_adapter(tensors, start)

    def _forward_rows(self, rows: Sequence[tuple[SequenceCache, Any]]) -> list[Array]:
        packed = np.concatenate([as_float32(np.asarray(inputs)) for _, inputs in rows])
        counts = [len(inputs) for _, inputs in rows]
        outputs = self._step(
            packed,
            [
                DecodeRow(sequence.length, count, sequence.layers, sequence.lora)
                for (sequence, _), count in zip(rows, counts, strict=True)
            ],
        )
        return np.split(outputs, np.cumsum(counts)[:-1])

    def catch_up(self, sequence: SequenceCache, positions: int) -> None:
        """Do nothing: no layer has recurrent states."""

    def run_sequences(
        self, inputs: Any, counts: Sequence[int], adapter: "StageAdapter | None" = None
    ) -> Array:
        parts = np.split(as_float32(np.asarray(inputs)), np.cumsum(counts)[:-1])
        return np.concatenate(self.forward([(self.new_sequence(adapter), part) for part in parts]))

    def record_sequences(
        self, inputs: "Array | torch.Tensor", counts: Sequence[int], adapter: "StageAdapter | None" = None
    ) -> "tuple[torch.Tensor, AutogradGraph]":
        return self._torch.record_sequences(inputs, counts, adapter)

    def gradients(
        self, graph: "AutogradGraph", grad_outputs: "Array | torch.Tensor"
    ) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        return self._torch.gradients(graph, grad_outputs)

    @cached_property
    def _torch(self) -> "TorchStage":
        from swarmnet_node.engine.torch_layers.torch_stage import TorchStage

        threads.current()  # becomes torch's setting
        return TorchStage.of_layers(self, self._layers, self._shape.linears, self._backend)


def _layer(shape: LlamaShape, block: BlockShape, weights: Weights, index: int) -> DecoderLayer:
    """Return a layer of these weights, joined where they have the same inputs.

    Raises ``IntegrityError`` if some of the joined modules have a bias, and others have none.
    """
    family, sizes = block.family, shape.linears
    products: dict[str, Any] = {
        name: _joined(weights, f"layers.{index}.", paths) for name, paths in family.products.items()
    }

    def norm(path: str) -> Norm | None:
        weight = weights.get(f"layers.{index}.{path}.weight")
        return None if weight is None else Norm(weight, shape.rms_norm_eps)

    return DecoderLayer(
        index=index,
        shape=block,
        rule=AttentionRule(),
        key_heads=shape.num_key_value_heads,
        modules={
            name: tuple((path, sizes[path][0]) for path in paths) for name, paths in family.products.items()
        },
        **products,
        attention_norm=norm(family.attention_norm),
        mlp_norm=norm(family.mlp_norm),
        query_norm=norm(family.query_norm),
        key_norm=norm(family.key_norm),
    )


def _joined(weights: Weights, prefix: str, modules: Sequence[str]) -> Linear:
    paths = [prefix + path for path in modules]
    packed: list[Any] = [weights[f"{path}.weight"] for path in paths]
    biases = [np.asarray(weights[f"{path}.bias"]) for path in paths if f"{path}.bias" in weights]
    if biases and len(biases) < len(paths):
        raise IntegrityError(f"only some of {' and '.join(paths)} have a bias")
    weight = packed[0] if len(packed) == 1 else PackedTensor.joined(packed)
    return Linear(weight, np.concatenate(biases) if biases else None)
