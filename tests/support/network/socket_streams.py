"""Streams of the libp2p transport over a socket pair instead of p2pd."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.framed_stream import FramedStream
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.net.limits.stream_scope import StreamScope
from swarmnet_protocols.net.pipe import Pipe
from swarmnet_protocols.net.protocol_ids import LINK
from swarmnet_protocols.timing import Timing
from tests.support.network.stream_scopes import new_scope


class End:
    """A stream on one end of a socket pair, with its resources."""

    def __init__(self, pipe: Pipe, link: LinkLimiter, *, is_outbound: bool = False) -> None:
        self.resources = ResourceManager()
        self.pipe = pipe
        self.link = link
        self.flushes: list[asyncio.Task[None]] = []
        peer = PeerId("other")
        scope = (
            StreamScope.outbound(self.resources, peer, Timing()) if is_outbound else new_scope(self.resources)
        )
        self.stream = FramedStream(peer, LINK, pipe, scope, self._closed, link)

    @property
    def streams(self) -> int:
        return self.resources.system.used[Resource.INBOUND_STREAMS]

    def _closed(self, stream: FramedStream) -> None:
        self.flushes.append(asyncio.get_running_loop().create_task(stream.flush()))


async def connect(end: socket.socket) -> Pipe:
    loop = asyncio.get_running_loop()
    _, pipe = await loop.create_unix_connection(Pipe, sock=end)
    return pipe


@asynccontextmanager
async def inbound_stream(link: LinkLimiter | None = None) -> AsyncIterator[tuple[End, socket.socket]]:
    """An inbound stream, and the socket of the other side."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with theirs:
        end = End(await connect(ours), link or LinkLimiter())
        try:
            yield end, theirs
        finally:
            if not end.pipe.writer.is_closing():
                end.pipe.writer.transport.abort()
            await asyncio.gather(*end.flushes, return_exceptions=True)


@asynccontextmanager
async def two_ends(link: LinkLimiter | None = None) -> AsyncIterator[tuple[End, End]]:
    """Both ends of a stream: the end that serves it, limited by ``link``, and the end that opened
    it."""
    async with inbound_stream(link) as (one, theirs):
        other = End(await connect(theirs.dup()), LinkLimiter(), is_outbound=True)
        theirs.close()
        try:
            yield one, other
        finally:
            if not other.pipe.writer.is_closing():
                other.pipe.writer.transport.abort()
            await asyncio.gather(*other.flushes, return_exceptions=True)
