"""Microbatches by name, the books of a round, and the choice of chains."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training import bandwidth
from swarmnet_protocols.training.bandwidth import LinkRates
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.codecs.boundary import BOUNDARY_CODECS, codecs_by_size
from swarmnet_protocols.training.pipeline import chains, microbatches, step_streams
from swarmnet_protocols.training.pipeline.chains import MOST_BATCHES, WAYS, StageDraws, part_of
from swarmnet_protocols.training.pipeline.ledger import (
    MAX_ATTEMPTS,
    Accounts,
    MicrobatchLedger,
    StepEnd,
    electors,
    lacking_tokens,
)
from swarmnet_protocols.training.pipeline.microbatches import (
    Microbatch,
    MicrobatchId,
    microbatch_from_wire,
    microbatch_to_wire,
)
from swarmnet_protocols.training.pipeline.stage_decisions import (
    Decision,
    Restore,
    StagesView,
    decide,
    job_round,
    newest_copy,
)
from swarmnet_protocols.training.pipeline.stage_rows import stage_rows
from swarmnet_protocols.wire import pipeline_pb2 as pb
from swarmnet_protocols.wire.report_pb2 import RecentWork, WorkerReport, WorkerStage
from tests.defences import Patch, defence, replacing, yes
from tests.support.network.virtual_time import run

JOB = bytes(range(32))
IDENTITIES = [Identity.from_seed(bytes([number])) for number in range(4)]
ORIGIN, FIRST, SECOND, OTHER = (each.peer_id for each in IDENTITIES)
INT4_BYTES = BOUNDARY_CODECS["int4"].size_bytes(8, 64)


def signed(sent: Microbatch, by: Identity = IDENTITIES[0]) -> Microbatch:
    return replace(sent, signature=by.sign(sent.signed_bytes(JOB)))


SENT = signed(Microbatch(MicrobatchId(7, ORIGIN, 3), 1, (FIRST, SECOND), 30, is_forward_only=True, sent=2))


def received(wire: pb.Microbatch, **changes: Any) -> Microbatch:
    expected: dict[str, Any] = {"job": JOB, "stages": 3, "count": 4, "positions": 32, "way": (ORIGIN, FIRST)}
    return microbatch_from_wire(wire, **expected | changes)


def test_a_microbatch_goes_round_the_ring() -> None:
    assert received(microbatch_to_wire(JOB, SENT)) == SENT
    second = SENT.onward()
    assert (second.sender, second.receiver, second.rest) == (FIRST, SECOND, ())
    home = second.onward()
    assert (home.sender, home.receiver, home.is_home) == (SECOND, ORIGIN, True)
    assert received(microbatch_to_wire(JOB, home), way=(SECOND, ORIGIN)) == home


def test_rows_of_stages_show_who_holds_what_and_who_waits() -> None:
    def worker(stage: int, compute_s: float, **sent: float) -> WorkerReport:
        recent = RecentWork(seconds=10, compute_s=compute_s, tokens=1000, **sent)
        return WorkerReport(recent=recent, stage=WorkerStage(number=stage, start=stage, end=stage + 1))

    first = worker(0, 2.0, forward_bytes=4000.0, backward_bytes=3000.0)
    rows = stage_rows([{ORIGIN: first, OTHER: first}, {FIRST: worker(1, 9.0, backward_bytes=2000.0)}, {}])

    assert rows[0]["workers"] == sorted([ORIGIN, OTHER])
    assert [each["missing"] for each in rows] == [0, 1, 2]
    assert [each["blocks"] for each in rows] == [[0, 1], [1, 2], None]
    assert [each["occupancy"] for each in rows] == [0.2, 0.9, None]
    assert [each["waits_for"] for each in rows] == [1, None, 1]
    assert [each["tokens_per_s"] for each in rows] == [200.0, 100.0, None]
    assert [each["bytes_per_token"] for each in rows] == [6.0, None, None]


def check_nothing(patch: Patch) -> None:
    def unchecked(wire: pb.Microbatch, **_: Any) -> Microbatch:
        return Microbatch(
            MicrobatchId(wire.round, PeerId(wire.origin), wire.number),
            wire.stage,
            tuple(map(PeerId, wire.chain)),
        )

    patch.setattr(microbatches, "microbatch_from_wire", unchecked)


@defence("a microbatch comes from the worker before this one in its chain", off=check_nothing)
@pytest.mark.parametrize(
    "change",
    [
        {"job": bytes(32)},
        {"number": 4},
        {"tokens": 33},
        {"stage": 0},
        {"stage": 4},
        {"stage": 2},
        {"origin": OTHER},
        {"origin": "nobody"},
        {"chain": [FIRST]},
        {"chain": [FIRST, FIRST]},
        {"chain": [FIRST, ORIGIN]},
        {"chain": [OTHER, SECOND]},
    ],
    ids=str,
)
def test_a_microbatch_that_goes_elsewhere_is_refused(change: dict[str, Any]) -> None:
    wire = microbatch_to_wire(JOB, SENT)
    if "chain" in change:
        wire.ClearField("chain")
    with pytest.raises(ProtocolViolation):
        microbatches.microbatch_from_wire(
            pb.Microbatch(**{field.name: value for field, value in wire.ListFields()} | change),
            job=JOB,
            stages=3,
            count=4,
            positions=32,
            way=(ORIGIN, FIRST),
        )


@defence("only the origin chooses chains", off=replacing(microbatches, "verify", yes))
@pytest.mark.parametrize(
    "change",
    [
        {"id": MicrobatchId(8, ORIGIN, 3)},
        {"id": MicrobatchId(7, ORIGIN, 2)},
        {"chain": (FIRST, OTHER)},
        {"tokens": 31},
        {"is_forward_only": False},
        {"sent": 3},
    ],
    ids=str,
)
def test_a_chain_that_its_origin_has_not_signed_is_refused(change: dict[str, Any]) -> None:
    for false in (replace(SENT, **change), signed(replace(SENT, **change), IDENTITIES[1])):
        with pytest.raises(ProtocolViolation, match="not signed"):
            received(microbatch_to_wire(JOB, false))


@pytest.mark.parametrize(
    "wire",
    [
        pb.Listing(job=JOB, numbers=[1, 1], tokens=[5, 5]),
        pb.Listing(job=JOB, numbers=[1, 2], tokens=[5]),
        pb.Listing(job=JOB, numbers=[4], tokens=[5]),
        pb.Listing(job=JOB, numbers=[1], tokens=[17]),
        pb.Listing(numbers=[1], tokens=[5]),
    ],
    ids=str,
)
def test_a_listing_out_of_range_is_refused(wire: pb.Listing) -> None:
    with pytest.raises(ProtocolViolation):
        step_streams.listing_from_wire(wire, job=JOB, count=4, most=16)


def test_the_end_of_a_round_names_ordered_peers() -> None:
    end = StepEnd(tuple(sorted((ORIGIN, FIRST))), 5)
    assert step_streams.end_from_wire(step_streams.end_to_wire(end).end) == end
    for wire in (
        pb.StepEnd(origins=sorted((ORIGIN, FIRST))[::-1]),
        pb.StepEnd(origins=[ORIGIN, ORIGIN]),
        pb.StepEnd(origins=["nobody"]),
        pb.StepEnd(tokens=step_streams.MAX_TOKENS + 1),
    ):
        with pytest.raises(ProtocolViolation):
            step_streams.end_from_wire(wire)


def test_a_microbatch_has_one_worker_of_each_stage() -> None:
    ledger = MicrobatchLedger()
    ledger.enter(0, (FIRST, SECOND), 10)
    ledger.enter(1, (FIRST, OTHER), 6)
    assert ledger.listed(FIRST) == {0: 10, 1: 6}
    assert not ledger.is_confirmed
    for peer in (FIRST, SECOND, OTHER):
        ledger.confirm(peer, ledger.listed(peer), ())
    assert ledger.is_confirmed
    ledger.enter(1, (FIRST, SECOND), 6)  # OTHER cannot be reached any more
    assert ledger.listed(OTHER) == {}
    assert not ledger.is_confirmed
    assert ledger.listed(SECOND) == {0: 10, 1: 6}


def test_only_a_minority_is_absent() -> None:
    ledger = MicrobatchLedger()
    for number, peer in enumerate((FIRST, SECOND, OTHER)):
        ledger.enter(number, (peer,), 1)
    assert ledger.absent(1, [FIRST, SECOND]) == {OTHER}
    assert ledger.absent(1, [FIRST]) == set()


def test_a_worker_counts_what_counting_origins_list() -> None:
    accounts = Accounts({ORIGIN: {0: 10}, OTHER: {0: 6}})
    assert accounts.end() is None
    assert accounts.counted(7) == {}
    accounts.ends = {
        OTHER: StepEnd((OTHER,), 6),
        FIRST: StepEnd((ORIGIN,), 10),
        ORIGIN: StepEnd((ORIGIN,), 10),
    }
    assert accounts.end() == StepEnd((ORIGIN,), 10)
    assert accounts.counted(7) == {MicrobatchId(7, ORIGIN, 0): 10}


def believe_anybody(patch: Patch) -> None:
    patch.setattr(Accounts, "electors", property(lambda _: frozenset(), lambda *_: None))


@defence("one origin that lies does not end a round", off=believe_anybody)
def test_two_of_three_electors_end_a_round() -> None:
    end, false = StepEnd((ORIGIN, FIRST), 10), StepEnd((), 0)
    accounts = Accounts(electors=frozenset((ORIGIN, FIRST, SECOND)))
    accounts.ends[SECOND] = false
    accounts.ends[OTHER] = false  # nobody's elector
    assert accounts.end() is None
    accounts.ends[ORIGIN] = end
    assert accounts.end() is None
    accounts.ends[FIRST] = end
    assert accounts.end() == end


def test_no_origin_chooses_whom_it_tells_the_end() -> None:
    origins = [ORIGIN, FIRST, SECOND, OTHER]
    told = [electors(round, OTHER, origins, 2) for round in range(200)]
    assert told == [electors(round, OTHER, origins[::-1], 2) for round in range(200)]
    counts = Counter(peer for each in told for peer in each)
    assert all(70 < counts[peer] < 130 for peer in origins)


def test_what_a_lost_origin_listed_can_be_forgotten() -> None:
    accounts = Accounts(ends={ORIGIN: StepEnd((FIRST, ORIGIN), 10)})
    accounts.list(ORIGIN, {0: 4})
    accounts.list(FIRST, {0: 6})
    accounts.lost |= {ORIGIN, FIRST}
    accounts.list(FIRST, {1: 6})  # it found this worker again
    accounts.forget_lost()
    assert accounts.counted(7) == {MicrobatchId(7, FIRST, 1): 6}


def test_a_stage_commits_all_tokens_or_fewer_at_last() -> None:
    end = StepEnd((ORIGIN,), 10)
    lacking = partial(lacking_tokens, end)
    assert [lacking(tokens, 1) for tokens in (-1, 9, 10, 11)] == [None, None, 0, None]
    assert [lacking(tokens, MAX_ATTEMPTS) for tokens in (-1, 9, 10, 11)] == [None, 1, 0, None]


def drawn(batches_s: Mapping[PeerId, float], parts: Sequence[range]) -> list[list[PeerId]]:
    """The workers of a stage that each origin draws, for one microbatch after another."""
    rng, found = random.Random(0), list[list[PeerId]]()
    for part in parts:
        draws = StageDraws(part, parts[-1].stop, batches_s, "7/1")
        found.append([draws.choose(batches_s, rng) for _ in part])
    return found


def test_origins_together_follow_speed() -> None:
    batches_s, parts = {FIRST: 1.0, SECOND: 0.5, OTHER: 0.0}, [range(100), range(100, 130), range(130, 180)]
    found = drawn(batches_s, parts)
    counts = Counter(chain.from_iterable(found))
    assert counts == pytest.approx({FIRST: 40, OTHER: 60, SECOND: 80}, abs=3)
    for each in found:  # without bursts
        for worker, count in Counter(each).items():
            assert each[: len(each) // 2].count(worker) == pytest.approx(count / 2, abs=1)


@pytest.mark.parametrize(("count", "batch"), [(12, 64), (60, 64), (60, 2)])
def test_an_origin_uses_few_workers_of_a_large_stage(count: int, batch: int) -> None:
    peers = [Identity.from_seed(bytes([number])).peer_id for number in range(count)]
    parts = [range(batch * number, batch * (number + 1)) for number in range(count)]
    found = drawn(dict.fromkeys(peers, 1.0), parts)
    assert all(min(WAYS, batch) <= len(set(each)) <= 2 * WAYS for each in found)
    assert Counter(chain.from_iterable(found)) == pytest.approx(dict.fromkeys(peers, batch), abs=2)


def test_another_worker_takes_the_place_of_one_that_failed() -> None:
    draws = StageDraws(range(60), 60, dict.fromkeys((FIRST, SECOND, OTHER), 1.0), "7/1")
    rng, free = random.Random(0), {FIRST: 1.0, SECOND: 3.0}
    found = Counter(draws.choose(free, rng) for _ in range(60))
    assert found == pytest.approx({FIRST: 20 + 15, SECOND: 20 + 5}, abs=6)


@defence(
    "a false speed counts as a few times the usual one", off=replacing(chains, "median_low", lambda _: 1e300)
)
def test_a_false_speed_takes_a_bounded_share() -> None:
    (found,) = drawn({FIRST: 1.0, SECOND: 1e-6, OTHER: 1.0}, [range(180)])
    assert found.count(SECOND) <= 180 * MOST_BATCHES / (MOST_BATCHES + 2) + 1


def test_origins_divide_all_microbatches_by_speed() -> None:
    for batches_s in ([1.0, 0.25, 0.0], [2.0, 2.0], [1.0, 1e-6], [0.0]):
        parts = [part_of(batches_s, slot, 8) for slot in range(len(batches_s))]
        assert [number for part in parts for number in part] == list(range(8 * len(batches_s)))
        assert all(1 <= len(part) <= 8 * MOST_BATCHES for part in parts)
    assert part_of([2.0, 2.0], 1, 8) == range(8, 16)
    assert [len(part_of([1.0, 0.25], slot, 11)) for slot in range(2)] == [5, 17]


def test_a_stage_goes_on_at_the_round_of_the_others() -> None:
    assert job_round([[7, 7, 9], [6], [5, 5]], stage=2) == 7
    assert job_round([[], [6], [4, 5, 5]], stage=0) == 6
    assert job_round([[3], [], []], stage=0) == 0


def test_the_newest_copy_is_of_a_round_that_the_job_has_reached() -> None:
    old, new, other = (WorkerPosition(*each) for each in ((4, b"a"), (6, b"b"), (6, b"c")))
    invented = WorkerPosition(99, b"d")
    assert newest_copy([old, new, other, other, invented], after=4, until=8) == other
    assert newest_copy([old, invented], after=4, until=8) is None


def test_a_worker_that_looks_at_the_stages_decides() -> None:
    """A worker at round 4, which waits, with two others of its stage."""
    calm = StagesView(4, True, True, [4, 4], 4, [], 0, False)
    assert decide(calm) is Decision.KEEP
    assert decide(replace(calm, mates=[5, 5])) is Decision.FETCH
    behind = replace(calm, job_round=7)
    assert decide(behind) == Restore(7, None)
    assert decide(replace(behind, may_lag=3)) is Decision.KEEP
    assert decide(replace(behind, waited=False)) is Decision.KEEP  # joins the others of its stage
    alone = replace(behind, mates=[], waited=False)
    copy = WorkerPosition(6, b"a")
    assert decide(replace(alone, copies=[copy])) == Restore(7, copy)
    assert decide(replace(alone, copies=[WorkerPosition(3, b"b")])) == Restore(7, None)
    new = replace(alone, round=0, has_trained=False)
    assert decide(new) is Decision.WAIT
    assert decide(replace(new, job_round=1)) == Restore(1, None)
    assert decide(replace(alone, waited=True, is_over=True)) is Decision.END
    assert decide(replace(alone, is_over=True)) == Restore(7, None)


@defence(
    "a tensor has a codec of the job",
    off=replacing(microbatches, "check_part", lambda *_: None),
    size_bytes=INT4_BYTES,
)
@pytest.mark.parametrize("size_bytes", [INT4_BYTES, 1, 1 << 50])
def test_a_tensor_in_a_codec_that_the_job_forbids_is_refused(size_bytes: int) -> None:
    sizes = codecs_by_size("auto", 8, 64)
    payload = bytes(min(size_bytes, INT4_BYTES))

    async def hostile() -> tuple[pb.Part, bytes]:
        return pb.Part(size_bytes=size_bytes), payload

    with pytest.raises(ProtocolViolation, match="another size"):
        run(microbatches.collected(hostile, sizes))
    assert INT4_BYTES not in sizes


def test_both_ends_measure_a_link(monkeypatch: Patch) -> None:
    monkeypatch.setattr(bandwidth, "MIN_BYTES", 100)
    rates = LinkRates()
    rates.add(FIRST, 60, 1.0)
    rates.told[FIRST] = 30.0
    assert rates.of_round() == {}
    rates.add(FIRST, 60, 1.0)
    rates.add(OTHER, 120, 1.0)
    assert rates.of_round() == {FIRST: 30.0}
    assert rates.arriving == {FIRST: 60.0, OTHER: 120.0}
    rates.told[FIRST] = 90.0
    assert rates.of_round() == {FIRST: 60.0}
