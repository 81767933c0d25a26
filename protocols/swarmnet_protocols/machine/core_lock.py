"""The core lock: the nodes and clients of one machine compute one after the other.

Each node has a thread for every core. Two that compute at once wait for each other's threads in every matrix product, which takes longer
than computing in turns. A node that is alone takes two uncontended file locks per forward. There are three ways to hold the lock:

1. ``exclusive``: a forward of a node, while no other process computes.
2. ``shared``: a training pass of a node. Several nodes compute passes at once, each on half the cores, because passes are long.
3. ``briefly``: a client's local layers, for some milliseconds. All clients compute between two forwards of a node, so that their next steps
   reach the first node together and become one forward.

A holder that is stopped (SIGSTOP) or dead does not block the others: the kernel releases the locks of a dead process, and the others wait
``STOPPED_S``, once, for a holder without a sign of life.
"""

import asyncio
import logging
import os
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Protocol

import platformdirs

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.platform import is_ours, lock, unlock

_log = logging.getLogger(__name__)

STOPPED_S = 0.2
"""Seconds without a sign of life after which a holder counts as stopped, and the others no longer wait for it."""
SIGN_S = 0.04
"""Seconds between two signs of life of a holder."""
BRIEF_WAIT_S = 0.05
"""Longest wait of ``briefly`` in seconds; then it computes without the lock."""
RECENT_S = 5.0
"""Seconds after which another node counts as idle; longer than a pass takes."""

_ENTRY = struct.Struct("8sd")
"""The name of the process that held the lock last, and the time by the machine's monotonic clock."""


class CoreLock(Protocol):
    """The lock of one process."""

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        """Compute alone while the context is open."""

    def shared(self) -> AbstractAsyncContextManager[bool]:
        """Compute beside others in ``shared``; yields whether another node has computed within ``RECENT_S``."""

    def briefly(self) -> AbstractContextManager[None]:
        """Compute for a few milliseconds on one thread, beside others in ``briefly`` and ``shared``. Needs no event loop."""


class NoCoreLock:
    """A :class:`CoreLock` that never waits, for a process that is alone on its cores."""

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def shared(self) -> AbstractAsyncContextManager[bool]:
        return nullcontext(False)

    def briefly(self) -> AbstractContextManager[None]:
        return nullcontext()


NO_CORE_LOCK = NoCoreLock()


class FileCoreLock:
    """A :class:`CoreLock` of all processes that open the same folder, made of two file locks.

    The holder of ``cores`` computes, alone or shared. The holder of ``queue`` is the next one, so that no process computes twice in a row
    while another waits.
    """

    def __init__(self, queue: "_FileLock", cores: "_FileLock", last: IO[bytes]) -> None:
        """See ``open``."""
        self._queue = queue
        self._cores = cores
        self._last = last
        self._name = secrets.token_bytes(8)
        self._others_at = -RECENT_S
        self._within = asyncio.Lock()
        """Held by one of the engines of this process, which has two while it moves to other blocks."""

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator["FileCoreLock"]:
        """The lock in ``folder``, which is created. Raises ``ConfigError`` if it cannot be, or belongs to another user."""
        with ExitStack() as stack:
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)
                status = folder.lstat()
                if not stat.S_ISDIR(status.st_mode) or not is_ours(status):
                    raise PermissionError("it belongs to another user")
                queue, cores = (
                    stack.enter_context(_FileLock.open(folder / name)) for name in ("queue", "cores")
                )
                last = stack.enter_context((folder / "last").open("w+b", buffering=0))
            except OSError as error:
                raise ConfigError(
                    f"cannot use {folder}: {error}", hint="set XDG_CACHE_HOME to a folder of yours"
                ) from None
            yield cls(queue, cores, last)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self._held(shared=False):
            self._exchange_last()
            yield

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[bool]:
        async with self._held(shared=True):
            self._exchange_last()
            yield time.monotonic() - self._others_at < RECENT_S

    @contextmanager
    def briefly(self) -> Iterator[None]:
        with self._cores.held_briefly():
            yield

    @asynccontextmanager
    async def _held(self, *, shared: bool) -> AsyncIterator[None]:
        async with self._within, self._held_by_process(shared=shared):
            yield

    @asynccontextmanager
    async def _held_by_process(self, *, shared: bool) -> AsyncIterator[None]:
        place, locked = await self._queue.acquire(), None
        if place is not None:
            try:
                locked = await self._cores.acquire(shared=shared)
            finally:
                self._queue.release(place)
        try:
            yield
        finally:
            if locked is not None:
                self._cores.release(locked)

    def _exchange_last(self) -> None:
        """Read which process held the lock last, and write this one."""
        self._last.seek(0)
        entry = self._last.read(_ENTRY.size)
        if len(entry) == _ENTRY.size:
            name, at = _ENTRY.unpack(entry)
            if name != self._name:
                self._others_at = at
        with suppress(OSError):  # if the disk is full, the others see no entry of this process
            self._last.seek(0)
            self._last.write(_ENTRY.pack(self._name, time.monotonic()))


def default_folder() -> Path:
    """The folder of the lock, in the user's cache folder, where no other user can create it first."""
    cache = platformdirs.user_cache_path("swarmnet", appauthor=False)
    return cache / f"core-lock-{socket.gethostname()}"


@contextmanager
def open_core_lock(folder: Path | None = None) -> Iterator[CoreLock]:
    """The core lock of this user's processes; ``NO_CORE_LOCK`` on Windows, and with a warning if the folder cannot be used."""
    if (
        sys.platform == "win32"
    ):  # locks on Windows can be neither shared by waiters nor awaited without polling
        yield NO_CORE_LOCK
        return
    with ExitStack() as stack:
        core_lock: CoreLock = NO_CORE_LOCK
        try:
            core_lock = stack.enter_context(FileCoreLock.open(folder or default_folder()))
        except ConfigError as error:
            _log.warning(
                "nodes of this machine will compute at the same time, more slowly: %s (%s)", error, error.hint
            )
        yield core_lock


class _FileLock:
    """A lock on a file. Its holder touches the file as a sign of life."""

    def __init__(self, file: IO[str], waiter: "_LockWaiter") -> None:
        self._file = file
        self._waiter = waiter
        self._stopped_sign = 0
        """The last sign of a holder that counts as stopped."""

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["_FileLock"]:
        """The lock on ``path``. Raises ``OSError``."""
        with path.open("w+") as file:
            waiter = _LockWaiter(path.open("w+"))
            try:
                yield cls(file, waiter)
            finally:
                waiter.close()

    async def acquire(self, *, shared: bool = False) -> IO[str] | None:
        """Take the lock; returns the locked file for ``release``, or None if the lock's holder is stopped."""
        locked = self._file if _try_lock(self._file, shared=shared) else await self._wait(shared)
        if locked is not None:
            self._sign()
        return locked

    def release(self, locked: IO[str]) -> None:
        """Release the lock that ``acquire`` gave."""
        self._sign_timer.cancel()
        unlock(locked.fileno())

    @contextmanager
    def held_briefly(self) -> Iterator[None]:
        """Share the lock while the context is open; after ``BRIEF_WAIT_S`` continue without it."""
        locked: IO[str] | None = self._file
        if not _try_lock(self._file, shared=True):
            request = self._waiter.request(shared=True)
            with suppress(TimeoutError):
                request.result(BRIEF_WAIT_S)
            locked = None if request.cancel() else self._waiter.file
        if locked is not None:
            os.utime(locked.fileno())
        try:
            yield
        finally:
            if locked is not None:
                unlock(locked.fileno())

    def _sign(self) -> None:
        os.utime(self._file.fileno())
        self._sign_timer = asyncio.get_running_loop().call_later(SIGN_S, self._sign)

    async def _wait(self, shared: bool) -> IO[str] | None:
        """Wait for the lock; returns the locked file, or None if the lock's holder is stopped."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        request = self._waiter.request(shared=shared)
        request.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
        try:
            last, last_at = 0, loop.time()
            while not request.done():
                sign = os.fstat(self._file.fileno()).st_mtime_ns
                if sign != last:
                    last, last_at = sign, loop.time()
                if sign == self._stopped_sign or loop.time() - last_at >= STOPPED_S:
                    self._stopped_sign = sign
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(SIGN_S):
                        await done.wait()
        except asyncio.CancelledError:
            if not request.cancel():
                unlock(self._waiter.file.fileno())
            raise
        return None if request.cancel() else self._waiter.file


class _LockWaiter:
    """A thread that blocks in flock(2), because polling would displace the threads of the process that computes."""

    def __init__(self, file: IO[str]) -> None:
        """``file``: one opened for this thread only, because a cancelled request may lock it while the process holds another lock."""
        self.file = file
        self._requests: SimpleQueue[tuple[bool, Future[None]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def request(self, *, shared: bool) -> "Future[None]":
        """A future that is done when ``file`` is locked. After a successful ``cancel``, it will not be locked."""
        request: Future[None] = Future()
        self._requests.put((shared, request))
        if self._thread is None:
            # A daemon thread, so that it does not delay the end of the process if the holder stays stopped.
            self._thread = Thread(target=self._run, name="core lock", daemon=True)
            self._thread.start()
        return request

    def close(self) -> None:
        """Close the file and end the thread, once flock(2) returns."""
        if self._thread is None:
            self.file.close()
        else:
            self._requests.put(None)

    def _run(self) -> None:
        with self.file:
            while (next_request := self._requests.get()) is not None:
                shared, request = next_request
                if request.cancelled():
                    continue
                try:
                    lock(self.file.fileno(), shared=shared, wait=True)
                except OSError:  # a file system without locks
                    request.cancel()
                    continue
                if request.set_running_or_notify_cancel():
                    request.set_result(None)
                else:
                    unlock(self.file.fileno())


def _try_lock(file: IO[str], *, shared: bool) -> bool:
    try:
        lock(file.fileno(), shared=shared)
    except BlockingIOError:
        return False
    return True
