"""The choice of blocks of a joining host: a pure function of the claims of all hosts and a random source.

In Petals (Borzunov et al. 2023, "Distributed Inference and Fine-tuning of Large Language Models Over The Internet", section 3.2) a host takes
the weakest span of all, so hosts that join with the same view of the swarm take the same blocks. Here a host draws a few spans at random and
takes the one that gives the swarm the most throughput: on a stale view, a choice among few is better than one among all (Mitzenmacher 2000,
"How Useful Is Old Information?").
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.routing.throughput import ROUNDING, Claim, Supply, highest_speed, usual_speed

DRAWS = 8
"""Spans that a joining host compares. With more, it finds a better one on a fresh view, and more often the one that other hosts find on a stale view."""
MAX_RIVALS = 16
"""Most joining hosts whose choices a host computes before its own: each choice takes milliseconds in a large swarm."""


@dataclass(frozen=True)
class Choice:
    """Blocks [start, end) for a host, and the reason in one sentence for its owner."""

    start: int
    end: int
    reason: str


def choose_span(claims: Sequence[Claim], *, blocks: int, length: int, rng: random.Random) -> Choice:
    """The span of ``length`` blocks for a host that joins the hosts of ``claims``.

    While blocks have no host, only spans are possible that leave the fewest such blocks, in the fewest pieces, so that hosts of any length
    fit beside it. At most ``DRAWS`` possible spans are drawn with ``rng``. The result is the one with which the swarm has the highest
    throughput, and among equals the one with the slowest block. Raises ``ValueError`` unless 0 < length <= blocks.
    """
    if not 0 < length <= blocks:
        raise ValueError(f"a span of {length} in a model of {blocks} blocks")
    usual = usual_speed(claims)
    supply = Supply(blocks, claims, most=highest_speed(claims))
    rates = supply.rates()
    starts = closing(rates, length)
    drawn = rng.sample(starts, min(DRAWS, len(starts))) if starts else draw(blocks, length, rng)
    before = supply.throughput()
    best, best_after = drawn[0], -1.0
    for start in drawn:
        supply.add(start, start + length, usual)
        after = supply.throughput()
        supply.add(start, start + length, -usual)
        is_equal = abs(after - best_after) <= ROUNDING * after
        slowest, best_slowest = min(rates[start : start + length]), min(rates[best : best + length])
        if slowest < best_slowest if is_equal else after > best_after:
            best, best_after = start, after
    reason = _reason(rates[best : best + length], before, best_after)
    return Choice(best, best + length, reason)


def draw(blocks: int, length: int, rng: random.Random) -> list[int]:
    """``DRAWS`` starts of spans of ``length`` blocks.

    Starts are drawn beyond both ends and then clamped, so that the first and last blocks are covered as often as the others.
    """
    return [min(max(rng.randrange(1 - length, blocks), 0), blocks - length) for _ in range(DRAWS)]


def resolve_claims(mine: Claim, others: Sequence[Claim], *, blocks: int) -> Choice:
    """The span to claim, which may be that of ``mine``, after the claims of other joining hosts have arrived.

    Hosts that chose at the same time choose again in the order of their peer ids, after the settled ones. Each draws with its peer id as
    the seed, so all hosts that see the same claims compute the same placement without further messages, and a host that joins again
    draws the same spans, whose weights it may still have.
    """
    placed = [claim for claim in others if claim.settled]
    rivals = sorted(
        (claim for claim in others if not claim.settled and claim.peer < mine.peer),
        key=lambda claim: claim.peer,
    )
    for rival in [*rivals[:MAX_RIVALS], mine]:
        length = min(rival.end - rival.start, blocks)
        choice = choose_span(placed, blocks=blocks, length=length, rng=random.Random(rival.peer))
        placed.append(Claim(rival.peer, choice.start, choice.end, rival.blocks_per_s))
    return choice


def closing(rates: Sequence[float], length: int) -> list[int]:
    """The starts of the spans that leave the fewest blocks without a host, in the fewest pieces; none if every block has a host."""
    if all(rates):
        return []
    found: list[int] = []
    least = (len(rates), len(rates))
    for start in range(len(rates) - length + 1):
        is_gap = [not rate for rate in rates]
        is_gap[start : start + length] = [False] * length
        pieces = sum(gap and not before for before, gap in zip([False, *is_gap], is_gap, strict=False))
        left = (sum(is_gap), pieces)
        if left < least:
            found, least = [], left
        if left == least:
            found.append(start)
    return found


def _reason(rates: Sequence[float], before: float, after: float) -> str:
    """The reason for choosing a span whose blocks have these rates, and which raises the throughput from ``before`` to ``after``."""
    gaps = sum(not rate for rate in rates)
    if gaps == len(rates):
        return "no other host has these blocks"
    if gaps:
        return f"no other host has {gaps} of these blocks"
    if after > 1.005 * before:
        return f"every block has a host, and another one here raises the swarm's throughput by {after / before - 1:.0%}"
    return f"every block has a host, and these blocks have the slowest ones of {DRAWS} spans drawn at random"
