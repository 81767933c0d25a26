"""The backend with a decode step in C: all layers of the Llama shape in one call.

A step has a few new positions of some sequences. ``decode.c`` is compiled once on each machine
(``swarmnet_protocols.machine.native_code``). Python fills its structs with pointers to torch's
memory: weights and norms once for a stage, KV caches and rotary angles in each step. Everything
else is ``TorchBackend``.
"""

import ctypes
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from swarmnet_node.engine.kernels.backend import (
    PRODUCTS,
    Backend,
    DecoderLayer,
    DecodeRow,
    DecodeStep,
    Linear,
    LoraLayers,
    LoraUpdate,
    RmsNorm,
    Rotary,
)
from swarmnet_node.engine.kernels.torch_backend import TorchBackend
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import (
    HEADERS,
    NativeLinear,
    Products,
    load_products,
    native_segments,
)

SOURCE = Path(__file__).with_name("decode.c")
FEW_POSITIONS = 128
"""Most positions of a step that C always computes faster. With so few, reading the weights takes
longest."""
MAX_POSITIONS = 512
"""Most positions that C computes together. More take more memory, and the weights are read seldom
enough."""
INPUTS_BYTES = 2 << 20
"""Most bytes of a float32 product's inputs that let C be faster even with more positions.
Arithmetic then takes longest, and C reads the inputs again for every few outputs. So they should
fit into a cache of the processor."""
CACHE_LINE_FLOATS = 16
QUERIES = 4
"""Most query heads that are scored at once. ``QUERIES`` in decode.c must be equal."""
ANGLES_POSITIONS = 64
"""Positions whose rotary angles are computed at once."""


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float))


class _Layer(Structure):
    _fields_ = (
        *((name, NativeLinear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _Norm) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")),
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


class _Update(Structure):
    _fields_ = (("down", c_void_p), ("ups", c_void_p), ("ranks", c_int64), ("pairs", c_int64))


class _Position(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("position", "capacity", "first", "rows")),
        *(("angles", c_void_p), ("caches", c_void_p), ("updates", c_void_p)),
    )


class _Lora:
    """The LoRA updates of some layers as C reads them: an ``_Update`` for each product of each
    layer."""

    def __init__(self, layers: Sequence[Mapping[str, LoraUpdate]]) -> None:
        self._kept: list[object] = []
        """Objects that the structs point to. They must stay alive."""
        self.ranks = max(len(update.down) for layer in layers for update in layer.values())
        self.updates = (_Update * (len(layers) * len(PRODUCTS)))(
            *(self._update(layer.get(product)) for layer in layers for product in PRODUCTS)
        )

    def _update(self, update: LoraUpdate | None) -> _Update:
        if update is None:
            return _Update()
        ups = (_Up * len(update.ups))(
            *(
                _Up(self._address(up), columns.start, len(up), ranks.start, up.shape[1])
                for columns, ranks, up in update.ups
            )
        )
        self._kept.append(ups)
        return _Update(self._address(update.down), ctypes.addressof(ups), len(update.down), len(update.ups))

    def _address(self, tensor: torch.Tensor) -> int:
        contiguous = tensor.contiguous()
        self._kept.append(contiguous)
        return contiguous.data_ptr()


class NativeBackend(TorchBackend):
    """``TorchBackend`` with a decode step in C, for float32 on the CPU."""

    def __init__(self, library: ctypes.CDLL, products: Products) -> None:
        super().__init__(products)
        self.decode = library.decode
        self.decode.restype = None
        self.decode.argtypes = [c_void_p] * 5

    @classmethod
    def load(cls, cache_dir: Path, target: str | None = None) -> "NativeBackend | None":
        """Compile the code, or load it from ``cache_dir`` if it was compiled before.

        ``target``: the best one to use (``native_code.targets``). Returns None if this machine
        cannot compile or load the code.
        """
        library = native_code.load(SOURCE, cache_dir, headers=HEADERS, target=target)
        return None if library is None else cls(library, load_products(cache_dir, target))

    def decode_step(self, layers: Sequence[DecoderLayer], rotary: Rotary) -> DecodeStep | None:
        return NativeDecodeStep(self, layers, rotary) if fits(layers, rotary) else None


class NativeDecodeStep:
    """Layers of one stage as C reads them."""

    def __init__(self, backend: NativeBackend, layers: Sequence[DecoderLayer], rotary: Rotary) -> None:
        """``fits`` must hold for the layers. Their weights are not copied."""
        self.max_positions = max_positions(layers)
        self._backend = backend
        self._decoder_layers = layers
        self._rotary = rotary
        self._first = layers[0].index
        self._hidden_size, self._head_size = layers[0].output.outputs, layers[0].head_size
        self._segments: list[object] = []
        """Objects that the structs of the layers point to. They must stay alive."""
        self._layers = (_Layer * len(layers))(*map(self._native_layer, layers))
        self._loras: WeakKeyDictionary[LoraLayers, _Lora | None] = WeakKeyDictionary()
        self._angles: dict[int, torch.Tensor] = {}
        """Rotary angles of the positions so far, in groups of ``ANGLES_POSITIONS``. They take far
        less memory than one KV cache."""
        self._shared_floats = _whole_cache_lines(max(map(_shared_floats, layers)))

    def __call__(self, inputs: torch.Tensor, rows: Sequence[DecodeRow]) -> torch.Tensor:
        count = sum(row.count for row in rows)
        if inputs.shape != (count, self._hidden_size) or inputs.dtype != torch.float32:
            raise ValueError(f"the decode step takes {count} positions of {self._hidden_size} float32")
        if count > MAX_POSITIONS:
            return torch.cat([self(inputs[first:end], part) for first, end, part in _tiles(rows)])
        caches = [self._caches(row) for row in rows]
        loras = [self._lora(row.lora) for row in rows]
        firsts = accumulate((row.count for row in rows), initial=0)
        positions = (_Position * count)(
            *(
                _Position(
                    *(position, capacity, first, row.count),
                    *(self._angles_at(position), ctypes.addressof(pointers)),
                    None if lora is None else ctypes.addressof(lora.updates),
                )
                for row, first, (capacity, pointers), lora in zip(rows, firsts, caches, loras, strict=False)
                for position in range(row.start, row.start + row.count)
            )
        )
        hidden = inputs.clone(memory_format=torch.contiguous_format)
        threads = torch.get_num_threads()
        longest = max(row.start + row.count for row in rows)
        ranks = max((lora.ranks for lora in loras if lora is not None), default=0)
        shared_floats = count * self._shared_floats + _whole_cache_lines(count * ranks)
        thread_floats = _whole_cache_lines(
            count * self._hidden_size + QUERIES * (longest + 2 * self._head_size)
        )
        scratch = torch.empty(shared_floats + threads * thread_floats)
        step = _Step(
            layers=len(self._layers),
            hidden_size=self._hidden_size,
            head_size=self._head_size,
            shared_floats=shared_floats,
            thread_floats=thread_floats,
            rows=count,
            threads=threads,
            ranks=ranks,
        )
        self._backend.decode(
            ctypes.byref(step), self._layers, positions, scratch.data_ptr(), hidden.data_ptr()
        )
        return hidden

    def _native_layer(self, layer: DecoderLayer) -> _Layer:
        return _Layer(
            *map(self._native_linear, (layer.qkv, layer.output, layer.gate_up, layer.down)),
            *map(_native_norm, (layer.attention_norm, layer.query_norm, layer.key_norm, layer.mlp_norm)),
            layer.heads,
            layer.key_heads,
            layer.down.inputs,
            layer.head_size**-0.5 if layer.rule.scaling is None else layer.rule.scaling,
        )

    def _native_linear(self, linear: Linear) -> NativeLinear:
        segments = native_segments(linear.weight)
        self._segments.append(segments)
        bias = None if linear.bias is None else linear.bias.data_ptr()
        return NativeLinear(ctypes.addressof(segments), bias, len(segments), linear.inputs)

    def _lora(self, lora: LoraLayers | None) -> _Lora | None:
        """Return the updates for these layers, or None without any. Computed once for each
        adapter."""
        if lora is None:
            return None
        if lora not in self._loras:
            layers = lora.layers[self._first : self._first + len(self._layers)]
            self._loras[lora] = _Lora(layers) if any(layers) else None
        return self._loras[lora]

    def _caches(self, row: DecodeRow) -> tuple[int, ctypes.Array[c_void_p]]:
        """Return the capacity of a row's caches, and the addresses of each layer's keys and
        values."""
        if len(row.caches) != len(self._layers):
            raise ValueError(f"caches of {len(row.caches)} layers for {len(self._layers)}")
        capacity = row.caches[0][0].shape[2]
        if row.start + row.count > capacity:
            raise ValueError(f"no room for {row.start + row.count} positions in a cache of {capacity}")
        return capacity, (c_void_p * (2 * len(row.caches)))(
            *(buffer.data_ptr() for buffers in row.caches for buffer in buffers)
        )

    def _angles_at(self, position: int) -> int:
        """Return the address of cosines and sines [2, head size]."""
        group, offset = divmod(position, ANGLES_POSITIONS)
        if group not in self._angles:
            start = group * ANGLES_POSITIONS
            positions = torch.arange(start, start + ANGLES_POSITIONS)
            self._angles[group] = _angles(self._decoder_layers, self._rotary, positions)
        angles = self._angles[group]
        return angles.data_ptr() + offset * angles.stride(0) * angles.element_size()


def _tiles(rows: Sequence[DecodeRow]) -> Iterator[tuple[int, int, list[DecodeRow]]]:
    """Divide a batch into parts of at most ``MAX_POSITIONS``: (first position, end, rows)."""
    total, left = sum(row.count for row in rows), deque(rows)
    for first in range(0, total, MAX_POSITIONS):
        room, part = min(MAX_POSITIONS, total - first), []
        while room:
            row = left.popleft()
            taken = min(row.count, room)
            part.append(replace(row, count=taken))
            room -= taken
            if taken < row.count:
                left.appendleft(replace(row, start=row.start + taken, count=row.count - taken))
        yield first, min(first + MAX_POSITIONS, total), part


def max_positions(layers: Sequence[DecoderLayer]) -> int:
    """Return the most positions of a step that C computes faster: any number with packed weights,
    fewer the wider float32 weights are."""
    linears = [linear for each in layers for linear in (each.qkv, each.output, each.gate_up, each.down)]
    if all(isinstance(linear.weight, PackedTensor) for linear in linears):
        return sys.maxsize
    inputs = max(linear.inputs for linear in linears)
    return min(MAX_POSITIONS, max(FEW_POSITIONS, INPUTS_BYTES // (4 * inputs)))


def fits(layers: Sequence[DecoderLayer], rotary: Rotary) -> bool:
    """Return whether the C code has a step for layers of these shapes.

    It has one for float32 on the CPU, equal sizes in all layers, and plain attention.
    """
    hidden_size, head_size = layers[0].output.outputs, layers[0].head_size
    return (
        layers[0].output.weight.device.type == "cpu"
        and head_size % 2 == 0
        and all(_layer_fits(layer, hidden_size, head_size) for layer in layers)
        and _angles(layers, rotary, torch.zeros(1, dtype=torch.long)).shape == (1, 2, head_size)
    )


def _layer_fits(layer: DecoderLayer, hidden_size: int, head_size: int) -> bool:
    width, inner = layer.heads * head_size, layer.down.inputs
    linears: list[tuple[Linear, tuple[int, ...]]] = [
        (layer.qkv, (width + 2 * layer.key_heads * head_size, hidden_size)),
        (layer.output, (hidden_size, width)),
        (layer.gate_up, (2 * inner, hidden_size)),
        (layer.down, (hidden_size, inner)),
    ]
    tensors: list[tuple[torch.Tensor, tuple[int, ...]]] = [
        (linear.weight, shape) for linear, shape in linears if isinstance(linear.weight, torch.Tensor)
    ]
    tensors += [(linear.bias, shape[:1]) for linear, shape in linears if linear.bias is not None]
    tensors += [(norm.weight, (hidden_size,)) for norm in (layer.attention_norm, layer.mlp_norm)]
    tensors += [
        (norm.weight, (head_size,)) for norm in (layer.query_norm, layer.key_norm) if norm is not None
    ]
    return (
        layer.rule.is_plain
        and layer.head_size == head_size
        and layer.heads % layer.key_heads == 0
        and (layer.query_norm is None) == (layer.key_norm is None)
        and all(linear.weight.shape == shape for linear, shape in linears)
        and all(
            tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()
            for tensor, shape in tensors
        )
    )


def _angles(layers: Sequence[DecoderLayer], rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    """Return cosines and sines [T, 2, head size] of positions [T].

    In all served models, they depend only on the positions.
    """
    cosines, sines = rotary(layers[0].attention_norm.weight, positions[None])
    return torch.stack((cosines[0], sines[0]), 1)


def _native_norm(norm: RmsNorm | None) -> _Norm:
    return _Norm() if norm is None else _Norm(norm.weight.data_ptr(), norm.eps)


def _shared_floats(layer: DecoderLayer) -> int:
    """Return the floats of scratch memory for one position that all threads share.

    They hold the states of all heads, the attention outputs, gate and up, their product, a sum to
    add to the hidden state, and the split inputs of one product.
    """
    outputs = (layer.qkv.outputs, layer.gate_up.outputs, layer.down.outputs)
    inputs = (layer.qkv.inputs, layer.output.inputs, layer.down.inputs)
    return sum(outputs) + layer.heads * layer.head_size + layer.down.inputs + max(inputs)


def _whole_cache_lines(floats: int) -> int:
    """Round up to whole cache lines, because threads that write to one line wait for each other."""
    return -(-floats // CACHE_LINE_FLOATS) * CACHE_LINE_FLOATS


def load_backend(cache_dir: Path) -> Backend:
    """Return the best backend of this machine.

    That is ``NativeBackend``, or ``TorchBackend`` where the C code does not compile.
    """
    return NativeBackend.load(cache_dir) or TorchBackend(load_products(cache_dir))
