"""Atomic writes, private folders, and the limit on open files."""

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 100
"""Longest path of a unix socket in bytes: Linux takes 107, macOS 103."""


@contextmanager
def replacing(path: Path, *, prefix: str = ".", mode: int = 0o600, durable: bool = True) -> Iterator[Path]:
    """A new file beside ``path`` that replaces it when the context ends without an error.

    Its name begins with ``prefix`` until then. ``durable``: it survives a loss of power. Raises ``OSError``.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=prefix)  # 0600
    os.close(descriptor)
    try:
        yield Path(name)
        os.chmod(name, mode)
        if durable:
            sync(Path(name))
        os.replace(name, path)
        if durable:
            sync(path.parent)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def write_whole(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace the content of ``path`` by ``data`` atomically. Creates its folder. Raises ``OSError``."""
    make_private(path.parent)
    with replacing(path, mode=mode, durable=durable) as fresh:
        fresh.write_bytes(data)


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700. An existing one keeps its mode."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allow_open_files(count: int) -> None:
    """Raise the limit on open files of this process and its children to ``count``, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
