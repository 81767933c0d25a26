"""Products of activations with packed matrices: on the CPU in C where this machine can compile it,
elsewhere in torch. C reads and writes arrays of numpy, and torch is imported when it is needed.

C multiplies codes and float32 activations as exact integers (``product.h``). So a result has the
same bits on every processor, and in a batch of any number of rows. Torch unpacks the matrix a panel
at a time and multiplies the panels. It does so for gradients, for activations of 16 bits, for many
rows on processors that have plain C only, and on accelerators. Activations keep 24 bits, so results
equal the product with dequantised weights, up to the rounding of sums.

On a CPU, loading interleaves the rows of packed matrices: C reads 16 of them side by side.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from ctypes import Structure, c_int64, c_void_p
from functools import cache
from operator import truediv
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

import numpy as np

from swarmnet_protocols.arrays import Array, as_tensor
from swarmnet_protocols.machine import measured_targets, native_code, threads
from swarmnet_protocols.quantization.formats import BLOCKS, WHOLE_ROWS, Format
from swarmnet_protocols.quantization.packed_tensor import GROUP, PackedTensor, Segment

if TYPE_CHECKING:
    import torch

HEADERS = tuple(
    Path(__file__).with_name(name)
    for name in ("lanes.h", "dots.h", "unpack.h", "interleaved.h", "product.h", "packed_product.h")
)
"""Included by C code that multiplies with packed matrices."""
SOURCE = Path(__file__).with_name("products.c")
PACED_COLUMNS, PACED_OUTPUTS = 2048, 64
"""Size of the matrix of ``pace`` in ``products.c``, which fits the nearest cache."""
PACED_ROWS = (1, 4, 64)
"""Rows of the products that choose a target: a token, a few, and a prompt."""
AHEAD = (8192, 2048, 0)
"""Bytes that products may fetch ahead. On two cores of Zen 4, one row of Q4_K takes 1.8 times as
long with 8192 as with 0. On Intel (Emerald Rapids), it takes 1.3 times as long with 0."""
AHEAD_OUTPUTS = 1 << 15
"""Outputs of the matrix that chooses from ``AHEAD``: 38 MB, more than the cache near a core."""
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
_NUMBERS = {Format.F32: "float32", Format.F16: "float16", Format.BF16: "bfloat16"}
"""Formats that torch has as a dtype, and its name."""


class NativeSegment(Structure):
    """``segment`` in ``product.h``."""

    _fields_ = (
        ("rows", c_void_p),
        *((name, c_int64) for name in ("format", "row_bytes", "outputs", "interleaved")),
    )


class NativeLinear(Structure):
    """``linear`` in ``product.h``."""

    _fields_ = (("segments", c_void_p), ("bias", c_void_p), ("count", c_int64), ("inputs", c_int64))


def native_segments(weight: PackedTensor | Array) -> "ctypes.Array[NativeSegment]":
    """Return a packed matrix, or a float32 one, as C reads it. The matrix must stay alive.

    C computes the address of a row from the size of the rows before it. So ``ValueError`` is raised
    unless the rows lie one after another in the machine's memory.
    """
    if isinstance(weight, np.ndarray):
        if weight.dtype != np.float32 or not weight.flags.c_contiguous:
            raise ValueError("C reads contiguous float32 in the machine's memory")
        rows = NativeSegment(weight.ctypes.data, 0, weight.strides[0], len(weight), 0)
        return (NativeSegment * 1)(rows)
    if weight.inputs is not None:
        raise ValueError("C reads columns in their order")
    return (NativeSegment * len(weight.segments))(*map(_native_segment, weight.segments))


def _native_segment(segment: Segment) -> NativeSegment:
    data = segment.data
    if not isinstance(data, np.ndarray) or not data.flags.c_contiguous:
        raise ValueError("C reads contiguous rows of bytes in the machine's memory")
    return NativeSegment(
        *(data.ctypes.data, int(segment.format), segment.row_bytes, segment.rows, segment.is_interleaved)
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

    def __init__(self, library: ctypes.CDLL | None, target: str = "") -> None:
        """``library``: the compiled code. With None, torch and the package ``gguf`` compute the
        products. ``target``: the target of the code."""
        self._library = library
        self.target = target
        self.packed_address = 0
        """The address of ``packed_product`` for other C code. 0 without C."""
        self._local = threading.local()
        self._most_rows: float = FEW_ROWS
        if library is not None:
            declare(library)
            self.packed_address = ctypes.cast(library.packed_product, c_void_p).value or 0
            self._most_rows = float("inf") if library.takes_many_rows() else FEW_ROWS

    @property
    def is_native(self) -> bool:
        return self._library is not None

    def loaded(self, matrix: PackedTensor, device: "torch.device") -> "PackedTensor | torch.Tensor":
        """Return ``matrix`` in the memory of ``device``, in the form that this multiplies there.

        - On a CPU with C, rows are interleaved where they are: ``matrix`` must not be used again.
        - On an accelerator, 16 and 32-bit numbers become ordinary tensors.
        """
        if device.type == "cpu" and self._library is not None:
            return PackedTensor(tuple(map(self._interleaved, matrix.segments)), matrix.inputs)
        if device.type != "cpu" and len(matrix.segments) == 1 and matrix.segments[0].format in _NUMBERS:
            import torch

            [segment] = matrix.segments
            return segment.tensor.contiguous().view(getattr(torch, _NUMBERS[segment.format])).to(device)
        return matrix.to(device)

    def _interleaved(self, segment: Segment) -> Segment:
        """Interleave rows in place, some groups at a time, so that they are never in memory twice.

        One thread is faster than reading from a disk, and takes no time from threads that multiply.
        """
        if segment.is_interleaved or segment.format in WHOLE_ROWS:
            return segment
        assert self._library is not None  # noqa: S101 - the caller asked
        data, missing = np.asarray(segment.data), -segment.rows % GROUP
        data = np.pad(data, ((0, missing), (0, 0))) if missing else np.ascontiguousarray(data)
        groups = data.reshape(-1, GROUP * segment.row_bytes)
        size = max(1, INTERLEAVED_BYTES // groups.shape[1])
        copied = np.empty_like(groups[:size])
        for first in range(0, len(groups), size):
            each = groups[first : first + size]
            copied[: len(each)] = each
            rows = Segment(segment.format, copied[: len(each)].reshape(-1, segment.row_bytes))
            native = _native_segment(rows)
            self._library.interleave(ctypes.byref(native), segment.columns, 1, each.ctypes.data)
        return Segment(segment.format, groups, segment.rows)

    def multiply(self, inputs: Array, weight: PackedTensor) -> Array:
        """Return ``inputs``, float32 [n, columns], times the matrix [rows, columns], computed in C:
        [n, rows].

        Every processor computes the same bits. Raises ``ValueError`` for other inputs, or without
        C.
        """
        rows, columns = weight.shape
        if self._library is None or inputs.dtype != np.float32 or inputs.shape[1:] != (columns,):
            raise ValueError(f"C multiplies float32 [n, {columns}], not {inputs.dtype} {inputs.shape}")
        if weight.inputs is not None:
            inputs, weight = inputs[:, np.asarray(weight.inputs)], PackedTensor(weight.segments)
        inputs = np.ascontiguousarray(inputs)
        segments = native_segments(weight)
        matrix = NativeLinear(ctypes.addressof(segments), None, len(segments), columns)
        outputs = np.empty((len(inputs), rows), np.float32)
        done = self._library.multiply(
            *(ctypes.byref(matrix), rows, inputs.ctypes.data, len(inputs)),
            *(threads.current(), outputs.ctypes.data),
        )
        if not done:
            raise MemoryError("no memory for the activations of a product")
        return outputs

    def unpacked(self, weight: PackedTensor, rows: Array | None = None) -> Array:
        """Unpack the rows with these indices [n] in C, by default all: float32 [n, columns].

        Raises ``IndexError`` if there is no such row.
        """
        if rows is None:
            found, first = np.empty(weight.shape, np.float32), 0
            for segment in weight.segments:
                self._unpack(segment, 0, found[first : first + segment.rows])
                first += segment.rows
        else:
            found, first, done = np.empty((len(rows), weight.shape[1]), np.float32), 0, 0
            for segment in weight.segments:
                [own] = np.nonzero((rows >= first) & (rows < first + segment.rows))
                part = found if len(own) == len(rows) else np.empty((len(own), weight.shape[1]), np.float32)
                self._unpack(segment, np.ascontiguousarray(rows[own] - first, np.int64), part)
                if part is not found:
                    found[own] = part
                first, done = first + segment.rows, done + len(own)
            if done < len(rows):
                raise IndexError(f"rows {rows} of {weight.shape[0]}")
        return found if weight.inputs is None else found[:, np.argsort(weight.inputs)]

    # ---- in torch -------------------------------------------------------------------------------

    def linear(
        self, inputs: "torch.Tensor", weight: PackedTensor, bias: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """Return ``inputs`` [..., columns] times the matrix [rows, columns], plus ``bias`` [rows]:
        [..., rows], in the dtype of the inputs.

        No gradients flow through it; ``packed_linear.linear`` adds them. Raises ``ValueError`` if
        the inputs have another number of columns.
        """
        import torch

        rows, columns = weight.shape
        if inputs.shape[-1] != columns:
            raise ValueError(f"inputs with {inputs.shape[-1]} columns for {columns}")
        flat = inputs.reshape(-1, columns)
        if self._is_native(weight) and len(flat) <= self._most_rows and flat.dtype == torch.float32:
            outputs = as_tensor(self.multiply(flat.detach().numpy(), weight))
            if bias is not None:
                outputs += bias
        else:
            if weight.inputs is not None:
                flat, weight = flat[:, as_tensor(weight.inputs)], PackedTensor(weight.segments)
            outputs = self._by_panels(flat, weight, bias)
        return outputs if inputs.dim() == 2 else outputs.view(*inputs.shape[:-1], rows)

    def back(self, gradients: "torch.Tensor", weight: PackedTensor) -> "torch.Tensor":
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
            found = found[:, as_tensor(weight.inputs).argsort()]
        return found.view(*gradients.shape[:-1], columns)

    def dequantize(self, weight: PackedTensor) -> "torch.Tensor":
        """Return the weights, float32 [rows, columns]."""
        return as_tensor(self.unpacked(weight)) if self._is_native(weight) else weight.dequantize()

    def select(self, weight: PackedTensor, rows: "torch.Tensor") -> "torch.Tensor":
        """Return the weights of the rows with these indices [n]: float32 [n, columns]. Raises
        ``IndexError`` if there is no such row."""
        if not self._is_native(weight):
            return weight.select(rows.cpu().numpy()).dequantize()
        return as_tensor(self.unpacked(weight, rows.numpy()))

    def _is_native(self, weight: PackedTensor) -> bool:
        return self._library is not None and weight.is_on_cpu

    def _by_panels(
        self, inputs: "torch.Tensor", weight: PackedTensor, bias: "torch.Tensor | None"
    ) -> "torch.Tensor":
        from torch.nn import functional

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

    def _panels(self, weight: PackedTensor) -> "Iterator[torch.Tensor]":
        """Yield the weights, float32, in panels of as many rows as this device unpacks at a time.
        Each panel may overwrite the one before."""
        columns = weight.shape[1]
        is_native = self._is_native(weight)
        size = PANEL_BYTES if weight.is_on_cpu else ACCELERATOR_PANEL_BYTES
        height = max(1, size // (4 * columns))
        for segment in weight.segments:
            for first in range(0, segment.rows, height):
                count = min(height, segment.rows - first)
                if not is_native:
                    yield segment.part(first, first + count).dequantize()
                else:
                    panel = self._panel_memory(count * columns).reshape(count, columns)
                    self._unpack(segment, first, panel)
                    yield as_tensor(panel)

    def _panel_memory(self, floats: int) -> Array:
        """This thread's memory for panels: fresh memory would cost as much time as the
        unpacking."""
        memory: Array | None = getattr(self._local, "panel", None)
        if memory is None or len(memory) < floats:
            memory = self._local.panel = np.empty(max(floats, PANEL_BYTES // 4), np.float32)
        return memory[:floats]

    def _unpack(self, segment: Segment, rows: Array | int, out: Array) -> None:
        """Write rows with these indices, or rows from one index on, to ``out`` [n, columns]."""
        assert self._library is not None  # noqa: S101 - the caller asked
        chosen, first = (None, rows) if isinstance(rows, int) else (rows.ctypes.data, 0)
        done = self._library.unpack_rows(
            *(ctypes.byref(_native_segment(segment)), segment.columns, first, len(out), chosen),
            *(threads.current(), out.ctypes.data),
        )
        if not done:
            raise IndexError(f"rows {rows} of {segment.rows}")


def paces(cache_dir: Path) -> measured_targets.Times:
    """Return the times of products on this machine, as ``measured_targets.measure`` does.

    Cases are each format with each of ``PACED_ROWS``, then a large matrix with each of ``AHEAD``.
    """
    row_bytes = {format: PACED_COLUMNS // weights * size for format, (weights, size) in BLOCKS.items()}
    cases = [
        (int(format), its_bytes, rows, PACED_OUTPUTS, 0)
        for format, its_bytes in row_bytes.items()
        for rows in PACED_ROWS
    ]
    cases += [(int(Format.Q4_K), row_bytes[Format.Q4_K], 1, AHEAD_OUTPUTS, ahead) for ahead in AHEAD]
    return measured_targets.measure(SOURCE, cache_dir, cases, headers=HEADERS)


def fastest_ahead(times: Sequence[float]) -> int:
    """Return the entry of ``AHEAD`` with the least of a target's last times."""
    return min(zip(times[-len(AHEAD) :], AHEAD, strict=True))[1]


def times_by_format(cache_dir: Path) -> dict[str, dict[str, float]]:
    """Return for each format how long each target takes here, as a multiple of the fastest target's
    time for all formats. Empty if there was one target or none."""
    times = paces(cache_dir)
    if len(times) < 2:
        return {}
    chosen, count = times[measured_targets.fastest(times)], len(PACED_ROWS)
    return {
        format.name: {
            target: round(geometric_mean(map(truediv, found[i : i + count], chosen[i : i + count])), 2)
            for target, found in times.items()
        }
        for i, format in zip(range(0, len(chosen) - len(AHEAD), count), BLOCKS, strict=True)
    }


@cache
def load_products(cache_dir: Path, target: str | None = None) -> Products:
    """Return the products of this machine; the compiled code is kept in ``cache_dir``.

    ``target``: the best target to compile the code for (``native_code.targets``). The default is
    the fastest target on this machine.
    """
    ahead = 0
    if target is None and (times := paces(cache_dir)):
        target = measured_targets.fastest(times)
        ahead = fastest_ahead(times[target])
    library = native_code.load(SOURCE, cache_dir, headers=HEADERS, target=target)
    if library is not None:
        library.fetch_ahead(c_int64(ahead))
    return Products(library, native_code.loaded_target(SOURCE) if library is not None else "")
