"""A stream between two peers of a simulated network."""

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.resources import Scope
from swarmnet_protocols.transport import Message, PeerId, ProtocolSpec, Refusal
from swarmnet_protocols.transport.framing import check_sizes, encode
from swarmnet_protocols.transport.meter import Meter
from swarmnet_protocols.transport.refusing import refused_by

if TYPE_CHECKING:
    from swarmnet_protocols.transport.memory import MemoryTransport

WINDOW_BYTES = 1 << 20
"""A sender waits while this much, or more, has been sent and not yet received."""


class MemoryStream:
    """One end of a stream on a :class:`MemoryNetwork`."""

    def __init__(
        self, transport: "MemoryTransport", peer: PeerId, protocol: ProtocolSpec, meter: Meter
    ) -> None:
        self.remote: MemoryStream | None = None
        self._transport = transport
        self._network = transport.network
        self._peer = peer
        self._protocol = protocol
        self._meter = meter
        meter.drop = self.close
        self._inbox: deque[tuple[Message, int]] = deque()
        self._unread_bytes = 0  # sent by this end, not yet received by the other
        self._sending = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed = False
        self._ended = ""
        self._refusal: Refusal | None = None

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def address(self) -> str:
        return self._network.address_of(self._peer)

    @property
    def scope(self) -> Scope:
        return self._meter.scope

    @property
    def protocol(self) -> ProtocolSpec:
        return self._protocol

    @property
    def closed(self) -> bool:
        return self._closed

    async def send(self, message: Message) -> None:
        head, payload = encode(message, self._protocol)
        # The sender may reuse its buffers as soon as this returns.
        message = Message(message.header, bytes(payload))
        size_bytes = len(head) + len(payload)
        async with self._sending:
            await self._meter.send(size_bytes)
            while self._unread_bytes >= WINDOW_BYTES and not self._closed and not self._ended:
                await self._change()
            if self._closed or self._ended or self.remote is None:
                raise self._gone()
            self._unread_bytes += size_bytes
            remote = self.remote
            self._network.carry(
                self._transport.peer_id, self._peer, size_bytes, lambda: remote._deliver(message, size_bytes)
            )

    async def receive(self) -> Message:
        return await self._meter.receive(self._read)

    async def _read(self) -> Message:
        while not self._inbox or self._closed:
            if self._closed or self._ended:
                raise self._gone()
            await self._change()
        message, size_bytes = self._inbox[0]
        check_sizes(len(message.header), len(message.payload), self._protocol)
        await self._meter.reserve(size_bytes)
        self._inbox.popleft()
        if self.remote is not None:
            self.remote._credit(size_bytes)
        return message

    def close(self) -> None:
        self.end("the other side closed the stream")

    def refuse(self, refusal: Refusal) -> None:
        if self.remote is not None and not self._closed:
            remote = self.remote
            self._network.carry(self._transport.peer_id, self._peer, 0, lambda: remote.refused(refusal))
        self.close()

    def refused(self, refusal: Refusal) -> None:
        """The other side does not want this stream."""
        self._refusal = refusal
        self._end_arrives("the other side refused the stream")

    def end(self, reason: str) -> None:
        """Close this end; the other one learns why, after everything that was sent."""
        if self._closed:
            return
        self._closed = True
        self._meter.close()
        self._transport.forget(self)
        self._changed.set()
        if remote := self.remote:
            self._network.carry(self._transport.peer_id, self._peer, 0, lambda: remote._end_arrives(reason))

    def _gone(self) -> StreamEnded:
        if self._refusal is not None and not self._closed:
            return refused_by(self._peer, self._refusal)
        return StreamEnded(self._ended or "the stream was closed")

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _deliver(self, message: Message, size_bytes: int) -> None:
        if self._closed:
            return
        self._network.record(self._peer, self._transport.peer_id, self._protocol, message)
        self._inbox.append((message, size_bytes))
        self._changed.set()

    def _credit(self, size_bytes: int) -> None:
        self._unread_bytes -= size_bytes
        self._changed.set()

    def _end_arrives(self, reason: str) -> None:
        self._ended = reason
        self._changed.set()
