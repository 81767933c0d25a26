"""A stream whose messages are protobufs: requests, replies, heartbeats and timeouts in one place.

Every protocol of swarmnet but the DHT's is a pair of message types, one for each direction, mostly with a ``oneof kind``. The kind
``heartbeat`` means in all of them that the sender is alive. A side that may send no other message for long sends heartbeats at a fixed rate
(:meth:`TypedStream.send_heartbeats`). ``receive`` does not return them; it raises ``DeadlineExceeded`` when they stop.

Heartbeats of a peer that sends a long prompt over a slow uplink wait behind it in the buffer of its router. The times between them grow before they
exceed the timeout, so that :class:`AdaptiveTimeout` can follow them, as TCP adapts its retransmission timeout to round trips (RFC 6298).

A side that does not do what was asked refuses the stream (``refusal.py``). A stream with one request and one reply is made with :func:`ask`.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation
from swarmnet_protocols.machine.aio import until
from swarmnet_protocols.net import Buffer, Message, PeerId, Stream
from swarmnet_protocols.net.refusal import Refusal

Sent = TypeVar("Sent", bound=Protobuf)
Received = TypeVar("Received", bound=Protobuf)

MAX_EXTENSION = 3.0
"""Longest timeout for heartbeats, as a multiple of the one for a peer that sends them evenly."""
_GAPS = 4.0
"""The timeout for heartbeats is at least this many times the longest recent time between two messages."""
_HALF_LIFE_S = 8.0
"""Seconds after which the longest time between two messages counts half."""


class AdaptiveTimeout:
    """The timeout for the next heartbeat: ``least_s``, or more while messages come unevenly; never more than ``MAX_EXTENSION * least_s``."""

    def __init__(self) -> None:
        self._longest_s: float | None = None

    def note(self, waited_s: float) -> None:
        """The next message has come after ``waited_s``. The first one does not count: it answers a request."""
        if self._longest_s is None:
            self._longest_s = 0.0
        else:
            self._longest_s = max(waited_s, self._longest_s * 0.5 ** (waited_s / _HALF_LIFE_S))

    def seconds(self, least_s: float) -> float:
        return min(max(least_s, _GAPS * (self._longest_s or 0.0)), MAX_EXTENSION * least_s)


class TypedStream(Generic[Sent, Received]):
    """One side of a stream on which it sends ``Sent`` and receives ``Received``.

    Any task may send; one at a time may receive.
    """

    def __init__(
        self,
        stream: Stream,
        sent: type[Sent],
        received: type[Received],
        *,
        silence_s: float,
        send_s: float = math.inf,
        on_heartbeat: Callable[[Received], None] = lambda _: None,
    ) -> None:
        """``sent`` and ``received``: the types of the messages. ``silence_s``: longest time between two messages of the other side, heartbeats
        included; up to ``MAX_EXTENSION`` times as long while heartbeats are late. It may be changed later. ``send_s``: longest time that the other
        side may leave a message unread. Infinity: no limit.
        ``on_heartbeat`` is called with each heartbeat, for those that carry news.
        """
        self.stream = stream
        self._received = received
        self.silence_s = silence_s
        self._send_s = send_s
        self.on_heartbeat = on_heartbeat
        self._has_heartbeats = "heartbeat" in received.DESCRIPTOR.fields_by_name
        self._timeout = AdaptiveTimeout()

    @property
    def peer(self) -> PeerId:
        """The authenticated id of the other side."""
        return self.stream.peer

    async def send(self, message: Sent, payload: Buffer = b"") -> None:
        """Send one message. Raises ``DeadlineExceeded`` if the other side does not read, and what ``Stream.send`` raises."""
        whole = Message(message.SerializeToString(), payload)
        if math.isinf(self._send_s):
            await self.stream.send(whole)
        else:
            await send_within(self.stream, whole, self._send_s)

    async def receive(self) -> tuple[Received, Buffer]:
        """The next message that is no heartbeat, and its payload.

        Raises ``DeadlineExceeded`` when not even a heartbeat comes in time, ``ProtocolViolation`` for bytes that are no ``Received``, and
        what ``Stream.receive`` raises.
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
        clock = asyncio.get_running_loop().time
        asked = clock()
        message = await receive_within(self.stream, self._timeout.seconds(self.silence_s))
        self._timeout.note(clock() - asked)
        return message

    async def send_heartbeats(self, period_s: float, heartbeat: Callable[[], Sent]) -> NoReturn:
        """Send what ``heartbeat`` returns, at once and then every ``period_s``, until cancelled or until sending fails."""
        while True:
            await self.send(heartbeat())
            await asyncio.sleep(period_s)

    def close(self) -> None:
        """End the stream, as ``Stream.close``."""
        self.stream.close()

    def refuse(self, refusal: Refusal) -> None:
        """End the stream with a reason, as ``Stream.refuse``."""
        self.stream.refuse(refusal)


async def ask(
    stream: Stream, request: Protobuf, reply: type[Received], *, within_s: float
) -> tuple[Received, Buffer]:
    """Send one request on ``stream``, receive one reply with its payload, and close the stream.

    Raises what ``Stream.send`` and ``Stream.receive`` raise, ``DeadlineExceeded`` after ``within_s`` each, and ``ProtocolViolation``
    for bytes that are no ``reply``.
    """
    with contextlib.closing(stream):
        typed = TypedStream(stream, type(request), reply, silence_s=within_s, send_s=within_s)
        await typed.send(request)
        return await typed.receive()


def parse(kind: type[Received], header: bytes) -> Received:
    """The message in ``header``. Raises ``ProtocolViolation`` for bytes that are no ``kind``."""
    try:
        return kind.FromString(header)
    except DecodeError as error:
        raise ProtocolViolation(f"not a {kind.DESCRIPTOR.name}") from error


async def receive_within(stream: Stream, silence_s: float) -> Message:
    """The next message. Raises ``DeadlineExceeded`` if none comes within ``silence_s``."""
    try:
        return await until(asyncio.get_running_loop().time() + silence_s, stream.receive)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.peer} has been silent for {silence_s:.3g} s") from error


async def send_within(stream: Stream, message: Message, timeout_s: float) -> None:
    """Send a message. Raises ``DeadlineExceeded`` if the other side has not read enough within ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            await stream.send(message)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.peer} has not read for {timeout_s:g} s") from error
