"""The throughput of a swarm: tokens per second of all hosts, which divide their time among their
blocks.

A host computes ``blocks_per_s`` single-token steps of one block per second. By the max-flow min-cut
theorem, all hosts together compute at most this many tokens per second:

    min over sets S of blocks of (sum of blocks_per_s over the hosts that have a block of S) / |S|

Hosts have contiguous spans, so no solver is needed. To serve ``demand`` tokens per second on every
block, :class:`Supply` fills the blocks in order, each from the hosts whose spans end first. No
other division serves more in total (Glover 1967, "Maximum Matching in a Convex Bipartite Graph"). A
block that falls short shows a set with a smaller ratio. Blocks between two bounds of spans have the
same hosts and are filled as one.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from statistics import median

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.spans import clipped

MAX_SPEED = 10.0
"""Highest speed that counts, in multiples of the median of all claims. With a false speed, a host
could keep others away from its blocks."""
FASTEST = 0.1
"""Share of all claims that are cut: the fastest ones. Each counts as fast as the slowest of them.
So a few false speeds count no more than true ones."""
ROUNDING = 1e-9
"""Relative difference below which two throughputs count as equal."""


@dataclass(frozen=True)
class Claim:
    """Blocks [start, end) that a host serves or intends to serve.

    ``blocks_per_s`` counts single-token steps of one block. ``settled`` is true if the host serves
    the blocks or has chosen them for good. A host that moves has two claims: a settled one for the
    blocks that it still serves, and another for the blocks that it will serve.
    """

    peer: PeerId
    start: int
    end: int
    blocks_per_s: float = 1.0
    settled: bool = True
    may_move: bool = True
    """True if the host may move to other blocks; false if its owner has fixed them."""
    may_switch: bool = False
    """True if the host may switch to another model of the swarm."""
    load: float = 0.0
    """Share of the last minutes that the host spent computing, in [0, 1]."""
    seen: bool = True
    """True if the reader has called the host and it confirmed these blocks (``sightings.py``)."""
    place: str = ""
    """Subnet where the reader reached the host. Hosts of one place count as one host; empty counts
    alone."""
    proven: bool = False
    """True if the host has lately computed one of these blocks for the reader."""


def usual_speed(claims: Iterable[Claim]) -> float:
    """Return the median claimed speed, assumed for a host without a measured speed; 1 without
    claims.
    """
    return median([claim.blocks_per_s for claim in claims] or [1.0])


def highest_speed(claims: Iterable[Claim]) -> float:
    """Return the speed that faster claims are cut to, at most ``MAX_SPEED`` medians.

    This is the 90th percentile (nearest rank). With fewer than ten claims it is the highest speed.
    """
    speeds = sorted(claim.blocks_per_s for claim in claims)
    if not speeds:
        return MAX_SPEED
    return min(speeds[math.ceil((1 - FASTEST) * len(speeds)) - 1], MAX_SPEED * median(speeds))


def holders(claims: Iterable[Claim], blocks: int) -> list[int]:
    """Return the number of hosts of each block. All hosts of one place are one host."""
    changes = [0] * (blocks + 1)
    shared = defaultdict[str, list[tuple[int, int]]](list)
    for claim in claims:
        start, end = clipped(claim, blocks)
        if start < end and claim.place:
            shared[claim.place].append((start, end))
        elif start < end:
            changes[start] += 1
            changes[end] -= 1
    for spans in shared.values():
        reached = 0
        for start, end in sorted(spans):
            if end > reached:
                changes[max(start, reached)] += 1
                changes[end] -= 1
                reached = end
    return list(accumulate(changes[:-1]))


def throughput(claims: Iterable[Claim], blocks: int) -> float:
    """Return the tokens per second of the hosts of ``claims`` together; 0 if a block has no
    host."""
    return Supply(blocks, claims).throughput()


class Supply:
    """The speeds of hosts by their spans, in blocks per second.

    Claims are clipped to the model's blocks, and to ``most`` blocks per second each.
    """

    def __init__(self, blocks: int, claims: Iterable[Claim] = (), most: float = float("inf")) -> None:
        self.blocks = blocks
        self._by_start: dict[int, dict[int, float]] = {}
        """First block of a span → end of the span → summed speed of its hosts."""
        bounds = {0, blocks}
        for claim in claims:
            start, end = clipped(claim, blocks)
            if start < end and claim.blocks_per_s > 0:
                bounds.update((start, end))
                ends = self._by_start.setdefault(start, {})
                ends[end] = ends.get(end, 0.0) + min(claim.blocks_per_s, most)
        self._bounds = sorted(bounds)
        """All starts and ends of spans, sorted. Blocks between two of them have the same hosts."""

    def add(self, start: int, end: int, blocks_per_s: float) -> None:
        """Add a host of blocks [start, end), or remove one with a negative speed."""
        start, end = max(start, 0), min(end, self.blocks)
        if start >= end:
            return
        for bound in (start, end):
            at = bisect_left(self._bounds, bound)
            if self._bounds[at] != bound:
                self._bounds.insert(at, bound)
        ends = self._by_start.setdefault(start, {})
        ends[end] = ends.get(end, 0.0) + blocks_per_s
        if ends[end] <= ROUNDING * abs(blocks_per_s):
            del ends[end]

    def copy(self) -> "Supply":
        copied = Supply(self.blocks)
        copied._by_start = {start: ends.copy() for start, ends in self._by_start.items()}
        copied._bounds = self._bounds.copy()
        return copied

    @property
    def mean(self) -> float:
        """The throughput if every host had every block. No placement of these hosts has a higher
        one.
        """
        return sum(sum(ends.values()) for ends in self._by_start.values()) / self.blocks

    def rates(self) -> list[float]:
        """Return the tokens per second of each block if hosts divide their time equally."""
        rates = [0.0] * self.blocks
        for start, ends in self._by_start.items():
            for end, blocks_per_s in ends.items():
                for block in range(start, end):
                    rates[block] += blocks_per_s / (end - start)
        return rates

    def throughput(self) -> float:
        """Return the least ratio of the module's equation, by Dinkelbach's method.

        Each filling that falls short yields a smaller ratio.
        """
        demand = self.mean
        while demand > 0.0:
            ratio = self._tightest(*self._filled(demand), demand)
            if ratio >= demand * (1 - ROUNDING):
                break
            demand = ratio
        return demand

    def served(self, demand: float) -> float:
        """Return the most blocks per second that hosts can serve if every block is asked for
        ``demand`` tokens per second."""
        return sum(self._filled(demand)[0])

    def can_give(self, demand: float) -> bool:
        """Tell whether the throughput is at least ``demand``. Much faster than ``throughput``."""
        return self.served(demand) >= self.blocks * demand * (1 - ROUNDING)

    def _filled(self, demand: float) -> tuple[list[float], list[int]]:
        """Divide the hosts' time so that most is served, up to ``demand`` tokens per second and
        block.

        Returns for each part between two bounds: the blocks per second spent on it, and the last
        end of the spans of the hosts that spend them.
        """
        # blocks per second that the hosts of spans with this end have left
        left: dict[int, float] = {}
        open_ends: list[int] = []  # of spans with something left, as a heap
        taken: list[float] = []
        furthest: list[int] = []
        for start, next_start in pairwise(self._bounds):
            for end, blocks_per_s in self._by_start.get(start, {}).items():
                if end in left:
                    left[end] += blocks_per_s
                else:
                    left[end] = blocks_per_s
                    heappush(open_ends, end)
            wanted = missing = demand * (next_start - start)
            last = 0
            while open_ends:
                end = open_ends[0]
                if end > start:
                    last = end
                    if left[end] > missing:
                        left[end] -= missing
                        missing = 0.0
                        break
                    missing -= left[end]
                del left[heappop(open_ends)]
            taken.append(wanted - missing)
            furthest.append(last)
        return taken, furthest

    def _tightest(self, taken: Sequence[float], furthest: Sequence[int], demand: float) -> float:
        """Return the smallest ratio among the cuts that explain why a block falls short of
        ``demand``. If no block falls short, return ``demand``."""
        smallest = demand
        for part, (start, end) in enumerate(pairwise(self._bounds)):
            if taken[part] < (end - start) * demand * (1 - ROUNDING):
                # The cut contains these blocks, and all earlier blocks served by a host that also
                # has a block of the cut.
                total, size, first = taken[part], end - start, start
                for earlier in range(part - 1, -1, -1):
                    if furthest[earlier] > first:
                        first = self._bounds[earlier]
                        total, size = total + taken[earlier], size + self._bounds[earlier + 1] - first
                smallest = min(smallest, total / size)
        return smallest
