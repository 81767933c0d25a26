"""Pieces in memory: the target of a download that does not go to disk."""

import hashlib
from collections.abc import Sequence

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.fetching.pieces import ModelFile, cut


class PieceMemory:
    """Bytes in memory that arrive in verified pieces. All of them are allocated at once."""

    def __init__(self, file: ModelFile, hashes: Sequence[bytes]) -> None:
        """Allocate the file. ``hashes`` are the SHA-256 of each piece of ``PIECE_BYTES`` (the last
        is shorter).
        """
        self.file = file
        self.starts: Sequence[int] = cut(file.size, ())
        self.data = bytearray(file.size)
        self._hashes = hashes
        self._here: set[int] = set()

    def has(self, piece: int) -> bool:
        """Return whether a piece is here."""
        return piece in self._here

    def write(self, first: int, data: bytes) -> int:
        """Keep the whole pieces at the beginning of ``data``, from piece ``first`` on. Returns
        their number.

        Raises ``IntegrityError`` for a piece with another hash.
        """
        view, piece = memoryview(data), first
        while piece < len(self._hashes) and len(view) >= (size := self._size(piece)):
            if hashlib.sha256(view[:size]).digest() != self._hashes[piece]:
                raise IntegrityError(f"piece {piece} of {self.file.name} does not have its hash")
            self.data[self.starts[piece] : self.starts[piece + 1]] = view[:size]
            self._here.add(piece)
            view, piece = view[size:], piece + 1
        return piece - first

    def sync(self) -> None:
        """Do nothing: memory has no slower copy."""

    def _size(self, piece: int) -> int:
        return self.starts[piece + 1] - self.starts[piece]
