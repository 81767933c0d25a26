"""Products of activations with packed matrices: on the CPU in C where this machine can compile it,
elsewhere in torch.

C multiplies codes and float32 activations as exact integers (``product.h``). So a result has the
same bits on every processor, and in a batch of any number of rows. Torch unpacks the matrix a panel
at a time and multiplies the panels: for gradients, for activations of 16 bits, for many rows on
processors that have plain C only, and on accelerators.
Activations keep 24 bits, so results equal the product with dequantised weights, up to the rounding
of sums.

On a CPU, loading interleaves the rows of packed matrices: C reads 16 of them side by side.
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
from swarmnet_protocols.quantization.formats import WHOLE_ROWS, Format
from swarmnet_protocols.quantization.packed_tensor import GROUP, PackedTensor, Segment

HEADERS = tuple(
    Path(__file__).with_name(name) for name in ("lanes.h", "dots.h", "unpack.h", "interleaved.h", "product.h")
)
"""Included by C code that multiplies with packed matrices."""
SOURCE = Path(__file__).with_name("products.c")
FEW_ROWS = 4
"""Most rows for a product in plain C. With more rows, panels are many times as fast, but give other
bits."""
PANEL_BYTES = 8 << 20
"""Bytes of the float32 weights that a CPU unpacks at a time: they stay in its cache."""
ACCELERATOR_PANEL_BYTES = 128 << 20
"""Bytes of the float32 weights that an accelerator unpacks at a time: each panel costs about a
dozen launches of operations."""


INTERLEAVED_BYTES = 1 << 20
"""Bytes that are interleaved at a time: few enough for the processor's cache."""
_NUMBERS = {Format.F32: torch.float32, Format.F16: torch.float16, Format.BF16: torch.bfloat16}
"""Formats that torch has as a dtype."""


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
    return NativeSegment(
        *(data.data_ptr(), int(segment.format), segment.row_bytes, segment.rows, segment.is_interleaved)
    )


def declare(library: ctypes.CDLL) -> None:
    """Declare the functions of ``products.c``."""
    library.multiply.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]
    library.unpack_rows.argtypes = [c_void_p, *[c_int64] * 3, c_void_p, c_int64, c_void_p]
    library.multiply.restype = library.unpack_rows.restype = c_int64
    library.interleave.argtypes = [c_void_p, c_int64, c_int64, c_void_p]
    library.interleave.restype = None
    library.takes_many_rows.restype = c_int64


class Products:
    """Products with packed matrices, on the device where these are. Made by
    :func:`load_products`."""

    def __init__(self, library: ctypes.CDLL | None) -> None:
        """``library``: the compiled code. With None, torch and the package ``gguf`` compute the
        products."""
        self._library = library
        self._local = threading.local()
        self._most_rows: float = FEW_ROWS
        if library is not None:
            declare(library)
            self._most_rows = float("inf") if library.takes_many_rows() else FEW_ROWS

    @property
    def is_native(self) -> bool:
        return self._library is not None

    def loaded(self, matrix: PackedTensor, device: torch.device) -> PackedTensor | torch.Tensor:
        """Return ``matrix`` in the memory of ``device``, in the form that this multiplies there.

        - On a CPU with C, rows are interleaved where they are: ``matrix`` must not be used again.
        - On an accelerator, 16 and 32-bit numbers become ordinary tensors.
        """
        if device.type == "cpu" and self._library is not None:
            return PackedTensor(tuple(map(self._interleaved, matrix.segments)), matrix.inputs)
        if device.type != "cpu" and len(matrix.segments) == 1 and matrix.segments[0].format in _NUMBERS:
            [segment] = matrix.segments
            return segment.data.contiguous().view(_NUMBERS[segment.format]).to(device)
        return matrix.to(device)

    def _interleaved(self, segment: Segment) -> Segment:
        """Interleave rows in place, some groups at a time, so that they are never in memory twice.

        One thread is faster than reading from a disk, and takes no time from threads that multiply.
        """
        if segment.is_interleaved or segment.format in WHOLE_ROWS:
            return segment
        assert self._library is not None  # noqa: S101 - the caller asked
        missing = -segment.rows % GROUP
        data = functional.pad(segment.data, (0, 0, 0, missing)) if missing else segment.data.contiguous()
        groups = data.view(-1, GROUP * segment.row_bytes)
        some = torch.split(groups, max(1, INTERLEAVED_BYTES // groups.shape[1]))
        copied = torch.empty_like(some[0])
        for each in some:
            ctypes.memmove(copied.data_ptr(), each.data_ptr(), each.nbytes)
            rows = Segment(segment.format, copied[: len(each)].view(-1, segment.row_bytes))
            self._library.interleave(ctypes.byref(_native_segment(rows)), segment.columns, 1, each.data_ptr())
        return Segment(segment.format, groups, segment.rows)

    def linear(
        self, inputs: torch.Tensor, weight: PackedTensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``inputs`` [..., columns], times the matrix [rows, columns], plus ``bias`` [rows]: [...,
        rows], in the dtype of the inputs.

        No gradients flow through it; ``packed_linear.linear`` adds them. Raises ``ValueError`` if
        the inputs have another number of columns.
        """
        rows, columns = weight.shape
        if inputs.shape[-1] != columns:
            raise ValueError(f"inputs with {inputs.shape[-1]} columns for {columns}")
        flat = inputs.reshape(-1, columns)
        if weight.inputs is not None:
            flat, weight = flat.index_select(1, weight.inputs), PackedTensor(weight.segments)
        if self._is_native(weight) and len(flat) <= self._most_rows and flat.dtype == torch.float32:
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
        sizes = [segment.rows for segment in weight.segments]
        for segment, part in zip(weight.segments, torch.split(whole, sizes), strict=True):
            self._unpack(segment, 0, part)
        return whole if weight.inputs is None else whole[:, weight.inputs.argsort()]

    def select(self, weight: PackedTensor, rows: torch.Tensor) -> torch.Tensor:
        """The weights of the rows with these indices [n]: float32 [n, columns]. Raises
        ``IndexError`` if there is no such row."""
        if not self._is_native(weight):
            return self.dequantize(weight.select(rows))
        found = torch.empty(len(rows), weight.shape[1])
        first = done = 0
        for segment in weight.segments:
            [own] = torch.where((rows >= first) & (rows < first + segment.rows))
            part = found if len(own) == len(rows) else torch.empty(len(own), weight.shape[1])
            self._unpack(segment, (rows[own] - first).long(), part)
            if part is not found:
                found[own] = part
            first, done = first + segment.rows, done + len(own)
        if done < len(rows):
            raise IndexError(f"rows {rows} of {weight.shape[0]}")
        return found if weight.inputs is None else found[:, weight.inputs.argsort()]

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
            for first in range(0, segment.rows, height):
                count = min(height, segment.rows - first)
                if not is_native:
                    yield segment.part(first, first + count).dequantize()
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

    def _unpack(self, segment: Segment, rows: torch.Tensor | int, out: torch.Tensor) -> None:
        """Write rows with these indices, or rows from one index on, to ``out`` [n, columns]."""
        assert self._library is not None  # noqa: S101 - the caller asked
        chosen, first = (None, rows) if isinstance(rows, int) else (rows.data_ptr(), 0)
        done = self._library.unpack_rows(
            *(ctypes.byref(_native_segment(segment)), segment.columns, first, len(out), chosen),
            *(torch.get_num_threads(), out.data_ptr()),
        )
        if not done:
            raise IndexError(f"rows {rows} of {segment.rows}")


@cache
def load_products(cache_dir: Path, target: str | None = None) -> Products:
    """The products of this machine; the compiled code is kept in ``cache_dir``.

    ``target``: the best one to compile it for (``native_code.targets``).
    """
    return Products(native_code.load(SOURCE, cache_dir, headers=HEADERS, target=target))
