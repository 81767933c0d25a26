"""Typed streams: protocols with their messages, heartbeats and timeouts in one place.

A :class:`TypedProtocol` names the message type of each direction and how long each side waits. The
life of a :class:`TypedStream`:

1. :meth:`TypedProtocol.open` and :meth:`TypedProtocol.serve` give a stream to both sides.
2. Both sides send and receive messages. Most message types have a ``oneof kind``, where the kind
   ``heartbeat`` means that the sender is alive. A side that may be silent for long sends heartbeats
   at a fixed rate (:meth:`TypedStream.send_heartbeats`). ``receive`` does not return them; it
   raises ``DeadlineExceeded`` when they stop.
3. Either side closes the stream. A side that does not do what was asked refuses it
   (``refusal.py``).

A peer that sends a long prompt over a slow uplink delays its own heartbeats, because they wait in
the buffer of its router. The gaps grow before they exceed the timeout, so :class:`AdaptiveTimeout`
can follow them. TCP adapts its retransmission timeout to round trips in the same way (RFC 6298).
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, NoReturn, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation
from swarmnet_protocols.machine.aio import loop_time, until
from swarmnet_protocols.net import Buffer, Message, PeerId, ProtocolSpec, Stream, Transport
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.timing import Timing

Sent = TypeVar("Sent", bound=Protobuf)
Received = TypeVar("Received", bound=Protobuf)
Request = TypeVar("Request", bound=Protobuf)
Reply = TypeVar("Reply", bound=Protobuf)

_USUAL = Timing()
MAX_EXTENSION = 3.0
"""Longest timeout for heartbeats, as a multiple of the timeout for a peer that sends them
evenly."""
_GAPS = 4.0
"""Least timeout for heartbeats, as a multiple of the longest recent gap between two messages."""
_HALF_LIFE_S = 8.0
"""Seconds until the longest gap between two messages counts half."""


class AdaptiveTimeout:
    """The timeout for the next heartbeat: ``least_s``, or more while messages come unevenly.

    It never exceeds ``MAX_EXTENSION * least_s``.
    """

    def __init__(self) -> None:
        self._longest_s: float | None = None

    def observe(self, waited_s: float) -> None:
        """Note that the next message came after ``waited_s``.

        The first message does not count, since it answers a request.
        """
        if self._longest_s is None:
            self._longest_s = 0.0
        else:
            self._longest_s = max(waited_s, self._longest_s * 0.5 ** (waited_s / _HALF_LIFE_S))

    def seconds(self, least_s: float) -> float:
        return min(max(least_s, _GAPS * (self._longest_s or 0.0)), MAX_EXTENSION * least_s)


class Patience(NamedTuple):
    """The time that one side of a stream waits for the other."""

    silence_s: float
    """Most seconds between two messages of the other side, heartbeats included.

    While heartbeats are late, the limit grows up to ``MAX_EXTENSION`` times."""
    send_s: float | None = None
    """Most seconds that the other side may leave a message unread. None: ``silence_s``."""


class TypedStream(Generic[Sent, Received]):
    """One side of a stream on which it sends ``Sent`` and receives ``Received``.

    Any task may send; one at a time may receive.
    """

    def __init__(
        self,
        stream: Stream,
        sent: type[Sent],
        received: type[Received],
        patience: Patience,
        *,
        on_heartbeat: Callable[[Received], None] = lambda _: None,
    ) -> None:
        """Create one side.

        ``on_heartbeat`` is called with each heartbeat, because some carry news.
        """
        self.stream = stream
        self._received = received
        self.silence_s = patience.silence_s
        """As in :class:`Patience`. May change at any time."""
        self._send_s = patience.silence_s if patience.send_s is None else patience.send_s
        self.on_heartbeat = on_heartbeat
        self._has_heartbeats = "heartbeat" in received.DESCRIPTOR.fields_by_name
        self._timeout = AdaptiveTimeout()

    @property
    def peer(self) -> PeerId:
        """The authenticated id of the other side."""
        return self.stream.peer

    async def send(self, message: Sent, payload: Buffer = b"") -> None:
        """Send one message.

        Raises ``DeadlineExceeded`` if the other side does not read, and what ``Stream.send``
        raises.
        """
        whole = Message(message.SerializeToString(), payload)
        if math.isinf(self._send_s):
            await self.stream.send(whole)
        else:
            await send_within(self.stream, whole, self._send_s)

    async def receive(self) -> tuple[Received, Buffer]:
        """Return the next message that is not a heartbeat, and its payload.

        Raises ``DeadlineExceeded`` when not even a heartbeat comes in time, ``ProtocolViolation``
        for bytes that are not a ``Received``, and what ``Stream.receive`` raises.
        """
        while True:
            message = await self._receive_in_time()
            received = parse(self._received, message.header)
            if not self._has_heartbeats or not received.HasField("heartbeat"):
                return received, message.payload
            self.on_heartbeat(received)

    async def _receive_in_time(self) -> Message:
        if math.isinf(self.silence_s):
            return await self.stream.receive()
        if not self._has_heartbeats:
            return await receive_within(self.stream, self.silence_s)
        asked = loop_time()
        message = await receive_within(self.stream, self._timeout.seconds(self.silence_s))
        self._timeout.observe(loop_time() - asked)
        return message

    async def send_heartbeats(self, period_s: float, heartbeat: Callable[[], Sent]) -> NoReturn:
        """Send what ``heartbeat`` returns, at once and then every ``period_s``, until cancelled or
        until sending fails."""
        while True:
            await self.send(heartbeat())
            await asyncio.sleep(period_s)

    async def ask(self, message: Sent) -> tuple[Received, Buffer]:
        """Send one request, receive one reply with its payload, and close the stream.

        Raises what :meth:`send` and :meth:`receive` raise.
        """
        with contextlib.closing(self):
            await self.send(message)
            return await self.receive()

    def close(self) -> None:
        """End the stream, as ``Stream.close``."""
        self.stream.close()

    def refuse(self, refusal: Refusal) -> None:
        """End the stream with a reason, as ``Stream.refuse``."""
        self.stream.refuse(refusal)


@dataclass(frozen=True, kw_only=True)
class TypedProtocol(ProtocolSpec, Generic[Request, Reply]):
    """A protocol, the messages of its two sides, and the patience of each side."""

    request: type[Request]
    """The messages of the opening side."""
    reply: type[Reply]
    """The messages of the serving side."""
    opener: Callable[[Timing], Patience] = lambda timing: Patience(timing.silence_s, math.inf)
    server: Callable[[Timing], Patience] = lambda timing: Patience(timing.client_silence_s, timing.chunk_s)

    async def open(
        self,
        transport: Transport,
        peer: PeerId,
        timing: Timing = _USUAL,
        *,
        addresses: Sequence[str] = (),
        deadline_s: float | None = None,
        on_heartbeat: Callable[[Reply], None] = lambda _: None,
    ) -> TypedStream[Request, Reply]:
        """Open a stream to ``peer`` within ``deadline_s``, or ``Timing.open_s``.

        Raises what ``Transport.open`` raises.
        """
        within_s = timing.open_s if deadline_s is None else deadline_s
        stream = await transport.open(peer, self, addresses=addresses, deadline_s=within_s)
        return TypedStream(stream, self.request, self.reply, self.opener(timing), on_heartbeat=on_heartbeat)

    async def serve(
        self,
        transport: Transport,
        handler: Callable[[TypedStream[Reply, Request]], Awaitable[None]],
        timing: Timing = _USUAL,
    ) -> None:
        """Serve streams until the transport closes, as ``Transport.serve``."""
        await transport.serve(self, lambda stream: handler(self.accept(stream, timing)))

    def accept(
        self,
        stream: Stream,
        timing: Timing = _USUAL,
    ) -> TypedStream[Reply, Request]:
        """Return the serving side of a stream that another peer opened."""
        return TypedStream(stream, self.reply, self.request, self.server(timing))


def parse(kind: type[Received], header: bytes) -> Received:
    """Parse the message in ``header``. Raises ``ProtocolViolation`` for bytes that are not a
    ``kind``.
    """
    try:
        return kind.FromString(header)
    except DecodeError as error:
        raise ProtocolViolation(f"not a {kind.DESCRIPTOR.name}") from error


async def receive_within(stream: Stream, silence_s: float) -> Message:
    """Return the next message. Raises ``DeadlineExceeded`` if none comes within ``silence_s``."""
    try:
        return await until(loop_time() + silence_s, stream.receive)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.peer} has been silent for {silence_s:.3g} s") from error


async def send_within(stream: Stream, message: Message, timeout_s: float) -> None:
    """Send a message. Raises ``DeadlineExceeded`` if the other side has not read enough within
    ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            await stream.send(message)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.peer} has not read for {timeout_s:g} s") from error
