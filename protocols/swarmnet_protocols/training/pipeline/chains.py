"""The choice of a microbatch's workers, one of each stage, and of an origin's microbatches. Pure.

Both follow the seconds that each worker announces for a batch. In each round, the workers of a
stage lie on a circle, in a drawn order that is the same for all origins. A worker's arc is as long
as its rate. All microbatches of the round lie on the same circle, so every worker gets its share of
them. Each origin uses a few workers of a stage, however many there are.

An origin takes its workers by smooth weighted round robin (as in nginx): every worker earns its
share with each microbatch. The worker with the most chosen pays the sum. So a worker of twice the
share gets two microbatches of three, and never two bursts in a row.
"""

import random
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import accumulate
from statistics import median_low

from swarmnet_protocols.net import PeerId

MOST_BATCHES = 16
"""Most batches that one origin takes in a round, and the most by which two origins differ. No
worker counts as more times faster than the usual one. With more, one false speed takes more of a
round. With less, a fast worker waits for slower ones."""
MAX_OPEN = 16
"""Microbatches of one caller that are open at a worker. The caller passes over a worker that is
full. With fewer, a fast worker waits. With more, one caller fills its memory."""
OPEN_PER_WORKER = 2
"""Microbatches under way for each worker of all stages, from all origins together. With fewer,
workers wait. With more, every worker keeps more graphs."""
OPEN_HERE = 4
"""Microbatches that an origin has under way in addition, because it computes some itself. With
fewer, a slow origin ends last. With more, every worker keeps more graphs."""

WAYS = 3
"""Arcs of a stage's circle from which an origin takes workers. With fewer, an origin cannot tell
which worker has another state than its stage. With more, origins hold more conversations."""


def rates(batches_s: Sequence[float]) -> list[float]:
    """Return batches per second from the seconds that workers announce for a batch.

    An unknown time, 0, counts as usual. A false one counts as at most ``MOST_BATCHES`` times the
    median of all.
    """
    known = [1 / each for each in batches_s if each > 0] or [1.0]
    most = MOST_BATCHES * median_low(known)
    usual = sum(min(each, most) for each in known) / len(known)
    return [min(1 / each, most) if each > 0 else usual for each in batches_s]


def part_of(batches_s: Sequence[float], slot: int, batch: int) -> range:
    """Return the microbatches of the origin of a slot, among those of all slots.

    ``batches_s``: the seconds that a batch of ``batch`` microbatches takes each origin. Every
    origin takes one microbatch at least, and all end at about the same time.
    """
    speeds = rates(batches_s)
    speeds = [max(each, max(speeds) / MOST_BATCHES) for each in speeds]
    spare = (batch - 1) * len(speeds)  # after one for each
    bounds = [place + round(spare * sum(speeds[:place]) / sum(speeds)) for place in (slot, slot + 1)]
    return range(*bounds)


class StageDraws:
    """One origin's draws of workers of a stage, in one round."""

    def __init__(self, part: range, total: int, workers: Mapping[PeerId, float], seed: str) -> None:
        """``part``: the origin's microbatches, among the ``total`` of all origins.

        ``workers``: the seconds that a batch takes each worker of the stage, 0 if unknown. ``seed``
        draws their order.
        """
        order = sorted(workers, key=lambda peer: sha256(f"{seed}/{peer}".encode()).digest())
        *ends, whole = accumulate(rates([workers[peer] for peer in order]))
        places = [(number + 0.5) / total + way / WAYS for way in range(WAYS) for number in part]
        self.shares = Counter(order[bisect(ends, place % 1 * whole)] for place in places)
        self._credit = dict.fromkeys(self.shares, 0)

    def choose(self, free: Mapping[PeerId, float], rng: random.Random) -> PeerId:
        """Return the worker for the next microbatch.

        ``free``: the seconds of the workers that may get it. If the drawn worker is not among
        them, any of them takes its place.
        """
        for peer, share in self.shares.items():
            self._credit[peer] += share
        drawn = max(self._credit, key=self._credit.__getitem__)
        self._credit[drawn] -= self.shares.total()
        return drawn if drawn in free else rng.choices(list(free), rates(list(free.values())))[0]
