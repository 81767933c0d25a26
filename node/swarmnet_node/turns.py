"""Nodes of one machine compute in turns: together they would wait for each other's threads at every product."""

import asyncio
import fcntl
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from swarmnet_protocols.errors import ConfigError

PATIENCE_S = 0.2
"""A holder that gives no sign for so long is stopped, and is not waited for."""
SIGN_S = 0.04
POLL_S = 0.001


def default_folder() -> Path:
    """Where the nodes of this user meet."""
    return Path(tempfile.gettempdir()) / f"swarmnet-{os.getuid()}"


class Turns:
    """Two locks that the kernel takes back from whoever dies.

    The holder of ``room`` computes. Who wants it waits at ``door``, one at a time, so nobody goes twice in a row while
    another waits.
    """

    def __init__(self, door: "_Lock", room: "_Lock") -> None:
        """See ``open``."""
        self._door = door
        self._room = room

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator["Turns"]:
        """Turns of all who open the same folder. Raises ``ConfigError`` unless it is, or can be made, ours."""
        with ExitStack() as stack:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                status = folder.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                    raise PermissionError("it belongs to somebody else")
                door, room = (
                    _Lock(stack.enter_context((folder / name).open("w")).fileno())
                    for name in ("door", "room")
                )
            except OSError as error:
                raise ConfigError(
                    f"cannot use {folder}: {error}", hint="set TMPDIR to a folder of yours"
                ) from None
            yield cls(door, room)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Compute alone while the context is open, as far as the others can be waited for."""
        async with self._door.held() as is_next, AsyncExitStack() as stack:
            if is_next:
                await stack.enter_async_context(self._room.held())
            inside = stack.pop_all()
        async with inside:
            yield


class _Lock:
    """The lock on an open file. Whoever holds it gives signs of life, which the file's time of change shows the others."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._in_vain = 0
        """The last sign of the holder that we gave up waiting for."""

    @asynccontextmanager
    async def held(self) -> AsyncIterator[bool]:
        """Hold the lock while the context is open; False if its holder is not waited for, the second time at once."""
        if not await self._take():
            yield False
            return
        self._sign()
        try:
            yield True
        finally:
            self._signing.cancel()
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _sign(self) -> None:
        os.utime(self._file)
        self._signing = asyncio.get_running_loop().call_later(SIGN_S, self._sign)

    async def _take(self) -> bool:
        loop = asyncio.get_running_loop()
        last, heard = 0, loop.time()
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sign = os.fstat(self._file).st_mtime_ns
                if sign != last:
                    last, heard = sign, loop.time()
                if sign == self._in_vain or loop.time() - heard >= PATIENCE_S:
                    self._in_vain = sign
                    return False
                await asyncio.sleep(POLL_S)
            else:
                return True
