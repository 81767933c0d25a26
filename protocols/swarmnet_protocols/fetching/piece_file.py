"""The targets of a download: a partial weight file, or memory.

A partial file is a sparse file of the full size, with pieces at their final offsets. Readers of
safetensors and gguf map it into memory like the whole file. Its folder is named by the SHA-256 of
the whole file::

    model-00002-of-00030.safetensors   the file; missing pieces are holes, which take no space
    lock                               locked by the processes that use the file
    present                            one bit a piece, set once it is verified and on disk
    noted                              hashes of arrived pieces, if no trusted table has them

A bit is set only after its data has reached the disk. So a process or machine may stop at any
moment: marked pieces are on disk, and the next start fetches the others.
"""

import errno
import hashlib
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from swarmnet_protocols.errors import IntegrityError, OutOfResources
from swarmnet_protocols.fetching.pieces import (
    HASH_BYTES,
    UNKNOWN,
    ModelFile,
    PieceTable,
    Progress,
    cut,
    has_bit,
)
from swarmnet_protocols.machine.files import make_private, write_whole
from swarmnet_protocols.machine.platform import lock

_PRESENT, _NOTED, _LOCK = "present", "noted", "lock"
SYNC_BYTES = 64 << 20
"""Bytes written between two updates of the bits. A killed process loses at most that many."""


class PieceFile:
    """A partial file. Methods that write raise ``OutOfResources`` for a full disk."""

    def __init__(self, folder: Path, file: ModelFile) -> None:
        """Open a file in ``folder``, which holds only this file, its bits and its lock."""
        self.file = file
        self.folder = folder
        self.path = folder / file.name
        self._bits_path = folder / _PRESENT
        self._noted_path = folder / _NOTED
        self._head_bytes = 0
        self._hashes = bytearray()
        self.notes = False
        """True if arriving pieces have their hashes noted."""
        self._starts: tuple[int, ...] = ()
        self._bits = bytearray()
        self._written: list[int] = []
        self._unsynced_bytes = 0
        self._hold: weakref.finalize[..., PieceFile] | None = None

    @property
    def exists(self) -> bool:
        """True if the partial file is on disk, with or without pieces."""
        return self.path.is_file()

    @property
    def size_on_disk(self) -> int:
        """Return the bytes of disk that the file takes."""
        return folder_bytes(self.folder)

    def create(self) -> None:
        """Create the file without pieces, unless it exists."""
        with full_disk(self.folder):
            make_private(self.folder)
            with self.path.open("ab") as file:
                if os.fstat(file.fileno()).st_size != self.file.size:
                    self._bits_path.unlink(missing_ok=True)
                    file.truncate(0)
                    file.truncate(self.file.size)

    # ---- which pieces are here ------------------------------------------------------------------

    def use(self, table: PieceTable, edges: Iterable[int] | None, *, notes: bool = False) -> None:
        """Read which pieces are here, numbered by ``table``.

        - ``edges``: the offsets where tensors begin and end. None while the header is not here;
          then only the header's pieces are numbered.
        - ``notes``: when a piece with an ``UNKNOWN`` hash arrives, note its hash. From then on the
          piece must have that hash.

        Raises ``IntegrityError`` if the table does not have one hash for each piece.
        """
        if edges is None:
            self._starts = table.head_starts
        else:
            self._starts = cut(self.file.size, [table.head_bytes, *edges])
            if len(self._starts) - 1 != table.count:
                raise IntegrityError(
                    f"{self.file.name} has {len(self._starts) - 1} pieces, the table of its pieces {table.count}"
                )
        self._head_bytes, self._hashes, self.notes = table.head_bytes, bytearray(table.hashes), notes
        bits = -(-table.count // 8)
        try:
            found = self._bits_path.read_bytes()
        except OSError:
            found = b""
        self._bits = bytearray(found if len(found) == bits else bits)
        for piece in range(table.count) if notes else ():
            if table.hash_of(piece) == UNKNOWN:
                self._bits[piece // 8] &= ~(1 << piece % 8)

    def read_notes(self) -> PieceTable | None:
        """Return the table of noted hashes; None without any."""
        try:
            return PieceTable.decode(self._noted_path.read_bytes(), self.file.size)
        except (OSError, IntegrityError):
            return None

    @property
    def starts(self) -> Sequence[int]:
        """The offsets at which pieces begin, and the end of the last one."""
        return self._starts

    @property
    def present(self) -> bytes:
        """One bit for each piece, the first in the lowest bit of the first byte."""
        return bytes(self._bits)

    def has(self, piece: int) -> bool:
        """Return whether a piece is here."""
        return has_bit(self._bits, piece)

    def present_bytes(self) -> int:
        """Return the bytes of the pieces that are here."""
        return sum(end - start for start, end in self._spans(range(len(self._starts) - 1)))

    def _spans(self, pieces: Iterable[int]) -> Iterator[tuple[int, int]]:
        for piece in pieces:
            if self.has(piece):
                yield self._starts[piece], self._starts[piece + 1]

    # ---- writing --------------------------------------------------------------------------------

    def check(self, first: int, data: bytes | memoryview) -> int:
        """Return the number of whole pieces in ``data``, which begins with piece ``first``.

        Raises ``IntegrityError`` for a piece with another hash.
        """
        piece, view, start = first, memoryview(data), self._starts[first]
        while piece < len(self._starts) - 1 and self._starts[piece + 1] - start <= len(view):
            part = view[self._starts[piece] - start : self._starts[piece + 1] - start]
            if not self._matches(piece, part):
                raise IntegrityError(
                    f"bytes {self._starts[piece]} to {self._starts[piece + 1]} of {self.file.name} do not have their hash"
                )
            piece += 1
        return piece - first

    def _matches(self, piece: int, data: bytes | memoryview) -> bool:
        expected = self._hashes[_place(piece)]
        return hashlib.sha256(data).digest() == expected or (self.notes and expected == UNKNOWN)

    def write(self, first: int, data: bytes | memoryview) -> int:
        """Verify and write the whole pieces in ``data``, which begins with piece ``first``.

        Returns their number. Raises ``IntegrityError``, and writes nothing, for a piece with
        another hash.
        """
        count = self.check(first, data)
        size = self._starts[first + count] - self._starts[first]
        with full_disk(self.folder):
            _write_all(self.path, self._starts[first], memoryview(data)[:size])
        if self.notes:
            self._note_hashes(first, memoryview(data)[:size])
        self._written += range(first, first + count)
        self._unsynced_bytes += size
        if self._unsynced_bytes >= SYNC_BYTES:
            self.sync()
        for piece in range(first, first + count):
            self._bits[piece // 8] |= 1 << piece % 8
        return count

    def _note_hashes(self, first: int, data: memoryview) -> None:
        """Note the hashes of the pieces in ``data``, from piece ``first`` on."""
        piece, start = first, self._starts[first]
        while self._starts[piece] - start < len(data):
            part = data[self._starts[piece] - start : self._starts[piece + 1] - start]
            self._hashes[_place(piece)] = hashlib.sha256(part).digest()
            piece += 1

    def _write_notes(self, written: Iterable[int]) -> None:
        """Add the hashes of the ``written`` pieces to the notes on disk.

        Another process may have noted others meanwhile.
        """
        there = self.read_notes()
        if there is None or (there.head_bytes, len(there.hashes)) != (self._head_bytes, len(self._hashes)):
            hashes = self._hashes
        else:
            hashes = bytearray(there.hashes)
            for piece in written:
                hashes[_place(piece)] = self._hashes[_place(piece)]
        write_whole(self._noted_path, PieceTable(self._head_bytes, bytes(hashes)).encode())

    def sync(self) -> None:
        """Wait until the written pieces have reached the disk, then mark them as present."""
        if not self._written:
            return
        written, self._written, self._unsynced_bytes = self._written, [], 0
        with full_disk(self.folder):
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
            if self.notes:
                self._write_notes(written)
            if not self._bits_path.exists() or self._bits_path.stat().st_size != len(self._bits):
                self._bits_path.write_bytes(bytes(len(self._bits)))
            with self._bits_path.open("r+b") as file:
                # Another process may have added pieces meanwhile.
                there = bytearray(file.read())
                for piece in written:
                    there[piece // 8] |= 1 << piece % 8
                file.seek(0)
                file.write(there)

    def verify(self, progress: Progress | None = None) -> bool:
        """Hash the present pieces again, and forget changed ones. Returns False if any has
        changed."""
        good = bytearray(len(self._bits))
        with self.path.open("rb") as file:
            for piece in range(len(self._starts) - 1):
                start, end = self._starts[piece : piece + 2]
                if self.has(piece):
                    file.seek(start)
                    if self._matches(piece, file.read(end - start)):
                        good[piece // 8] |= 1 << piece % 8
                    if progress is not None:
                        progress(f"checking {self.file.name}", end, self.file.size)
        if good == self._bits:
            return True
        self._bits = good
        with full_disk(self.folder):
            self._bits_path.write_bytes(good)
        return False

    def adopt(self, pieces: Iterable[int]) -> None:
        """Mark pieces that ``write_head`` wrote as present if they match their hashes, which are
        known by now."""
        with self.path.open("rb") as file:
            for piece in pieces:
                start, end = self._starts[piece : piece + 2]
                file.seek(start)
                if not self.has(piece) and self._matches(piece, file.read(end - start)):
                    self._bits[piece // 8] |= 1 << piece % 8
                    self._written.append(piece)
        self.sync()

    def remove(self) -> int:
        """Remove the file and its bits. Returns the freed bytes.

        A process that has mapped the file can still read it.
        """
        self.release()
        return self.remove_folder(self.folder)

    @staticmethod
    def remove_folder(folder: Path) -> int:
        """Remove the folder of a partial file. Returns the freed bytes."""
        freed = folder_bytes(folder)
        shutil.rmtree(folder, ignore_errors=True)
        return freed

    def hold(self) -> None:
        """Mark the file as used now, and keep other processes from removing it to make room.

        The mark holds until ``release`` or the end of this process.
        """
        if self._hold is None:
            make_private(self.folder)
            descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            self._hold = weakref.finalize(self, os.close, descriptor)
            # Another process may remove the folder at this moment, or the file system may not
            # support locks.
            with suppress(OSError):
                lock(descriptor, shared=True)
        with suppress(OSError):
            os.utime(self.folder)

    def release(self) -> None:
        """End ``hold``."""
        if self._hold is not None:
            self._hold()
            self._hold = None

    def write_head(self, data: bytes) -> None:
        """Write the beginning of the file before its hashes are known. It is not marked as
        present."""
        self.create()
        with full_disk(self.folder):
            _write_all(self.path, 0, memoryview(data))


def _place(piece: int) -> slice:
    return slice(piece * HASH_BYTES, (piece + 1) * HASH_BYTES)


def _write_all(path: Path, offset: int, data: memoryview) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        while data:
            data = data[file.write(data) or 0 :]


def folder_bytes(folder: Path) -> int:
    """Return the bytes of disk of all files in the folder of a partial file."""
    found = 0
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            stat = path.stat()
            # Windows does not report the blocks of a file
            blocks = getattr(stat, "st_blocks", None)
            found += stat.st_size if blocks is None else blocks * 512
    return found


def is_held(folder: Path) -> bool:
    """Tell whether a process uses the partial file in a folder."""
    try:
        with (folder / _LOCK).open("rb") as file:
            lock(file.fileno())
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Convert the errors of a full disk or an exceeded quota into ``OutOfResources``."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OutOfResources(
            f"no space is left for weights in {folder}: {error.strerror}",
            hint="free some space, remove a model with `swarmnet model rm`, host fewer blocks, or choose another --cache-dir",
        ) from error


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
