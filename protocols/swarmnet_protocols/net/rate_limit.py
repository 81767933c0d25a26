"""Rates that a peer keeps, whoever it talks to: what goes out waits for its turn, what comes in is read more slowly.

A line is charged for what it carries before it is known what that makes on the wire; ``settle`` corrects it by what was measured.
Beats and pings never wait, small messages (decode steps) go before pieces of large ones (prompts), which are never starved.
"""

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnet_protocols.net.flow_control import ReceiveWindow

PIECE_BYTES = 16 << 10
"""Large messages go, and are read, in pieces of this size, between which others have their turn."""
AHEAD_BYTES = 16 << 10
"""So much is read at once if it is there: a small message and the size before it, rather than one after the other."""
TINY_BYTES = 2048
"""Beats, pings, the opening words of streams: late ones would look like a death."""
SMALL_SHARE = 0.5
"""Of the rate, for small messages while large ones that came at once, unasked, are being made up for."""
SMALL_TURNS = 8
"""So many small messages go before one piece of a large one that waits."""
BURST_S = 0.1
"""What was not used for so long may be made up for at once."""
WIRE_FACTOR = 1.04
"""What a byte of ours makes on the wire, headers of IP, TCP or QUIC and of libp2p included, at 1,500 bytes a packet."""
MAX_AHEAD_S = 1.0
"""What was charged and not seen on the wire within this time will not come."""


class TokenBucket:
    """Bytes that may go at a steady rate. Pure: time is an argument. Without a rate everything may."""

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self._level = 0.0
        self._at = 0.0

    def set_rate(self, bytes_per_s: float, now: float) -> None:
        """Another rate from now on. Debts of an unlimited time are forgotten."""
        self._fill(now)
        if math.isinf(self.bytes_per_s) or math.isinf(bytes_per_s):
            self._level = 0.0
        self.bytes_per_s = bytes_per_s

    def charge(self, size_bytes: float, now: float) -> None:
        """So much goes now, whether or not there was room."""
        self._fill(now)
        if not math.isinf(self.bytes_per_s):
            self._level -= size_bytes

    def wait_s(self, now: float) -> float:
        """Until the next may go. A byte is not worth a wait that no clock shows."""
        self._fill(now)
        return -self._level / self.bytes_per_s if self._level < -1.0 else 0.0

    def _fill(self, now: float) -> None:
        if not math.isinf(self.bytes_per_s):
            gained = self._level + (now - self._at) * self.bytes_per_s
            self._level = min(gained, self.bytes_per_s * BURST_S)
        self._at = now


_Queue = deque[tuple[int, asyncio.Future[None]]]
"""How many bytes are to go, and who waits until they may."""


class RateLimiter:
    """One direction of everything that a peer sends or receives."""

    def __init__(self) -> None:
        self.total_bytes = 0.0
        """Bytes on the wire so far, as measured, or as estimated where they cannot be."""
        self.sharing = 0
        """Payloads that come as they are granted, at the moment."""
        self._bucket = TokenBucket()
        self._small_bucket = TokenBucket()
        self._small: _Queue = deque()
        self._large: _Queue = deque()
        self._small_turns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._charged_bytes = 0.0
        self._ahead_bytes = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self._bucket.bytes_per_s

    @property
    def is_limited(self) -> bool:
        return not math.isinf(self.bytes_per_s)

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Keep this rate, or none, from now on; on the loop that the line is used on."""
        rate = math.inf if bytes_per_s is None else bytes_per_s
        self._bucket.set_rate(rate, _now())
        self._small_bucket.set_rate(rate * SMALL_SHARE, _now())
        self._go_on()

    def count(self, size_bytes: int) -> None:
        """Something goes without waiting; what comes later makes up for it."""
        wire_bytes = size_bytes * WIRE_FACTOR
        self.total_bytes += wire_bytes
        self._charged_bytes += wire_bytes
        self._bucket.charge(wire_bytes, _now())

    async def turn(self, size_bytes: int, *, of_bytes: int) -> None:
        """Wait until ``size_bytes`` of a message of ``of_bytes`` may go, and count them."""
        if self.is_limited and of_bytes > TINY_BYTES:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue = self._small if of_bytes <= PIECE_BYTES else self._large
            queue.append((size_bytes, waiting))
            self._go_on()
            await waiting
        else:
            self.count(size_bytes)

    def settle(self, measured_bytes: float, *, sees_all: bool) -> None:
        """So much was seen on the wire since the last time; ``sees_all``: nothing else can have been there.

        Then it is what counts in ``total_bytes``, in place of what was charged; otherwise it counts as far as it is more. The rate
        is charged with what is more, and never paid back: what came before it was read is read at the rate all the same, or
        whoever waits with more would send it all at once. What was charged and not seen counts for a while as charged for what is
        seen next.
        """
        owed = measured_bytes - self._charged_bytes
        self._charged_bytes = 0.0
        ahead = self._ahead_bytes - owed
        unpaid = max(0.0, -ahead)
        self._ahead_bytes = min(max(0.0, ahead), self._bucket.bytes_per_s * MAX_AHEAD_S)
        self.total_bytes += owed if sees_all else unpaid
        self._bucket.charge(unpaid, _now())
        self._go_on()

    def _go_on(self) -> None:
        """Let go whoever may, and come back for the others."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (queue := self._next()) is not None:
            size_bytes, waiting = queue[0]
            wait_s = self._bucket.wait_s(_now())
            if queue is self._small:
                wait_s = min(wait_s, self._small_bucket.wait_s(_now()))
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._go_on)
                return
            queue.popleft()
            self._small_turns = self._small_turns + 1 if queue is self._small else 0
            if queue is self._small:
                self._small_bucket.charge(size_bytes * WIRE_FACTOR, _now())
            self.count(size_bytes)
            waiting.set_result(None)

    def _next(self) -> _Queue | None:
        """Whose first is next; None if nobody waits."""
        for queue in (self._small, self._large):
            while queue and queue[0][1].done():  # who was cancelled waits no longer
                queue.popleft()
        may_large = self._large and self._bucket.wait_s(_now()) == 0
        large_first = may_large and self._small_turns >= SMALL_TURNS
        queue = self._large if large_first or not self._small else self._small
        return queue or None


class LinkLimiter:
    """Both directions."""

    def __init__(self) -> None:
        self.up = RateLimiter()
        self.down = RateLimiter()


class LimitedReader:
    """Reads a byte stream no faster than ``line`` allows. A cancelled read loses nothing if it is made again.

    What waits for ``grants``, if there are any, is granted at that rate, and read as it comes.
    """

    def __init__(
        self, reader: asyncio.StreamReader, line: RateLimiter, grants: "ReceiveWindow | None" = None
    ) -> None:
        self._reader = reader
        self._line = line
        self._grants = grants
        self._kept = bytearray()
        self._paid = 0

    @property
    def kept_bytes(self) -> int:
        """So many ``readexactly`` gives at once: they came together with what was read before."""
        return len(self._kept)

    async def readexactly(self, size_bytes: int, deadline: asyncio.Timeout | None = None) -> bytes:
        """As of ``StreamReader``. ``deadline``, for whoever sends, stands still while we wait for our own turn."""
        while (missing := size_bytes - len(self._kept)) > 0:
            if self._grants is not None and self._grants.is_waited_for:
                await self._read_granted(self._grants, deadline)
            elif self._line.is_limited and size_bytes > TINY_BYTES:
                wanted = min(PIECE_BYTES, missing)
                if self._paid < wanted:
                    left_s = _pause(deadline)
                    await self._line.turn(wanted - self._paid, of_bytes=size_bytes)
                    self._paid = wanted
                    _go_on(deadline, left_s)
                self._take(await self._reader.read(wanted))
            elif self._line.is_limited or missing > AHEAD_BYTES:
                self._take(await self._reader.readexactly(missing))
            else:
                self._take(await self._reader.read(AHEAD_BYTES))
        if len(self._kept) == size_bytes:
            data, self._kept = bytes(self._kept), bytearray()
        else:
            data = bytes(memoryview(self._kept)[:size_bytes])
            del self._kept[:size_bytes]
        return data

    async def _read_granted(self, grants: "ReceiveWindow", deadline: asyncio.Timeout | None) -> None:
        """Grant what is due, and read what there is."""
        left_s = _pause(deadline)
        self._paid += await grants.go_on()
        _go_on(deadline, left_s)
        data = await self._reader.read(grants.most_bytes)
        self._take(data)
        grants.take(len(data))

    def _take(self, data: bytes) -> None:
        """Keep what was read, and count as much of it as had no turn of its own."""
        if not data:
            raise asyncio.IncompleteReadError(bytes(self._kept), None)
        paid = min(self._paid, len(data))
        self._paid -= paid
        if len(data) > paid:
            self._line.count(len(data) - paid)
        self._kept += data


def _pause(deadline: asyncio.Timeout | None) -> float:
    """Hold a deadline. How long it had to go."""
    until = None if deadline is None else deadline.when()
    if deadline is None or until is None:
        return math.inf
    deadline.reschedule(None)
    return until - _now()


def _go_on(deadline: asyncio.Timeout | None, left_s: float) -> None:
    """Have a deadline that was held end after ``left_s``."""
    if deadline is not None and not math.isinf(left_s):
        deadline.reschedule(_now() + left_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
