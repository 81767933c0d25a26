"""Placement leaves no gap that a joining host could fill, and hosts that join at once agree without messages."""

import random

from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.placement import Claim, choose_start, resolve_claims

BLOCKS = 8


@st.composite
def claims(draw: st.DrawFn) -> list[Claim]:
    found = []
    for index in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, BLOCKS - 1))
        end = draw(st.integers(start + 1, BLOCKS))
        found.append(Claim(PeerId(f"old{index}"), start, end, draw(st.sampled_from([0.5, 1.0, 4.0]))))
    return found


def uncovered(found: list[Claim]) -> int:
    return BLOCKS - len({block for claim in found for block in range(claim.start, claim.end)})


@given(claims(), st.integers(1, BLOCKS))
def test_a_newcomer_fills_the_largest_gap_that_a_window_can(found: list[Claim], length: int) -> None:
    start = choose_start(found, blocks=BLOCKS, length=length)
    assert 0 <= start <= BLOCKS - length
    chosen = uncovered([*found, Claim(PeerId("new"), start, start + length)])
    best = min(
        uncovered([*found, Claim(PeerId("new"), other, other + length)])
        for other in range(BLOCKS - length + 1)
    )
    assert chosen == best


@given(claims(), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_hosts_that_join_at_once_agree_in_any_order(
    old: list[Claim], lengths: list[int], rng: random.Random
) -> None:
    joining = {
        PeerId(f"new{index}"): Claim(
            PeerId(f"new{index}"),
            start := choose_start(old, blocks=BLOCKS, length=length),
            start + length,
            settled=False,
        )
        for index, length in enumerate(lengths)
    }
    for _ in range(len(joining)):
        for peer in rng.sample(sorted(joining), len(joining)):
            others = [*old, *(claim for other, claim in joining.items() if other != peer)]
            joining[peer] = resolve_claims(joining[peer], others, blocks=BLOCKS)
    again = {
        peer: resolve_claims(
            claim, [*old, *(c for other, c in joining.items() if other != peer)], blocks=BLOCKS
        )
        for peer, claim in joining.items()
    }
    assert again == joining, "a second round changes no choice"
    one_by_one = list(old)
    for peer in sorted(joining):
        length = joining[peer].end - joining[peer].start
        start = choose_start(one_by_one, blocks=BLOCKS, length=length)
        one_by_one.append(Claim(peer, start, start + length, settled=False))
    assert uncovered([*old, *joining.values()]) == uncovered(one_by_one), "as good as one after another"
