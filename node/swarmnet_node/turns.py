"""Nodes of one machine compute in turns: together they would wait for each other's threads at every product."""

import asyncio
import fcntl
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from swarmnet_protocols.errors import ConfigError

PATIENCE_S = 0.2
"""A node that does not give way for so long, because it is stopped or reads a long prompt, is not waited for."""
POLL_S = 0.001


def default_folder() -> Path:
    """Where the nodes of this user meet."""
    return Path(tempfile.gettempdir()) / f"swarmnet-{os.getuid()}"


class Turns:
    """Two locks that the kernel takes back from whoever dies.

    The holder of ``room`` computes. Who wants it waits at ``door``, one at a time, so nobody goes twice in a row while
    another waits.
    """

    def __init__(self, door: int, room: int) -> None:
        """Open files. See ``open``."""
        self._door = door
        self._room = room
        self._waits = True

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
                    stack.enter_context((folder / name).open("w")).fileno() for name in ("door", "room")
                )
            except OSError as error:
                raise ConfigError(
                    f"cannot use {folder}: {error}", hint="set TMPDIR to a folder of yours"
                ) from None
            yield cls(door, room)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Compute alone while the context is open, as far as the others can be waited for."""
        taken = await self._take()
        try:
            yield
        finally:
            if taken:
                fcntl.flock(self._room, fcntl.LOCK_UN)

    async def _take(self) -> bool:
        """Who waited in vain does not wait again until the room was free once."""
        deadline = asyncio.get_running_loop().time() + (PATIENCE_S if self._waits else 0)
        self._waits = False
        if await _locked(self._door, deadline):
            try:
                self._waits = await _locked(self._room, deadline)
            finally:
                fcntl.flock(self._door, fcntl.LOCK_UN)
        return self._waits


async def _locked(file: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(POLL_S)
        else:
            return True
