"""The backend with a decode step in C: all layers of a stage in one call.

A step has a few new positions of some sequences. ``decode.c`` is compiled once on each machine
(``swarmnet_protocols.machine.native_code``). Python fills its structs with pointers to arrays:
weights and norms once for a stage, KV caches in each step. Everything else is ``TorchBackend``,
which is imported when it is needed.
"""

import ctypes
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from swarmnet_node.engine.kernels.backend import (
    PRODUCTS,
    Backend,
    DecoderLayer,
    DecodeRow,
    DecodeStep,
    LoraLayers,
    LoraUpdate,
)
from swarmnet_node.engine.kernels.native_layers import NativeLayers, fits
from swarmnet_node.engine.kernels.rotary_embeddings import logarithm
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.machine.threads import current as cores
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import HEADERS, Products, load_products

if TYPE_CHECKING:
    import torch

    from swarmnet_node.engine.kernels.torch_backend import TorchBackend

SOURCE = Path(__file__).with_name("decode.c")
INCLUDED = (*HEADERS, *(SOURCE.with_name(name) for name in ("transcendentals.h", "attention.h", "mlp.h")))
MAX_POSITIONS = 512
"""Most positions that C computes together. More take more memory, and the weights are read seldom
enough."""
CACHE_LINE_FLOATS = 16
QUERIES = 4
"""Most query heads that are scored at once. ``QUERIES`` in attention.h must be equal."""


class _Step(Structure):
    _fields_ = (
        ("packed", c_void_p),
        ("rotaries", c_void_p),
        *(
            (name, c_int64)
            for name in (
                *("layers", "hidden_size", "rotary_count", "angle_floats"),
                *("shared_floats", "thread_floats", "rows", "threads", "ranks"),
            )
        ),
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
        *(("caches", c_void_p), ("updates", c_void_p), ("query_scale", c_float)),
    )


class _Lora:
    """The LoRA updates of some layers as C reads them: an ``_Update`` for each product of each
    layer."""

    def __init__(self, layers: Sequence[DecoderLayer], loras: Sequence[Mapping[str, LoraUpdate]]) -> None:
        self._kept: list[object] = []
        """Objects that the structs point to. They must stay alive."""
        updates = [
            _joined(layer, lora, product)
            for layer, lora in zip(layers, loras, strict=True)
            for product in PRODUCTS
        ]
        self.ranks = max(len(update.down) for update in updates if update is not None)
        self.updates = (_Update * len(updates))(*map(self._update, updates))

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

    def _address(self, tensor: "torch.Tensor") -> int:
        contiguous = tensor.contiguous()
        self._kept.append(contiguous)
        return contiguous.data_ptr()


def _joined(layer: DecoderLayer, lora: Mapping[str, LoraUpdate], product: str) -> LoraUpdate | None:
    """Return the update of a product, whose modules may have updates of their own."""
    import torch

    if product in lora:
        return lora[product]
    ups, downs, first, rank = [], [], 0, 0
    for path, size in layer.modules[product]:
        if update := lora.get(path):
            ups += [
                (
                    slice(first + outputs.start, first + outputs.stop),
                    slice(rank + ranks.start, rank + ranks.stop),
                    up,
                )
                for outputs, ranks, up in update.ups
            ]
            downs.append(update.down)
            rank += len(update.down)
        first += size
    return LoraUpdate(torch.cat(downs), tuple(ups)) if downs else None


class NativeBackend:
    """``TorchBackend`` with a decode step in C, for float32 on the CPU."""

    is_exact = True

    def __init__(self, library: ctypes.CDLL, products: Products) -> None:
        self.products = products
        self.decode = library.decode
        self.decode.restype = None
        self.decode.argtypes = [c_void_p] * 5

    @classmethod
    def load(cls, cache_dir: Path, target: str | None = None) -> "NativeBackend | None":
        """Compile the code, or load it from ``cache_dir`` if it was compiled before.

        ``target``: the best one to use (``native_code.targets``). Returns None if this machine
        cannot compile or load the code.
        """
        products = load_products(cache_dir, target)
        if not products.packed_address:
            return None  # decode.c calls it
        library = native_code.load(SOURCE, cache_dir, headers=INCLUDED, target=target or products.target)
        return None if library is None else cls(library, products)

    @cached_property
    def torch(self) -> "TorchBackend":
        """The operations that C lacks."""
        from swarmnet_node.engine.kernels.torch_backend import TorchBackend

        return TorchBackend(self.products)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.torch, name)

    def decode_step(self, layers: Sequence[DecoderLayer]) -> DecodeStep | None:
        try:
            arrays = [layer.mapped(_as_array) for layer in layers]
        except TypeError:
            return None
        return NativeDecodeStep(self, arrays) if fits(arrays) else None


class NativeDecodeStep:
    """Layers of one stage as C reads them."""

    def __init__(self, backend: NativeBackend, layers: Sequence[DecoderLayer]) -> None:
        """``fits`` must hold for the layers. Their weights are not copied."""
        self._backend = backend
        self._decoder_layers = layers
        self._first = layers[0].index
        self._hidden_size = layers[0].output.outputs
        self._head_size = max(layer.shape.head_size for layer in layers)
        self._native = NativeLayers(layers)
        self._loras: WeakKeyDictionary[LoraLayers, _Lora | None] = WeakKeyDictionary()
        self._shared_floats = _whole_cache_lines(self._native.shared_floats)

    def __call__(self, inputs: Array, rows: Sequence[DecodeRow]) -> Array:
        count = sum(row.count for row in rows)
        if inputs.shape != (count, self._hidden_size) or inputs.dtype != np.float32:
            raise ValueError(f"the decode step takes {count} positions of {self._hidden_size} float32")
        if count > MAX_POSITIONS:
            return np.concatenate([self(inputs[first:end], part) for first, end, part in _tiles(rows)])
        caches = [self._caches(row) for row in rows]
        loras = [self._lora(row.lora) for row in rows]
        firsts = accumulate((row.count for row in rows), initial=0)
        positions = (_Position * count)(
            *(
                _Position(
                    *(position, capacity, first, row.count, ctypes.addressof(pointers)),
                    None if lora is None else ctypes.addressof(lora.updates),
                    self._query_scale(position),
                )
                for row, first, (capacity, pointers), lora in zip(rows, firsts, caches, loras, strict=False)
                for position in range(row.start, row.start + row.count)
            )
        )
        hidden = np.array(inputs, order="C")
        threads = cores()
        longest = max(row.start + row.count for row in rows)
        ranks = max((lora.ranks for lora in loras if lora is not None), default=0)
        shared_floats = count * self._shared_floats + _whole_cache_lines(count * ranks)
        thread_floats = _whole_cache_lines(
            count * self._hidden_size
            + max(QUERIES * (longest + 2 * self._head_size), self._native.experts_floats(count))
        )
        scratch = np.empty(shared_floats + threads * thread_floats, np.float32)
        step = _Step(
            packed=self._backend.products.packed_address,
            rotaries=ctypes.addressof(self._native.rotaries),
            layers=len(self._decoder_layers),
            hidden_size=self._hidden_size,
            rotary_count=len(self._native.rotaries),
            angle_floats=self._native.angle_floats,
            shared_floats=shared_floats,
            thread_floats=thread_floats,
            rows=count,
            threads=threads,
            ranks=ranks,
        )
        self._backend.decode(
            ctypes.byref(step), self._native.layers, positions, scratch.ctypes.data, hidden.ctypes.data
        )
        return hidden

    def _query_scale(self, position: int) -> float:
        """Return what queries at a position are multiplied by (Llama 4)."""
        growth = self._decoder_layers[0].shape.query_growth
        return 1.0 if growth is None else 1 + growth[0] * logarithm(1 + position // growth[1])

    def _lora(self, lora: LoraLayers | None) -> _Lora | None:
        """Return the updates for these layers, or None without any. Computed once for each
        adapter."""
        if lora is None:
            return None
        if lora not in self._loras:
            own = lora.layers[self._first : self._first + len(self._decoder_layers)]
            self._loras[lora] = _Lora(self._decoder_layers, own) if any(own) else None
        return self._loras[lora]

    def _caches(self, row: DecodeRow) -> tuple[int, ctypes.Array[c_void_p]]:
        """Return the capacity of a row's caches, and the addresses of each layer's keys and
        values."""
        if len(row.caches) != len(self._decoder_layers):
            raise ValueError(f"caches of {len(row.caches)} layers for {len(self._decoder_layers)}")
        capacity = row.caches[0][0].shape[2]
        if row.start + row.count > capacity:
            raise ValueError(f"no room for {row.start + row.count} positions in a cache of {capacity}")
        return capacity, (c_void_p * (2 * len(row.caches)))(
            *(_address(buffer) for buffers in row.caches for buffer in buffers)
        )


def _address(values: "Array | torch.Tensor") -> int:
    return values.ctypes.data if isinstance(values, np.ndarray) else values.data_ptr()


def _as_array(values: Any) -> Any:
    """Return a tensor as an array on the same memory. Raises ``TypeError`` unless it is float32 on
    the CPU."""
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, PackedTensor):
        if not values.is_on_cpu:
            raise TypeError("a matrix in an accelerator's memory")
        return values
    if values.device.type != "cpu" or str(values.dtype) != "torch.float32":
        raise TypeError(f"{values.dtype} on {values.device}")
    return values.detach().numpy()


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


def _whole_cache_lines(floats: int) -> int:
    """Round up to whole cache lines, because threads that write to one line wait for each other."""
    return -(-floats // CACHE_LINE_FLOATS) * CACHE_LINE_FLOATS


def load_backend(cache_dir: Path) -> Backend:
    """Return the best backend of this machine.

    That is ``NativeBackend``, or ``TorchBackend`` where the C code does not compile.
    """
    found: Any = NativeBackend.load(cache_dir)
    if found is None:
        from swarmnet_node.engine.kernels.torch_backend import TorchBackend

        found = TorchBackend(load_products(cache_dir))
    backend: Backend = found
    return backend
