"""Pieces: the parts of a weight file that are fetched and verified on their own, as in a torrent.

A file is cut where its tensors begin and end, where each expert of a merged tensor does, and every
``PIECE_BYTES`` in between. The file's own header, which is the first piece or pieces, has the
positions of the tensors. So a table of pieces needs only the size of the header and the SHA-256 of
each piece.

The *pieces hash* of a model is the hash over the tables of all its files. With a swarm file that
names it, a newcomer can verify every piece, whichever peer sends it.
"""

import hashlib
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.machine.files import write_whole

PIECE_BYTES = 1 << 20
"""Most bytes of a piece."""
MIN_SLICE_BYTES = 64 << 10
"""Least bytes of an expert. Only merged tensors of larger experts are cut between experts."""
MAX_PIECES = 4 << 20
"""Most pieces of a file."""
MAX_TENSORS = 200_000
"""Most tensors of a file that can be fetched by piece."""
HASH_BYTES = hashlib.sha256().digest_size
UNKNOWN = bytes(HASH_BYTES)
"""Placeholder for the hash of a piece that has not arrived, in tables that this machine notes
itself."""
_SIZE_BYTES = 8
_KNOWN, _CLAIMED = "known", "claimed"
_TABLE_DOMAIN = b"swarmnet-pieces-2\n"
_LISTING_DOMAIN = b"swarmnet-listing-1\n"


class Progress(Protocol):
    """Receives the progress of a long operation: ``done`` of ``total`` (None while unknown)."""

    def __call__(self, description: str, done: int, total: int | None) -> None: ...


@dataclass(frozen=True)
class ModelFile:
    """A file of a model: its path in the model with forward slashes, its size in bytes and its
    SHA-256.
    """

    name: str
    size: int
    sha256: bytes


def cut(size: int, edges: Iterable[int]) -> tuple[int, ...]:
    """Return the offsets where the pieces of a file begin, and its ``size`` in bytes at the end.

    The file is cut at ``edges``, and every ``PIECE_BYTES`` in between. Raises ``IntegrityError``
    for an edge outside the file, and for a file of more than ``MAX_PIECES``.
    """
    _check_count(size // PIECE_BYTES)
    bounds = sorted({0, size, *edges})
    if bounds[0] < 0 or bounds[-1] > size:
        raise IntegrityError(f"a tensor lies outside its file of {size} bytes")
    starts: list[int] = []
    for start, end in itertools.pairwise(bounds):
        starts.extend(range(start, end, PIECE_BYTES))
    return (*starts, size)


def _check_count(pieces: int) -> None:
    if pieces > MAX_PIECES:
        raise IntegrityError(f"a file has more than {MAX_PIECES} pieces")


def pieces_between(starts: Sequence[int], start: int, end: int) -> range:
    """Return the numbers of the pieces that overlap bytes [start, end)."""
    if start >= end:
        return range(0)
    return range(bisect_right(starts, start) - 1, bisect_left(starts, end))


@dataclass(frozen=True)
class Layout:
    """The layout of a weight file, as its header tells it.

    The fields are the size of the header, and by tensor the bytes [start, end) from the start of
    the file, and the shape.
    """

    head_bytes: int
    spans: Mapping[str, tuple[int, int]]
    shapes: Mapping[str, Sequence[int]]

    @property
    def slices(self) -> dict[str, int]:
        """Tensor → number of parts that it is cut into along its first dimension. The parts are the
        experts of a merged tensor.

        Tensors of fewer than three dimensions are left out. So are tensors with parts below
        ``MIN_SLICE_BYTES``, such as the filters of a convolution.
        """
        found = {}
        for name, shape in self.shapes.items():
            start, end = self.spans[name]
            size, count = end - start, shape[0] if len(shape) > 2 else 0
            if count and size % count == 0 and size // count >= MIN_SLICE_BYTES:
                found[name] = count
        return found

    @property
    def edges(self) -> list[int]:
        """The offsets where the header ends, tensors begin and end, and merged tensors are cut.

        Raises ``IntegrityError`` for more than ``MAX_PIECES``.
        """
        slices = self.slices
        _check_count(len(self.spans) + sum(slices.values()))
        edges = [self.head_bytes, *(edge for span in self.spans.values() for edge in span)]
        for name, count in slices.items():
            start, end = self.spans[name]
            edges.extend(range(start, end, (end - start) // count))
        return edges


@dataclass(frozen=True)
class PieceTable:
    """The hashes of a file's pieces, 32 bytes each, and the size of the header before its first
    tensor.
    """

    head_bytes: int
    hashes: bytes

    @property
    def count(self) -> int:
        """The number of pieces."""
        return len(self.hashes) // HASH_BYTES

    @property
    def head_starts(self) -> tuple[int, ...]:
        """The offsets where the pieces of the header begin, and the header's size at the end."""
        return cut(self.head_bytes, ())

    def hash_of(self, piece: int) -> bytes:
        """Return the SHA-256 of one piece."""
        return self.hashes[piece * HASH_BYTES : (piece + 1) * HASH_BYTES]

    def hash(self, file: ModelFile) -> bytes:
        """Return the hash of the table of ``file``."""
        return hashlib.sha256(_TABLE_DOMAIN + file.sha256 + self.encode()).digest()

    def encode(self) -> bytes:
        """Encode the table: the size of the header (u64, big endian), then the hashes."""
        return self.head_bytes.to_bytes(_SIZE_BYTES, "big") + self.hashes

    @staticmethod
    def max_bytes(size: int) -> int:
        """Return the most bytes of an encoded table of a file of ``size`` bytes."""
        most = size // PIECE_BYTES + size // MIN_SLICE_BYTES + 2 * MAX_TENSORS
        return _SIZE_BYTES + HASH_BYTES * min(most, MAX_PIECES)

    @classmethod
    def of_head(cls, head: bytes, count: int) -> "PieceTable":
        """Return the table of a file of ``count`` pieces with only the header here.

        The hashes of other pieces are ``UNKNOWN``.
        """
        hasher = Hasher(cut(len(head), ()))
        hasher.update(head)
        known = hasher.table(len(head)).hashes
        return cls(len(head), known + UNKNOWN * (count - len(known) // HASH_BYTES))

    @classmethod
    def decode(cls, data: bytes, size: int) -> "PieceTable":
        """Read the table of a file of ``size`` bytes from an untrusted source.

        Raises ``IntegrityError`` if the file cannot have such a table.
        """
        head_bytes, hashes = int.from_bytes(data[:_SIZE_BYTES], "big"), data[_SIZE_BYTES:]
        table = cls(head_bytes, hashes)
        fewest = len(cut(size, ())) - 1
        if (
            len(data) < _SIZE_BYTES
            or len(data) > cls.max_bytes(size)
            or len(hashes) % HASH_BYTES
            or not min(1, size) <= head_bytes <= size
            or table.count < fewest
        ):
            raise IntegrityError(f"not a table of the pieces of a file of {size} bytes")
        return table


def has_bit(bits: bytes | bytearray, number: int) -> bool:
    """Return whether bit ``number`` is set; bits beyond the end are not."""
    return number // 8 < len(bits) and bool(bits[number // 8] & 1 << number % 8)


def listing_of(tables: Mapping[bytes, bytes]) -> bytes:
    """Return the listing of a model's files: the SHA-256 of each file, in order, and the hash of
    its table.

    ``tables`` has the hash of each table, by the SHA-256 of the file.
    """
    return b"".join(sha256 + table for sha256, table in sorted(tables.items()))


def listing_hash(listing: bytes) -> bytes:
    """Return the pieces hash of the model with this listing of files."""
    return hashlib.sha256(_LISTING_DOMAIN + listing).digest()


class Hasher:
    """Hashes a file as a whole and by piece, in one reading."""

    def __init__(self, starts: Sequence[int]) -> None:
        self._starts = starts
        self._whole = hashlib.sha256()
        self._piece = hashlib.sha256()
        self._hashes: list[bytes] = []
        self._position = 0

    def update(self, data: bytes) -> None:
        """Add the next bytes of the file. Bytes beyond its last piece count only for the hash of
        the whole.
        """
        self._whole.update(data)
        view = memoryview(data)
        while view and len(self._hashes) < len(self._starts) - 1:
            end = self._starts[len(self._hashes) + 1]
            part = view[: end - self._position]
            self._piece.update(part)
            self._position += len(part)
            view = view[len(part) :]
            if self._position == end:
                self._hashes.append(self._piece.digest())
                self._piece = hashlib.sha256()

    @property
    def sha256(self) -> bytes:
        """The SHA-256 of the whole."""
        return self._whole.digest()

    def table(self, head_bytes: int) -> PieceTable:
        """Return the table of the pieces."""
        return PieceTable(head_bytes, b"".join(self._hashes))


class Tables:
    """The tables of the pieces of files, on disk in ``folder``, by the SHA-256 of the file.

    A table is *known* if this machine made it from a whole file, or a pieces hash covers it. Other
    tables are *claimed* by a peer. A claimed table can contradict another source, but does not make
    the bytes of that source trusted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[tuple[bytes, str], PieceTable] = {}

    def known(self, file: ModelFile) -> PieceTable | None:
        """Return the known table of a file; None if there is none."""
        return self._get(file, _KNOWN)

    def claimed(self, file: ModelFile) -> PieceTable | None:
        """Return the table that was claimed last; None if there is none."""
        return self._get(file, _CLAIMED)

    def add(self, file: ModelFile, table: PieceTable) -> None:
        """Keep a known table. If the disk is full, keep it only as long as the process runs."""
        self._put(file, table, _KNOWN)
        self.forget_claim(file)

    def claim(self, file: ModelFile, table: PieceTable) -> None:
        """Keep a claimed table."""
        self._put(file, table, _CLAIMED)

    def listing(self, model: bytes, files: Sequence[ModelFile]) -> bytes:
        """Return the listing of a model of these files; empty if it is not known."""
        known = {file.sha256: table.hash(file) for file in files if (table := self.known(file)) is not None}
        if len(known) == len({file.sha256 for file in files}):
            return listing_of(known)
        try:
            return self._listing_path(model).read_bytes()
        except OSError:
            return b""

    def add_listing(self, model: bytes, listing: bytes) -> None:
        """Keep a listing that has the pieces hash of the model."""
        with suppress(OSError):
            write_whole(self._listing_path(model), listing, durable=False)

    def _listing_path(self, model: bytes) -> Path:
        return self._folder / f"{model.hex()}.listing"

    def forget_claim(self, file: ModelFile) -> None:
        """Forget a claimed table, which was wrong or is no longer needed."""
        self._kept.pop((file.sha256, _CLAIMED), None)
        with suppress(OSError):
            self._path(file, _CLAIMED).unlink(missing_ok=True)

    def _get(self, file: ModelFile, kind: str) -> PieceTable | None:
        if (file.sha256, kind) not in self._kept:
            try:
                data = self._path(file, kind).read_bytes()
                self._kept[file.sha256, kind] = PieceTable.decode(data, file.size)
            except (OSError, IntegrityError):
                return None
        return self._kept[file.sha256, kind]

    def _put(self, file: ModelFile, table: PieceTable, kind: str) -> None:
        self._kept[file.sha256, kind] = table
        with suppress(OSError):
            write_whole(self._path(file, kind), table.encode(), durable=False)

    def _path(self, file: ModelFile, kind: str) -> Path:
        return self._folder / f"{file.sha256.hex()}.{kind}"
