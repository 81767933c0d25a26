"""The choice of blocks of a joining host: a pure function of the claims of all hosts and a random source.

Spans are compared by the throughput of the swarm. A host computes ``blocks_per_s`` single-token steps of one block per second, and spends
them on the blocks of its span as its clients ask. The most tokens per second that all hosts together can give is, by the min-cut theorem,

    min over sets S of blocks of (sum of blocks_per_s over the hosts that have a block of S) / |S|

Petals (Borzunov et al. 2023, "Distributed Inference and Fine-tuning of Large Language Models Over The Internet", section 3.2) takes the
weakest span of all, so hosts that join with the same view of the swarm all take the same blocks. Here a host compares a few spans drawn at
random: on a stale view a choice among few does better than one among all (Mitzenmacher 2000, "How Useful Is Old Information?").
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import median

from swarmnet_protocols.net import PeerId

DRAWS = 8
"""Spans that a joining host compares. More find a better one on a fresh view, and more often the same one as other hosts on a stale view."""
MAX_RIVALS = 16
"""Joining hosts whose choices a host computes before its own, at most, because each takes milliseconds in a large swarm."""
MAX_SPEED = 10.0
"""Highest speed of a claim that counts, in medians of all claims: a host can announce any speed, and so keep others away from its blocks."""
_ROUNDING = 1e-9
"""Relative difference below which two throughputs count as equal."""


@dataclass(frozen=True)
class Claim:
    """Blocks [start, end) that a host serves, or intends to, at ``blocks_per_s`` single-token steps of one block per second.

    ``settled``: whether the choice is final.
    """

    peer: PeerId
    start: int
    end: int
    blocks_per_s: float = 1.0
    settled: bool = True


@dataclass(frozen=True)
class Choice:
    """Blocks [start, end) for a host, and the reason in one sentence for its owner."""

    start: int
    end: int
    reason: str


def throughput(claims: Iterable[Claim], blocks: int) -> float:
    """Tokens per second that the hosts of ``claims`` can give together; 0 if one of the model's ``blocks`` has no host."""
    return _throughput(_by_start(claims, blocks), blocks)


def choose_span(claims: Sequence[Claim], *, blocks: int, length: int, rng: random.Random) -> Choice:
    """The span of ``length`` blocks for a host that joins the hosts of ``claims``.

    While blocks have no host, it is a span that leaves the fewest such blocks, in the fewest pieces, so that hosts of any lengths fit
    beside it. Of at most ``DRAWS`` possible spans, drawn with ``rng``, it is the one with which the swarm has the highest throughput, and
    among equals the one with the slowest block. Raises ``ValueError`` unless 0 < length <= blocks.
    """
    if not 0 < length <= blocks:
        raise ValueError(f"a span of {length} in a model of {blocks} blocks")
    usual = median([claim.blocks_per_s for claim in claims] or [1.0])
    supply = _by_start(claims, blocks, most=MAX_SPEED * usual)
    rates = _rates(supply, blocks)
    starts = _closing(rates, length)
    if starts:
        drawn = rng.sample(starts, min(DRAWS, len(starts)))
    else:
        # Starts before block 0 and after the last possible one count as these, so that the first and last blocks have their share.
        drawn = [min(max(rng.randrange(1 - length, blocks), 0), blocks - length) for _ in range(DRAWS)]
    before = _throughput(supply, blocks)
    best, best_after = drawn[0], -1.0
    for start in drawn:
        supply[start].append((start + length, usual))
        after = _throughput(supply, blocks)
        supply[start].pop()
        is_equal = abs(after - best_after) <= _ROUNDING * after
        slowest, best_slowest = min(rates[start : start + length]), min(rates[best : best + length])
        if slowest < best_slowest if is_equal else after > best_after:
            best, best_after = start, after
    reason = _reason(rates[best : best + length], before, best_after)
    return Choice(best, best + length, reason)


def resolve_claims(mine: Claim, others: Sequence[Claim], *, blocks: int) -> Choice:
    """The span to claim in place of that of ``mine``, or the same one, after the claims of other joining hosts arrived.

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


_Supply = list[list[tuple[int, float]]]
"""For each block, the ends of the spans that start there, each with the summed ``blocks_per_s`` of its hosts."""


def _by_start(claims: Iterable[Claim], blocks: int, most: float = float("inf")) -> _Supply:
    """The claims within the model, each with at most ``most`` blocks per second."""
    spans: dict[tuple[int, int], float] = {}
    for claim in claims:
        span = max(claim.start, 0), min(claim.end, blocks)
        if span[0] < span[1]:
            spans[span] = spans.get(span, 0.0) + min(claim.blocks_per_s, most)
    supply: _Supply = [[] for _ in range(blocks)]
    for (start, end), blocks_per_s in spans.items():
        supply[start].append((end, blocks_per_s))
    return supply


def _rates(supply: _Supply, blocks: int) -> list[float]:
    """Tokens per second of each block if every host spends the same time on each of its blocks."""
    rates = [0.0] * blocks
    for start, spans in enumerate(supply):
        for end, blocks_per_s in spans:
            for block in range(start, end):
                rates[block] += blocks_per_s / (end - start)
    return rates


def _closing(rates: Sequence[float], length: int) -> list[int]:
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


def _throughput(supply: _Supply, blocks: int) -> float:
    """The least ratio of the module's equation, found by Dinkelbach's method: each flow that falls short yields a smaller ratio."""
    demand = sum(blocks_per_s for spans in supply for _, blocks_per_s in spans) / blocks
    while demand > 0.0:
        ratio = _tightest(supply, blocks, demand)
        if ratio >= demand * (1 - _ROUNDING):
            break
        demand = ratio
    return demand


def _tightest(supply: _Supply, blocks: int, demand: float) -> float:
    """The smallest ratio among the cuts that keep ``demand`` tokens per second from some block; ``demand`` if none does.

    Block after block takes its demand from the hosts that have it, those first whose span ends first: then a block falls short only
    if no other division gives more to it and those before it.
    """
    left = [0.0] * (blocks + 1)  # blocks per second that the hosts of spans with this end have left
    ends: list[int] = []  # of spans with something left, as a heap
    furthest = [0] * blocks  # the last end that a block has taken from
    taken = [0.0] * blocks
    smallest = demand
    for block in range(blocks):
        for end, blocks_per_s in supply[block]:
            if blocks_per_s and not left[end]:
                heappush(ends, end)
            left[end] += blocks_per_s
        while ends and taken[block] < demand:
            end = ends[0]
            if end > block:
                furthest[block] = end
                part = min(left[end], demand - taken[block])
                taken[block] += part
                left[end] -= part
                if left[end]:
                    break
            left[heappop(ends)] = 0.0
        if taken[block] < demand * (1 - _ROUNDING):
            # The cut: this block and, of those before it, each that took from a host which also has a block of the cut.
            total, size, first = taken[block], 1, block
            for earlier in range(block - 1, -1, -1):
                if furthest[earlier] > first:
                    total, size, first = total + taken[earlier], size + 1, earlier
            smallest = min(smallest, total / size)
    return smallest


def _reason(rates: Sequence[float], before: float, after: float) -> str:
    """Why the span whose blocks have these rates is chosen, if it raises the throughput from ``before`` to ``after``."""
    gaps = sum(not rate for rate in rates)
    if gaps == len(rates):
        return "no other host has these blocks"
    if gaps:
        return f"no other host has {gaps} of these blocks"
    if after > 1.005 * before:
        return f"every block has a host, and another one here raises the swarm's throughput by {after / before - 1:.0%}"
    return f"every block has a host, and these blocks have the slowest ones of {DRAWS} spans drawn at random"
