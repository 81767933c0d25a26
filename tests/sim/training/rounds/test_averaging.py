"""Rounds of averaging under crashes, hangs, cuts and slow links: one decision, the same bits, in
time."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.member_link import MemberLink
from swarmnet_protocols.training.rounds.transfers import Outgoing
from swarmnet_protocols.wire import training_pb2 as pb
from tests.support.network.memory_network import Delivery, LinkProfile
from tests.support.network.virtual_time import TimedExecutor
from tests.support.training.lab import (
    KINDS,
    TIMING,
    Outcomes,
    TrainingLab,
    Work,
    averaged,
    check_agreement,
    kind_of,
    nth,
    on_delivery,
    random_round,
    simulate,
)

ROUNDS_PER_SEED = 2


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "float16", "int8", "int4", "fp4", "topk"])
def test_all_members_get_the_mean(codec: str) -> None:
    lab = TrainingLab(4)
    work = Work.random(lab, 30_000, codec)
    outcomes = averaged(lab, work)
    assert all(outcome.committed for outcome in outcomes.values())
    assert all(len(names) == 4 for outcome in outcomes.values() for names in outcome.contributors)


def test_a_member_counts_at_most_the_tokens_of_a_round() -> None:
    lab = TrainingLab(3, rules=AggregationRules(max_weight=10.0))
    work = Work.random(lab, 30_000)
    claims = zip(lab.members(), (3.0, 4.0, 1e12), strict=True)
    members = [replace(member, weight=weight) for member, weight in claims]
    outcomes: Outcomes = simulate(lambda lab: lab.average(work, members=members), lab)
    assert {outcome.tokens for outcome in outcomes.values()} == {17.0}


def test_a_result_is_not_requested_again_while_it_is_verified() -> None:
    link = LinkProfile(delay_s=0.02, bytes_per_s=1e6)
    lab = TrainingLab(3, link=link, timing=RoundTiming(30.0, 60.0, 90.0))
    count = 1_800_000
    work = Work.random(lab, count)

    async def scenario(lab: TrainingLab) -> Outcomes:
        for exchange in lab.exchanges.values():
            # longer than a member waits for one that is silent
            exchange._context = replace(exchange._context, executor=TimedExecutor(2.5))
        return await lab.average(work)

    outcomes: Outcomes = simulate(scenario, lab)
    check_agreement(work, outcomes)
    assert all(outcome.committed for outcome in outcomes.values())
    sent = sum(outcome.bytes_sent for outcome in outcomes.values())
    assert sent == pytest.approx(4 * count * 4, rel=0.02), "two of three slices and two results of one, each"


def test_bulk_data_that_is_queued_is_not_queued_again() -> None:
    def messages(*payloads: bytes) -> Iterator[Outgoing]:
        return iter([(pb.ExchangeRequest(), payload) for payload in payloads])

    async def scenario(lab: TrainingLab) -> None:
        link = MemberLink(lab.transports[lab.peers[0]], lab.members()[1], pb.Hello(), TIMING, lambda up: None)
        link.post_bulk("contribution", "slice", messages(b"1", b"2"))
        first = link._next()
        link.post_bulk("contribution", "slice", messages(b"1", b"2"))
        assert [first, link._next(), link._next()] == [*messages(b"1", b"2"), None]
        link.post_bulk("contribution", "slice", messages(b"1"))
        assert [link._next()] == [*messages(b"1")], "it had been sent, so it is queued again"
        await link.close()

    simulate(scenario, TrainingLab(2))


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_death_at_any_message_costs_only_its_own_contribution(kind: str, victim: str) -> None:
    lab = TrainingLab(5)
    work = Work.random(lab, 30_000)
    on_delivery(
        lab, lambda delivery: kind_of(delivery) == kind, lambda delivery: lab.crash(getattr(delivery, victim))
    )
    outcomes = averaged(lab, work)
    assert len(lab.crashed) == 1
    assert all(outcome.committed for outcome in outcomes.values())
    survivors = set(outcomes)
    assert all(survivors <= set(names) for outcome in outcomes.values() for names in outcome.contributors)


@pytest.mark.parametrize("kind", ["contribution", "result"])
def test_a_death_while_bundles_are_sent_leaves_the_same_bits(kind: str) -> None:
    lab = TrainingLab(5)
    work = Work.random(lab, 5 * 4096, "topk")
    on_delivery(lab, nth(kind, 8), lambda delivery: lab.crash(delivery.source))
    outcomes = averaged(lab, work)
    assert len(lab.crashed) == 1
    assert all(outcome.committed for outcome in outcomes.values())


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_hangs_and_wakes_gets_the_decision_or_is_behind(kind: str, victim: str) -> None:
    lab = TrainingLab(5)
    work = Work.random(lab, 30_000)
    hung = []

    def hang(delivery: Delivery) -> None:
        hung.append(getattr(delivery, victim))
        lab.network.hang(hung[0])
        asyncio.get_running_loop().call_later(7.0, lab.network.resume, hung[0])

    on_delivery(lab, lambda delivery: kind_of(delivery) == kind, hang)
    outcomes = averaged(lab, work)
    assert all(outcome.committed for peer, outcome in outcomes.items() if peer not in hung)
    assert outcomes[hung[0]].committed


def test_a_hang_is_noticed_by_silence_and_not_by_a_deadline() -> None:
    lab = TrainingLab(5)
    work = Work.random(lab, 30_000)
    hung = lab.peers[2]

    def hang(_: Delivery) -> None:
        lab.network.hang(hung)
        asyncio.get_running_loop().call_later(2 * TIMING.deadline_s, lab.network.resume, hung)

    on_delivery(lab, lambda delivery: delivery.source == hung, hang)
    outcomes = averaged(lab, work)
    others = [outcome for peer, outcome in outcomes.items() if peer != hung]
    assert all(outcome.committed and outcome.wait_s < TIMING.contribution_s for outcome in others)
    assert outcomes[hung].behind


def test_random_rounds_with_one_fault(seed: int) -> None:
    for index in range(ROUNDS_PER_SEED):
        lab, _, outcomes = random_round(f"{seed}/{index}", faults=1)
        if lab.crashed:
            assert all(outcome.committed for outcome in outcomes.values()), f"{seed}/{index}"


def test_random_rounds_with_many_faults(seed: int) -> None:
    random_round(f"{seed}/storm", faults=4)
