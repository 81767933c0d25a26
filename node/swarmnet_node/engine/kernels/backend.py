"""The backend interface: the arithmetic of decoder layers, and the weights it works on.

A backend computes the operations of one decoder layer: products with weights, RMSNorm, rotary
embedding, attention over a KV cache, the gate of the MLP, LoRA. Models do not know its
implementation, and call it in three ways:

1. ``torch_layers/llama_layers.py`` computes layers of the Llama shape entirely with the backend,
   from joined weights.
2. transformers runs layers of any other shape. Their attention and LoRA updates go to the backend.
3. A backend may offer a :class:`DecodeStep`, which computes all layers of a stage in one call. With
   few positions, the overhead of each operation is long compared with the time to read its weights.

There are two backends: ``TorchBackend`` has every operation on every device; ``NativeBackend`` adds
a decode step in C. Both read packed weights (``swarmnet_protocols.quantization``).

Shapes: T positions of all sequences of a batch, D hidden size, H query heads, Hkv key heads, d head
size, S cached positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from swarmnet_node.engine.kernels.block_shapes import BlockShape
from swarmnet_protocols.arrays import Array

if TYPE_CHECKING:
    import torch

Angles = tuple[Any, Any]
"""Cosines and signed sines [1, 1, T, d]. The first half of the sines is negated, so that a rotation
needs no subtraction."""

PRODUCTS = ("qkv", "output", "gate_up", "down")
"""The four products of a :class:`DecoderLayer`."""
NORMS = (
    *("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm"),
    *("query_norm", "key_norm", "value_norm"),
)
"""The norms of a :class:`DecoderLayer`, in the order of ``layer`` in decode.c."""


@dataclass(frozen=True)
class Linear:
    """A linear layer: ``weight`` [outputs, inputs], packed or in the activations' dtype, and
    ``bias``. Both are tensors, or arrays for C."""

    weight: Any
    bias: Any = None

    @property
    def inputs(self) -> int:
        return int(self.weight.shape[1])

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0])


@dataclass(frozen=True)
class Norm:
    """An RMSNorm, or a LayerNorm, over the last dimension.

    ``weight`` is [size], or [heads, size] if every head has weights of its own.
    """

    weight: Any
    eps: float
    bias: Any = None
    is_centred: bool = False
    """True if the mean is subtracted first: a LayerNorm."""


@dataclass(frozen=True)
class Experts:
    """All routed experts of one layer."""

    router: Linear
    gate_up: tuple[Linear, ...]
    """For each expert: the outputs of its gate, then of its up projection."""
    down: tuple[Linear, ...]
    correction: Any = None
    """Numbers added to the scores that choose experts, not to their weights: [experts]. None if a
    family has no such numbers."""

    @property
    def inner(self) -> int:
        """The inputs of an expert's down projection."""
        return self.down[0].inputs

    @property
    def weights(self) -> list[Any]:
        """All weights."""
        found = [linear.weight for linear in (self.router, *self.gate_up, *self.down)]
        return found if self.correction is None else [*found, self.correction]

    def mapped(self, change: Callable[[Any], Any]) -> "Experts":
        """Return the experts with ``change`` of each weight in its place."""

        def of(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
            return tuple(Linear(change(linear.weight)) for linear in linears)

        correction = None if self.correction is None else change(self.correction)
        [router] = of((self.router,))
        return Experts(router, of(self.gate_up), of(self.down), correction)


@dataclass(frozen=True)
class AttentionRule:
    """The attention of one layer. None means that the layer has no such feature."""

    scaling: float | None = None
    """Factor of the scores; None: 1 / sqrt(d)."""
    sliding_window: int | None = None
    """Number of positions that a query sees."""
    softcap: float | None = None
    """Bound of the scores."""
    sinks: "torch.Tensor | None" = None
    """One further score for each head, [H]."""

    @property
    def is_plain(self) -> bool:
        """True if the attention is softmax(scaling * QKᵀ)V, without window, cap or sinks."""
        return self.sliding_window is None and self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer, and what it computes with them.

    - ``index`` counts from the first layer of the whole stage.
    - ``qkv`` has the outputs of all query heads, then of the key heads, then of the value heads.
    - ``gate_up`` has the outputs of the gate, then of the up projection, and last the logit of the
      MLP's share. A layer may lack gate and share. With experts, it may lack the whole MLP.
    - Norms of heads have the size of one head, or that of all heads together.
    - ``modules`` has the linear modules whose outputs each product concatenates: paths, and numbers
      of outputs.
    """

    index: int
    shape: BlockShape
    rule: AttentionRule
    key_heads: int
    qkv: Linear
    output: Linear
    gate_up: Linear | None
    down: Linear | None
    modules: Mapping[str, tuple[tuple[str, int], ...]]
    attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    experts: Experts | None = None
    scale: float = 1.0
    """Factor of the layer's outputs."""

    @property
    def inner(self) -> int:
        """The inputs of the MLP's down projection. 0 without an MLP."""
        return 0 if self.down is None else self.down.inputs

    @property
    def weights(self) -> list[Any]:
        """All weights and biases."""
        tensors = [each for part in self._parts.values() for each in (part.weight, part.bias)]
        own = self.experts.weights if self.experts else []
        return [*own, *(each for each in tensors if each is not None)]

    @property
    def _parts(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in (*PRODUCTS, *NORMS)}
        return {name: part for name, part in found.items() if part is not None}

    def mapped(self, change: Callable[[Any], Any]) -> "DecoderLayer":
        """Return the layer with ``change`` of each weight and bias in its place."""

        def of(part: Any) -> Any:
            bias = None if part.bias is None else change(part.bias)
            return replace(part, weight=change(part.weight), bias=bias)

        experts = self.experts and self.experts.mapped(change)
        return replace(self, experts=experts, **{name: of(part) for name, part in self._parts.items()})


@dataclass(frozen=True, eq=False)
class LoraUpdate:
    """The LoRA pairs of one product (Hu et al., 2021, equation 3): y += B A x.

    ``down`` [ranks, inputs] has the A of all pairs, one after another. Each entry of ``ups``
    belongs to one pair: (columns of the product's outputs, rows of ``down``, B [outputs, rank]).
    """

    down: "torch.Tensor"
    ups: "tuple[tuple[slice, slice, torch.Tensor], ...]"


@dataclass(frozen=True, eq=False)
class LoraLayers:
    """The LoRA updates of one adapter: for each layer of the whole stage, by product."""

    layers: tuple[Mapping[str, LoraUpdate], ...]

    @property
    def is_empty(self) -> bool:
        return not any(self.layers)


@dataclass(frozen=True)
class DecodeRow:
    """One sequence of a decode step: ``count`` new positions from ``start`` on.

    ``caches`` has each layer's keys and values [1, Hkv, capacity, d], with room for the new
    positions.
    """

    start: int
    count: int
    caches: Sequence[tuple[Any, Any]]
    lora: LoraLayers | None = None


class DecodeStep(Protocol):
    """All layers of a stage in one call."""

    def __call__(self, inputs: Array, rows: Sequence[DecodeRow]) -> Array:
        """Compute the layers for the rows' new positions: [T, D] to [T, D], float32.

        Writes their keys and values into the caches. Raises ``ValueError`` for inputs or caches of
        other shapes.
        """


@dataclass(frozen=True)
class Ranges:
    """The sequences of a batch in a buffer of keys. All tensors are int32 on the buffer's device.

    - Sequence i has ``lengths[i]`` positions from ``starts[i]`` on. ``starts`` [B + 1] ascends and
      ends with the end of the buffer.
    - The batch's queries [first_queries[i], first_queries[i + 1]) are the last positions of
      sequence i.
    - No sequence has more than ``most_queries`` queries or more than ``longest`` positions.
    """

    starts: "torch.Tensor"
    lengths: "torch.Tensor"
    first_queries: "torch.Tensor"
    most_queries: int
    longest: int


@dataclass(frozen=True)
class Recording:
    """A recorded computation. ``replay`` computes it again, from the same memory into
    ``outputs``."""

    outputs: "torch.Tensor"
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records computations on one device."""

    def record(self, compute: "Callable[[], torch.Tensor]") -> Recording:
        """Record ``compute``, which has run before and reads and writes memory at fixed addresses.

        Raises ``RuntimeError`` if it contains an operation that cannot be recorded, such as reading
        a value back.
        """


class Backend(Protocol):
    """The operations of a decoder layer. All tensors of a call have one dtype and one device.

    Operations leave their arguments unchanged, except that ``add_lora`` updates ``outputs``. They
    can be differentiated with respect to activations and LoRA; weights are frozen.
    """

    is_exact: bool
    """True if it has decode steps in C."""

    def linear(self, inputs: "torch.Tensor", linear: Linear) -> "torch.Tensor":
        """Multiply: [T, inputs] to [T, outputs]."""

    def rms_norm(self, states: "torch.Tensor", norm: Norm) -> "torch.Tensor":
        """Apply RMSNorm over the last dimension of [..., size]. The shape stays.

        Zhang and Sennrich, 2019, equation 4.
        """

    def rope(self, states: "torch.Tensor", angles: Angles) -> "torch.Tensor":
        """Apply the rotary embedding to [1, heads, T, d]. Component i is paired with i + d / 2.

        RoFormer, section 3.4.2.
        """

    def attention(
        self,
        query: "torch.Tensor",
        keys: "torch.Tensor",
        values: "torch.Tensor",
        rule: AttentionRule,
        visible: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """Attend with queries [B, H, T, d] to keys and values [B, Hkv, S, d]. Returns [B, H, T, d].

        Keys and values may be views of a KV cache. The queries are the last T of the S positions.
        ``visible`` [T, S] is true where a query sees a key; without it, each query sees every
        position up to its own. The sliding window of ``rule`` is ignored, because ``visible``
        contains it.
        """

    def is_fused(self, query: "torch.Tensor", values: "torch.Tensor", rule: AttentionRule) -> bool:
        """Return whether ``ranged_attention`` accepts more than one query of a sequence, for
        tensors like these."""

    def ranged_attention(
        self,
        query: "torch.Tensor",
        keys: "torch.Tensor",
        values: "torch.Tensor",
        ranges: Ranges,
        rule: AttentionRule,
    ) -> "torch.Tensor":
        """Attend with queries [T, H, d] to keys and values [P, Hkv, d].

        Each query attends to the range of its own sequence. Returns [T, H, d]. Each query sees the
        keys up to its own position, within the sliding window of ``rule``. Unless ``is_fused``,
        there is one query of each sequence.
        """

    def recorder(self, device: "torch.device") -> Recorder | None:
        """Return a recorder of decode steps on ``device``. None if this backend cannot record
        there."""

    def swiglu(self, gate_up: "torch.Tensor") -> "torch.Tensor":
        """Compute the gated activation of an MLP, silu(gate) * up (Shazeer, 2020): [T, 2 n] to [T,
        n]."""

    def add_lora(self, inputs: "torch.Tensor", outputs: "torch.Tensor", update: LoraUpdate) -> None:
        """Add the LoRA update of ``inputs`` [T, inputs] to ``outputs`` [T, outputs], in place."""

    def decode_step(self, layers: Sequence[DecoderLayer]) -> DecodeStep | None:
        """Return a decode step for these layers, whose tensors must stay where they are.

        None if this backend has none for their shape, dtype or device. Before using it, the caller
        compares its outputs with the outputs of the single operations.
        """
