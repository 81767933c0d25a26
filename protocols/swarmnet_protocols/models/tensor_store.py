"""The tensor store: tensors on disk, one file each, named by the SHA-256 of its bytes.

Layout, in a folder that all processes of a user share::

    ab/ab12…f0         a whole tensor; its bytes match its name
    ab/ab12…f0.part    the first bytes of a tensor whose download goes on or was cut off

A file gets its final name only after its hash was verified, so a reader of a whole tensor need not hash it again. A download is locked:
a second process waits, and then finds the tensor whole. The time of modification is the time of last use, by which tensors are evicted.
"""

import errno
import fcntl
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swarmnet_protocols.errors import IntegrityError, OutOfResources
from swarmnet_protocols.machine.files import make_private, sync

_PART = ".part"
_DIGEST_BYTES = hashlib.sha256().digest_size
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A file of the store. ``used_at`` is in seconds since the epoch; ``is_whole`` is False for the beginning of a tensor."""

    digest: bytes
    size: int
    used_at: float
    is_whole: bool


class TensorStore:
    """Tensors by the SHA-256 of their bytes. Raises ``OutOfResources`` for a full disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, digest: bytes) -> Path | None:
        """The file of a whole tensor, which counts as used; None if it is not here."""
        path = self._path(digest)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        except PermissionError:  # a read-only store has no eviction
            return path if path.is_file() else None
        return path

    @contextmanager
    def download(self, digest: bytes, size: int) -> Iterator["PartialTensor | None"]:
        """The partial file of a tensor of ``size`` bytes, for the one caller that downloads it; None if the tensor is whole already.

        What was written stays when the context ends, so the next download goes on behind it.
        """
        path = self._path(digest)
        part = path.with_name(path.name + _PART)
        with _full_disk(self.root):
            make_private(path.parent)
            while True:
                file = part.open("a+b")
                fcntl.flock(file, fcntl.LOCK_EX)
                if part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat()):
                    break
                file.close()  # another process has completed or removed the file that was waited for
        with file:
            if path.exists():
                part.unlink()
                yield None
                return
            partial = PartialTensor(file.fileno(), part, path, digest, size)
            try:
                yield partial
            finally:
                if not partial.written:
                    part.unlink(missing_ok=True)

    def entries(self) -> list[StoredTensor]:
        """All tensors of the store, the least recently used first."""
        return sorted(self._entries(), key=lambda entry: entry.used_at)

    def remove(self, digests: Iterable[bytes]) -> int:
        """Remove these tensors, whole or partial, if they are here. Returns the bytes that are free now.

        A download that is under way goes on. A process that has mapped a tensor keeps its bytes until it unmaps them.
        """
        freed = 0
        for digest in digests:
            path = self._path(digest)
            freed += _unlink(path)
            part = path.with_name(path.name + _PART)
            with suppress(FileNotFoundError, BlockingIOError), part.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                freed += _unlink(part)
        return freed

    def evict(self, max_bytes: int, keep: Collection[bytes] = ()) -> int:
        """Remove the least recently used tensors until the store has at most ``max_bytes``, except those in ``keep``.

        Returns the bytes that are free now.
        """
        entries = self.entries()
        excess = sum(entry.size for entry in entries) - max_bytes
        freed = 0
        for entry in entries:
            if freed >= excess:
                break
            if entry.digest not in keep:
                freed += self.remove([entry.digest])
        return freed

    def _path(self, digest: bytes) -> Path:
        if len(digest) != _DIGEST_BYTES:
            raise ValueError(f"a SHA-256 of {len(digest)} bytes")
        return self.root / digest.hex()[:2] / digest.hex()

    def _entries(self) -> Iterator[StoredTensor]:
        for path in self.root.glob("??/*"):
            name = path.name.removesuffix(_PART)
            with suppress(FileNotFoundError, ValueError):  # removed meanwhile, or not a file of the store
                digest = bytes.fromhex(name)
                info = path.stat()
                if len(digest) == _DIGEST_BYTES:
                    yield StoredTensor(digest, info.st_size, info.st_mtime, is_whole=path.name == name)


class PartialTensor:
    """The beginning of a tensor, which grows until it is whole."""

    def __init__(self, descriptor: int, part: Path, path: Path, digest: bytes, size: int) -> None:
        self.size = size
        self._descriptor = descriptor
        self._part = part
        self._path = path
        self._digest = digest
        self._hash = hashlib.sha256()
        self.written = os.fstat(descriptor).st_size
        """Bytes that are there: a source sends those from this offset on."""
        if self.written > size:
            self.discard()
        for offset in range(0, self.written, _CHUNK_BYTES):
            self._hash.update(os.pread(descriptor, _CHUNK_BYTES, offset))

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``. Raises ``IntegrityError``, and keeps nothing of it, if the tensor would become longer than its size."""
        if self.written + len(data) > self.size:
            raise IntegrityError(
                f"more than the {self.size} bytes of tensor {self._digest.hex()[:12]} were sent"
            )
        with _full_disk(self._part):
            view = memoryview(data)
            while view:
                count = os.write(self._descriptor, view)
                self._hash.update(view[:count])
                self.written += count
                view = view[count:]

    def complete(self) -> Path:
        """Give the tensor its final name. Raises ``IntegrityError``, and discards what was written, unless it is whole and matches its hash."""
        if self.written != self.size or self._hash.digest() != self._digest:
            found = f"{self.written} of {self.size} bytes" if self.written != self.size else "another hash"
            self.discard()
            raise IntegrityError(f"tensor {self._digest.hex()[:12]} arrived with {found}")
        with _full_disk(self._part):
            os.fsync(self._descriptor)
            os.rename(self._part, self._path)
            sync(self._path.parent)
        return self._path

    def discard(self) -> None:
        """Forget what was written: the tensor is fetched from its first byte."""
        os.ftruncate(self._descriptor, 0)
        self._hash = hashlib.sha256()
        self.written = 0


def _unlink(path: Path) -> int:
    """Remove a file; returns its size, or 0 if there is none."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


@contextmanager
def _full_disk(place: Path) -> Iterator[None]:
    """Convert the errors of a full disk or an exceeded quota."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OutOfResources(
            f"no space is left for tensors in {place.parent}: {error.strerror}",
            hint="free some space, choose another --cache-dir, or set a lower --max-disk",
        ) from error
