"""The times of a session's steps on a host."""

import itertools
from collections.abc import Iterator

import pytest

from swarmnet_node.hosting import step_times
from swarmnet_node.hosting.step_times import MAX_STEPS, HopStepTimes
from swarmnet_protocols.session.hop_times import HOP_MOMENTS, HopTimes, Moment
from tests.defences import defence, replacing


@pytest.fixture
def times() -> HopStepTimes:
    return fresh()


def fresh(*, are_wanted: bool = True) -> HopStepTimes:
    ticks: Iterator[int] = itertools.count(100)
    return HopStepTimes(lambda: float(next(ticks)), are_wanted=are_wanted)


def send(times: HopStepTimes, seq: int) -> None:
    for moment in HOP_MOMENTS[1:]:
        times.mark(seq, moment)


def test_times_count_from_the_opening_of_the_session(times: HopStepTimes) -> None:
    times.received(7)
    send(times, 7)
    assert times.complete.get_nowait() == HopTimes(7, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))


def test_the_times_of_a_step_that_is_sent_again_are_told_once(times: HopStepTimes) -> None:
    times.received(7)
    for moment in (*HOP_MOMENTS[1:], *HOP_MOMENTS[3:]):
        times.mark(7, moment)
    assert times.complete.qsize() == 1


def test_a_step_that_was_computed_unseen_has_no_times(times: HopStepTimes) -> None:
    times.received(7)
    times.mark(7, Moment.TAKEN)
    times.mark(7, Moment.SENT)
    assert times.complete.empty()


def test_no_times_are_taken_unless_they_are_wanted() -> None:
    times = fresh(are_wanted=False)
    times.received(7)
    send(times, 7)
    assert times.complete.empty()


@defence(
    "a host takes the times of a limited number of steps", off=replacing(step_times, "MAX_STEPS", 1 << 40)
)
def test_the_memory_for_times_is_limited() -> None:
    times = fresh()
    for seq in range(2 * MAX_STEPS):
        times.received(seq)
    assert list(times._under_way) == list(range(MAX_STEPS, 2 * MAX_STEPS))
    for _ in range(2):
        for seq in range(MAX_STEPS):
            times.received(seq)
            send(times, seq)
    assert times.complete.qsize() == MAX_STEPS
