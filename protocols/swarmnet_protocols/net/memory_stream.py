"""A stream between two peers of a simulated network."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Refusal
from swarmnet_protocols.net.flow_control import ReceiveWindow, SendWindow
from swarmnet_protocols.net.framing import check_sizes, encode
from swarmnet_protocols.net.meter import Meter
from swarmnet_protocols.net.refusal import SIZES, refused_by
from swarmnet_protocols.net.resources import Scope

if TYPE_CHECKING:
    from swarmnet_protocols.net.memory import MemoryTransport

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
        self._inbox: deque[_Incoming | tuple[int, int]] = deque()
        """Messages, and what is said of grants."""
        self._unread_bytes = 0  # sent by this end, not yet received by the other
        self._sending = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed = False
        self._ended = ""
        self._refusal: Refusal | None = None
        self._allowance = SendWindow() if protocol.has_flow_control and meter.is_ours else None
        self._grants: ReceiveWindow | None = None

    def connect(self, remote: "MemoryStream") -> None:
        """``remote``, the other end, has opened this one."""
        self.remote, remote.remote = remote, self
        if self._protocol.has_flow_control:
            self._grants = ReceiveWindow(self._transport.pace.down, self._tell)

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
        async with self._sending:
            max_uncredited_bytes = (
                math.inf if self._allowance is None else self._allowance.max_uncredited_bytes
            )
            head, payload = encode(message, self._protocol, max_uncredited_bytes=max_uncredited_bytes)
            # The sender may reuse its buffers as soon as this returns.
            message = Message(message.header, bytes(payload))
            size_bytes = len(head) + len(payload)
            await self._meter.send(size_bytes)
            while self._unread_bytes >= WINDOW_BYTES and not self._closed and not self._ended:
                await self._change()
            if self._closed or self._ended or self.remote is None:
                raise self._gone()
            self._unread_bytes += size_bytes
            incoming = _Incoming(message, size_bytes, waits=len(payload) > max_uncredited_bytes)
            if self._allowance is not None and incoming.waits:
                await self._send_granted(self.remote, incoming, self._allowance)
            else:
                self._carry(size_bytes, partial(self.remote._deliver, incoming))

    async def _send_granted(
        self, remote: "MemoryStream", incoming: "_Incoming", allowance: SendWindow
    ) -> None:
        left_bytes = len(incoming.message.payload)
        allowance.start(left_bytes)
        self._carry(incoming.size_bytes - left_bytes, partial(remote._deliver, incoming))
        try:
            while left_bytes:
                piece_bytes = await allowance.acquire(left_bytes)
                left_bytes -= piece_bytes
                self._carry(
                    piece_bytes, partial(remote._deliver_more, incoming, piece_bytes, is_all=not left_bytes)
                )
        except BaseException:  # half a message has been sent
            self.close()
            raise

    async def receive(self) -> Message:
        return await self._meter.receive(self._read)

    async def _read(self) -> Message:
        incoming = await self._next()
        message, size_bytes = incoming.message, incoming.size_bytes
        check_sizes(len(message.header), len(message.payload), self._protocol)
        header_bytes, payload_bytes = size_bytes - len(message.payload), len(message.payload)
        if self._grants is not None and not incoming.is_expected:
            self._grants.start(
                header_bytes, payload_bytes, needs_credit=incoming.waits, received_bytes=header_bytes
            )
            incoming.is_expected = True
        await self._meter.reserve(size_bytes)
        if self._grants is not None and incoming.waits:
            await self._read_granted(incoming, self._grants)
        else:
            await self._transport.pace.down.acquire(size_bytes, message_bytes=size_bytes)
        self._inbox.popleft()
        if self.remote is not None:
            self.remote._credit(size_bytes)
        return message

    async def _next(self) -> "_Incoming":
        """The next message, or what is here of it; grants that come before it are heard."""
        while True:
            while not self._inbox or self._closed:
                if self._closed or self._ended:
                    raise self._gone()
                await self._change()
            first = self._inbox[0]
            if isinstance(first, _Incoming):
                return first
            if self._allowance is None:
                raise ProtocolViolation("a grant came that nobody waits for")
            self._allowance.on_control(*first)
            self._inbox.popleft()

    async def _read_granted(self, incoming: "_Incoming", grants: ReceiveWindow) -> None:
        while grants.is_open:
            if self._closed or self._ended:
                raise self._gone()
            if incoming.more_bytes:
                more_bytes, incoming.more_bytes = incoming.more_bytes, 0
                grants.received(more_bytes)
            elif not await grants.grant() and not incoming.more_bytes:
                await self._change()

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
        for half in (self._allowance, self._grants):
            if half is not None:
                half.close()
        if remote := self.remote:
            self._network.carry(self._transport.peer_id, self._peer, 0, lambda: remote._end_arrives(reason))

    def _gone(self) -> StreamEnded:
        if self._refusal is not None and not self._closed:
            return refused_by(self._peer, self._refusal)
        return StreamEnded(self._ended or "the stream was closed")

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _carry(self, size_bytes: int, arrive: Callable[[], None]) -> None:
        self._network.carry(self._transport.peer_id, self._peer, size_bytes, arrive)

    def _tell(self, word: int, size_bytes: int) -> None:
        if self.remote is not None:
            self._carry(SIZES.size, partial(self.remote._deliver, (word, size_bytes)))

    def _deliver(self, first: "_Incoming | tuple[int, int]") -> None:
        """A message arrives, or what comes before its payload if that waits for grants; or what ``_tell`` says."""
        if self._closed:
            return
        if isinstance(first, _Incoming) and not first.waits:
            self._network.record(self._peer, self._transport.peer_id, self._protocol, first.message)
        self._inbox.append(first)
        self._changed.set()

    def _deliver_more(self, incoming: "_Incoming", size_bytes: int, *, is_all: bool) -> None:
        """More of a payload arrives."""
        if self._closed:
            return
        if is_all:
            self._network.record(self._peer, self._transport.peer_id, self._protocol, incoming.message)
        incoming.more_bytes += size_bytes
        self._changed.set()

    def _credit(self, size_bytes: int) -> None:
        self._unread_bytes -= size_bytes
        self._changed.set()

    def _end_arrives(self, reason: str) -> None:
        self._ended = reason
        self._changed.set()
        if self._allowance is not None:
            self._allowance.close()


@dataclass(eq=False)
class _Incoming:
    """A message of which at least the header is here."""

    message: Message
    size_bytes: int
    waits: bool
    """Its payload comes as it is granted; otherwise it is here too."""
    more_bytes: int = 0
    """So much more of that is here, and not looked at."""
    is_expected: bool = False
