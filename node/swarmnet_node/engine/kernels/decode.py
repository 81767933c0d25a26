"""Fused layers in one native call, for the steps that decoding is made of: a few new positions of some lanes."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import Structure, c_float, c_int64, c_void_p
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from swarmnet_node.engine.adapters import Addition, StageAdapter
from swarmnet_node.engine.kernels.fused_layers import PRODUCTS, FusedLayer, FusedLayers, Linear
from swarmnet_node.engine.kernels.fused_ops import Norm
from swarmnet_node.engine.kv_cache import KVGeometry, LayerShape, SequenceCache
from swarmnet_protocols.machine import native_code

SOURCE = Path(__file__).with_name("decode.c")
CACHE_LINE_FLOATS = 16
QUERIES = 4
"""At most so many heads are scored at once."""
ANGLES_POSITIONS = 64
"""Rotary angles are computed for a block of so many positions at once."""


class _Linear(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("inputs", c_int64))


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float))


class _Layer(Structure):
    _fields_ = (
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _Norm) for name in ("before_attention", "of_queries", "of_keys", "before_mlp")),
        *((name, c_int64) for name in ("heads", "key_heads", "inner")),
        ("scaling", c_float),
    )


class _Step(Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("layers", "hidden_size", "head_size", "shared_floats", "thread_floats"),
            *("rows", "threads", "ranks"),
        )
    )


class _Up(Structure):
    _fields_ = (
        ("weight", c_void_p),
        *((name, c_int64) for name in ("first", "outputs", "first_rank", "ranks")),
    )


class _Addition(Structure):
    _fields_ = (("down", c_void_p), ("ups", c_void_p), ("ranks", c_int64), ("pairs", c_int64))


class _Place(Structure):
    _fields_ = (
        *(("position", c_int64), ("capacity", c_int64)),
        *(("angles", c_void_p), ("caches", c_void_p), ("additions", c_void_p)),
    )


class _Additions:
    """What an adapter adds to some layers, as native code reads it: an ``_Addition`` for each product of each."""

    def __init__(self, layers: Sequence[Mapping[str, Addition]]) -> None:
        self._kept: list[object] = []
        self.ranks = max(len(addition.down) for layer in layers for addition in layer.values())
        self.array = (_Addition * (len(layers) * len(PRODUCTS)))(
            *(self._addition(layer.get(product)) for layer in layers for product in PRODUCTS)
        )

    def _addition(self, addition: Addition | None) -> _Addition:
        if addition is None:
            return _Addition()
        ups = (_Up * len(addition.ups))(
            *(
                _Up(self._address(up), columns.start, len(up), ranks.start, up.shape[1])
                for columns, ranks, up in addition.ups
            )
        )
        self._kept.append(ups)
        return _Addition(
            self._address(addition.down), ctypes.addressof(ups), len(addition.down), len(addition.ups)
        )

    def _address(self, tensor: torch.Tensor) -> int:
        rows = tensor.contiguous()
        self._kept.append(rows)
        return rows.data_ptr()


class Native:
    """The compiled code; whoever has one may try it on layers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.decode = library.decode
        self.decode.restype = None
        self.decode.argtypes = [c_void_p] * 5

    @classmethod
    def load(cls, cache_dir: Path) -> "Native | None":
        """Compile, or find in ``cache_dir`` what was compiled before; None where this machine cannot."""
        library = native_code.load(SOURCE, cache_dir)
        return None if library is None else cls(library)


class NativeLayers:
    """What ``FusedLayers`` computes, for a few new positions of some lanes, with their adapters."""

    def __init__(self, native: Native, fused: FusedLayers, geometry: KVGeometry, first: int = 0) -> None:
        """``fits`` holds for ``fused``, whose memory is used where it is; ``geometry`` is that of their lanes.

        Adapters count layers from another one, of which ``first`` is our first.
        """
        self._native = native
        self._fused = fused
        self._geometry = geometry
        self._first = first
        self._additions: WeakKeyDictionary[StageAdapter, _Additions | None] = WeakKeyDictionary()
        self._hidden_size, self._head_size = _sizes(fused)
        self._layers = (_Layer * len(fused.layers))(*map(_native_layer, fused.layers))
        self._angles: dict[int, torch.Tensor] = {}
        """Of positions that lanes have had, by blocks: a small part of what the cache of one lane takes."""
        self._shared_floats = _whole_lines(max(map(_shared_floats, fused.layers)))

    def part(self, start: int, end: int, geometry: KVGeometry) -> "NativeLayers":
        """Layers [start, end) of these, whose lanes have ``geometry``."""
        return NativeLayers(self._native, self._fused.part(start, end), geometry, self._first + start)

    def __call__(
        self, inputs: torch.Tensor, sequences: Sequence[SequenceCache], counts: Sequence[int]
    ) -> torch.Tensor:
        """Hidden states [N, D] of the next positions, ``counts`` of each lane, in and out.

        Lanes have room for them; their keys and values are written and ``length`` is left as it is.
        """
        positions = sum(counts)
        if inputs.shape != (positions, self._hidden_size) or inputs.dtype != torch.float32:
            raise ValueError(f"native layers take {positions} positions of {self._hidden_size} float32")
        caches = [self._caches(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        additions = [self._additions_of(sequence.adapter) for sequence in sequences]
        places = (_Place * positions)(
            *(
                _Place(
                    *(position, capacity, self._angles_at(position), ctypes.addressof(pointers)),
                    None if added is None else ctypes.addressof(added.array),
                )
                for sequence, count, (capacity, pointers), added in zip(
                    sequences, counts, caches, additions, strict=True
                )
                for position in range(sequence.length, sequence.length + count)
            )
        )
        hidden = inputs.clone(memory_format=torch.contiguous_format)
        threads = torch.get_num_threads()
        longest = max(place.position for place in places) + 1
        ranks = max((added.ranks for added in additions if added is not None), default=0)
        shared_floats = positions * self._shared_floats + _whole_lines(positions * ranks)
        thread_floats = _whole_lines(positions * self._hidden_size + QUERIES * longest)
        scratch = torch.empty(shared_floats + threads * thread_floats)
        step = _Step(
            layers=len(self._layers),
            hidden_size=self._hidden_size,
            head_size=self._head_size,
            shared_floats=shared_floats,
            thread_floats=thread_floats,
            rows=positions,
            threads=threads,
            ranks=ranks,
        )
        self._native.decode(ctypes.byref(step), self._layers, places, scratch.data_ptr(), hidden.data_ptr())
        return hidden

    def _additions_of(self, adapter: StageAdapter | None) -> _Additions | None:
        """What an adapter adds to our layers; None for nothing. It is found once, as long as the adapter is there."""
        if adapter is None:
            return None
        if adapter not in self._additions:
            layers = adapter.layers[self._first : self._first + len(self._layers)]
            self._additions[adapter] = _Additions(layers) if any(layers) else None
        return self._additions[adapter]

    def _caches(self, sequence: SequenceCache, count: int) -> tuple[int, ctypes.Array[c_void_p]]:
        """Capacity, and the addresses of keys and values of every layer."""
        if sequence.geometry != self._geometry:
            raise ValueError("native layers take lanes of their own")
        buffers = [buffer for index in range(len(self._layers)) for buffer in sequence.layer(index)]
        capacity = buffers[0].shape[2]
        if sequence.length + count > capacity:
            raise ValueError(f"no room for {sequence.length + count} positions in a lane of {capacity}")
        return capacity, (c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))

    def _angles_at(self, position: int) -> int:
        """The address of cosines and sines, [2, head size]."""
        block, offset = divmod(position, ANGLES_POSITIONS)
        if block not in self._angles:
            start = block * ANGLES_POSITIONS
            self._angles[block] = _angles(self._fused, torch.arange(start, start + ANGLES_POSITIONS))
        angles = self._angles[block]
        return angles.data_ptr() + offset * angles.stride(0) * angles.element_size()


def _angles(fused: FusedLayers, positions: torch.Tensor) -> torch.Tensor:
    """Cosines and sines, [T, 2, head size]. No model is served whose angles depend on more than the position."""
    cosines, sines = fused.rotary(fused.layers[0].output[0], positions[None])
    return torch.stack((cosines[0], sines[0]), 1)


def fits(fused: FusedLayers, geometry: KVGeometry) -> bool:
    """Whether the native code knows such layers. As with ``FusedLayers``, what it computes needs a trial."""
    hidden_size, head_size = _sizes(fused)
    return (
        geometry.dtype == torch.float32
        and geometry.device.type == "cpu"
        and head_size % 2 == 0
        and _angles(fused, torch.zeros(1, dtype=torch.long)).shape == (1, 2, head_size)
        and all(
            _layer_fits(layer, hidden_size, head_size)
            and shape == LayerShape(layer.key_heads, head_size, head_size)
            for layer, shape in zip(fused.layers, geometry.layers, strict=True)
        )
    )


def _layer_fits(layer: FusedLayer, hidden_size: int, head_size: int) -> bool:
    rule, width, inner = layer.rule, layer.heads * head_size, layer.down[0].shape[1]
    products: list[tuple[Linear, tuple[int, ...]]] = [
        (layer.qkv, (width + 2 * layer.key_heads * head_size, hidden_size)),
        (layer.output, (hidden_size, width)),
        (layer.gate_up, (2 * inner, hidden_size)),
        (layer.down, (hidden_size, inner)),
    ]
    tensors: list[tuple[torch.Tensor, tuple[int, ...]]] = [(weight, shape) for (weight, _), shape in products]
    tensors += [(bias, shape[:1]) for (_, bias), shape in products if bias is not None]
    tensors += [(weight, (hidden_size,)) for _, weight, _ in (layer.attention_norm, layer.mlp_norm)]
    tensors += [(weight, (head_size,)) for _, weight, _ in layer.head_norms]
    return (
        rule.sliding_window is None
        and rule.softcap is None
        and rule.sinks is None
        and layer.size == head_size
        and layer.heads % layer.key_heads == 0
        and len(layer.head_norms) in (0, 2)
        and all(
            tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()
            for tensor, shape in tensors
        )
    )


def _sizes(fused: FusedLayers) -> tuple[int, int]:
    """Of a hidden state, and of a head."""
    return fused.layers[0].output[0].shape[0], fused.layers[0].size


def _native_layer(layer: FusedLayer) -> _Layer:
    of_queries, of_keys = map(_native_norm, layer.head_norms) if layer.head_norms else (_Norm(), _Norm())
    return _Layer(
        *map(_native_linear, (layer.qkv, layer.output, layer.gate_up, layer.down)),
        _native_norm(layer.attention_norm),
        of_queries,
        of_keys,
        _native_norm(layer.mlp_norm),
        layer.heads,
        layer.key_heads,
        layer.down[0].shape[1],
        layer.size**-0.5 if layer.rule.scaling is None else layer.rule.scaling,
    )


def _native_linear(linear: Linear) -> _Linear:
    weight, bias = linear
    return _Linear(weight.data_ptr(), None if bias is None else bias.data_ptr(), weight.shape[1])


def _native_norm(norm: Norm) -> _Norm:
    _, weight, eps = norm
    return _Norm(weight.data_ptr(), eps)


def _shared_floats(layer: FusedLayer) -> int:
    """A row's states of all heads, what its query heads attended to, gates and ups, their products, and a sum to add."""
    rows: list[int] = [weight.shape[0] for weight, _ in (layer.qkv, layer.gate_up, layer.down)]
    return sum(rows, layer.heads * layer.size + layer.down[0].shape[1])


def _whole_lines(floats: int) -> int:
    """Threads that write into one cache line of memory would wait for each other."""
    return -(-floats // CACHE_LINE_FLOATS) * CACHE_LINE_FLOATS
