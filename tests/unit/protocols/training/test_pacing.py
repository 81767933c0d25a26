"""Steps of workers of unequal speed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training import pacing
from swarmnet_protocols.training.pacing import (
    Speed,
    Spent,
    Wait,
    WorkerPace,
    kept_share,
    overlap_of,
    steps_in_time,
    waited_for,
)
from tests.defences import defence, replacing

MOST = 48
seconds = st.floats(1e-3, 1e3)


@pytest.mark.parametrize(
    ("step_s", "rest_s", "steps"), [(1, 0, 48), (4, 0, 12), (10, 0, 5), (4, 16, 8), (100, 0, 3), (0.5, 0, 48)]
)
def test_all_workers_end_with_the_fastest(step_s: float, rest_s: float, steps: int) -> None:
    assert steps_in_time(Speed(step_s, rest_s), [0.0, 480.0, 48.0], MOST) == steps


@given(seconds, st.lists(seconds, max_size=5), st.integers(1, 200))
def test_a_worker_ends_half_a_step_from_the_fastest(step_s: float, others: list[float], most: int) -> None:
    mine = Speed(step_s)
    steps = steps_in_time(mine, others, most)
    fastest_s = min([mine.round_s(most), *others])
    assert 1 <= steps <= most
    if steps > max(1, round(most * pacing.LEAST_SHARE)):
        assert abs(mine.round_s(steps) - fastest_s) <= step_s * 0.500001


@defence("a false speed takes few steps from others", off=replacing(pacing, "LEAST_SHARE", 0.0))
def test_a_false_speed_leaves_the_others_a_sixteenth() -> None:
    assert steps_in_time(Speed(1.0), [1e-9], MOST) == MOST // 16


def test_a_worker_that_became_slower_ends_with_the_others() -> None:
    pace = WorkerPace(MOST, 0, 1.0)
    assert pace.limit == (3, math.inf)
    pace.rounds_s = [48.0]
    assert pace.limit == (3, math.inf)  # nobody waits for it
    pace.rounds_s = [48.0, 0.0, 20.0]
    assert pace.limit == (3, 26.0)


@pytest.mark.parametrize(
    ("steps", "overlap", "overlapped"),
    [(48, 5, 5), (12, 5, 2), (2, 5, 1), (1, 5, 0), (48, 48, 48), (5, 48, 5), (9, 0, 0)],
)
def test_an_exchange_gets_the_same_share_of_every_round(steps: int, overlap: int, overlapped: int) -> None:
    assert overlap_of(steps, overlap, MOST) == overlapped


def test_a_late_contribution_counts_for_less_the_later_it_is() -> None:
    assert [kept_share(staleness) for staleness in (-1, 0, 3)] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("last", "why"), [(Spent(9, 1, 0), "compute"), (Spent(4, 6, 0), "network"), (Spent(4, 1, 5), "disk")]
)
def test_the_last_worker_is_named_with_the_cause(last: Spent, why: str) -> None:
    peers = [PeerId(name) for name in "abc"]
    spent = dict(zip(peers, [Spent(4, 1, 0), Spent(4, 1, 0), last], strict=True))
    arrived_s = dict(zip(peers, [1.0, 2.0, 7.0], strict=True))
    assert waited_for(arrived_s, spent) == Wait(peers[2], why, 5.0)
    assert waited_for(arrived_s | {peers[2]: 2.5}, spent) is None
