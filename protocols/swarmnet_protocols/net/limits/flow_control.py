"""Credit-based flow control: a receiver with a rate limit grants credit for each part of a large
payload.

A sender that only waits for a slow reader first fills p2pd and its sockets, nearly 1 MiB a stream.
So if the link of the serving side (:class:`ReceiveWindow`) is limited, it controls the opening side
(:class:`SendWindow`):

1. LIMIT, once, before anything else: from here on, payloads over this many bytes need credit.
2. The sender announces such a payload with NEEDS_CREDIT and waits.
3. CREDIT, repeatedly: the sender may send this many more bytes. The receiver charges its rate
   limiter when it grants them.

Smaller payloads (decode steps) need no credit. They are charged when they are read.
"""

import asyncio
import math
from collections.abc import Callable

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net.limits.rate_limit import PIECE_BYTES, TINY_BYTES, RateLimiter

LIMIT = 0xFFFF_FFFD
"""Stands in for the header size, once a stream. The second size is the largest payload that needs
no credit."""
CREDIT = 0xFFFF_FFFE
"""Stands in for the header size. The second size is the credit in bytes."""
NEEDS_CREDIT = 0x8000_0000
"""Flag in the header size. The sender waits for credit before it sends the payload."""
MIN_BYTES = PIECE_BYTES
"""Least bytes of a payload that needs credit, and of a credit (except for the rest of a
payload)."""
MAX_UNCREDITED_BYTES = 1 << 20
"""Larger payloads always need credit."""
UNCREDITED_S = 0.02
"""Seconds of the link's rate. Payloads that take at most this long need no credit, because a round
trip would take longer."""
CREDIT_S = 0.03
"""Seconds of the rate that one credit covers, so that fast links do not send a credit for each
piece."""
IN_FLIGHT_S = 0.25
"""Most credit in flight over all streams, in seconds of the rate: about a round trip."""
READ_AHEAD_BYTES = 16 << 10
"""Most bytes of one read of a small message. One read brings its sizes and the message together."""


def due_bytes(left_bytes: int, in_flight_bytes: int, bytes_per_s: float, open_windows: int) -> int:
    """Return the next credit in bytes; 0 until more has arrived.

    ``left_bytes`` of the payload have no credit yet. ``open_windows`` receive windows share the
    link.
    """
    if in_flight_bytes > bytes_per_s * IN_FLIGHT_S / open_windows:
        return 0
    return int(min(left_bytes, max(MIN_BYTES, bytes_per_s * CREDIT_S)))


class SendWindow:
    """The side that opened the stream: what it may send."""

    def __init__(self) -> None:
        self.max_uncredited_bytes = math.inf
        """Larger payloads need credit."""
        self._ungranted_bytes = 0
        self._credit_bytes = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    def on_control(self, kind: int, size_bytes: int) -> None:
        """Handle LIMIT or CREDIT of the other side.

        Raises ``ProtocolViolation`` for a second LIMIT, and for credit that is too small or exceeds
        the payload.
        """
        least_bytes = min(self._ungranted_bytes, MIN_BYTES)
        if kind == LIMIT and math.isinf(self.max_uncredited_bytes):
            self.max_uncredited_bytes = max(MIN_BYTES, size_bytes)
        elif kind == CREDIT and 0 < least_bytes <= size_bytes <= self._ungranted_bytes:
            self._ungranted_bytes -= size_bytes
            self._credit_bytes += size_bytes
            self._changed.set()
        else:
            what = "credit" if kind == CREDIT else "a second limit"
            raise ProtocolViolation(f"{what} of {size_bytes} bytes while {self._ungranted_bytes} need credit")

    def start(self, payload_bytes: int) -> None:
        """Begin a payload that needs credit, after the previous one was sent whole."""
        self._ungranted_bytes = payload_bytes

    async def acquire(self, max_bytes: int) -> int:
        """Wait for credit, and use at most ``max_bytes`` of it. Returns the bytes to send.

        Raises ``StreamEnded`` after ``close``.
        """
        while not self._credit_bytes:
            if self._is_closed:
                raise StreamEnded("the stream was closed")
            self._changed.clear()
            await self._changed.wait()
        size_bytes = min(max_bytes, self._credit_bytes)
        self._credit_bytes -= size_bytes
        return size_bytes

    def close(self) -> None:
        """Note that the stream is closed. Idempotent."""
        self._is_closed = True
        self._changed.set()


class ReceiveWindow:
    """The side that serves the stream. It grants credit at the rate of ``limiter``.

    ``send_control`` sends LIMIT or CREDIT with a size.
    """

    def __init__(self, limiter: RateLimiter, send_control: Callable[[int, int], None]) -> None:
        self._limiter = limiter
        self._send_control = send_control
        self._size_bytes = 0
        self._granted_bytes = 0
        self._received_bytes = 0
        self._max_uncredited_bytes: int | None = None
        self._is_limited_from_start = limiter.is_limited
        self._send_limit()

    @property
    def is_open(self) -> bool:
        """True if a payload that needs credit is under way."""
        return self._received_bytes < self._size_bytes

    @property
    def max_read_bytes(self) -> int:
        """The granted bytes that have not arrived, plus one to detect a sender that exceeds its
        credit.
        """
        excess = 1 if self._granted_bytes < self._size_bytes else 0
        return self._granted_bytes - self._received_bytes + excess

    def start(
        self, header_bytes: int, payload_bytes: int, *, needs_credit: bool, received_bytes: int
    ) -> None:
        """Begin a message. ``received_bytes`` of it have come. The header needs no credit.

        Raises ``ProtocolViolation`` for a large payload that is sent without credit.
        """
        if needs_credit:
            self.close()
            self._size_bytes, self._granted_bytes = header_bytes + payload_bytes, header_bytes
            self._received_bytes = 0
            self._limiter.open_windows += self.is_open
            self.received(min(received_bytes, self._size_bytes))
        elif self._max_uncredited_bytes is None:
            self._send_limit()
        elif self._is_limited_from_start and payload_bytes > self._max_uncredited_bytes:
            raise ProtocolViolation(f"{payload_bytes} bytes were sent without credit")

    async def grant(self) -> int:
        """Grant the credit that is due, as soon as the limiter allows it. Returns the bytes
        granted."""
        size_bytes = due_bytes(
            self._size_bytes - self._granted_bytes,
            self._granted_bytes - self._received_bytes,
            self._limiter.bytes_per_s,
            self._limiter.open_windows,
        )
        if size_bytes:
            await self._limiter.acquire(size_bytes, message_bytes=self._size_bytes)
            self._granted_bytes += size_bytes
            self._send_control(CREDIT, size_bytes)
        return size_bytes

    def received(self, size_bytes: int) -> None:
        """Count bytes of the payload. Raises ``ProtocolViolation`` when they exceed the credit."""
        self._received_bytes += size_bytes
        if self._received_bytes > self._granted_bytes:
            raise ProtocolViolation("more of a payload came than credit was granted for")
        if size_bytes and not self.is_open:
            self._limiter.open_windows -= 1

    def close(self) -> None:
        """End the payload under way, if there is one. Idempotent."""
        if self.is_open:
            self._received_bytes = self._size_bytes
            self._limiter.open_windows -= 1

    def _send_limit(self) -> None:
        if self._limiter.is_limited:
            size_bytes = self._limiter.bytes_per_s * UNCREDITED_S
            self._max_uncredited_bytes = int(min(max(MIN_BYTES, size_bytes), MAX_UNCREDITED_BYTES))
            self._send_control(LIMIT, self._max_uncredited_bytes)


class LimitedReader:
    """Reads a byte stream no faster than ``limiter`` allows, or ``window`` grants credit.

    A cancelled read loses nothing: the next one continues it.
    """

    def __init__(
        self, reader: asyncio.StreamReader, limiter: RateLimiter, window: ReceiveWindow | None = None
    ) -> None:
        self._reader = reader
        self._limiter = limiter
        self._window = window
        self._buffer = bytearray()
        self._acquired_bytes = 0
        """Bytes acquired from the limiter and not read yet."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes that have been read and not returned. ``readexactly`` returns as many without
        waiting.
        """
        return len(self._buffer)

    def drop(self) -> None:
        """Free what was read and not returned."""
        self._buffer = bytearray()

    async def readexactly(self, size_bytes: int, deadline: asyncio.Timeout | None = None) -> bytes:
        """Read as ``StreamReader.readexactly``.

        ``deadline`` is the sender's. It is suspended while the limiter delays the read.
        """
        while (missing := size_bytes - len(self._buffer)) > 0:
            if self._window is not None and self._window.is_open:
                await self._read_credited(self._window, deadline)
            elif self._limiter.is_limited and size_bytes > TINY_BYTES:
                wanted = min(PIECE_BYTES, missing)
                if self._acquired_bytes < wanted:
                    left_s = _suspend(deadline)
                    await self._limiter.acquire(wanted - self._acquired_bytes, message_bytes=size_bytes)
                    self._acquired_bytes = wanted
                    _resume(deadline, left_s)
                self._append(await self._reader.read(wanted))
            elif self._limiter.is_limited or missing > READ_AHEAD_BYTES:
                self._append(await self._reader.read(missing))
            else:
                self._append(await self._reader.read(READ_AHEAD_BYTES))
        if len(self._buffer) == size_bytes:
            data, self._buffer = bytes(self._buffer), bytearray()
        else:
            data = bytes(memoryview(self._buffer)[:size_bytes])
            del self._buffer[:size_bytes]
        return data

    async def _read_credited(self, window: ReceiveWindow, deadline: asyncio.Timeout | None) -> None:
        left_s = _suspend(deadline)
        self._acquired_bytes += await window.grant()
        _resume(deadline, left_s)
        data = await self._reader.read(window.max_read_bytes)
        self._append(data)
        window.received(len(data))

    def _append(self, data: bytes) -> None:
        """Buffer what was read, and charge the bytes that were not acquired before."""
        if not data:
            # errors outlive the stream
            raise asyncio.IncompleteReadError(bytes(self._buffer[:1]), None)
        acquired = min(self._acquired_bytes, len(data))
        self._acquired_bytes -= acquired
        if len(data) > acquired:
            self._limiter.count(len(data) - acquired)
        self._buffer += data


def seconds_left(deadline: asyncio.Timeout) -> float:
    """Return seconds until a deadline; infinity if it is suspended."""
    until = deadline.when()
    return math.inf if until is None else until - loop_time()


def _suspend(deadline: asyncio.Timeout | None) -> float:
    """Suspend a deadline. Returns the seconds that were left; infinity if there is none."""
    if deadline is None:
        return math.inf
    left_s = seconds_left(deadline)
    deadline.reschedule(None)
    return left_s


def _resume(deadline: asyncio.Timeout | None, left_s: float) -> None:
    if deadline is not None and not math.isinf(left_s):
        deadline.reschedule(loop_time() + left_s)
