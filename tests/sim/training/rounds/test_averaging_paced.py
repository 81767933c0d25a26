"""An exchange spread over time: no burst on any link, and the same bits in time, whichever member
fails."""

from collections import deque
from pathlib import Path

import pytest

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.training.bandwidth import MIN_BYTES, ArrivalRates
from swarmnet_protocols.training.rounds.deadlines import SENDING_FRACTION, RoundTiming
from swarmnet_protocols.wire import training_pb2 as pb
from tests.support.network.memory_network import Delivery, LinkProfile
from tests.support.network.virtual_time import run
from tests.support.training.lab import (
    Outcomes,
    TrainingLab,
    Work,
    check_agreement,
    nth,
    on_delivery,
    simulate,
)
from tests.support.training.workers import COMPUTE_S, WorkerLab, train, write_job

STEP_S = 0.8
OVERLAP_STEPS = 5
SPREAD_S = OVERLAP_STEPS * STEP_S
COUNT = 1 << 20
ROUNDS = 3
GRAIN = 1.08
"""Tolerance, because parts are sent whole, and time is reserved for the arrival of the last
part."""
FAST = LinkProfile(delay_s=0.02, bytes_per_s=1e9)


class Meter:
    """The most bytes that a worker sent in any window of ``seconds``, and the bytes that each
    worker sent in all."""

    def __init__(self, lab: TrainingLab, seconds: float) -> None:
        self.peak_bytes = 0
        self.sent = dict.fromkeys(lab.peers, 0)
        self._seconds = seconds
        self._windows: dict[PeerId, deque[tuple[float, int]]] = {peer: deque() for peer in lab.peers}
        lab.network.observers.append(self._count)

    def _count(self, delivery: Delivery) -> None:
        if delivery.protocol.id != EXCHANGE.id:
            return
        size_bytes = len(delivery.message.header) + len(delivery.message.payload)
        self.sent[delivery.source] += size_bytes
        window = self._windows[delivery.source]
        window.append((delivery.time_s, size_bytes))
        while window[0][0] <= delivery.time_s - self._seconds:
            window.popleft()
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in window))


def exchanged(
    lab: TrainingLab, work: Work, spread_s: float = SPREAD_S, late_s: dict[PeerId, float] | None = None
) -> Outcomes:
    outcomes: Outcomes = simulate(lambda lab: lab.average(work, spread_s=spread_s, late_s=late_s or {}), lab)
    check_agreement(work, outcomes)
    assert all(outcome.committed for outcome in outcomes.values())
    return outcomes


def peak_share(spread_s: float, late_s: float = 0.0) -> tuple[float, Outcomes]:
    """The largest share of a worker's bytes in an exchange that it sends in the time of one inner
    step."""
    lab = TrainingLab(4, link=FAST)
    meter = Meter(lab, STEP_S)
    outcomes = exchanged(lab, Work.random(lab, COUNT, "int4"), spread_s, {lab.peers[1]: late_s})
    return meter.peak_bytes / max(meter.sent.values()), outcomes


def test_no_inner_step_sees_more_than_its_share_of_an_exchange() -> None:
    burst, _ = peak_share(0.0)
    spread, outcomes = peak_share(SPREAD_S)
    assert burst > 0.95
    assert spread <= GRAIN / OVERLAP_STEPS
    assert max(outcome.wait_s for outcome in outcomes.values()) <= 1.05 * SPREAD_S


def test_a_member_that_begins_late_sends_results_after_contributions() -> None:
    spread, _ = peak_share(SPREAD_S, late_s=STEP_S)
    assert spread <= GRAIN / OVERLAP_STEPS


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize(("kind", "number"), [("contribution", 100), ("result", 100)])
def test_a_death_in_a_paced_exchange_costs_only_its_own_contribution(
    kind: str, number: int, victim: str
) -> None:
    lab = TrainingLab(5)
    on_delivery(lab, nth(kind, number), lambda delivery: lab.crash(getattr(delivery, victim)))
    outcomes = exchanged(lab, Work.random(lab, COUNT // 4))
    assert len(lab.crashed) == 1
    for outcome in outcomes.values():
        assert all(set(outcomes) <= set(names) for names in outcome.contributors)


def test_a_connection_reset_during_a_paced_exchange_is_recovered() -> None:
    lab = TrainingLab(4)

    def reset(delivery: Delivery) -> None:
        lab.network.reset(delivery.source, delivery.target, delivery.protocol)

    on_delivery(lab, nth("contribution", 100), reset)
    on_delivery(lab, nth("result", 100), reset)
    for outcome in exchanged(lab, Work.random(lab, COUNT // 4)).values():
        assert all(len(names) == 4 for names in outcome.contributors)


def test_a_link_slower_than_the_pace_is_not_slowed_further() -> None:
    def took_s(spread_s: float) -> float:
        lab = TrainingLab(3, link=FAST)
        slow, *others = lab.peers
        for other in others:
            lab.network.set_link(slow, other, LinkProfile(delay_s=0.02, bytes_per_s=1e6))
        outcomes = exchanged(lab, Work.random(lab, COUNT), spread_s)
        return max(outcome.wait_s for outcome in outcomes.values())

    at_once_s = took_s(0.0)
    assert took_s(0.8 * at_once_s) <= 1.02 * at_once_s


def test_a_paced_sender_does_not_count_as_slow() -> None:
    lab = TrainingLab(3, link=FAST)
    outcomes = exchanged(lab, Work.random(lab, COUNT))
    arrivals = [arrival for outcome in outcomes.values() for arrival in outcome.arrivals]
    assert len(arrivals) == 3 * 2 * 2
    assert max(arrival.size_bytes for arrival in arrivals) < MIN_BYTES
    rates = ArrivalRates()
    rates.add(arrivals)
    assert rates.bytes_per_s() == {}


def test_a_slow_transfer_is_not_sent_twice() -> None:
    sent = []
    for spread_s in (0.0, 2 * SPREAD_S):
        lab = TrainingLab(4, link=FAST, timing=RoundTiming(12.0, 24.0, 36.0))
        outcomes = exchanged(lab, Work.random(lab, COUNT // 4), spread_s)
        sent.append(sum(outcome.bytes_sent for outcome in outcomes.values()))
    assert sent[1] <= 1.05 * sent[0]


def test_deadlines_hold_for_any_spread() -> None:
    lab = TrainingLab(4)
    for outcome in exchanged(lab, Work.random(lab, COUNT // 4), spread_s=1e6).values():
        assert all(len(names) == 4 for names in outcome.contributors)
        assert outcome.wait_s <= lab.timing.replace_reducer_s + 0.5


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("streaming", "sync_every = 20\nfragments = 2\noverlap_steps = 5"),
        ("eager", "sync_every = 10"),
        ("co2", "sync_every = 10"),
        ("diloco", "sync_every = 10"),
    ],
)
def test_workers_spread_an_exchange_over_the_steps_that_it_overlaps(
    method: str, settings: str, tmp_path: Path
) -> None:
    lab = WorkerLab(
        tmp_path, write_job(tmp_path, method, settings, 'min_workers = 2\ncodec = "float32"', rounds=ROUNDS)
    )
    sent: dict[tuple[PeerId, bytes], list[tuple[float, int]]] = {}

    def observe(delivery: Delivery) -> None:
        if delivery.protocol.id == EXCHANGE.id:
            part = pb.ExchangeRequest.FromString(delivery.message.header).contribution
            if part.size_bytes:
                left = part.size_bytes - part.offset
                sent.setdefault((delivery.source, part.hash), []).append((delivery.time_s, left))

    lab.network.observers.append(observe)
    run(train(lab, "anna", "boris"))

    # In virtual time a call of the computing thread takes equally long for any number of steps; the
    # first round has twice as many.
    overlap_s = 0.0 if method == "diloco" else COMPUTE_S
    later = list(sent.values())[len(sent) // ROUNDS :]
    assert later
    for parts in later:
        (began_s, whole), (ended_s, last) = parts[0], parts[-1]
        evenly_s = 0.5 * SENDING_FRACTION * overlap_s * (whole - last) / whole
        assert ended_s - began_s == pytest.approx(evenly_s, abs=0.02)
