"""The differences between Linux, macOS and Windows.

They concern files and their locks, limits on open files, ports, signals, event loops and child
processes. Other modules import neither ``fcntl`` nor ``resource``. They branch on ``sys.platform``
only where no other module needs the same branch.
"""

import asyncio
import contextlib
import ctypes
import mmap
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

if sys.platform == "win32":
    import msvcrt
    import random
    import subprocess
else:
    import fcntl  # noqa: TID251
    import resource  # noqa: TID251

HAS_UNIX_SOCKETS = sys.platform != "win32"
"""True if asyncio and gRPC support unix sockets here."""
LOCK_START = 1 << 30
"""First byte that a lock covers on Windows.

It is behind the end of the file, because no other process may read locked bytes.
"""
LOCK_BYTES = 64
"""Most processes that can share a lock on Windows.

A sharing process locks one of these bytes. An exclusive process locks all of them.
"""
FOLDER_LOCK = ".lock"
_POLL_S = 0.05
"""Seconds between two tries of a lock on Windows, which cannot wait without a limit."""

APART: Mapping[str, Any]
if sys.platform == "win32":
    APART = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
else:
    APART = {"start_new_session": True}
"""Arguments of ``subprocess.Popen`` for a child that Ctrl-C does not reach. Its parent ends it."""


# ---- files -------------------------------------------------------------------------------------


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed or the process ends.

    ``shared``: others may share the lock. Raises ``BlockingIOError`` if the lock is held, unless
    ``wait``. Raises ``OSError`` on a file system without locks.
    """
    if sys.platform == "win32":
        while not _try_lock_bytes(descriptor, shared):
            if not wait:
                raise BlockingIOError("another process has locked the file")
            time.sleep(_POLL_S)
    else:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)


if sys.platform == "win32":

    def _try_lock_bytes(descriptor: int, shared: bool) -> bool:
        """Try to lock bytes of a file, because Windows' C library has no shared locks.

        A sharing process locks any one byte. An exclusive process locks all bytes.
        """
        starts = random.sample(range(LOCK_BYTES), LOCK_BYTES) if shared else [0]
        for start in starts:
            os.lseek(descriptor, LOCK_START + start, os.SEEK_SET)
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1 if shared else LOCK_BYTES)
            except PermissionError:
                continue
            return True
        return False


def folder_descriptor(folder: Path) -> int:
    """Open a descriptor that can lock ``folder``. On Windows, it is of the file ``FOLDER_LOCK`` in
    the folder.

    Raises ``OSError``.
    """
    if sys.platform == "win32":
        return os.open(folder / FOLDER_LOCK, os.O_RDWR | os.O_CREAT)
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk. Windows flushes folders by itself.

    Raises ``OSError``.
    """
    if sys.platform == "win32":
        if path.is_dir():
            return
        flags = os.O_RDWR  # flushing needs the right to write
    else:
        flags = os.O_RDONLY
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_ours(status: os.stat_result) -> bool:
    """Return whether a file belongs to the user of this process.

    True on Windows, where the access lists of the folders above decide.
    """
    if sys.platform == "win32":
        return True
    return status.st_uid == os.geteuid()


def mode_for_others(status: os.stat_result, mask: int = stat.S_IRWXG | stat.S_IRWXO) -> int:
    """Return the permission bits in ``mask`` that a file has; by default, the bits of other users.

    0 on Windows, where modes say nothing.
    """
    return 0 if sys.platform == "win32" else stat.S_IMODE(status.st_mode) & mask


# ---- ports -------------------------------------------------------------------------------------


def reclaim_port(end: socket.socket, *, is_shared: bool = False) -> None:
    """Let a socket use a port whose connections just ended, unless another socket listens there.

    ``is_shared``: the port may also belong to sockets that called ``share_port``. Not on Windows.
    """
    if sys.platform == "win32":  # SO_REUSEADDR would take the port of another process
        end.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    elif is_shared:
        share_port(end)
    else:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def share_port(end: socket.socket) -> None:
    """Let several sockets of this user have one port, if each of them calls this."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform != "win32":
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


# ---- the process and its children --------------------------------------------------------------


def allow_open_files(count: int) -> None:
    """Raise the limit on open files of this process and its children to ``count``.

    The hard limit caps ``count``. Windows limits no sockets, and streams are sockets.
    """
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def return_freed_memory() -> None:
    """Return freed memory that the C library keeps to the system. Takes some milliseconds."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def fresh_memory(size: int) -> "np.ndarray[Any, Any]":
    """Return uint8 [size] of zeros in pages of its own, which go back to the system with it.

    numpy's own memory asks the kernel for huge pages, which take longer to clear than to read into.
    """
    import numpy as np

    if not size:
        return np.empty(0, np.uint8)
    if sys.platform == "win32":
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, the fastest of the system."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # noqa: TID251

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def on_stop_signals(action: Callable[[], object]) -> None:
    """Call ``action`` on the running loop at SIGINT (Ctrl-C), SIGTERM and, on Windows, Ctrl-Break.

    Needs the main thread.
    """
    loop = asyncio.get_running_loop()
    if sys.platform == "win32":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGBREAK):
            signal.signal(number, lambda _number, _frame: loop.call_soon_threadsafe(action))
    else:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, action)
