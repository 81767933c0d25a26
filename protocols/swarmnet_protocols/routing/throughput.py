"""The throughput of a swarm: what its hosts can give together, each of them spending its time on any blocks of its span.

A host computes ``blocks_per_s`` single-token steps of one block per second. The most tokens per second that all hosts together can give is,
by the min-cut theorem,

    min over sets S of blocks of (sum of blocks_per_s over the hosts that have a block of S) / |S|

For spans no solver is needed. To give ``demand`` tokens per second to every block, the blocks are filled in order, each from the hosts whose
spans end first: no other division gives more in total (Glover 1967, "Maximum Matching in a Convex Bipartite Graph"), and a block that falls
short yields a tighter set.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import median

from swarmnet_protocols.net import PeerId

MAX_SPEED = 10.0
"""Highest speed of a claim that counts, in medians of all claims: a host can announce any speed, and so keep others away from its blocks."""
ROUNDING = 1e-9
"""Relative difference below which two throughputs count as equal."""


@dataclass(frozen=True)
class Claim:
    """Blocks [start, end) that a host serves, or intends to, at ``blocks_per_s`` single-token steps of one block per second.

    ``settled``: whether it serves them or has chosen them for good. A host that moves has two claims: a settled one for the blocks that it
    still serves, and another one for those that it will serve.
    """

    peer: PeerId
    start: int
    end: int
    blocks_per_s: float = 1.0
    settled: bool = True
    may_move: bool = True
    """Whether the host may choose other blocks: its owner can name them."""


def usual_speed(claims: Iterable[Claim]) -> float:
    """The median of the claimed speeds: what to expect of a host whose speed is not measured. 1 without claims."""
    return median([claim.blocks_per_s for claim in claims] or [1.0])


def throughput(claims: Iterable[Claim], blocks: int) -> float:
    """Tokens per second that the hosts of ``claims`` can give together; 0 if one of the model's ``blocks`` has no host."""
    return Supply(blocks, claims).throughput()


class Supply:
    """Blocks per second that hosts can spend, by their spans. Claims count within the model, each with ``most`` blocks per second at most."""

    def __init__(self, blocks: int, claims: Iterable[Claim] = (), most: float = float("inf")) -> None:
        self.blocks = blocks
        self._by_start: list[dict[int, float]] = [{} for _ in range(blocks)]
        """For each block, the ends of the spans that start there, each with the summed speed of its hosts."""
        for claim in claims:
            self.add(claim.start, claim.end, min(claim.blocks_per_s, most))

    def add(self, start: int, end: int, blocks_per_s: float) -> None:
        """Add a host of blocks [start, end); remove one, if its speed is negative."""
        start, end = max(start, 0), min(end, self.blocks)
        if start < end:
            ends = self._by_start[start]
            ends[end] = ends.get(end, 0.0) + blocks_per_s
            if ends[end] <= ROUNDING * abs(blocks_per_s):
                del ends[end]

    def copy(self) -> "Supply":
        copied = Supply(self.blocks)
        copied._by_start = [dict(ends) for ends in self._by_start]
        return copied

    @property
    def mean(self) -> float:
        """The throughput if every host had every block: no placement of these hosts has a higher one."""
        return sum(blocks_per_s for ends in self._by_start for blocks_per_s in ends.values()) / self.blocks

    def rates(self) -> list[float]:
        """Tokens per second of each block if every host spends the same time on each of its blocks."""
        rates = [0.0] * self.blocks
        for start, ends in enumerate(self._by_start):
            for end, blocks_per_s in ends.items():
                for block in range(start, end):
                    rates[block] += blocks_per_s / (end - start)
        return rates

    def throughput(self) -> float:
        """The least ratio of the module's equation, found by Dinkelbach's method: each filling that falls short yields a smaller ratio."""
        demand = self.mean
        while demand > 0.0:
            taken, furthest = self._fill(demand)
            ratio = _tightest(taken, furthest, demand)
            if ratio >= demand * (1 - ROUNDING):
                break
            demand = ratio
        return demand

    def served(self, demand: float) -> float:
        """The most blocks per second that the hosts can spend if each block takes at most ``demand`` tokens per second."""
        return sum(self._fill(demand)[0])

    def _fill(self, demand: float) -> tuple[list[float], list[int]]:
        """For each block, the tokens per second that it gets, at most ``demand``, and the last end of the spans whose hosts give them."""
        left = [0.0] * (self.blocks + 1)  # blocks per second that the hosts of spans with this end have left
        open_ends: list[int] = []  # of spans with something left, as a heap
        furthest = [0] * self.blocks
        taken = [0.0] * self.blocks
        for block, spans in enumerate(self._by_start):
            for end, blocks_per_s in spans.items():
                if blocks_per_s and not left[end]:
                    heappush(open_ends, end)
                left[end] += blocks_per_s
            while open_ends and taken[block] < demand:
                end = open_ends[0]
                if end > block:
                    furthest[block] = end
                    part = min(left[end], demand - taken[block])
                    taken[block] += part
                    left[end] -= part
                    if left[end]:
                        break
                left[heappop(open_ends)] = 0.0
        return taken, furthest


def _tightest(taken: Sequence[float], furthest: Sequence[int], demand: float) -> float:
    """The smallest ratio among the cuts that keep ``demand`` tokens per second from some block; ``demand`` if none does."""
    smallest = demand
    for block, rate in enumerate(taken):
        if rate < demand * (1 - ROUNDING):
            # The cut: this block and, of those before it, each that took from a host which also has a block of the cut.
            total, size, first = rate, 1, block
            for earlier in range(block - 1, -1, -1):
                if furthest[earlier] > first:
                    total, size, first = total + taken[earlier], size + 1, earlier
            smallest = min(smallest, total / size)
    return smallest
