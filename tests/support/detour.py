"""A TCP proxy to a peer whose open connections can be stalled while new ones work, as after a link
was cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from swarmnet_protocols.machine.aio import cancel, race


class Detour:
    """Made by ``to``. Connections to ``address`` reach the peer through the proxy."""

    def __init__(self, ip: str, port: str) -> None:
        self.address = ""
        self._target = ip, port
        self._carries = asyncio.Event()
        self._carries.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, address: str) -> AsyncIterator[Self]:
        """A detour to ``address``, a TCP multiaddr, for as long as the context."""
        *_, ip, _, port, p2p, peer = address.split("/")
        detour = cls(ip, port)
        server = await asyncio.start_server(detour._accept, "127.0.0.1", 0)
        detour.address = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}/{p2p}/{peer}"
        try:
            yield detour
        finally:
            server.close()
            await cancel(*detour._tasks)

    def hold(self) -> asyncio.Event:
        """Stall the connections that are open, without closing them, until the returned event is
        set."""
        held, self._carries = self._carries, asyncio.Event()
        held.clear()
        self._carries.set()
        return held

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._carry(reader, writer, self._carries))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carries: asyncio.Event
    ) -> None:
        with contextlib.closing(writer):
            there, back = await asyncio.open_connection(*self._target)
            with contextlib.closing(back), contextlib.suppress(OSError):
                await race(_pass_on(reader, back, carries), _pass_on(there, writer, carries))


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carries: asyncio.Event
) -> None:
    while data := await reader.read(1 << 16):
        await carries.wait()
        writer.write(data)
        await writer.drain()
