"""When the parts of an exchange may go out: evenly, in their turn, and before the deadlines."""

from collections import deque
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.training.methods.streaming import StreamingSettings
from swarmnet_protocols.training.rounds.deadlines import (
    CONTRIBUTION_FRACTION,
    MAX_PART_BYTES,
    MAX_PARTS,
    MIN_PART_BYTES,
    SENDING_FRACTION,
    Pace,
    RoundTiming,
    SendSchedule,
)
from swarmnet_protocols.training.rounds.reduction import Contribution, Result
from swarmnet_protocols.training.rounds.transfers import contribution_header, parts, result_header
from tests.support.training.lab import terms_of

TIMING = RoundTiming(contribution_s=20.0, majority_s=40.0, deadline_s=60.0)
SECONDS = st.floats(0.0, 100.0)
SIZES = st.integers(0, 1 << 32)


def test_parts_are_sent_evenly_and_a_late_sender_does_not_wait() -> None:
    now = 10.0
    result = Result(bytes(32), b"", bytes(8 * MIN_PART_BYTES))
    pace = Pace(10.0, 18.0, len(result.payload))
    coming = parts(result.payload, partial(result_header, 0, result), pace, lambda: now)

    def sent() -> tuple[int, bool]:
        """The offset of the next part, and whether it was delayed."""
        part = next(coming)
        assert isinstance(part, tuple), "it is not due"
        return part[0].result.offset, part[0].result.paced

    assert sent() == (0, False)
    assert next(coming) == next(coming) == 11.0, "it is asked again and again"
    now = 11.0
    assert sent() == (MIN_PART_BYTES, True)
    now = 14.5
    assert [sent() for _ in range(3)] == [(number * MIN_PART_BYTES, False) for number in (2, 3, 4)]
    assert next(coming) == 15.0


@given(SECONDS, SECONDS, SIZES)
def test_a_pace_begins_and_ends_when_it_says(start_s: float, seconds: float, size_bytes: int) -> None:
    pace = Pace(start_s, start_s + seconds, size_bytes)
    assert pace.due_s(0) == start_s
    assert pace.due_s(size_bytes) <= pace.end_s + 1e-9
    assert pace.due_s(size_bytes // 2) <= start_s + seconds / 2 + 1e-9
    assert 0 < pace.part_bytes <= MAX_PART_BYTES
    if seconds > 1 and MIN_PART_BYTES * MAX_PARTS < size_bytes < MAX_PART_BYTES * MAX_PARTS:
        assert size_bytes / MAX_PARTS <= pace.part_bytes < size_bytes / MAX_PARTS + 1


def test_messages_without_a_deadline_are_sent_at_once_in_large_parts() -> None:
    pace = Pace(5.0, 5.0, 1 << 20)
    assert (pace.part_bytes, pace.due_s(1 << 20)) == (MAX_PART_BYTES, 5.0)
    assert Pace(5.0, 1.0, 1 << 20).due_s(1 << 20) == 5.0


def test_contributions_and_results_have_one_rate_and_their_turn() -> None:
    spread = SendSchedule(10.0, 0.25, 0.0, TIMING)
    contribution = spread.contribution(1, 100, 0.5)
    assert contribution.end_s - contribution.start_s == pytest.approx(0.25 * SENDING_FRACTION * 10.0)
    early = spread.result(1, 300, 1.0)
    assert early.start_s == contribution.end_s, "after the contribution on the same link"
    assert early.end_s - early.start_s == pytest.approx(0.75 * SENDING_FRACTION * 10.0)
    assert spread.result(2, 300, 1.0).start_s == 1.0


def test_however_long_an_exchange_may_take_its_rate_is_one() -> None:
    spread = SendSchedule(1e6, 0.25, 0.0, TIMING)
    contribution = spread.contribution(1, 100, 0.0)
    assert contribution.end_s == CONTRIBUTION_FRACTION * TIMING.contribution_s
    result = spread.result(1, 300, 1.0)
    assert result.end_s == TIMING.replace_reducer_s
    spread = SendSchedule(1e6, 0.5, 0.0, TIMING)
    contribution, result = spread.contribution(1, 100, 0.0), spread.result(1, 100, 1.0)
    assert contribution.end_s - contribution.start_s == result.end_s - result.start_s == 10.0


def test_without_a_spread_parts_are_sent_at_once() -> None:
    spread = SendSchedule(0.0, 0.5, 7.0, TIMING)
    assert spread.contribution(1, 100, 8.0) == Pace(8.0, 8.0, 100)
    assert spread.result(1, 100, 9.0) == Pace(9.0, 9.0, 100)


@given(SECONDS.map(lambda value: 100 * value), st.floats(0.01, 0.99), SECONDS, SECONDS)
def test_no_pace_misses_a_deadline(spread_s: float, contributions: float, now: float, later_s: float) -> None:
    began_s = 3.0
    spread = SendSchedule(spread_s, contributions, began_s, TIMING)
    contribution = spread.contribution(1, 100, began_s + now)
    result = spread.result(1, 100, began_s + now + later_s)
    if contribution.end_s > contribution.start_s:
        assert contribution.end_s <= began_s + CONTRIBUTION_FRACTION * TIMING.contribution_s
    if result.end_s > result.start_s:
        assert result.end_s <= began_s + TIMING.replace_reducer_s
    assert result.start_s <= max(
        began_s + now + later_s, began_s + CONTRIBUTION_FRACTION * TIMING.contribution_s
    )


def sent(schedule: SendSchedule, sizes: tuple[int, int]) -> list[tuple[float, int]]:
    """The time and bytes of each part on one link: those of a contribution and then those of a
    result."""
    now = 0.1
    times = []
    contribution = Contribution.of(1e5, bytes(sizes[0]))
    pace = schedule.contribution(1, sizes[0], now)
    header = partial(contribution_header, 0, contribution)
    messages = [parts(contribution.data, header, pace, lambda: now)]
    result = Result(bytes(32), b"", bytes(sizes[1]))
    pace = schedule.result(1, sizes[1], pace.end_s + 0.1)
    messages.append(parts(result.payload, partial(result_header, 0, result), pace, lambda: now))
    for turn in (turn for each in messages for turn in each):
        if isinstance(turn, tuple):
            times.append((now, turn[0].ByteSize() + len(turn[1])))
        else:
            now = turn
    return times


def test_streaming_in_int4_peaks_below_a_hundredth_of_allreduce() -> None:
    members, parameters, step_s = 8, 135_000_000, 10.0
    method = StreamingSettings()

    def sizes(codec: str, count: int) -> tuple[int, int]:
        """The bytes of a contribution and of a result."""
        terms = terms_of(count, codec, members=members)
        return terms.codec.max_bytes(count), terms.result_bytes(count, members)

    slice_sizes = sizes("int4", parameters // method.fragments // members)
    spread = SendSchedule(
        method.overlap_steps * step_s,
        slice_sizes[0] / sum(slice_sizes),
        0.0,
        RoundTiming(200.0, 400.0, 600.0),
    )
    window: deque[tuple[float, int]] = deque()
    peak_bytes = 0
    for part in sent(spread, slice_sizes):
        window.append(part)
        while window[0][0] <= part[0] - step_s:
            window.popleft()
        peak_bytes = max(peak_bytes, sum(size_bytes for _, size_bytes in window))
    # Every link carries equally many bytes: with allreduce, the slices of a whole vector in one
    # inner step.
    allreduce_bytes = sum(sizes("float32", parameters)) / members
    assert peak_bytes <= allreduce_bytes / 100
