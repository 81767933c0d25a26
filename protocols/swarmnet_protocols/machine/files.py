"""Files that are there whole or not at all, and folders of one owner."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 100
"""Of a unix socket's path: Linux takes 107, macOS 103."""


@contextmanager
def replacing(path: Path, *, prefix: str = ".", mode: int = 0o600, durable: bool = True) -> Iterator[Path]:
    """A new file beside ``path`` that becomes it unless something is raised inside.

    Its name begins with ``prefix`` until then. A ``durable`` one is not lost with the power. Raises ``OSError``.
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
    """Write all of ``data`` under ``path``, or nothing: what was there stays. Makes its folder. Raises ``OSError``."""
    make_private(path.parent)
    with replacing(path, mode=mode, durable=durable) as fresh:
        fresh.write_bytes(data)


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner alone. One that is there stays as it is."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def sync(path: Path) -> None:
    """Have a file or a folder be on the disk. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
