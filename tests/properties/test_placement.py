"""The throughput of a swarm is that of the tightest set of blocks; a joining host leaves no gap
that it could fill; hosts that join at once agree."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.placement import choose_span, resolve_claims
from swarmnet_protocols.routing.throughput import Claim, throughput

BLOCKS = 8


@st.composite
def claims(draw: st.DrawFn, most: int = 5) -> list[Claim]:
    found = []
    for index in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, BLOCKS - 1))
        end = draw(st.integers(start + 1, BLOCKS))
        speed = draw(st.sampled_from([0.01, 0.5, 1.0, 1.1, 4.0]))
        found.append(Claim(PeerId(f"old{index}"), start, end, speed))
    return found


def gaps(found: list[Claim]) -> list[bool]:
    served = {block for claim in found for block in range(claim.start, claim.end)}
    return [block not in served for block in range(BLOCKS)]


def pieces(found: list[Claim]) -> int:
    return sum(gap and not before for before, gap in pairwise([False, *gaps(found)]))


@given(claims(10))
def test_the_throughput_is_that_of_the_tightest_set_of_blocks(found: list[Claim]) -> None:
    """Compared with all sets of blocks: by the min-cut theorem the throughput is the lowest bound
    that a set gives."""
    ratios = []
    for chosen in range(1, 1 << BLOCKS):
        blocks = {block for block in range(BLOCKS) if chosen >> block & 1}
        speeds = [claim.blocks_per_s for claim in found if blocks & set(range(claim.start, claim.end))]
        ratios.append(sum(speeds) / len(blocks))
    assert throughput(found, BLOCKS) == pytest.approx(min(ratios))


@given(claims(), st.integers(1, BLOCKS), st.integers())
def test_a_newcomer_fills_the_largest_gap_and_leaves_fewest_pieces(
    found: list[Claim], length: int, seed: int
) -> None:
    choice = choose_span(found, blocks=BLOCKS, length=length, rng=random.Random(seed))
    assert 0 <= choice.start < choice.end == choice.start + length <= BLOCKS

    def left(start: int) -> tuple[int, int]:
        after = [*found, Claim(PeerId("new"), start, start + length)]
        return sum(gaps(after)), pieces(after)

    assert left(choice.start) == min(left(start) for start in range(BLOCKS - length + 1))


@given(claims(), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_hosts_that_join_at_once_agree_in_any_order(
    old: list[Claim], lengths: list[int], rng: random.Random
) -> None:
    joining = {}
    for index, length in enumerate(lengths):
        peer = PeerId(f"new{index}")
        choice = choose_span(old, blocks=BLOCKS, length=length, rng=random.Random(peer))
        joining[peer] = Claim(peer, choice.start, choice.end, settled=False)

    def resolved(peer: PeerId) -> Claim:
        others = [*old, *(claim for other, claim in joining.items() if other != peer)]
        choice = resolve_claims(joining[peer], others, blocks=BLOCKS)
        return Claim(peer, choice.start, choice.end, settled=False)

    for _ in range(len(joining)):
        for peer in rng.sample(sorted(joining), len(joining)):
            joining[peer] = resolved(peer)
    assert {peer: resolved(peer) for peer in joining} == joining, "a second round changes no choice"
    one_by_one = list(old)
    for peer in sorted(joining):
        length = joining[peer].end - joining[peer].start
        choice = choose_span(one_by_one, blocks=BLOCKS, length=length, rng=random.Random(peer))
        one_by_one.append(Claim(peer, choice.start, choice.end))
    assert gaps([*old, *joining.values()]) == gaps(one_by_one), "as good as one after another"
