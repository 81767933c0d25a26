"""Congestion control: how much of its large payloads a stream may have under way before the other side confirms that it has come.

TCP sends until its path drops packets. The buffer of a home router holds seconds of an uplink by then, and every heartbeat of this machine
waits behind them until its peers take it for dead. So the side that opened a stream with flow control keeps a window of bytes under way
that fills the path and adds a queue of about ``QUEUE_S``. The other side confirms what has come, every ``CONFIRMED_BYTES``.
"""

from collections import deque

from swarmnet_protocols.errors import ProtocolViolation

CONFIRMED_BYTES = 64 << 10
"""Of a payload over this size, the receiver confirms each part of this size, and the rest."""
MIN_WINDOW_BYTES = 256 << 10
"""The window of a new stream, and the least one: 0.1 s of an uplink of 20 Mbit/s, and as much as a new stream of yamux takes."""
MAX_WINDOW_BYTES = 16 << 20
"""As much as a stream of yamux takes."""
QUEUE_S = 0.2
"""The delay that a stream may add to its path: a tenth of the silence after which a peer is taken for dead."""


def next_window_bytes(window_bytes: float, acked_bytes: int, rtt_s: float, min_rtt_s: float) -> float:
    """The window after ``acked_bytes`` that came home after ``rtt_s``: equation 2 of FAST TCP (Wei et al. 2006), with ``QUEUE_S`` for alpha.

    Its fixed point has a queue of ``QUEUE_S`` on top of the shortest round trip, ``min_rtt_s``. It at most doubles in a round trip.
    """
    factor = min(2.0, (min_rtt_s + QUEUE_S) / rtt_s) if rtt_s > 0 else 2.0
    window_bytes += (factor - 1.0) * min(acked_bytes, window_bytes)
    return min(max(window_bytes, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES)


class CongestionWindow:
    """The sender's account of the bytes under way on one stream. Times are in seconds on any one clock."""

    def __init__(self) -> None:
        self.window_bytes = float(MIN_WINDOW_BYTES)
        self.in_flight_bytes = 0
        self._pieces: deque[tuple[int, float]] = deque()
        """Size and time of sending of each piece under way."""
        self._min_rtt_s = float("inf")
        self._was_full = False
        """The window has held the sender up since the last confirmation: only then does it grow."""

    def has_room(self) -> bool:
        """Whether another piece may be sent."""
        has_room = self.in_flight_bytes < self.window_bytes
        self._was_full |= not has_room
        return has_room

    def on_sent(self, size_bytes: int, now: float) -> None:
        """Count a piece that is sent now."""
        self.in_flight_bytes += size_bytes
        self._pieces.append((size_bytes, now))

    def on_confirmed(self, size_bytes: int, now: float) -> None:
        """The other side has received this many bytes more. Raises ``ProtocolViolation`` if fewer, or none, were under way."""
        if not 0 < size_bytes <= self.in_flight_bytes:
            raise ProtocolViolation(f"{size_bytes} bytes were confirmed while {self.in_flight_bytes} were sent")
        self.in_flight_bytes -= size_bytes
        left_bytes, sent_at = size_bytes, now
        while left_bytes:
            piece_bytes, sent_at = self._pieces.popleft()
            if piece_bytes > left_bytes:
                self._pieces.appendleft((piece_bytes - left_bytes, sent_at))
            left_bytes -= min(left_bytes, piece_bytes)
        rtt_s = now - sent_at
        self._min_rtt_s = min(self._min_rtt_s, rtt_s)
        window_bytes = next_window_bytes(self.window_bytes, size_bytes, rtt_s, self._min_rtt_s)
        if self._was_full or window_bytes < self.window_bytes:
            self.window_bytes = window_bytes
        self._was_full = False
