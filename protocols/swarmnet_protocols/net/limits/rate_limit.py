"""Rate limits: the token bucket of all limits, and the limiter of bytes on the network link."""

import asyncio
import math
from collections import deque
from dataclasses import dataclass

from swarmnet_protocols.machine.aio import loop_time

PIECE_BYTES = 16 << 10
"""Larger messages are sent and read in pieces of this many bytes, with small messages between the
pieces."""
TINY_BYTES = 2048
"""Messages of at most this many bytes never wait. Late heartbeats, pings and handshakes would look
like a failure."""
SMALL_SHARE = 0.5
"""Share of the rate that small messages keep while unrequested large messages have overdrawn the
bucket."""
SMALL_PER_LARGE = 8
"""Most small messages in a row while a piece of a large message waits."""
BURST_S = 0.1
"""Burst of a link, in seconds of its rate."""
WIRE_FACTOR = 1.04
"""Bytes on the wire per byte of a message, with the headers of Noise, TCP and IPv4.

The kernel counted the bytes of a p2pd with packets of 1,500 bytes. Messages of 4 KiB, 16 KiB and 1
MiB take 1.059, 1.044 and 1.038 times their size; :func:`wire_bytes` counts 1.060, 1.045 and 1.040.
It does not count retransmissions, nor the acknowledgements of what the other side sends."""
MESSAGE_BYTES = 80
"""Further bytes on the wire per message: mostly the headers of its last packet."""
MIN_WAIT_S = 1e-6
"""Shorter waits are rounding errors of the refill."""


@dataclass(frozen=True)
class RateLimit:
    """``per_s`` on average, and at most ``burst`` at once after a pause."""

    per_s: float
    burst: float


UNLIMITED = RateLimit(math.inf, math.inf)


class TokenBucket:
    """A token bucket that refills at ``limit.per_s`` up to ``limit.burst`` and may be overdrawn.

    Time is an argument.
    """

    def __init__(self, limit: RateLimit = UNLIMITED, now: float = 0.0) -> None:
        """The bucket starts full."""
        self.limit = limit
        self._level = limit.burst
        self._at = now

    def set_limit(self, limit: RateLimit, now: float) -> None:
        """Change the limit. A change from or to unlimited empties the bucket, because an unlimited
        link has already used its burst."""
        self._refill(now)
        if math.isinf(self.limit.per_s) or math.isinf(limit.per_s):
            self._level = 0.0
        self.limit = limit

    def level(self, now: float) -> float:
        """Return the tokens in the bucket; negative if it is overdrawn."""
        self._refill(now)
        return self._level

    def spend(self, amount: float, now: float) -> None:
        """Spend ``amount``, even if the bucket has less."""
        self._refill(now)
        if not math.isinf(self.limit.per_s):
            self._level -= amount

    def wait_s(self, now: float, amount: float = 0.0) -> float:
        """Return seconds until the bucket has ``amount``."""
        self._refill(now)
        if math.isinf(self.limit.per_s):
            return 0.0
        wait_s = (amount - self._level) / self.limit.per_s
        return wait_s if wait_s > MIN_WAIT_S else 0.0

    def _refill(self, now: float) -> None:
        if not math.isinf(self.limit.per_s):
            self._level = min(self._level + (now - self._at) * self.limit.per_s, self.limit.burst)
        self._at = now


_Queue = deque[tuple[int, asyncio.Future[None]]]
"""Waiting sizes, each with its future."""


def wire_bytes(size_bytes: int) -> float:
    """Return the estimated bytes on the wire of a message of ``size_bytes``, or a piece of one."""
    return size_bytes * WIRE_FACTOR + MESSAGE_BYTES


class RateLimiter:
    """Limits the bytes in one direction of the link. Unlimited until ``set_rate``.

    There are three classes of messages:

    1. Tiny messages (heartbeats, pings) never wait.
    2. Small messages (decode steps) go before large ones, as long as they use at most
       ``SMALL_SHARE`` of an overdrawn bucket.
    3. Pieces of large messages (prompts) go when the bucket is not overdrawn. At most
       ``SMALL_PER_LARGE`` small messages go before the next piece.
    """

    def __init__(self) -> None:
        self.total_bytes = 0.0
        """Estimated bytes on the wire since the start."""
        self.open_windows = 0
        """Receive windows with a payload under way, which share the rate."""
        self._bucket = TokenBucket()
        self._small_bucket = TokenBucket()
        self._small: _Queue = deque()
        self._large: _Queue = deque()
        self._small_in_a_row = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def bytes_per_s(self) -> float:
        """The limit; infinite without one."""
        return self._bucket.limit.per_s

    @property
    def is_limited(self) -> bool:
        return not math.isinf(self.bytes_per_s)

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Change the limit; None: no limit. Called on the loop that sends and receives."""
        rate = math.inf if bytes_per_s is None else bytes_per_s
        for bucket, share in (self._bucket, 1.0), (self._small_bucket, SMALL_SHARE):
            bucket.set_limit(RateLimit(rate * share, rate * share * BURST_S), loop_time())
        self._wake()

    def count(self, size_bytes: int) -> None:
        """Charge bytes that do not wait."""
        charged_bytes = wire_bytes(size_bytes)
        self.total_bytes += charged_bytes
        self._bucket.spend(charged_bytes, loop_time())

    async def acquire(self, size_bytes: int, *, message_bytes: int) -> None:
        """Wait until ``size_bytes`` of a message of ``message_bytes`` may go, and charge them."""
        if self.is_limited and message_bytes > TINY_BYTES:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue = self._small if message_bytes <= PIECE_BYTES else self._large
            queue.append((size_bytes, waiting))
            self._wake()
            await waiting
        else:
            self.count(size_bytes)

    def _wake(self) -> None:
        """Release messages as far as the buckets allow, and set a timer for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (queue := self._next()) is not None:
            size_bytes, waiting = queue[0]
            wait_s = self._bucket.wait_s(loop_time())
            if queue is self._small:
                wait_s = min(wait_s, self._small_bucket.wait_s(loop_time()))
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake)
                return
            queue.popleft()
            self._small_in_a_row = self._small_in_a_row + 1 if queue is self._small else 0
            if queue is self._small:
                self._small_bucket.spend(wire_bytes(size_bytes), loop_time())
            self.count(size_bytes)
            waiting.set_result(None)

    def _next(self) -> _Queue | None:
        """Return the queue whose first message goes next; None if both are empty."""
        for queue in (self._small, self._large):
            while queue and queue[0][1].done():  # cancelled
                queue.popleft()
        large_may_go = self._large and self._bucket.wait_s(loop_time()) == 0
        large_first = large_may_go and self._small_in_a_row >= SMALL_PER_LARGE
        queue = self._large if large_first or not self._small else self._small
        return queue or None


class LinkLimiter:
    """The rate limiters of both directions of this machine's network link."""

    def __init__(self) -> None:
        self.up = RateLimiter()
        self.down = RateLimiter()
        self.relay = RateLimiter()
        """Bytes that this machine forwards for other peers. They also count in ``up`` and
        ``down``."""
        self.may_relay = True

    def set_relay_rate(self, bytes_per_s: float) -> None:
        """Limit the forwarded bytes; 0: forward nothing."""
        self.may_relay = bytes_per_s > 0
        self.relay.set_rate(bytes_per_s or None)
