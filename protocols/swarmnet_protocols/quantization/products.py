"""Products of activations with packed matrices: on the CPU in C where this machine can compile it,
elsewhere in torch.

With few rows, reading the weights bounds the time: C multiplies codes and activations as exact
integers (``product.h``), and its results have the same bits on every processor. With many rows, the
matrix is unpacked a panel at a time, and torch multiplies. Activations keep 24 bits, so results
equal the product with dequantised weights, up to the rounding of sums.
"""

import ctypes
import threading
from collections.abc import Iterator
from ctypes import Structure, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch.nn import functional

from swarmnet_protocols.machine import native_code
from swarmnet_protocols.quantization.packed_tensor import PackedTensor, Segment

HEADERS = tuple(
    Path(__file__).with_name(name) for name in ("lanes.h", "dots.h", "unpack.h", "interleaved.h", "product.h")
)
"""Included by C code that multiplies with packed matrices."""
SOURCE = Path(__file__).with_name("products.c")
FEW_ROWS = 64
"""Most rows for the product in C. With more rows, torch's product with unpacked panels is
faster."""
PANEL_BYTES = 8 << 20
"""Bytes of the float32 weights that a CPU unpacks at a time: they stay in its cache."""
ACCELERATOR_PANEL_BYTES = 128 << 20
"""Bytes of the float32 weights that an accelerator unpacks at a time: each panel costs about a
dozen launches of operations."""


class NativeSegment(Structure):
    """``segment`` in ``product.h``."""

    _fields_ = (
        ("rows", c_void_p),
        *((name, c_int64) for name in ("format", "row_bytes", "outputs", "interleaved")),
    )


class NativeLinear(Structure):
    """``linear`` in ``product.h``."""

    _fields_ = (("segments", c_void_p), ("bias", c_void_p), ("count", c_int64), ("inputs", c_int64))


def native_segments(weight: "PackedTensor | torch.Tensor") -> "ctypes.Array[NativeSegment]":
    """Return a packed matrix, or a float32 one, as C reads it. The matrix must stay alive.

    Raises ``ValueError`` unless its rows lie one after another in the memory of the CPU, because C
    computes the address of a row from the size of the rows before it.
    """
    if isinstance(weight, torch.Tensor):
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.is_contiguous():
            raise ValueError("C reads contiguous float32 in the memory of the CPU")
        rows = NativeSegment(weight.data_ptr(), 0, weight.stride(0) * 4, len(weight), 0)
        return (NativeSegment * 1)(rows)
    if weight.inputs is not None:
        raise ValueError("C reads columns in their order")
    return (NativeSegment * len(weight.segments))(*map(_native_segment, weight.segments))


def _native_segment(segment: Segment) -> NativeSegment:
    data = segment.data
    if data.device.type != "cpu" or not data.is_contiguous():
        raise ValueError("C reads contiguous rows of bytes in the memory of the CPU")
    return NativeSegment(data.data_ptr(), int(segment.format), data.shape[1], len(data), 0)


def declare(library: ctypes.CDLL) -> None:
    """Declare the functions of ``products.c``."""
    library.multiply.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]
    library.unpack_rows.argtypes = [c_void_p, *[c_int64] * 3, c_void_p, c_int64, c_void_p]
    library.multiply.restype = library.unpack_rows.restype = c_int64
    library.interleave.argtypes = [c_void_p, c_int64, c_int64, c_void_p]
    library.interleave.restype = None


class Products:
    """Products with packed matrices, on the device where these are. Made by
    :func:`load_products`."""

    def __init__(self, library: ctypes.CDLL | None) -> None:
        """``library``: the compiled code. With None, torch and the package ``gguf`` compute the
        products."""
        self._library = library
        self._local = threading.local()
        if library is not None:
            declare(library)

    @property
    def is_native(self) -> bool:
        return self._library is not None

    def linear(
        self, inputs: torch.Tensor, weight: PackedTensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``inputs`` [..., columns], times the matrix [rows, columns], plus ``bias`` [rows]: [...,
        rows], in the dtype of the inputs.

        No gradients flow through it; ``packed_linear.linear`` adds them.
        """
        rows, columns = weight.shape
        flat = inputs.reshape(-1, columns)
        if weight.inputs is not None:
            flat, weight = flat.index_select(1, weight.inputs), PackedTensor(weight.segments)
        if self._is_native(weight) and len(flat) <= FEW_ROWS and flat.dtype == torch.float32:
            outputs = self._multiply(flat.contiguous(), weight)
            if bias is not None:
                outputs += bias
        else:
            outputs = self._by_panels(flat, weight, bias)
        return outputs if inputs.dim() == 2 else outputs.view(*inputs.shape[:-1], rows)

    def back(self, gradients: torch.Tensor, weight: PackedTensor) -> torch.Tensor:
        """Return the gradients [..., columns] of the inputs of ``linear``, given the ``gradients``
        [..., rows] of its outputs."""
        rows, columns = weight.shape
        flat = gradients.reshape(-1, rows)
        found = flat.new_zeros(len(flat), columns)
        first = 0
        for panel in self._panels(weight):
            found.addmm_(flat[:, first : first + len(panel)], panel.to(flat.dtype))
            first += len(panel)
        if weight.inputs is not None:
            found = found[:, weight.inputs.argsort()]
        return found.view(*gradients.shape[:-1], columns)

    def dequantize(self, weight: PackedTensor) -> torch.Tensor:
        """The weights, float32 [rows, columns]."""
        if not self._is_native(weight):
            return weight.dequantize()
        whole = torch.empty(weight.shape)
        first = 0
        for segment in weight.segments:
            self._unpack(segment, 0, whole[first : first + len(segment.data)])
            first += len(segment.data)
        return whole if weight.inputs is None else whole[:, weight.inputs.argsort()]

    def _is_native(self, weight: PackedTensor) -> bool:
        return self._library is not None and weight.device.type == "cpu"

    def _multiply(self, inputs: torch.Tensor, weight: PackedTensor) -> torch.Tensor:
        assert self._library is not None  # noqa: S101 - the caller asked
        segments = native_segments(weight)
        matrix = NativeLinear(ctypes.addressof(segments), None, len(segments), weight.shape[1])
        outputs = torch.empty(len(inputs), weight.shape[0])
        done = self._library.multiply(
            *(ctypes.byref(matrix), weight.shape[0], inputs.data_ptr(), len(inputs)),
            *(torch.get_num_threads(), outputs.data_ptr()),
        )
        if not done:
            raise MemoryError("no memory for the activations of a product")
        return outputs

    def _by_panels(
        self, inputs: torch.Tensor, weight: PackedTensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        outputs = None
        first = 0
        for panel in self._panels(weight):
            end = first + len(panel)
            part = functional.linear(
                inputs, panel.to(inputs.dtype), None if bias is None else bias[first:end]
            )
            if len(panel) == weight.shape[0]:
                return part
            if outputs is None:
                outputs = inputs.new_empty(len(inputs), weight.shape[0])
            outputs[:, first:end] = part
            first = end
        return inputs.new_empty(len(inputs), 0) if outputs is None else outputs

    def _panels(self, weight: PackedTensor) -> Iterator[torch.Tensor]:
        """The weights, float32, in panels of as many rows as this device unpacks at a time. Each
        panel may overwrite the one before."""
        columns = weight.shape[1]
        is_native = self._is_native(weight)
        size = PANEL_BYTES if weight.device.type == "cpu" else ACCELERATOR_PANEL_BYTES
        height = max(1, size // (4 * columns))
        for segment in weight.segments:
            for first in range(0, len(segment.data), height):
                count = min(height, len(segment.data) - first)
                if not is_native:
                    yield Segment(segment.format, segment.data[first : first + count]).dequantize()
                else:
                    panel = self._panel_memory(count * columns).view(count, columns)
                    self._unpack(segment, first, panel)
                    yield panel

    def _panel_memory(self, floats: int) -> torch.Tensor:
        """This thread's memory for panels: fresh memory would cost as much time as the
        unpacking."""
        memory: torch.Tensor | None = getattr(self._local, "panel", None)
        if memory is None or len(memory) < floats:
            memory = self._local.panel = torch.empty(max(floats, PANEL_BYTES // 4))
        return memory[:floats]

    def _unpack(self, segment: Segment, first: int, out: torch.Tensor) -> None:
        assert self._library is not None  # noqa: S101 - the caller asked
        native = _native_segment(segment)
        done = self._library.unpack_rows(
            *(ctypes.byref(native), out.shape[1], first, len(out), None),
            *(torch.get_num_threads(), out.data_ptr()),
        )
        if not done:
            raise IndexError(f"rows {first} to {first + len(out)} of {len(segment.data)}")


@cache
def load_products(cache_dir: Path, target: str | None = None) -> Products:
    """The products of this machine; the compiled code is kept in ``cache_dir``.

    ``target``: the best one to compile it for (``native_code.targets``).
    """
    return Products(native_code.load(SOURCE, cache_dir, headers=HEADERS, target=target))
