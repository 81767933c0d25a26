"""Choose the blocks of a joining host, as a pure function of all claims and a random source.

In Petals (Borzunov et al. 2023, "Distributed Inference and Fine-tuning of Large Language Models
Over The Internet", section 3.2) a host takes the weakest span of all. So hosts that join with the
same view of the swarm take the same blocks. Here a host draws a few spans at random and takes the
one with the most throughput. On a stale view, a choice among a few is better than a choice among
all (Mitzenmacher 2000, "How Useful Is Old Information?").
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.routing.throughput import ROUNDING, Claim, Supply, highest_speed, usual_speed

DRAWS = 8
"""Number of spans that a joining host compares. With more, it finds a better span on a fresh view.
On a stale view it more often picks the span that other hosts pick, too."""
MAX_RIVALS = 16
"""Most joining hosts whose choices a host computes before its own. Each choice takes milliseconds
in a large swarm."""


@dataclass(frozen=True)
class Choice:
    """Blocks [start, end) for a host. ``reason`` is one sentence for its owner."""

    start: int
    end: int
    reason: str


def choose_span(claims: Sequence[Claim], *, blocks: int, length: int, rng: random.Random) -> Choice:
    """Choose ``length`` blocks for a host that joins the hosts of ``claims``.

    While some blocks have no host, only spans that leave the fewest gaps, in the fewest pieces, are
    candidates. So the gaps stay together, and later hosts of any length can fill them. At most
    ``DRAWS`` candidates are drawn with ``rng``. The candidate with the highest throughput of the
    model wins. If candidates are equal, the one with the slowest block wins. Raises ``ValueError``
    unless 0 < length <= blocks.
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
        is_better = slowest < best_slowest if is_equal else after > best_after
        if is_better:
            best, best_after = start, after
    reason = _reason(rates[best : best + length], before, best_after)
    return Choice(best, best + length, reason)


def draw(blocks: int, length: int, rng: random.Random) -> list[int]:
    """Draw ``DRAWS`` starts of spans of ``length`` blocks.

    Starts before the first block and behind the last span are drawn, too, and then moved to the
    nearest span. So the first and last blocks are covered as often as the others.
    """
    return [min(max(rng.randrange(1 - length, blocks), 0), blocks - length) for _ in range(DRAWS)]


def resolve_claims(mine: Claim, others: Sequence[Claim], *, blocks: int) -> Choice:
    """Return the span to claim after the claims of other joining hosts have arrived.

    The result may be the span of ``mine``. Hosts that chose at the same time choose again, in the
    order of their peer ids, after the settled hosts. Each draws with its peer id as seed. So all
    hosts that see the same claims compute the same placement. A host that joins again draws the
    same spans, and may still have their weights.
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
    """Return the starts of the spans that leave the fewest blocks without a host, in the fewest
    pieces.

    Empty if every block has a host.
    """
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
    """Return the reason for a span, in one sentence.

    ``rates`` belong to its blocks; the span raises the throughput from ``before`` to ``after``.
    """
    gaps = sum(not rate for rate in rates)
    if gaps == len(rates):
        return "no other host has these blocks"
    if gaps:
        return f"no other host has {gaps} of these blocks"
    if after > 1.005 * before:
        return f"every block has a host, and another one here raises the swarm's throughput by {after / before - 1:.0%}"
    return f"every block has a host, and of {DRAWS} spans drawn at random this one has the slowest hosts"
