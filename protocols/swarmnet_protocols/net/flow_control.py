"""Large payloads that go no further than whoever reads them has granted: what its line cannot take yet is not sent at all.

A sender that is held back by slow reading alone has filled p2pd and its sockets before it notices, the better part of a MiB for each
stream. So a peer that keeps a rate tells whoever opens a stream to it to wait: of a large payload, so much is sent as was granted.
"""

import asyncio
import math
from collections.abc import Callable

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.net.rate_limit import PIECE_BYTES, RateLimiter

WAIT = 0xFFFF_FFFD
"""In place of the size of a header, once: payloads over the second size, of messages that begin from here on, are to wait for grants."""
GRANT = 0xFFFF_FFFE
"""In place of the size of a header: so many bytes more of the payload may be sent as the second size says."""
WAITS = 0x8000_0000
"""Added to the size of a header: the payload waits for grants."""
MIN_BYTES = PIECE_BYTES
"""No smaller payload waits, and no smaller grant is made but that of the rest."""
MAX_UNASKED_BYTES = 1 << 20
"""Larger ones always do."""
LARGE_S = 0.02
"""What a line takes in longer waits. Steps of a few tokens are smaller, and not worth a trip there and back."""
GRANT_S = 0.03
"""What a line takes in so long is granted at once, so that fast lines do not grant too often."""
AHEAD_S = 0.25
"""What a line takes in so long may be on its way beyond that, over all streams: a trip there and back."""


def due_bytes(left_bytes: int, on_its_way_bytes: int, bytes_per_s: float, sharing: int) -> int:
    """What to grant next of a payload of which so much is not granted, 0 for nothing yet, on a line that so many payloads share."""
    if on_its_way_bytes > bytes_per_s * AHEAD_S / sharing:
        return 0
    return int(min(left_bytes, max(MIN_BYTES, bytes_per_s * GRANT_S)))


class SendWindow:
    """The opener's half: what it may send."""

    def __init__(self) -> None:
        self.waits_over = math.inf
        """Payloads of more bytes wait for grants."""
        self._ungranted_bytes = 0
        self._granted_bytes = 0
        self._is_over = False
        self._changed = asyncio.Event()

    def hear(self, word: int, size_bytes: int) -> None:
        """What the other side says in place of a message: ``WAIT``, or ``GRANT``.

        Raises ``ProtocolViolation`` when it says the first twice, grants what nobody waits for, or too little to be worth it.
        """
        least_bytes = min(self._ungranted_bytes, MIN_BYTES)
        if word == WAIT and math.isinf(self.waits_over):
            self.waits_over = max(MIN_BYTES, size_bytes)
        elif word == GRANT and 0 < least_bytes <= size_bytes <= self._ungranted_bytes:
            self._ungranted_bytes -= size_bytes
            self._granted_bytes += size_bytes
            self._changed.set()
        else:
            what = "a grant" if word == GRANT else "another limit"
            raise ProtocolViolation(
                f"{what} of {size_bytes} bytes where {self._ungranted_bytes} wait to be granted"
            )

    def begin(self, payload_bytes: int) -> None:
        """A payload of which nothing is granted yet is to be announced. The one before it was sent to its end."""
        self._ungranted_bytes = payload_bytes

    async def spend(self, most_bytes: int) -> int:
        """So much may be sent now, ``most_bytes`` at most. Waits for a grant; raises ``StreamEnded`` when there will be none."""
        while not self._granted_bytes:
            if self._is_over:
                raise StreamEnded("the stream was closed")
            self._changed.clear()
            await self._changed.wait()
        size_bytes = min(most_bytes, self._granted_bytes)
        self._granted_bytes -= size_bytes
        return size_bytes

    def end(self) -> None:
        """The stream is closed."""
        self._is_over = True
        self._changed.set()


class ReceiveWindow:
    """The other half: what it grants at the rate of ``line``. ``tell`` sends two sizes in place of a message."""

    def __init__(self, line: RateLimiter, tell: Callable[[int, int], None]) -> None:
        self._line = line
        self._tell = tell
        self._size_bytes = 0
        self._granted_bytes = 0
        self._came_bytes = 0
        self._waits_over: int | None = None
        self._has_always_waited = line.is_limited
        self._have_wait()

    @property
    def is_waited_for(self) -> bool:
        """Whether a payload that waits for grants is coming, and more of it has to come."""
        return self._came_bytes < self._size_bytes

    @property
    def most_bytes(self) -> int:
        """What may come now at most, and one byte more for those who send more than that."""
        more = 1 if self._granted_bytes < self._size_bytes else 0
        return self._granted_bytes - self._came_bytes + more

    def expect(self, header_bytes: int, payload_bytes: int, *, waits: bool, here_bytes: int) -> None:
        """A message begins, whose header needs no grant, and of which so much is here already.

        Raises ``ProtocolViolation`` for a payload that should wait and does not.
        """
        if waits:
            self.end()
            self._size_bytes, self._granted_bytes = header_bytes + payload_bytes, header_bytes
            self._came_bytes = 0
            self._line.sharing += self.is_waited_for
            self.take(min(here_bytes, self._size_bytes))
        elif self._waits_over is None:
            self._have_wait()
        elif self._has_always_waited and payload_bytes > self._waits_over:
            raise ProtocolViolation(f"{payload_bytes} bytes came that should have waited to be granted")

    async def go_on(self) -> int:
        """Grant what is due, as the line allows. How much that was."""
        size_bytes = due_bytes(
            self._size_bytes - self._granted_bytes,
            self._granted_bytes - self._came_bytes,
            self._line.bytes_per_s,
            self._line.sharing,
        )
        if size_bytes:
            await self._line.turn(size_bytes, of_bytes=self._size_bytes)
            self._granted_bytes += size_bytes
            self._tell(GRANT, size_bytes)
        return size_bytes

    def take(self, size_bytes: int) -> None:
        """So much came of what is waited for. Raises ``ProtocolViolation`` when that is more than was granted."""
        self._came_bytes += size_bytes
        if self._came_bytes > self._granted_bytes:
            raise ProtocolViolation("more of a payload came than was granted")
        if size_bytes and not self.is_waited_for:
            self._line.sharing -= 1

    def end(self) -> None:
        """Nothing more comes. Idempotent."""
        if self.is_waited_for:
            self._came_bytes = self._size_bytes
            self._line.sharing -= 1

    def _have_wait(self) -> None:
        if self._line.is_limited:
            in_a_moment = self._line.bytes_per_s * LARGE_S
            self._waits_over = int(min(max(MIN_BYTES, in_a_moment), MAX_UNASKED_BYTES))
            self._tell(WAIT, self._waits_over)
