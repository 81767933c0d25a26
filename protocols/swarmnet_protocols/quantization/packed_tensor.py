"""Packed matrices: weights in memory as a gguf file has them, in blocks of a few bits a weight."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize

from swarmnet_protocols.quantization.formats import BLOCKS, OWN_FORMATS, WHOLE_ROWS, Format
from swarmnet_protocols.quantization.unpack import unpack

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
    data: torch.Tensor
    interleaved_rows: int | None = None
    """The number of rows if they are interleaved, else None."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` unless ``data`` has whole blocks of its format, and the groups of
        its rows."""
        if self.data.dtype != torch.uint8 or self.data.dim() != 2:
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
        width: int = self.data.shape[1]
        return width // GROUP if self.is_interleaved else width

    @property
    def columns(self) -> int:
        """Weights of a row."""
        weights, block_bytes = BLOCKS[self.format]
        return self.row_bytes // block_bytes * weights

    @property
    def by_rows(self) -> torch.Tensor:
        """``data`` [rows, bytes of a row]. Raises ``ValueError`` if rows are interleaved."""
        if self.is_interleaved:
            raise ValueError("only the C code reads interleaved rows")
        return self.data

    def part(self, first: int, end: int) -> "Segment":
        """Rows [first, end), on the same memory. Raises ``ValueError`` for a part of a group."""
        if not self.is_interleaved:
            return Segment(self.format, self.data[first:end])
        if first % GROUP or (end % GROUP and end != self.rows):
            raise ValueError(f"rows {first} to {end} are not whole groups of {GROUP}")
        return Segment(self.format, self.data[first // GROUP : -(-end // GROUP)], end - first)

    def dequantize(self) -> torch.Tensor:
        """The weights, float32 [rows, columns], exactly as gguf's Python code computes them.

        Raises ``ValueError`` if rows are interleaved: ``Products.dequantize`` reads those.
        """
        data = self.by_rows
        if data.device.type != "cpu" or self.format in OWN_FORMATS:
            return unpack(self.format, data)
        values = dequantize(data.contiguous().numpy(), GGMLQuantizationType(self.format))
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"])).view(len(data), -1)


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A matrix [rows, columns] of packed rows: consecutive segments of one format each.
    Immutable."""

    segments: tuple[Segment, ...]
    inputs: torch.Tensor | None = None
    """For each column of the segments, its column in the matrix, [columns]. None if both have one
    order."""

    @classmethod
    def of(cls, format: Format, data: torch.Tensor) -> "PackedTensor":
        """A matrix of one format, from its bytes [rows, bytes of a row]. Raises ``ValueError`` as
        ``Segment``."""
        return cls((Segment(format, data),))

    @classmethod
    def joined(cls, matrices: Sequence["PackedTensor"]) -> "PackedTensor":
        """The rows of all matrices, one after another.

        Rows of one format are copied together. Interleaved ones stay where they are.

        Raises ``ValueError`` if their columns differ in number, or are not in order.
        """
        if any(matrix.inputs is not None for matrix in matrices):
            raise ValueError("columns in different orders")
        segments: list[Segment] = []
        for segment in (segment for matrix in matrices for segment in matrix.segments):
            is_alike = bool(segments) and segments[-1].format == segment.format
            if is_alike and not segment.is_interleaved and not segments[-1].is_interleaved:
                segments[-1] = Segment(segment.format, torch.cat([segments[-1].data, segment.data]))
            else:
                segments.append(segment)
        return cls(tuple(segments))

    @classmethod
    def taking_turns(cls, matrices: Sequence["PackedTensor"]) -> "PackedTensor":
        """The first rows of all matrices, then their second rows, and so on. Raises ``ValueError``
        unless they have one shape and one format."""
        segments = [segment for matrix in matrices for segment in matrix.segments]
        if any(matrix.inputs is not None for matrix in matrices):
            raise ValueError("columns in different orders")
        if len(segments) != len(matrices) or len({(each.format, each.data.shape) for each in segments}) != 1:
            raise ValueError("only matrices of one shape and one format can take turns")
        data = torch.stack([each.by_rows for each in segments], 1)
        return cls.of(segments[0].format, data.view(-1, data.shape[-1]))

    def __post_init__(self) -> None:
        if len({segment.columns for segment in self.segments}) != 1:
            raise ValueError("segments with rows of different length")

    @property
    def shape(self) -> torch.Size:
        """[rows, columns]."""
        return torch.Size([sum(segment.rows for segment in self.segments), self.segments[0].columns])

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, with the padding of groups."""
        return sum(segment.data.nbytes for segment in self.segments)

    @property
    def device(self) -> torch.device:
        return self.segments[0].data.device

    def to(self, device: torch.device) -> "PackedTensor":
        """The same matrix in the memory of ``device``. Rows must not be interleaved."""
        inputs = None if self.inputs is None else self.inputs.to(device)
        segments = tuple(Segment(each.format, each.by_rows.to(device)) for each in self.segments)
        return PackedTensor(segments, inputs)

    def split(self, sizes: Sequence[int]) -> list["PackedTensor"]:
        """Consecutive parts of this matrix with ``sizes[i]`` rows each, on the same memory."""
        pieces, first = [], 0
        for size in sizes:
            pieces.append(self.rows(first, first + size))
            first += size
        return pieces

    def select(self, rows: torch.Tensor) -> "PackedTensor":
        """A matrix of the rows with these indices [n], in their order. Rows must not be
        interleaved."""
        if len(self.segments) == 1:
            [segment] = self.segments
            return PackedTensor(
                (Segment(segment.format, segment.by_rows.index_select(0, rows)),), self.inputs
            )
        starts = torch.tensor([0, *(segment.rows for segment in self.segments)]).cumsum(0)
        holders = torch.searchsorted(starts[1:], rows, right=True)
        _, counts = torch.unique_consecutive(holders, return_counts=True)
        found = []
        for run in torch.split(rows, counts.tolist()):
            at = int(torch.searchsorted(starts[1:], run[0], right=True))
            data = self.segments[at].by_rows.index_select(0, run - starts[at])
            found.append(PackedTensor.of(self.segments[at].format, data))
        return PackedTensor(PackedTensor.joined(found).segments, self.inputs)

    def select_columns(self, columns: torch.Tensor) -> "PackedTensor":
        """Return the matrix with these columns: a permutation [columns] of their indices.

        If whole blocks change places, their bytes are moved. Otherwise the order is kept in
        ``inputs``.
        """
        if self.inputs is not None:
            columns = self.inputs.argsort()[columns]
        moved = [_with_blocks_moved(segment, columns) for segment in self.segments]
        segments = tuple(segment for segment in moved if segment is not None)
        if len(segments) == len(self.segments):
            return PackedTensor(segments)
        return PackedTensor(self.segments, columns.argsort())

    def dequantize(self) -> torch.Tensor:
        """The weights, float32 [rows, columns], exactly as gguf's Python code computes them."""
        values = torch.cat([segment.dequantize() for segment in self.segments])
        return values if self.inputs is None else values[:, self.inputs.argsort()]

    def rows(self, first: int, end: int) -> "PackedTensor":
        """Rows [first, end), on the same memory. Raises as ``Segment.part``."""
        found: list[Segment] = []
        for segment in self.segments:
            size = segment.rows
            if max(first, 0) < min(end, size):
                found.append(segment.part(max(first, 0), min(end, size)))
            first, end = first - size, end - size
        return PackedTensor(tuple(found), self.inputs)


def _with_blocks_moved(segment: Segment, columns: torch.Tensor) -> Segment | None:
    """The columns with these indices; None if a block would be torn."""
    weights, block_bytes = BLOCKS[segment.format]
    runs = columns.view(-1, weights)
    starts = runs[:, 0]
    if (starts % weights).any() or not torch.equal(runs, starts[:, None] + torch.arange(weights)):
        return None
    blocks = segment.by_rows.view(segment.rows, -1, block_bytes)
    return Segment(segment.format, blocks.index_select(1, starts // weights).flatten(1))
