"""Placement: blocks without a host first, then the throughput of the swarm; the same answer for
every node."""

import random

import pytest

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing import placement
from swarmnet_protocols.routing import throughput as throughput_module
from swarmnet_protocols.routing.placement import MAX_RIVALS, choose_span, resolve_claims
from swarmnet_protocols.routing.throughput import Claim, throughput
from tests.defences import defence, replacing

A, B, C = (PeerId(name) for name in "abc")


def starts(claims: list[Claim], *, blocks: int, length: int) -> set[int]:
    """The starts that some of 200 hosts choose."""
    return {
        choose_span(claims, blocks=blocks, length=length, rng=random.Random(seed)).start
        for seed in range(200)
    }


def test_the_first_host_starts_at_the_beginning_or_ends_at_the_end() -> None:
    assert starts([], blocks=6, length=2) == {0, 4}


def test_a_gap_goes_before_a_slow_block() -> None:
    claims = [Claim(A, 0, 2, 1.0), Claim(B, 2, 4, 5.0)]
    assert starts(claims, blocks=6, length=2) == {4}


def test_a_host_helps_most_where_the_slowest_host_is_alone() -> None:
    claims = [Claim(A, 0, 10, 10.0), Claim(B, 10, 20, 30.0), Claim(C, 20, 30, 30.0)]
    choice = choose_span(claims, blocks=30, length=10, rng=random.Random(1))
    with_it = [*claims, Claim(PeerId("d"), choice.start, choice.end, 30.0)]
    assert choice.start < 10
    assert throughput(with_it, 30) > throughput(claims, 30)


def test_a_host_gives_its_time_to_the_slower_of_two_blocks() -> None:
    assert throughput([Claim(A, 0, 1, 1.0), Claim(B, 1, 2, 3.0), Claim(C, 0, 2, 2.0)], 2) == 3.0


@pytest.mark.parametrize("length", [0, 7, -1])
def test_a_span_that_does_not_fit_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="span"):
        choose_span([], blocks=6, length=length, rng=random.Random(0))


def test_claims_beyond_the_model_count_only_within_it() -> None:
    claims = [Claim(A, -5, 3), Claim(B, 5, 1 << 30), Claim(C, 7, 9)]
    assert starts(claims, blocks=6, length=2) == {3}
    assert throughput(claims, 6) == 0.0


def test_the_reason_names_the_blocks_without_a_host_and_then_the_gain() -> None:
    claims = [Claim(A, 0, 2, 2.0)]
    reasons = []
    for start, end in [(2, 4), (4, 6), (0, 6), (0, 6)]:
        choice = choose_span(claims, blocks=6, length=4, rng=random.Random(0))
        reasons.append(choice.reason)
        claims.append(Claim(B, start, end, 2.0))
    assert reasons == [
        "no other host has these blocks",
        "no other host has 2 of these blocks",
        "every block has a host, and another one here raises the swarm's throughput by 33%",
        "every block has a host, and another one here raises the swarm's throughput by 25%",
    ]


def test_rivals_give_way_by_peer_id_and_all_to_the_settled() -> None:
    mine, rival = Claim(B, 0, 2, settled=False), Claim(A, 0, 2, settled=False)
    first = resolve_claims(rival, [mine], blocks=4)
    assert first == resolve_claims(rival, [], blocks=4), "a host with a greater peer id does not count"
    assert resolve_claims(mine, [rival], blocks=4).start == 2 - first.start
    assert resolve_claims(rival, [Claim(C, 0, 2)], blocks=4).start == 2


def test_a_rival_with_more_blocks_than_the_model_hosts_them_all() -> None:
    assert "every block" in resolve_claims(Claim(B, 0, 2), [Claim(A, 0, 99, settled=False)], blocks=4).reason


@defence(
    "intents of others cost a joining host a bounded time", off=replacing(placement, "MAX_RIVALS", 1 << 20)
)
def test_the_choices_that_a_host_computes_for_others_are_bounded() -> None:
    computed = []

    def counted(*args: object, **named: object) -> object:
        computed.append(1)
        return choose_span(*args, **named)  # type: ignore[arg-type]

    rivals = [Claim(PeerId(f"a{number}"), 0, 2, settled=False) for number in range(3 * MAX_RIVALS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarmnet_protocols.routing.placement.choose_span", counted)
        resolve_claims(Claim(B, 0, 2), rivals, blocks=4)
    assert len(computed) == MAX_RIVALS + 1


@defence("an announced speed keeps few joining hosts away", off=replacing(throughput_module, "FASTEST", 0.0))
def test_a_false_speed_keeps_no_hosts_away() -> None:
    def later_hosts(speed: float) -> float:
        """The mean number of the 100 later hosts on the blocks of a host that announces ``speed``.
        All others announce 1."""
        claims = [Claim(B, start, start + 2) for start in (0, 2, 4, 6)] * 3 + [Claim(A, 6, 8, speed)]
        for seed in range(100):
            choice = choose_span(claims, blocks=8, length=2, rng=random.Random(seed))
            claims.append(Claim(C, choice.start, choice.end))
        return sum(max(0, claim.end - max(claim.start, 6)) for claim in claims[13:]) / 2

    assert later_hosts(1e6) == later_hosts(1.0)
