"""Streams of real nodes without p2pd: its socket is one of a pair."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.meter import Meter
from swarmnet_protocols.net.p2pd.pipe import Pipe
from swarmnet_protocols.net.p2pd.stream import P2pdStream
from swarmnet_protocols.net.protocol_ids import LINK
from swarmnet_protocols.net.rate_limit import LinkLimiter
from swarmnet_protocols.net.resources import Resource, ResourceManager
from swarmnet_protocols.timing import Timing
from tests.support.meters import a_meter


class End:
    """A stream on one end of a pair of sockets, and what it takes."""

    def __init__(self, pipe: Pipe, pace: LinkLimiter, *, is_ours: bool = False) -> None:
        self.resources = ResourceManager()
        self.pipe = pipe
        self.pace = pace
        self.flushes: list[asyncio.Task[None]] = []
        peer = PeerId("somebody")
        meter = Meter.of_ours(self.resources, peer, Timing()) if is_ours else a_meter(self.resources)
        self.stream = P2pdStream(peer, LINK, pipe, meter, self._closed, pace)

    @property
    def streams(self) -> int:
        return self.resources.system.used[Resource.INBOUND_STREAMS]

    def _closed(self, stream: P2pdStream) -> None:
        self.flushes.append(asyncio.get_running_loop().create_task(stream.flush()))


async def connected(end: socket.socket) -> Pipe:
    loop = asyncio.get_running_loop()
    _, pipe = await loop.create_unix_connection(Pipe, sock=end)
    return pipe


@asynccontextmanager
async def a_stream_to(pace: LinkLimiter | None = None) -> AsyncIterator[tuple[End, socket.socket]]:
    """A stream, and the socket of whoever is on its other side."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with theirs:
        end = End(await connected(ours), pace or LinkLimiter())
        try:
            yield end, theirs
        finally:
            end.pipe.writer.transport.abort()
            await asyncio.gather(*end.flushes, return_exceptions=True)


@asynccontextmanager
async def two_ends(pace: LinkLimiter | None = None) -> AsyncIterator[tuple[End, End]]:
    """The other one has opened the stream; the one keeps ``pace``."""
    async with a_stream_to(pace) as (one, theirs):
        other = End(await connected(theirs.dup()), LinkLimiter(), is_ours=True)
        theirs.close()
        try:
            yield one, other
        finally:
            other.pipe.writer.transport.abort()
            await asyncio.gather(*other.flushes, return_exceptions=True)
