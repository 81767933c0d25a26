"""Decoder layers as ``decode.c`` reads them: structs with pointers to arrays."""

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int64, c_void_p
from typing import Any

import numpy as np

from swarmnet_node.engine.kernels.backend import NORMS, PRODUCTS, DecoderLayer, Experts, Linear, Norm
from swarmnet_node.engine.kernels.block_shapes import ACTIVATIONS, BlockShape
from swarmnet_node.engine.kernels.rotary_embeddings import RotaryEmbedding
from swarmnet_protocols.quantization.products import NativeLinear, native_segments

MOST_POSITIONS = 1 << 62
"""A sliding window that is never full. A larger number would overflow in C."""
ROWS = 64
"""Most rows that are multiplied with an expert at a time. ``ROWS`` in product.h must be equal."""


class _Norm(Structure):
    _fields_ = (
        *(("weight", c_void_p), ("bias", c_void_p)),
        *((name, c_int64) for name in ("size", "stride", "centred")),
        ("eps", c_float),
    )


class _Rotary(Structure):
    _fields_ = (
        ("frequencies", c_void_p),
        *((name, c_int64) for name in ("pairs", "interleaved")),
        ("scale", c_float),
    )


class _Mixture(Structure):
    _fields_ = (
        *(("router", NativeLinear), ("experts", c_void_p), ("correction", c_void_p)),
        *((name, c_int64) for name in ("count", "chosen", "inner", "sigmoid", "normalised")),
        ("scale", c_float),
    )


class _Layer(Structure):
    _fields_ = (
        *((name, NativeLinear) for name in PRODUCTS),
        ("mixture", _Mixture),
        *((name, _Norm) for name in NORMS),
        *(
            (name, c_int64)
            for name in (
                *("heads", "key_heads", "head_size", "inner"),
                *("rotary", "window", "activation", "gated", "parallel", "shares"),
            )
        ),
        *((name, c_float) for name in ("scaling", "softcap", "residual", "scale")),
    )


class NativeLayers:
    """The layers of one stage. Their weights are not copied, and must stay where they are."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        """``fits`` must hold for the layers."""
        self._kept: list[object] = []
        """Objects that the structs point to. They must stay alive."""
        self._embeddings = list({layer.shape.rotary: None for layer in layers if layer.shape.rotary})
        self.rotaries = (_Rotary * len(self._embeddings))(*map(self._rotary, self._embeddings))
        self.layers = (_Layer * len(layers))(*map(self._layer, layers))
        self.angle_floats = sum(2 * len(each.frequencies) for each in self._embeddings)
        """Cosines and sines of one position, of all rotary embeddings."""
        self.shared_floats = self.angle_floats + max(map(_shared_floats, layers))
        """Floats of scratch memory for one position that all threads share."""
        self._hidden_size = layers[0].output.outputs
        self._experts = [(layer.experts, layer.shape.chosen) for layer in layers if layer.experts is not None]

    def experts_floats(self, rows: int) -> int:
        """Return the floats of scratch memory of each thread for the experts of ``rows``
        positions.

        ``routed_at`` in mlp.h divides this memory.
        """
        most = 0
        for experts, chosen in self._experts:
            inner, count = experts.inner, experts.router.outputs
            of_row = 2 * max(self._hidden_size, inner) + max(self._hidden_size, 2 * inner)
            most = max(most, 2 * rows * chosen + 2 * count + min(rows, ROWS) * of_row)
        return most

    def _layer(self, layer: DecoderLayer) -> _Layer:
        shape, rule = layer.shape, layer.rule
        return _Layer(
            *(self._linear(getattr(layer, product)) for product in PRODUCTS),
            self._mixture(layer.experts, shape),
            *(self._norm(getattr(layer, name)) for name in NORMS),
            heads=shape.heads,
            key_heads=layer.key_heads,
            head_size=shape.head_size,
            inner=layer.inner,
            rotary=-1 if shape.rotary is None else self._embeddings.index(shape.rotary),
            window=min(rule.sliding_window or 0, MOST_POSITIONS),
            activation=ACTIVATIONS[shape.activation],
            gated=shape.family.is_gated,
            parallel=shape.family.is_parallel,
            shares=_has_share(shape),
            scaling=shape.head_size**-0.5 if rule.scaling is None else rule.scaling,
            softcap=rule.softcap or 0.0,
            residual=shape.residual,
            scale=layer.scale,
        )

    def _mixture(self, experts: Experts | None, shape: BlockShape) -> _Mixture:
        mixture = shape.family.mixture
        if experts is None or mixture is None:
            return _Mixture()
        pairs = zip(experts.gate_up, experts.down, strict=True)
        linears = [self._linear(linear) for pair in pairs for linear in pair]
        native = (NativeLinear * len(linears))(*linears)
        self._kept.append(native)
        return _Mixture(
            router=self._linear(experts.router),
            experts=ctypes.addressof(native),
            correction=None if experts.correction is None else experts.correction.ctypes.data,
            count=experts.router.outputs,
            chosen=shape.chosen,
            inner=experts.inner,
            sigmoid=mixture.is_sigmoid,
            normalised=shape.is_normalised,
            scale=shape.mixed_scale,
        )

    def _linear(self, linear: Linear | None) -> NativeLinear:
        if linear is None:
            return NativeLinear()
        segments = native_segments(linear.weight)
        self._kept.append(segments)
        bias = None if linear.bias is None else linear.bias.ctypes.data
        return NativeLinear(ctypes.addressof(segments), bias, len(segments), linear.inputs)

    def _norm(self, norm: Norm | None) -> _Norm:
        if norm is None:
            return _Norm()
        size = norm.weight.shape[-1]
        return _Norm(
            norm.weight.ctypes.data,
            None if norm.bias is None else norm.bias.ctypes.data,
            size,
            size if norm.weight.ndim == 2 else 0,
            norm.is_centred,
            norm.eps,
        )

    def _rotary(self, rotary: RotaryEmbedding) -> _Rotary:
        frequencies = (c_float * len(rotary.frequencies))(*rotary.frequencies)
        self._kept.append(frequencies)
        return _Rotary(ctypes.addressof(frequencies), len(frequencies), rotary.is_interleaved, rotary.scale)


def fits(layers: Sequence[DecoderLayer]) -> bool:
    """Return whether the C code has a step for these layers: float32 in arrays, and weights of the
    sizes that the code computes with."""
    hidden_size, growth = layers[0].output.outputs, layers[0].shape.query_growth
    return all(layer.shape.query_growth == growth and _layer_fits(layer, hidden_size) for layer in layers)


def _layer_fits(layer: DecoderLayer, hidden_size: int) -> bool:
    shape, rule, inner = layer.shape, layer.rule, layer.inner
    width, key_width = shape.heads * shape.head_size, layer.key_heads * shape.head_size
    linears: list[tuple[Linear, tuple[int, ...]]] = [
        (layer.qkv, (width + 2 * key_width, hidden_size)),
        (layer.output, (hidden_size, width)),
    ]
    if layer.gate_up is not None and layer.down is not None:
        gate_up = (1 + shape.family.is_gated) * inner + _has_share(shape)
        linears += [(layer.gate_up, (gate_up, hidden_size)), (layer.down, (hidden_size, inner))]
    if layer.experts is not None:
        linears += _linears_of_experts(layer.experts, hidden_size)
    wholes = (layer.attention_norm, layer.mlp_norm, layer.attention_out_norm, layer.mlp_out_norm)
    norms = [(norm, (hidden_size,)) for norm in wholes if norm is not None] + _norms_of_heads(layer)
    tensors: list[tuple[Any, tuple[int, ...]]] = [
        (each.weight, size) for each, size in linears if isinstance(each.weight, np.ndarray)
    ]
    tensors += [(norm.weight, size) for norm, size in norms]
    tensors += [(linear.bias, size[:1]) for linear, size in linears if linear.bias is not None]
    tensors += [(norm.bias, size[-1:]) for norm, size in norms if norm.bias is not None]
    if layer.experts is not None and layer.experts.correction is not None:
        tensors.append((layer.experts.correction, (layer.experts.router.outputs,)))
    return (
        rule.sinks is None
        and (
            rule.sliding_window is None or (isinstance(rule.sliding_window, int) and rule.sliding_window > 0)
        )
        and (rule.softcap is None or rule.softcap > 0)
        and (layer.gate_up is None) == (layer.down is None)
        and (layer.down is not None or layer.experts is not None)
        and (layer.experts is None) == (shape.family.mixture is None)
        and (layer.experts is None or 0 < shape.chosen <= layer.experts.router.outputs)
        and not (layer.experts is not None and shape.family.is_parallel)
        and layer.key_heads > 0
        and shape.heads % layer.key_heads == 0
        and (layer.query_norm is None) == (layer.key_norm is None)
        and (shape.rotary is None or 2 * len(shape.rotary.frequencies) <= shape.head_size)
        and all(linear.weight.shape == size for linear, size in linears)
        and all(
            tensor.shape == size and tensor.dtype == np.float32 and tensor.flags.c_contiguous
            for tensor, size in tensors
        )
    )


def _has_share(shape: BlockShape) -> bool:
    """Return whether a sigmoid multiplies the outputs of the MLP."""
    return shape.family.mixture is not None and shape.family.mixture.has_share


def _linears_of_experts(experts: Experts, hidden_size: int) -> list[tuple[Linear, tuple[int, ...]]]:
    """Return the matrices of experts, and the sizes that they must have."""
    count, inner = len(experts.down), experts.inner
    return [
        (experts.router, (count, hidden_size)),
        *((each, (2 * inner, hidden_size)) for each in experts.gate_up),
        *((each, (hidden_size, inner)) for each in experts.down),
    ]


def _norms_of_heads(layer: DecoderLayer) -> list[tuple[Norm, tuple[int, ...]]]:
    """Return the norms of heads, and the sizes that their weights must have.

    If a norm of queries takes all heads together, so does the norm of keys.
    """
    size, heads, key_heads = layer.shape.head_size, layer.shape.heads, layer.key_heads
    if layer.query_norm is not None and layer.query_norm.weight.shape == (heads * size,):
        queries, keys = (heads * size,), (key_heads * size,)
    else:
        queries, keys = (size,), (size,)
    found: list[tuple[Norm, tuple[int, ...]]] = []
    for norm, count, wanted in (
        (layer.query_norm, heads, queries),
        (layer.key_norm, key_heads, keys),
        (layer.value_norm, key_heads, (size,)),
    ):
        if norm is not None:
            found.append((norm, (count, size) if norm.weight.ndim > 1 and wanted == (size,) else wanted))
    return found


def _shared_floats(layer: DecoderLayer) -> int:
    """Return the floats of scratch memory for one position that all threads share.

    They hold the states of all heads, the attention outputs, gate and up, their product, and a sum
    to add to the hidden state. Layers with experts add logits of experts, and the inputs of their
    down projections. The split inputs of one product and the angles come on top.
    """
    hidden, experts, mixed = layer.output.outputs, 0, 0
    if layer.experts is not None:
        experts, mixed = layer.experts.router.outputs, layer.shape.chosen * layer.experts.inner
    gate_up = 0 if layer.gate_up is None else layer.gate_up.outputs
    parts = max(hidden, layer.output.inputs, layer.inner, mixed)
    outputs = layer.qkv.outputs + layer.output.inputs + gate_up + layer.inner + hidden
    return outputs + experts + mixed + parts
