"""Packed matrices: weights in memory as a gguf file has them, in blocks of a few bits a weight.

In the machine's memory their bytes are arrays of numpy, so that C computes without torch. In an
accelerator's memory they are tensors of torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from swarmnet_protocols.arrays import Array, as_tensor, joined
from swarmnet_protocols.quantization.formats import BLOCKS, OWN_FORMATS, WHOLE_ROWS, Format

if TYPE_CHECKING:
    import torch

GROUP = 16
"""Rows that are interleaved with each other. ``GROUP`` in product.h must be equal."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Rows of one format. ``data`` is uint8, in one of two forms:

    - [rows, bytes of a row], as files have them. It may be a view of a file in memory.
    - Interleaved, [groups, ``GROUP`` * bytes of a row]: only the C code knows the order of the
      bytes of a group. The last group is padded with rows of zeros.
    """

    format: Format
    data: "Array | torch.Tensor"
    """An array, or on an accelerator a tensor."""
    interleaved_rows: int | None = None
    """The number of rows if they are interleaved, else None."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` unless ``data`` has whole blocks of its format, and the groups of
        its rows."""
        if self.data.ndim != 2 or not str(self.data.dtype).endswith("uint8"):
            raise ValueError("a segment is bytes [rows, bytes of a row]")
        _, block_bytes = BLOCKS[self.format]
        if self.row_bytes % block_bytes:
            raise ValueError(f"rows of {self.row_bytes} bytes in blocks of {block_bytes}")
        if self.is_interleaved and self.data.shape != (-(-self.rows // GROUP), GROUP * self.row_bytes):
            raise ValueError(f"bytes {tuple(self.data.shape)} for groups of {self.rows} rows")
        if self.is_interleaved and (self.format in WHOLE_ROWS or self.rows < 0):
            raise ValueError(f"bytes of {self.rows} interleaved rows of {self.format.name}")

    @property
    def is_interleaved(self) -> bool:
        return self.interleaved_rows is not None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.data) if self.interleaved_rows is None else self.interleaved_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        width = int(self.data.shape[1])
        return width // GROUP if self.is_interleaved else width

    @property
    def columns(self) -> int:
        """Weights of a row."""
        weights, block_bytes = BLOCKS[self.format]
        return self.row_bytes // block_bytes * weights

    @property
    def by_rows(self) -> "Array | torch.Tensor":
        """``data`` [rows, bytes of a row]. Raises ``ValueError`` if rows are interleaved."""
        if self.is_interleaved:
            raise ValueError("only the C code reads interleaved rows")
        return self.data

    @property
    def tensor(self) -> "torch.Tensor":
        """``by_rows`` as a tensor, on the same memory."""
        return as_tensor(self.by_rows)

    def part(self, first: int, end: int) -> "Segment":
        """Return rows [first, end), on the same memory. Raises ``ValueError`` for a part of a
        group."""
        if not self.is_interleaved:
            return Segment(self.format, self.data[first:end])
        if first % GROUP or (end % GROUP and end != self.rows):
            raise ValueError(f"rows {first} to {end} are not whole groups of {GROUP}")
        return Segment(self.format, self.data[first // GROUP : -(-end // GROUP)], end - first)

    def dequantize(self) -> "torch.Tensor":
        """Return the weights, float32 [rows, columns], exactly as gguf's Python code computes them.

        Raises ``ValueError`` if rows are interleaved: ``Products.dequantize`` reads those.
        """
        data = self.by_rows
        if not isinstance(data, np.ndarray) or self.format in OWN_FORMATS:
            from swarmnet_protocols.quantization.unpack import unpack

            return unpack(self.format, self.tensor)
        from gguf import GGMLQuantizationType, dequantize

        values = dequantize(np.ascontiguousarray(data), GGMLQuantizationType(self.format))
        return as_tensor(np.require(values, np.float32, ["C", "W"])).view(len(data), -1)


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A matrix [rows, columns] of packed rows: consecutive segments of one format each.
    Immutable."""

    segments: tuple[Segment, ...]
    inputs: "Array | torch.Tensor | None" = None
    """For each column of the segments, its column in the matrix, [columns]. None if both have one
    order."""

    @classmethod
    def of(cls, format: Format, data: "Array | torch.Tensor") -> "PackedTensor":
        """Return a matrix of one format, on the memory of its bytes [rows, bytes of a row]. Raises
        ``ValueError`` as ``Segment``."""
        if not isinstance(data, np.ndarray) and data.device.type == "cpu":
            data = data.numpy()
        return cls((Segment(format, data),))

    @classmethod
    def of_numbers(cls, matrix: Array) -> "PackedTensor":
        """Return a matrix of float32 [rows, columns], on the same memory if it is contiguous."""
        return cls.of(Format.F32, np.ascontiguousarray(matrix, np.float32).view(np.uint8))

    @classmethod
    def joined(cls, matrices: Sequence["PackedTensor"]) -> "PackedTensor":
        """Return the rows of all matrices, one after another.

        Rows of one format are copied together. Interleaved ones stay where they are.

        Raises ``ValueError`` if their columns differ in number, or are not in order.
        """
        if any(matrix.inputs is not None for matrix in matrices):
            raise ValueError("columns in different orders")
        segments: list[Segment] = []
        for segment in (segment for matrix in matrices for segment in matrix.segments):
            is_alike = bool(segments) and segments[-1].format == segment.format
            if is_alike and not segment.is_interleaved and not segments[-1].is_interleaved:
                segments[-1] = Segment(segment.format, joined([segments[-1].data, segment.data]))
            else:
                segments.append(segment)
        return cls(tuple(segments))

    @classmethod
    def taking_turns(cls, matrices: Sequence["PackedTensor"]) -> "PackedTensor":
        """Return the first rows of all matrices, then their second rows, and so on. Raises
        ``ValueError`` unless they have one shape and one format."""
        segments = [segment for matrix in matrices for segment in matrix.segments]
        if any(matrix.inputs is not None for matrix in matrices):
            raise ValueError("columns in different orders")
        if len(segments) != len(matrices) or len({(each.format, each.data.shape) for each in segments}) != 1:
            raise ValueError("only matrices of one shape and one format can take turns")
        data = np.stack([each.by_rows for each in segments], 1)
        return cls.of(segments[0].format, data.reshape(-1, data.shape[-1]))

    def __post_init__(self) -> None:
        if len({segment.columns for segment in self.segments}) != 1:
            raise ValueError("segments with rows of different length")

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns]."""
        return sum(segment.rows for segment in self.segments), self.segments[0].columns

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, with the padding of groups."""
        return sum(segment.data.nbytes for segment in self.segments)

    @property
    def is_on_cpu(self) -> bool:
        """True if the weights are in the machine's memory, not in an accelerator's."""
        return isinstance(self.segments[0].data, np.ndarray)

    @property
    def device(self) -> "torch.device":
        return as_tensor(self.segments[0].data).device

    def to(self, device: "torch.device") -> "PackedTensor":
        """Return the same matrix in the memory of ``device``. Rows must not be interleaved."""
        if device.type == "cpu":
            return self
        inputs = None if self.inputs is None else as_tensor(self.inputs).to(device)
        segments = tuple(Segment(each.format, each.tensor.to(device)) for each in self.segments)
        return PackedTensor(segments, inputs)

    def split(self, sizes: Sequence[int]) -> list["PackedTensor"]:
        """Return consecutive parts of this matrix with ``sizes[i]`` rows each, on the same
        memory."""
        pieces, first = [], 0
        for size in sizes:
            pieces.append(self.rows(first, first + size))
            first += size
        return pieces

    def select(self, rows: Array) -> "PackedTensor":
        """Return a matrix of the rows with these indices [n], in their order. Rows must not be
        interleaved."""
        if len(self.segments) == 1:
            [segment] = self.segments
            return PackedTensor((Segment(segment.format, segment.by_rows[rows]),), self.inputs)
        ends = np.cumsum([segment.rows for segment in self.segments])
        holders = np.searchsorted(ends, rows, "right")
        changes = np.flatnonzero(np.diff(holders)) + 1
        found = []
        for start, end in pairwise([0, *changes.tolist(), len(rows)]):
            segment = self.segments[holders[start]]
            own = rows[start:end] - (ends[holders[start]] - segment.rows)
            found.append(PackedTensor.of(segment.format, segment.by_rows[own]))
        return PackedTensor(PackedTensor.joined(found).segments, self.inputs)

    def select_columns(self, columns: Array) -> "PackedTensor":
        """Return the matrix with these columns: a permutation [columns] of their indices.

        If whole blocks change places, their bytes are moved. Otherwise the order is kept in
        ``inputs``.
        """
        if self.inputs is not None:
            columns = np.argsort(self.inputs)[columns]
        moved = [_with_blocks_moved(segment, columns) for segment in self.segments]
        segments = tuple(segment for segment in moved if segment is not None)
        if len(segments) == len(self.segments):
            return PackedTensor(segments)
        return PackedTensor(self.segments, np.argsort(columns))

    def dequantize(self) -> "torch.Tensor":
        """Return the weights, float32 [rows, columns], exactly as gguf's Python code computes
        them."""
        import torch

        values = torch.cat([segment.dequantize() for segment in self.segments])
        return values if self.inputs is None else values[:, as_tensor(self.inputs).argsort()]

    def rows(self, first: int, end: int) -> "PackedTensor":
        """Return rows [first, end), on the same memory. Raises as ``Segment.part``."""
        found: list[Segment] = []
        for segment in self.segments:
            size = segment.rows
            if max(first, 0) < min(end, size):
                found.append(segment.part(max(first, 0), min(end, size)))
            first, end = first - size, end - size
        return PackedTensor(tuple(found), self.inputs)


def _with_blocks_moved(segment: Segment, columns: Array) -> Segment | None:
    """Return the columns with these indices; None if a block would be torn."""
    weights, block_bytes = BLOCKS[segment.format]
    runs = columns.reshape(-1, weights)
    starts = runs[:, 0]
    if (starts % weights).any() or not np.array_equal(runs, starts[:, None] + np.arange(weights)):
        return None
    blocks = segment.by_rows.reshape(segment.rows, -1, block_bytes)
    return Segment(segment.format, blocks[:, starts // weights].reshape(segment.rows, -1))
