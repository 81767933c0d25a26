"""Rounds of several groups: one average with the same bits for all, whoever fails."""

import math
import random

import pytest
import torch

from swarmnet_protocols.errors import ConfigError, ProtocolViolation, StreamEnded, SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.rounds import reduction, terms
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules, weighted_mean
from swarmnet_protocols.training.rounds.averaging import Averager
from swarmnet_protocols.training.rounds.reduction import contributors, read_summary
from swarmnet_protocols.training.rounds.round_runner import Outcome
from swarmnet_protocols.training.rounds.terms import RoundMember, RoundTerms
from swarmnet_protocols.wire import training_pb2 as pb
from tests.defences import defence, nothing, replacing
from tests.support.training.lab import (
    COUNT,
    JOB,
    KINDS,
    PEERS,
    SLACK_S,
    TIMING,
    Outcomes,
    TrainingLab,
    Work,
    kind_of,
    nth,
    on_delivery,
    random_fault,
    simulate,
)

WORKERS = 15
STRANGER = PEERS[-1]


async def refused(*_: object) -> None:
    raise StreamEnded("this worker gets nothing")


def groups_of(lab: TrainingLab, groups: int) -> list[list[RoundMember]]:
    """Split the members of a lab into groups, each with members of the whole list."""
    return [lab.members()[group::groups] for group in range(groups)]


def averaged(lab: TrainingLab, work: Work, groups: int = 3) -> Outcomes:
    split = groups_of(lab, groups)
    outcomes: Outcomes = simulate(lambda lab: lab.average(work, groups=split), lab)
    committed = [outcome for outcome in outcomes.values() if outcome.committed]
    for outcome in committed:
        assert outcome.average is not None
        assert outcome.contributors == committed[0].contributors
        assert outcome.tokens == committed[0].tokens
        assert torch.equal(outcome.average, mean_of_means(work, outcome, split))
    assert all(outcome.wait_s <= TIMING.deadline_s + SLACK_S for outcome in outcomes.values())
    return outcomes


def mean_of_means(work: Work, outcome: Outcome, groups: list[list[RoundMember]]) -> torch.Tensor:
    """The exact result: the weighted mean of the groups' weighted means."""
    slices = []
    for (start, end), peers in zip(outcome.slices, outcome.contributors, strict=True):
        means: dict[PeerId, tuple[float, torch.Tensor]] = {}
        for group in groups:
            inside = [member.peer for member in group if member.peer in peers]
            if not inside:
                continue
            weights = [work.weights[peer] for peer in inside]
            rows = [work.values[peer][start:end] for peer in inside]
            mean = weighted_mean(rows, torch.tensor(weights, dtype=torch.float64))
            between = RoundTerms.of(JOB, 0, group, COUNT, work.codec, groups=groups)
            reducer = between.members[between.reducers[outcome.slices.index((start, end))]].peer
            means[reducer] = math.fsum(weights), mean
        ordered = [means[peer] for peer in sorted(means)]
        totals = torch.tensor([weight for weight, _ in ordered], dtype=torch.float64)
        slices.append(weighted_mean([mean for _, mean in ordered], totals))
    return torch.cat(slices)


@pytest.mark.parametrize("groups", [2, 3, 5, 8])
def test_all_groups_get_the_mean_of_all(groups: int) -> None:
    lab = TrainingLab(WORKERS)
    outcomes = averaged(lab, Work.random(lab, COUNT), groups)
    assert all(outcome.committed for outcome in outcomes.values())
    assert outcomes[lab.peers[0]].all_contributors() == tuple(sorted(lab.peers))
    assert all(len(peers) == WORKERS for peers in outcomes[lab.peers[0]].contributors)


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_death_at_any_message_costs_no_group_its_round(kind: str, victim: str) -> None:
    lab = TrainingLab(12)  # a group has one member more than delegates
    work = Work.random(lab, COUNT)
    on_delivery(
        lab, lambda delivery: kind_of(delivery) == kind, lambda delivery: lab.crash(getattr(delivery, victim))
    )
    outcomes = averaged(lab, work)
    assert len(lab.crashed) == 1
    assert all(outcome.committed for outcome in outcomes.values())


@defence(
    "a group whose reducer dies gets the mean from another group",
    off=replacing(Averager, "_fetch", refused),
)
def test_the_death_of_the_only_delegate_costs_its_group_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "LEAST_DELEGATES", 1)
    lab = TrainingLab(WORKERS)
    work = Work.random(lab, COUNT)
    on_delivery(
        lab, lambda delivery: kind_of(delivery) == "contribution", lambda delivery: lab.crash(delivery.target)
    )
    outcomes = averaged(lab, work, 5)
    (victim,) = lab.crashed
    group = {member.peer for part in groups_of(lab, 5) for member in part if victim in {m.peer for m in part}}
    assert all(outcome.committed for outcome in outcomes.values())
    without = [names for names in outcomes[next(iter(outcomes))].contributors if not group & set(names)]
    assert without, "the group's mean of a slice died with its reducer"
    assert all(len(names) >= WORKERS - 3 for names in outcomes[next(iter(outcomes))].contributors)


@defence(
    "only peers that know the terms get the result of an exchange between groups",
    off=replacing(terms.RoundTerms, "agreement", lambda self: bytes(16)),
)
def test_a_stranger_gets_no_result() -> None:
    async def scenario(lab: TrainingLab) -> None:
        split = groups_of(lab, 3)
        await lab.average(Work.random(lab, COUNT), groups=split)
        member = split[0][0].peer
        numbers = [between for _, between in lab.exchanges[member]._runners if between]
        assert numbers
        async with lab.network.transport(STRANGER) as stranger:
            for number in numbers:
                stream = await EXCHANGE.open(stranger, member)
                hello = pb.Hello(exchange_number=0, agreement=bytes(16), between=number)
                await stream.send(pb.ExchangeRequest(hello=hello))
                with pytest.raises(SwarmnetError, match="must know the terms"):
                    await stream.receive()

    simulate(scenario, TrainingLab(9))


def test_random_faults_leave_the_same_bits(seed: int) -> None:
    rng = random.Random(f"groups {seed}")
    lab = TrainingLab(WORKERS, seed=seed)
    for _ in range(3):
        on_delivery(lab, nth(rng.choice(KINDS), rng.randint(1, 30)), random_fault(lab, rng))
    averaged(lab, Work.random(lab, COUNT), rng.choice([2, 3, 5]))


@defence(
    "members of a round with several groups check the contributors of each",
    off=replacing(reduction, "below", nothing),
    inside=[1 << 5, 1, 1],
)
@pytest.mark.parametrize("inside", [[], [1, 1], [0, 0, 0], [1 << 5, 1, 1]])
def test_a_result_with_impossible_contributors_is_refused(inside: list[int]) -> None:
    split = groups_of(TrainingLab(WORKERS), 3)
    round = RoundTerms.of(JOB, 0, split[0], COUNT, get_codec("float32"), groups=split)
    good = pb.Summary(slice=1, inside=[1 << 4, 0, 3])
    assert len(contributors(round, read_summary(round, 1, good.SerializeToString()))) == 3
    wrong = pb.Summary(slice=1, inside=inside)
    with pytest.raises(ProtocolViolation):
        read_summary(round, 1, wrong.SerializeToString())


def test_groups_that_no_round_can_have_are_refused() -> None:
    one, two, three = groups_of(TrainingLab(WORKERS), 3)
    robust = AggregationRules.named("median", 1.0)
    for groups, rules in (
        ([one], AggregationRules()),
        ([one, two, two], AggregationRules()),
        ([two, three], AggregationRules()),
        ([one, two, three], robust),
    ):
        with pytest.raises(ConfigError):
            RoundTerms.of(JOB, 0, one, COUNT, get_codec("float32"), rules, groups=groups)
