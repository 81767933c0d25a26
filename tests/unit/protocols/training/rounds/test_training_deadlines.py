"""When the parts of an exchange may go out: evenly, in their turn, and before the deadlines."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.training.codecs import get_codec
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
from swarmnet_protocols.training.rounds.reduction import Contribution, Result, SliceTerms
from swarmnet_protocols.training.rounds.transfers import Part, contribution_messages, parts, result_messages

TIMING = RoundTiming(contribution_s=20.0, majority_s=40.0, deadline_s=60.0)
SECONDS = st.floats(0.0, 100.0)
SIZES = st.integers(0, 1 << 32)


def test_parts_are_sent_evenly_and_a_late_sender_does_not_wait() -> None:
    now = 10.0
    size_bytes = 8 * MIN_PART_BYTES
    coming = parts(bytes(size_bytes), Pace(10.0, 18.0, size_bytes), lambda: now)
    first = next(coming)
    assert isinstance(first, Part)
    assert not first.paced
    assert next(coming) == next(coming) == 11.0, "it is asked again and again"
    now = 11.0
    second = next(coming)
    assert isinstance(second, Part)
    assert (second.offset, second.paced) == (MIN_PART_BYTES, True)
    now = 14.5
    late = [part for part in (next(coming), next(coming), next(coming)) if isinstance(part, Part)]
    assert [part.paced for part in late] == [False] * 3
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


def sent(schedule: SendSchedule, terms: SliceTerms, members: int) -> list[tuple[float, int]]:
    """The time and bytes of each part on one link: those of a contribution and then those of a
    result."""
    now = 0.1
    times = []
    contribution = bytes(terms.contribution_bytes)
    pace = schedule.contribution(1, len(contribution), now)
    messages = [
        contribution_messages(
            0, Contribution.of(1e5, contribution), parts(contribution, pace, lambda: now), lambda: True
        )
    ]
    result = bytes(terms.result_bytes(members))
    pace = schedule.result(1, len(result), pace.end_s + 0.1)
    messages.append(result_messages(0, Result(bytes(32), b"", result), parts(result, pace, lambda: now)))
    for turn in (turn for each in messages for turn in each):
        if isinstance(turn, tuple):
            times.append((now, turn[0].ByteSize() + len(turn[1])))
        else:
            now = turn
    return times


def test_streaming_in_int4_peaks_below_a_hundredth_of_allreduce() -> None:
    members, parameters, step_s = 8, 135_000_000, 10.0
    method = StreamingSettings()
    whole = SliceTerms(0, 0, parameters, get_codec("float32"))
    slice = SliceTerms(0, 0, parameters // method.fragments // members, get_codec("int4"))
    of_both = slice.contribution_bytes + slice.result_bytes(members)
    spread = SendSchedule(
        method.overlap_steps * step_s,
        slice.contribution_bytes / of_both,
        0.0,
        RoundTiming(200.0, 400.0, 600.0),
    )
    window: deque[tuple[float, int]] = deque()
    peak_bytes = 0
    for part in sent(spread, slice, members):
        window.append(part)
        while window[0][0] <= part[0] - step_s:
            window.popleft()
        peak_bytes = max(peak_bytes, sum(size_bytes for _, size_bytes in window))
    # Every link carries equally many bytes: with allreduce, the slices of a whole vector in one
    # inner step.
    allreduce_bytes = (whole.contribution_bytes + whole.result_bytes(members)) / members
    assert peak_bytes <= allreduce_bytes / 100
