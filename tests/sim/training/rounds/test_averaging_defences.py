"""A member that is late, disagrees, or sends invalid contributions or sizes: the others commit
without it."""

import asyncio
from dataclasses import replace

import pytest
import torch

from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.net import Message, PeerId
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.reduction import (
    Contribution,
    read_result,
    read_summary,
    reduce_slice,
)
from swarmnet_protocols.training.rounds.round_runner import Outcome
from swarmnet_protocols.training.rounds.terms import RoundMember, RoundTerms
from swarmnet_protocols.wire import training_pb2 as pb
from tests.support.attacks.refusals import final_refusal
from tests.support.network import memory_network
from tests.support.network.memory_network import LinkProfile
from tests.support.training.lab import (
    JOB,
    PEERS,
    TIMING,
    TrainingLab,
    Work,
    averaged,
    check_agreement,
    random_round,
    simulate,
    terms_of,
)

SIZE = 30_000


@pytest.mark.parametrize("late_s", [1.0, 7.0, 13.0])
def test_a_member_that_begins_late_still_gets_the_average(late_s: float) -> None:
    lab = TrainingLab(4)
    work = Work.random(lab, SIZE)
    late = lab.peers[1]
    outcomes = simulate(lambda lab: lab.average(work, late_s={late: late_s}), lab)
    check_agreement(work, outcomes)
    assert all(outcome.committed for outcome in outcomes.values())
    contributes = late_s < TIMING.contribution_s
    assert all((late in names) == contributes for names in outcomes[late].contributors)


def test_a_slow_member_without_a_slice_is_left_out() -> None:
    lab = TrainingLab(4)
    work = Work.random(lab, SIZE)
    slow = lab.peers[0]
    for other in lab.peers[1:]:
        lab.network.set_link(slow, other, LinkProfile(delay_s=0.05, bytes_per_s=4e3))
    members = lab.members([1.0, 1e6, 1e6, 1e6])
    outcomes = simulate(lambda lab: lab.average(work, members=members), lab)
    check_agreement(work, outcomes)
    for peer in lab.peers[1:]:
        assert outcomes[peer].committed
        assert all(slow not in names for names in outcomes[peer].contributors)


def test_values_that_are_not_finite_are_not_sent_nor_is_weight_0() -> None:
    lab = TrainingLab(4)
    work = Work.random(lab, SIZE)
    work.values[lab.peers[0]][7] = float("nan")
    work.weights[lab.peers[1]] = 0.0
    for outcome in averaged(lab, work).values():
        assert outcome.committed
        assert all(names == tuple(lab.peers[2:]) for names in outcome.contributors)


def test_a_screened_or_too_heavy_contribution_is_left_out_and_named() -> None:
    rules = AggregationRules(
        screen=lambda rows, _: ["too long" if row.norm() > 1e4 else "" for row in rows], max_weight=10.0
    )
    lab = TrainingLab(4, rules=rules)
    work = Work.random(lab, SIZE)
    work.values[lab.peers[0]] *= 1e6
    work.weights[lab.peers[1]] = 1e9
    for outcome in averaged(lab, work).values():
        assert all(names == tuple(lab.peers[2:]) for names in outcome.contributors)
        assert outcome.excluded == ((lab.peers[0], "too long"), (lab.peers[1], "weight 1e+09 is above 10"))


def test_a_contribution_or_result_without_its_hash_does_not_count() -> None:
    codec = get_codec("float32")
    terms = terms_of(2, "float32", members=3)
    good, other = (codec.encode(torch.tensor(values)) for values in ([1.0, 2.0], [5.0, 6.0]))
    payloads = [
        (0, Contribution.of(1.0, good)),
        (1, replace(Contribution.of(1.0, good), data=other)),
        (2, Contribution.of(1.0, good[:-1])),
    ]
    reduced = reduce_slice(terms, 0, payloads)
    assert reduced is not None
    result, values = reduced
    summary = read_summary(terms, 0, result.summary)
    assert [each.member for each in summary.contributors] == [0]
    assert [each.member for each in summary.excluded] == [1, 2]
    assert values.tolist() == [1.0, 2.0]
    assert read_result(terms, 0, result, 2, None).tolist() == [1.0, 2.0]
    with pytest.raises(ProtocolViolation, match="hash"):
        read_result(terms, 0, replace(result, payload=other), 2, None)


def test_contributions_that_all_fail_discard_the_round() -> None:
    lab = TrainingLab(3, rules=AggregationRules(screen=lambda rows, _: ["no"] * len(rows)))
    for outcome in averaged(lab, Work.random(lab, SIZE)).values():
        assert not outcome.committed
        assert not outcome.behind


def test_remaining_contributions_are_screened_again() -> None:
    """A result must not contain a contribution that its readers leave out."""

    def first_of_many(rows: torch.Tensor, _: torch.Tensor) -> list[str]:
        return [f"one of {len(rows)}" if len(rows) > 2 and not index else "" for index in range(len(rows))]

    rules = AggregationRules(screen=first_of_many)
    lab = TrainingLab(4, rules=rules)
    for outcome in averaged(lab, Work.random(lab, SIZE)).values():
        assert all(names == tuple(lab.peers[2:]) for names in outcome.contributors)
        assert outcome.excluded == ((lab.peers[0], "one of 4"), (lab.peers[1], "one of 3"))


def test_contributions_are_combined_by_the_rules() -> None:
    lab = TrainingLab(3, rules=AggregationRules(aggregate=lambda rows, _: rows.amax(dim=0)))
    work = Work.random(lab, SIZE)
    outcomes = simulate(lambda lab: lab.average(work), lab)
    for outcome in outcomes.values():
        assert torch.equal(outcome.average, torch.stack(list(work.values.values())).amax(dim=0))


def test_one_of_two_members_neither_decides_alone_nor_waits_in_vain() -> None:
    lab = TrainingLab(2)
    work = Work.random(lab, SIZE)

    async def scenario(lab: TrainingLab) -> dict[PeerId, Outcome]:
        asyncio.get_running_loop().call_later(0.01, lab.crash, lab.peers[1])
        return await lab.average(work)

    (outcome,) = simulate(scenario, lab).values()
    assert outcome.behind
    assert outcome.wait_s < TIMING.deadline_s - 1
    assert "1 of 2" in outcome.reason


def test_a_member_with_another_roster_is_refused_and_ends_behind() -> None:
    lab = TrainingLab(4)
    work = Work.random(lab, SIZE)
    odd = lab.peers[3]

    async def scenario(lab: TrainingLab) -> list[Outcome]:
        def call(peer: PeerId, members: list[RoundMember]) -> "asyncio.Future[Outcome]":
            exchange = lab.exchanges[peer]
            return asyncio.ensure_future(
                exchange.average(0, members, work.values[peer], weight=1.0, codec=work.codec)
            )

        others = [RoundMember(PEERS[9], (), 1e6), *lab.members()[1:]]
        calls = [call(peer, others if peer == odd else lab.members()) for peer in lab.peers]
        return await asyncio.gather(*calls)

    outcomes = simulate(scenario, lab)
    assert [outcome.committed for outcome in outcomes] == [True, True, True, False]
    assert outcomes[3].behind


@pytest.mark.parametrize(
    "request_",
    [
        pb.ExchangeRequest(
            contribution=pb.Contribution(slice=0, weight=1.0, size_bytes=1 << 40, hash=bytes(16))
        ),
        pb.ExchangeRequest(contribution=pb.Contribution(slice=99, weight=1.0, hash=bytes(16))),
        pb.ExchangeRequest(contribution=pb.Contribution(slice=0, weight=-1.0, hash=bytes(16))),
        pb.ExchangeRequest(contribution=pb.Contribution(slice=0, weight=1.0, size_bytes=8, hash=bytes(32))),
        pb.ExchangeRequest(result=pb.Result(slice=1, size_bytes=4, hash=bytes(31))),
        pb.ExchangeRequest(
            result=pb.Result(slice=1, size_bytes=8, hash=bytes(32))
        ),  # not the hash of 8 zeros
        pb.ExchangeRequest(plan=pb.Plan()),
        pb.ExchangeRequest(prepare=pb.Prepare(attempt=1 << 20)),
        pb.ExchangeRequest(vote=pb.Vote(signature=bytes(63))),
        pb.ExchangeRequest(decided=pb.Decided(votes=[pb.Ballot(member=4, signature=bytes(64))])),
        pb.ExchangeRequest(decided=pb.Decided(hashes=bytes(31))),
        pb.ExchangeRequest(),
    ],
    ids=lambda request: str(request).partition("{")[0],
)
def test_a_message_out_of_bounds_ends_only_its_stream(request_: pb.ExchangeRequest) -> None:
    lab = TrainingLab(4)
    work = Work.random(lab, SIZE)
    members = lab.members()
    bad, target = lab.peers[1], lab.peers[0]
    terms = RoundTerms.of(JOB, 0, members, SIZE, work.codec)

    async def lie() -> str:
        hello = pb.Hello(exchange_number=0, agreement=terms.agreement())
        stream = await lab.transports[bad].open(target, EXCHANGE, deadline_s=2.0)
        await stream.send(Message(pb.ExchangeRequest(hello=hello).SerializeToString()))
        await stream.send(Message(request_.SerializeToString(), bytes(8)))
        return (await final_refusal(stream)).detail

    async def scenario(lab: TrainingLab) -> tuple[dict[PeerId, Outcome], str]:
        # The liar's own exchange never begins the round.
        calls = {
            peer: asyncio.ensure_future(
                lab.exchanges[peer].average(
                    0, members, work.values[peer], weight=work.weights[peer], codec=work.codec
                )
            )
            for peer in lab.peers
            if peer != bad
        }
        refusal = await lie()
        return dict(zip(calls, await asyncio.gather(*calls.values()), strict=True)), refusal

    outcomes, refusal = simulate(scenario, lab)
    assert refusal
    check_agreement(work, outcomes)
    assert all(outcome.committed for outcome in outcomes.values())


def test_a_peer_outside_the_roster_is_refused() -> None:
    lab = TrainingLab(3)
    work = Work.random(lab, SIZE)
    terms = RoundTerms.of(JOB, 0, lab.members(), SIZE, work.codec)

    async def scenario(lab: TrainingLab) -> str:
        async with lab.network.transport(PEERS[12]) as stranger:
            await lab.average(work)
            stream = await stranger.open(lab.peers[0], EXCHANGE, deadline_s=2.0)
            hello = pb.Hello(exchange_number=0, agreement=terms.agreement())
            await stream.send(Message(pb.ExchangeRequest(hello=hello).SerializeToString()))
            return (await final_refusal(stream)).detail

    assert "not in the roster" in simulate(scenario, lab)


def test_heartbeats_to_a_peer_that_does_not_read_end_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of a member that waits for a round and reads no heartbeats is ended, and its
    reservation is released."""
    monkeypatch.setattr(memory_network, "STREAM_BUFFER_BYTES", 16)
    lab = TrainingLab(2)
    target, idle = lab.peers

    async def scenario(lab: TrainingLab) -> None:
        stream = await lab.transports[idle].open(target, EXCHANGE, deadline_s=2.0)
        hello = pb.ExchangeRequest(hello=pb.Hello(exchange_number=9, agreement=bytes(16)))
        await stream.send(Message(hello.SerializeToString()))
        await asyncio.sleep(1.0)
        used = lab.transports[target].resources.peer(idle, asyncio.get_running_loop().time()).used
        assert used[Resource.PENDING_ROUNDS] == 1
        await asyncio.sleep(3 * TIMING.streams.silence_s)
        assert used[Resource.PENDING_ROUNDS] == 0
        stream.close()

    simulate(scenario, lab)


def test_exchange_numbers_only_increase() -> None:
    lab = TrainingLab(3)

    async def scenario(lab: TrainingLab) -> None:
        for round in (0, 1, 5):
            work = Work.random(lab, SIZE, seed=round)
            check_agreement(work, outcomes := await lab.average(work, round=round))
            assert all(outcome.committed for outcome in outcomes.values())
        with pytest.raises(ConfigError, match="exchange 5"):
            await lab.average(work, round=5)

    simulate(scenario, lab)


def test_equal_seeds_give_equal_traces() -> None:
    first, again = (random_round("7/3", faults=2)[0].network.trace_hash() for _ in range(2))
    assert first == again
    assert random_round("7/4", faults=2)[0].network.trace_hash() != first
