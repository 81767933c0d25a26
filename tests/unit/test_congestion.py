"""The congestion window: it fills a path whatever its rate and delay, and the queue that it adds to the path is bounded."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net.limits.congestion import (
    CONFIRMED_BYTES,
    FIRST_WINDOW_BYTES,
    MAX_WINDOW_BYTES,
    MIN_WINDOW_BYTES,
    QUEUE_S,
    CongestionWindow,
    next_window_bytes,
)


def send_for(seconds: float, *, bytes_per_s: float, round_trip_s: float, streams: int) -> tuple[float, float]:
    """Streams that always have more to send share an uplink, and begin a second apart.

    Returns the longest delay of the uplink's queue and the part of its rate that was used, both after ten seconds.
    """
    windows = [CongestionWindow() for _ in range(streams)]
    events = [(float(number), number, 0) for number in range(streams)]
    free_at, longest_s, sent_bytes = 0.0, 0.0, 0
    while events:
        now, number, confirmed_bytes = heapq.heappop(events)
        if now > seconds:
            break
        window = windows[number]
        if confirmed_bytes:
            window.on_confirmed(confirmed_bytes, now)
        while window.has_room():
            window.on_sent(CONFIRMED_BYTES, now)
            free_at = max(free_at, now) + CONFIRMED_BYTES / bytes_per_s
            heapq.heappush(events, (free_at + round_trip_s, number, CONFIRMED_BYTES))
            if now > 10.0:
                longest_s = max(longest_s, free_at - now)
                sent_bytes += CONFIRMED_BYTES
    return longest_s, sent_bytes / (seconds - 10.0) / bytes_per_s


@pytest.mark.parametrize("round_trip_s", [0.01, 0.1, 0.6])
@pytest.mark.parametrize("mbit", [2, 5, 20, 100])
def test_one_stream_fills_an_uplink_and_adds_little_delay(mbit: float, round_trip_s: float) -> None:
    rate = mbit * 125_000
    queue_s, used = send_for(30.0, bytes_per_s=rate, round_trip_s=round_trip_s, streams=1)
    assert used > 0.97
    assert queue_s < 1.5 * QUEUE_S + 2 * CONFIRMED_BYTES / rate


@pytest.mark.parametrize(("mbit", "streams"), [(20, 2), (20, 8), (20, 16), (5, 4)])
def test_streams_that_share_an_uplink_leave_room_for_heartbeats(mbit: int, streams: int) -> None:
    queue_s, used = send_for(60.0, bytes_per_s=mbit * 125_000, round_trip_s=0.1, streams=streams)
    assert used > 0.97
    assert queue_s < 1.5, "peers are taken for dead after 2 s of silence"


@given(
    st.floats(MIN_WINDOW_BYTES, MAX_WINDOW_BYTES),
    st.integers(1, MAX_WINDOW_BYTES),
    st.floats(0.0, 60.0),
    st.floats(0.0, 1.0),
)
def test_a_window_stays_in_its_bounds_and_falls_only_when_the_queue_is_long(
    window_bytes: float, acked_bytes: int, rtt_s: float, nearness: float
) -> None:
    min_rtt_s = rtt_s * nearness
    after_bytes = next_window_bytes(window_bytes, acked_bytes, rtt_s, min_rtt_s)
    assert MIN_WINDOW_BYTES <= after_bytes <= min(MAX_WINDOW_BYTES, window_bytes + acked_bytes)
    if rtt_s - min_rtt_s < QUEUE_S - 1e-9:
        assert after_bytes >= window_bytes
    elif rtt_s - min_rtt_s > QUEUE_S + 1e-9:
        assert after_bytes <= window_bytes


def test_a_window_that_holds_nothing_up_does_not_grow() -> None:
    window = CongestionWindow()
    for number in range(100):
        assert window.has_room()
        window.on_sent(CONFIRMED_BYTES, number)
        window.on_confirmed(CONFIRMED_BYTES, number + 0.1)
    assert window.window_bytes == FIRST_WINDOW_BYTES


def test_pieces_are_confirmed_in_any_division() -> None:
    window = CongestionWindow()
    window.on_sent(100, 0.0)
    window.on_sent(200, 1.0)
    window.on_confirmed(150, 2.0)
    window.on_confirmed(1, 2.0)
    window.on_confirmed(149, 2.0)
    assert window.in_flight_bytes == 0


@pytest.mark.parametrize("size_bytes", [0, 101])
def test_a_confirmation_of_what_was_not_sent_is_a_violation(size_bytes: int) -> None:
    window = CongestionWindow()
    window.on_sent(100, 0.0)
    with pytest.raises(ProtocolViolation, match=f"{size_bytes} bytes were confirmed while 100"):
        window.on_confirmed(size_bytes, 1.0)
