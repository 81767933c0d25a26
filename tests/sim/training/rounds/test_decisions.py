"""A member that lies about the decision of a round: the others commit without it, name it, and have
the same bits."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.rounds.messages import (
    DISCARD,
    HASH_BYTES,
    Control,
    Decided,
    Hashes,
    Proposal,
    Report,
    Vote,
)
from swarmnet_protocols.training.rounds.round_runner import RoundRunner
from swarmnet_protocols.training.rounds.round_state import RoundState
from swarmnet_protocols.training.rounds.terms import RoundTerms
from swarmnet_protocols.training.rounds.votes import UNVOTED, Votes
from tests.defences import defence, no, replacing
from tests.support.network.virtual_time import run
from tests.support.training.lab import (
    COUNT,
    ROBUST,
    TIMING,
    Outcomes,
    TrainingLab,
    Work,
    averaged,
    check_agreement,
    simulate,
)
from tests.support.training.workers import WorkerLab, train, write_job

Lie = Callable[[RoundState, int], Sequence[Control]]
"""What a liar sends to a member when its link comes up, in addition to what an honest member
sends."""

RNG = random.Random(0)


def invented(state: RoundState) -> Hashes:
    return tuple(RNG.randbytes(HASH_BYTES) for _ in state._slices)


def discards(_: RoundState, __: int) -> Sequence[Control]:
    return [Decided(DISCARD)]


def invents_results(state: RoundState, _: int) -> Sequence[Control]:
    return [Decided(invented(state))]


def signs_alone(state: RoundState, member: int) -> Sequence[Control]:
    hashes = DISCARD if member % 2 else invented(state)
    electorate = state._votes._electorate
    signature = electorate.sign(state._votes._signed(hashes))
    return [Decided(hashes, tuple((voter, signature) for voter in range(len(electorate.keys))))]


def lying(patch: pytest.MonkeyPatch, liars: set[PeerId], lie: Lie) -> None:
    """Make ``liars`` send what ``lie`` says whenever a link comes up."""
    honest_begin, honest_missed = RoundRunner.__init__, RoundState._send_missed
    states: dict[int, bool] = {}

    def begin(self: RoundRunner, terms: RoundTerms, *args: object) -> None:
        honest_begin(self, terms, *args)  # type: ignore[arg-type]
        states[id(self._round)] = terms.members[self._me].peer in liars

    def send_missed(self: RoundState, member: int) -> None:
        honest_missed(self, member)
        if states[id(self)]:
            for message in lie(self, member):
                self._send(member, message)

    patch.setattr(RoundRunner, "__init__", begin)
    patch.setattr(RoundState, "_send_missed", send_missed)


def lies_to_one(state: RoundState, member: int) -> Sequence[Control]:
    victim = max(each for each in range(len(state._members)) if each != state._me)
    return [Decided(DISCARD)] if member == victim else []


def check_round_without(liar: PeerId, work: Work, outcomes: Outcomes, *, named: bool = True) -> None:
    honest = {peer: outcome for peer, outcome in outcomes.items() if peer != liar}
    check_agreement(work, honest)
    for outcome in honest.values():
        assert outcome.committed, outcome.reason
        assert outcome.refuted == ((liar,) if named else ())


@pytest.mark.parametrize("lie", [discards, invents_results, signs_alone, lies_to_one])
@pytest.mark.parametrize("count", [4, 5])
def test_a_decision_of_one_member_decides_nothing_and_names_it(
    lie: Lie, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = TrainingLab(count)
    work = Work.random(lab, COUNT)
    liar = lab.peers[1]
    lying(monkeypatch, {liar}, lie)
    outcomes: Outcomes = simulate(lambda lab: lab.average(work), lab)
    check_round_without(liar, work, outcomes)
    assert all(outcome.excluded == ((liar, UNVOTED),) for peer, outcome in outcomes.items() if peer != liar)


def test_the_votes_of_an_earlier_round_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = TrainingLab(4)
    work = Work.random(lab, COUNT)
    liar = lab.peers[1]
    kept: list[Decided] = []
    keep = RoundState._conclude

    def conclude(self: RoundState, now: float) -> None:
        keep(self, now)
        if self._votes.decided is not None and len(kept) < 1:
            kept.append(self._votes.decided)

    def replays(_: RoundState, __: int) -> Sequence[Control]:
        return kept

    async def scenario(lab: TrainingLab) -> list[Outcomes]:
        return [await lab.average(work, round=round) for round in range(2)]

    monkeypatch.setattr(RoundState, "_conclude", conclude)
    lying(monkeypatch, {liar}, replays)
    first, second = simulate(scenario, lab)
    check_round_without(liar, work, first, named=False)
    check_round_without(liar, work, second)


def claims_results(state: RoundState, _: int) -> Sequence[Control]:
    return [Report(tuple((each,) for each in invented(state)), None)]


def votes_for_missing_results(state: RoundState, _: int) -> Sequence[Control]:
    return [Report(tuple(() for _ in state._slices), state._votes.cast(invented(state)))]


def proposes_to_discard(_: RoundState, __: int) -> Sequence[Control]:
    return [Proposal(DISCARD)]


@pytest.mark.parametrize("lie", [claims_results, votes_for_missing_results, proposes_to_discard])
@pytest.mark.parametrize("place", range(5))
def test_false_claims_of_one_member_keep_no_round_from_committing(
    lie: Lie, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = TrainingLab(5, rules=ROBUST)
    work = Work.random(lab, COUNT)
    liar = lab.peers[place]
    lying(monkeypatch, {liar}, lie)
    outcomes: Outcomes = simulate(lambda lab: lab.average(work), lab)
    bits = {peer: outcome.average for peer, outcome in outcomes.items() if peer != liar}
    first = next(iter(bits.values()))
    assert first is not None
    assert all(each is not None and torch.equal(each, first) for each in bits.values())


def test_members_that_see_both_votes_of_a_coordinator_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = TrainingLab(4)
    work = Work.random(lab, COUNT)
    liar = lab.peers[1]

    def votes_twice(state: RoundState, _: int) -> Sequence[Control]:
        votes = state._votes
        signatures = {
            hashes: votes._electorate.sign(votes._signed(hashes)) for hashes in (DISCARD, invented(state))
        }
        return [Vote(hashes, signature) for hashes, signature in signatures.items()]

    lying(monkeypatch, {liar}, votes_twice)
    outcomes: Outcomes = simulate(lambda lab: lab.average(work), lab)
    check_round_without(liar, work, outcomes)


def test_without_a_liar_all_vote_once_and_none_is_named() -> None:
    lab = TrainingLab(5)
    for outcome in averaged(lab, Work.random(lab, COUNT)).values():
        assert outcome.committed
        assert outcome.refuted == ()
        assert outcome.wait_s < TIMING.contribution_s


@defence(
    "a liar that lies to one member is excluded by all", off=replacing(Votes, "_proves", no), aggregate="mean"
)
@pytest.mark.parametrize("aggregate", ["mean", "median"])
def test_workers_exclude_one_that_decides_alone_and_stay_agreed(
    aggregate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The liar deceives one worker only. This worker cannot follow the liar any more, and would be
    alone if the others did."""
    exchange = f'min_workers = 2\naggregate = "{aggregate}"'
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 1", exchange, rounds=4))
    honest = ("anna", "boris", "clara")
    liar = next(
        name
        for name in map("mallory-{}".format, itertools.count())
        if lab.peer(name) < min(map(lab.peer, honest))
    )
    lying(monkeypatch, {lab.peer(liar)}, lies_to_one)
    lab.observer = lambda name, event: (
        lab.workers[liar].stop() if name == "anna" and event["event"] == "done" else None
    )
    run(train(lab, *honest, liar))
    del lab.events[liar]
    lab.check_equal()
    for name in honest:
        rounds = lab.rounds(name)
        assert sorted(rounds) == [0, 1, 2, 3]
        assert [each["peer_id"] for event in rounds.values() for each in event["excluded"]] == [
            lab.peer(liar)
        ]
        assert set(rounds[3]["contributors"]) == {lab.peer(each) for each in honest}
