"""Atomic writes, and private and scratch folders."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarmnet_protocols.machine.platform import is_ours, lock, sync

MAX_SOCKET_PATH_BYTES = 100
"""Longest path of a unix socket in bytes. Linux accepts 107, macOS 103."""
UNFINISHED = ".new-"
_SCRATCH_PREFIX = "swarmnet-"
_LOCK_NAME = ".lock"
"""A file in each scratch folder. The process that uses the folder keeps this file locked."""


@contextmanager
def replacing(path: Path, *, prefix: str = ".", mode: int = 0o600, durable: bool = True) -> Iterator[Path]:
    """Yield a new file next to ``path`` that replaces it if the context ends without an error.

    The name of the new file begins with ``prefix``. ``durable``: the result survives a loss of
    power. Raises ``OSError``.
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


@contextmanager
def creating(folder: Path, *, mode: int = 0o700, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder that is renamed to ``folder`` if the context ends without an error.

    The name of the new folder begins with ``UNFINISHED``. The result survives a loss of power.
    Raises ``OSError``, also if ``folder`` is not empty and may not be overwritten.
    """
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=UNFINISHED))
    try:
        fresh.chmod(mode)
        yield fresh
        for path in (*fresh.rglob("*"), fresh):
            sync(path)
        if overwrite and folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_whole(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace the content of ``path`` by ``data`` atomically.

    Creates its folder. Raises ``OSError``.
    """
    make_private(path.parent)
    with replacing(path, mode=mode, durable=durable) as fresh:
        fresh.write_bytes(data)


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700. An existing one keeps its mode."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder with mode 0700, and remove it when the context ends.

    The folder is in ``parent``, by default the system's temporary directory. First removes the
    scratch folders in ``parent`` whose processes were killed. Raises ``OSError``.
    """
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=parent))
    try:
        fresh = folder / (_LOCK_NAME + ".new")
        with fresh.open("wb") as file:
            # The lock file gets its name only once it is locked: an unlocked file of this name
            # belongs to a process that has ended. On a file system without locks the folder stays
            # if the process is killed.
            with suppress(OSError):
                lock(file.fileno())
                fresh.rename(folder / _LOCK_NAME)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's scratch folders in ``parent`` whose lock is free."""
    for folder in parent.glob(_SCRATCH_PREFIX + "*"):
        with suppress(OSError):
            info = folder.lstat()
            if not stat.S_ISDIR(info.st_mode) or not is_ours(info):
                continue
            with (folder / _LOCK_NAME).open("rb") as file:
                lock(file.fileno())
                shutil.rmtree(folder, ignore_errors=True)
