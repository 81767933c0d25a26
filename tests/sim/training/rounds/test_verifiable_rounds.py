"""Rounds of jobs with a robust aggregation rule: a reducer that lies is refuted, and moves
nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.checkpoint import CheckpointStore, WorkerCheckpoint
from swarmnet_node.training.known_workers import KnownWorkers
from swarmnet_node.training.replica import Replica
from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.codecs.values import pieces
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.training.rounds import reduction
from swarmnet_protocols.training.rounds import terms as terms_module
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.reduction import (
    Contribution,
    Result,
    read_result,
    result_hash,
    signed_bytes,
)
from swarmnet_protocols.training.rounds.round_runner import RoundRunner
from swarmnet_protocols.training.rounds.terms import RoundTerms
from swarmnet_protocols.wire import training_pb2 as pb
from tests.defences import Patch, defence, nothing, replacing, yes
from tests.support.network.virtual_time import run
from tests.support.training.lab import COUNT, IDENTITIES, JOB, ROBUST, Outcomes, TrainingLab, Work, simulate
from tests.support.training.workers import WorkerLab, train, write_job

LIAR = 0
"""The member that lies, by its place in the roster: it reduces the first slice."""

Payloads = Sequence[tuple[int, Contribution]]
Lie = Callable[[RoundTerms, int, Payloads], Result]


def bundle(terms: RoundTerms, index: int, payloads: Payloads) -> Result:
    contributors = [
        pb.Contributor(member=member, weight=each.weight, hash=each.hash, signature=each.signature)
        for member, each in payloads
    ]
    summary = pb.Summary(exchange_number=terms.exchange_number, slice=index, contributors=contributors)
    data = b"".join(piece for _, each in payloads for piece in pieces(each.data))
    return Result(result_hash(summary.SerializeToString(), data), summary.SerializeToString(), data)


def forged(terms: RoundTerms, index: int) -> Contribution:
    return Contribution.of(1.0, terms.codec.encode(torch.full((terms.size(index),), 1e6)))


def another_average(terms: RoundTerms, index: int, payloads: Payloads) -> Result:
    """A result with the liar's numbers in the form of a round that is not verifiable: encoded,
    without contributions."""
    summary, lie = bundle(terms, index, payloads).summary, forged(terms, index).data
    return Result(result_hash(summary, lie), summary, lie)


def other_contributions(terms: RoundTerms, index: int, payloads: Payloads) -> Result:
    """In the names of the others, but for one of them, who could tell."""
    lie = forged(terms, index)
    return bundle(terms, index, [(member, each if member == 1 else lie) for member, each in payloads])


def its_own_signature(terms: RoundTerms, index: int, payloads: Payloads) -> Result:
    key = list(IDENTITIES.values())[LIAR]
    lie = forged(terms, index)
    signed = replace(lie, signature=key.sign(signed_bytes(terms, index, lie)))
    return bundle(terms, index, [(member, each if member == 1 else signed) for member, each in payloads])


def only_its_own(terms: RoundTerms, index: int, payloads: Payloads) -> Result:
    """Signed and true, but the only contribution of which the median is made."""
    return bundle(terms, index, [(member, each) for member, each in payloads if member == LIAR])


def lying_reducers(patch: pytest.MonkeyPatch, lie: Lie, liars: set[PeerId]) -> None:
    """Make ``liars`` send results of their own making whenever they reduce a slice."""
    honest = RoundRunner._reduce

    async def reduce(self: RoundRunner, index: int, payloads: list[tuple[int, Contribution]]) -> None:
        if self._terms.members[self._me].peer not in liars:
            await honest(self, index, payloads)
            return
        values = torch.full((self._terms.size(index),), 1e6)
        self._store(index, lie(self._terms, index, payloads), values)

    patch.setattr(RoundRunner, "_reduce", reduce)


LIES = [another_average, other_contributions, its_own_signature, only_its_own]


def average_with(
    lie: Lie, count: int, patch: pytest.MonkeyPatch, rules: AggregationRules, codec: str = "float32"
) -> tuple[Work, Outcomes]:
    """A round of ``count`` members, of which the liar reduces its slice as ``lie`` has it."""
    lab = TrainingLab(count, rules=rules)
    work = Work.random(lab, COUNT, codec)

    lying_reducers(patch, lie, {lab.peers[LIAR]})
    return work, simulate(lambda lab: lab.average(work), lab)


@defence(
    "a robust result needs contributions of a quorum",
    off=replacing(RoundTerms, "quorum", 1),
    lie=only_its_own,
    count=4,
)
@pytest.mark.matrix
@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("lie", LIES)
def test_a_lying_reducer_changes_nothing_and_is_refuted_by_all(
    lie: Lie, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, outcomes = average_with(lie, count, monkeypatch, ROBUST)
    liar, *honest = sorted(work.values)
    for peer in honest:
        outcome = outcomes[peer]
        assert outcome.average is not None, outcome.reason
        assert outcome.average.abs().max() < 10
        assert outcome.refuted == (liar,)
        assert liar in dict(outcome.excluded)


def test_without_verification_one_liar_decides_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    _, outcomes = average_with(another_average, 4, monkeypatch, replace(ROBUST, verifiable=False))
    assert any(outcome.average is not None and outcome.average.max() > 1e5 for outcome in outcomes.values())


def test_without_signatures_a_forwarded_result_excludes_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forged contribution is seen by its author alone, so a member that forwards it may be
    honest."""
    _, outcomes = average_with(other_contributions, 4, monkeypatch, replace(ROBUST, verifiable=False), "topk")
    assert [outcome.refuted for outcome in outcomes.values()] == [()] * 4


@pytest.mark.parametrize("codec", ["float32", "int8", "topk"])
def test_honest_members_commit_the_aggregate_of_all_contributions(codec: str) -> None:
    lab = TrainingLab(4, rules=ROBUST)
    work = Work.random(lab, COUNT, codec)
    outcomes = simulate(lambda lab: lab.average(work), lab)
    for outcome in outcomes.values():
        assert outcome.committed
        assert outcome.refuted == ()
        assert outcome.average is not None
        for (start, end), contributors in zip(outcome.slices, outcome.contributors, strict=True):
            assert set(contributors) == set(lab.peers)
            rows = [
                work.codec.decode(work.codec.encode(work.values[peer][start:end]), end - start)
                for peer in contributors
            ]
            weights = torch.tensor([work.weights[peer] for peer in contributors], dtype=torch.float64)
            assert torch.equal(outcome.average[start:end], ROBUST.aggregate(torch.stack(rows), weights))


def signed(terms: RoundTerms, member: int, values: torch.Tensor, *, index: int = 0) -> Contribution:
    payload = Contribution.of(1.0, terms.codec.encode(values))
    key = IDENTITIES[terms.members[member].peer]
    return replace(payload, signature=key.sign(signed_bytes(terms, index, payload)))


@defence("a contribution counts only with its author's signature", off=replacing(reduction, "verify", yes))
def test_a_contribution_to_another_round_slice_or_job_is_refused() -> None:
    members = TrainingLab(4).members()
    codec = get_codec("float32")
    here = RoundTerms.of(JOB, 7, members, COUNT, codec, ROBUST)
    values = torch.ones(here.size(0))
    good = [(member, signed(here, member, values)) for member in range(3)]
    assert torch.equal(read_result(here, 0, bundle(here, 0, good), 3, None), values)
    elsewhere = [
        (RoundTerms.of(JOB, 6, members, COUNT, codec, ROBUST), 0),
        (here, 1),
        (RoundTerms.of(bytes(32), 7, members, COUNT, codec, ROBUST), 0),
    ]
    for terms, index in elsewhere:
        replayed = [*good[:2], (2, signed(terms, 2, values, index=index))]
        with pytest.raises(ProtocolViolation, match="not signed by its author"):
            read_result(here, 0, bundle(here, 0, replayed), 3, None)
    heavier = [*good[:2], (2, replace(good[2][1], weight=2.0))]
    with pytest.raises(ProtocolViolation, match="not signed by its author"):
        read_result(here, 0, bundle(here, 0, heavier), 3, None)


def test_a_worker_without_a_key_cannot_take_part() -> None:
    member = replace(TrainingLab(1).members()[0], peer=PeerId("QmNoKey"))
    with pytest.raises(ConfigError, match="cannot sign"):
        RoundTerms.of(JOB, 0, [member], 8, get_codec("float32"))


@defence(
    "a worker that sent a false result is excluded",
    off=replacing(KnownWorkers, "exclude", nothing),
    honest=3,
    lying=1,
)
@pytest.mark.parametrize(("honest", "lying"), [(3, 1), (5, 3)], ids=["1 of 4", "3 of 8"])
def test_workers_exclude_liars_and_train_on(
    honest: int, lying: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = 'min_workers = 2\naggregate = "centered-clip"'
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 2", exchange, rounds=6))
    # So that each of them reduces a slice of so small a model.
    monkeypatch.setattr(terms_module, "ALIGNMENT", 16)
    good, bad = [
        [f"{kind}-{number}" for number in range(count)] for kind, count in (("good", honest), ("bad", lying))
    ]
    liars = {lab.peer(name) for name in bad}
    lying_reducers(monkeypatch, another_average, liars)

    def stop_liars(name: str, event: dict[str, Any]) -> None:
        if name in good and event["event"] == "done":
            for each in bad:
                lab.workers[each].stop()

    lab.observer = stop_liars
    run(train(lab, *good, *bad))
    for name in good:
        rounds = [event for event in lab.events[name] if event["event"] == "round"]
        refuted = {each["peer_id"] for event in rounds for each in event["excluded"]}
        assert refuted >= liars
        for event in rounds[-2:]:  # a liar that nobody excludes contributes to every other round
            assert event["committed"]
            assert set(event["contributors"]) == {lab.peer(each) for each in good}
        saved = CheckpointStore(lab.folder / name).load_newest(open_job(lab.sealed).id)
        assert saved is not None
        assert saved.parameters.abs().max() < 100


def saving_no_exclusions(patch: Patch) -> None:
    honest = Replica.checkpoint

    def checkpoint(self: Replica, job_id: str, round: int, _: object = ()) -> WorkerCheckpoint:
        return honest(self, job_id, round)

    patch.setattr(Replica, "checkpoint", checkpoint)


@defence("an exclusion outlasts a restart", off=saving_no_exclusions)
def test_an_exclusion_outlasts_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = 'min_workers = 2\naggregate = "centered-clip"'
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 2", exchange, rounds=12))
    monkeypatch.setattr(terms_module, "ALIGNMENT", 16)
    liar = lab.peer("liar")
    lying_reducers(monkeypatch, another_average, {liar})
    remembered: list[set[PeerId]] = []

    def watch(name: str, event: dict[str, Any]) -> None:
        anna = lab.workers["anna"]._workers.excluded
        if (name, event["event"]) == ("anna", "ready"):
            remembered.append(set(anna))
        elif (name, event["event"], len(remembered)) == ("anna", "round", 1) and event["round"] >= 6:
            lab.crash("anna")
        elif name == "boris" and event["event"] == "round" and event["round"] == 8:
            lab.start("anna")
        elif event["event"] == "done":
            lab.workers["liar"].stop()

    lab.observer = watch
    run(train(lab, "anna", "boris", "clara", "liar"))
    assert remembered == [set(), {liar}]
