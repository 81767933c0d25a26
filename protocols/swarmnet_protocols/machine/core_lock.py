"""Nodes of one machine compute in turns: together they would wait for each other's threads at every product.

Clients compute between two turns, all of them at once: then their next steps come to the first node together, and are one forward there.
Training passes are long, so they need not be done soon, but all of them need to be: those of several nodes are computed at once, each on
fewer cores.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO

import platformdirs

from swarmnet_protocols.errors import ConfigError

_log = logging.getLogger(__name__)

PATIENCE_S = 0.2
"""A holder that gives no sign for so long is stopped, and is not waited for."""
SIGN_S = 0.04
SHARING_PATIENCE_S = 0.05
"""How long a client, which computes for a few milliseconds, waits for the turn of a node."""
RECENT_S = 5.0
"""Whoever began to compute within this time is taken to go on: longer than a pass takes."""

_ENTRY = struct.Struct("8sd")
"""Who went into the room last, and when, by the clock of the machine."""


def default_folder() -> Path:
    """Where the nodes of this user on this machine meet: in the user's own cache, where no other user could make it first."""
    cache = platformdirs.user_cache_path("swarmnet", appauthor=False)
    return cache / f"turns-{socket.gethostname()}"


class NoCoreLock:
    """The turns of a node that shares its cores with no other."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """See ``Turns``."""
        return nullcontext()

    def beside(self) -> AbstractAsyncContextManager[bool]:
        """See ``Turns``."""
        return nullcontext(False)

    def share(self) -> AbstractContextManager[None]:
        """See ``Turns``."""
        return nullcontext()


ALONE = NoCoreLock()


class CoreLock:
    """Two locks that the kernel takes back from whoever dies.

    Who holds ``room`` computes, alone or with others that are content with that. Who wants it waits at ``door``, one at a time, so
    nobody goes twice in a row while another waits.
    """

    def __init__(self, door: "_Lock", room: "_Lock", last: int) -> None:
        """See ``open``."""
        self._door = door
        self._room = room
        self._last = last
        self._name = secrets.token_bytes(8)
        self._others_at = -RECENT_S

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator["CoreLock"]:
        """Turns of all who open the same folder. Raises ``ConfigError`` unless it is, or can be made, ours."""
        with ExitStack() as stack:
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)
                status = folder.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                    raise PermissionError("it belongs to somebody else")
                door, room = (stack.enter_context(_Lock.open(folder / name)) for name in ("door", "room"))
                last = stack.enter_context((folder / "last").open("w+"))
            except OSError as error:
                raise ConfigError(
                    f"cannot use {folder}: {error}", hint="set XDG_CACHE_HOME to a folder of yours"
                ) from None
            yield cls(door, room, last.fileno())

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Compute alone while the context is open, as far as the others can be waited for."""
        async with self._inside(fcntl.LOCK_EX):
            self._meet()
            yield

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[bool]:
        """Compute while nobody has a turn, as far as that can be waited for; yields whether other nodes compute these days."""
        async with self._inside(fcntl.LOCK_SH):
            self._meet()
            yield time.monotonic() - self._others_at < RECENT_S

    @contextmanager
    def share(self) -> Iterator[None]:
        """Compute something short, on one thread and without a loop, while nobody has a turn, as far as that can be waited for.

        So several clients compute at once what comes between two steps, and what they send next comes to the nodes together.
        """
        with self._room.shared():
            yield

    @asynccontextmanager
    async def _inside(self, kind: int) -> AsyncIterator[None]:
        async with self._door.held() as is_next, AsyncExitStack() as stack:
            if is_next:
                await stack.enter_async_context(self._room.held(kind))
            inside = stack.pop_all()
        async with inside:
            yield

    def _meet(self) -> None:
        """See who was here before us, and leave our name."""
        entry = os.pread(self._last, _ENTRY.size, 0)
        if len(entry) == _ENTRY.size:
            name, at = _ENTRY.unpack(entry)
            if name != self._name:
                self._others_at = at
        with suppress(OSError):  # where the disk is full, the others do not learn of us
            os.pwrite(self._last, _ENTRY.pack(self._name, time.monotonic()), 0)


@contextmanager
def take_turns(folder: Path | None = None) -> Iterator["CoreLock | NoCoreLock"]:
    """Turns with the other processes of this user. Without a usable folder for them, which only costs speed, this process takes none."""
    with ExitStack() as stack:
        turns: CoreLock | NoCoreLock = ALONE
        try:
            turns = stack.enter_context(CoreLock.open(folder or default_folder()))
        except ConfigError as error:
            _log.warning(
                "nodes of this machine will compute at the same time, more slowly: %s (%s)", error, error.hint
            )
        yield turns


class _Lock:
    """The lock on a file. Whoever holds it gives signs of life, which the file's time of change shows the others."""

    def __init__(self, file: IO[str], waiting: "_Waiting") -> None:
        self._file = file
        self._waiting = waiting
        self._in_vain = 0
        """The last sign of the holder that we gave up waiting for."""

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["_Lock"]:
        """The lock on ``path``. Raises ``OSError``."""
        with path.open("w+") as file:
            waiting = _Waiting(path.open("w+"))
            try:
                yield cls(file, waiting)
            finally:
                waiting.close()

    @asynccontextmanager
    async def held(self, kind: int = fcntl.LOCK_EX) -> AsyncIterator[bool]:
        """Hold the lock while the context is open; False if its holder is not waited for, the second time at once."""
        locked = await self._take(kind)
        if locked is None:
            yield False
            return
        self._sign()
        try:
            yield True
        finally:
            self._signing.cancel()
            fcntl.flock(locked, fcntl.LOCK_UN)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share the lock while the context is open, or go without it where that takes too long."""
        locked: IO[str] | None = self._file
        if not _try(self._file, fcntl.LOCK_SH):
            wish = self._waiting.wish(fcntl.LOCK_SH)
            with suppress(TimeoutError):
                wish.result(SHARING_PATIENCE_S)
            locked = None if wish.cancel() else self._waiting.file
        if locked is not None:
            os.utime(locked.fileno())
        try:
            yield
        finally:
            if locked is not None:
                fcntl.flock(locked, fcntl.LOCK_UN)

    def _sign(self) -> None:
        os.utime(self._file.fileno())
        self._signing = asyncio.get_running_loop().call_later(SIGN_S, self._sign)

    async def _take(self, kind: int) -> IO[str] | None:
        """The file that is locked then; None if its holder is not waited for."""
        if _try(self._file, kind):
            return self._file
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        wish = self._waiting.wish(kind)
        wish.add_done_callback(lambda _: loop.call_soon_threadsafe(came.set))
        try:
            last, heard = 0, loop.time()
            while not wish.done():
                sign = os.fstat(self._file.fileno()).st_mtime_ns
                if sign != last:
                    last, heard = sign, loop.time()
                if sign == self._in_vain or loop.time() - heard >= PATIENCE_S:
                    self._in_vain = sign
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(SIGN_S):
                        await came.wait()
        except asyncio.CancelledError:
            if not wish.cancel():
                fcntl.flock(self._waiting.file, fcntl.LOCK_UN)
            raise
        return None if wish.cancel() else self._waiting.file


class _Waiting:
    """A thread that the kernel wakes when a lock is free.

    Whoever looked again and again would push aside the threads of those who compute, each of which the others wait for.
    """

    def __init__(self, file: IO[str]) -> None:
        """``file`` is ours, and opened for us alone: the lock that a wish gave up may come when its owner holds it already."""
        self.file = file
        self._wishes: SimpleQueue[tuple[int, Future[None]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def wish(self, kind: int) -> "Future[None]":
        """Done when ``file`` is locked. If it can be cancelled, it is not and will not be."""
        wish: Future[None] = Future()
        self._wishes.put((kind, wish))
        if self._thread is None:
            # Not one that the interpreter waits for at its end: the holder of the lock may be stopped for good.
            self._thread = Thread(target=self._wait, name="turns", daemon=True)
            self._thread.start()
        return wish

    def close(self) -> None:
        """End the thread, and with it the file, as soon as the kernel lets it go."""
        if self._thread is None:
            self.file.close()
        else:
            self._wishes.put(None)

    def _wait(self) -> None:
        with self.file:
            while (asked := self._wishes.get()) is not None:
                kind, wish = asked
                if wish.cancelled():
                    continue
                try:
                    fcntl.flock(self.file, kind)
                except OSError:  # a file system without locks
                    wish.cancel()
                    continue
                if wish.set_running_or_notify_cancel():
                    wish.set_result(None)
                else:
                    fcntl.flock(self.file, fcntl.LOCK_UN)


def _try(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
