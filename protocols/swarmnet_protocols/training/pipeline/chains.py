"""The choice of a microbatch's workers, one of each stage, and of an origin's microbatches. Pure.

Both follow the seconds that each worker announces for a batch. For each stage, an origin draws by
smooth weighted round robin (as in nginx): every worker earns its rate with each microbatch. The
worker with the most chosen pays the sum. So a worker of twice the speed gets two microbatches of
three, and never two bursts in a row.
"""

from collections.abc import Mapping, Sequence
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


class Chains:
    """Chooses workers by announced speed."""

    def __init__(self) -> None:
        self._credit: dict[PeerId, float] = {}

    def choose(self, workers: Mapping[PeerId, float]) -> PeerId:
        """Return the worker for the next microbatch. Raises ``ValueError`` if there is none.

        ``workers``: the seconds that a batch takes each worker of a stage, 0 if unknown.
        """
        weights = rates(list(workers.values()))
        for peer, weight in zip(workers, weights, strict=True):
            self._credit[peer] = self._credit.get(peer, 0.0) + weight / sum(weights)
        chosen = max(sorted(workers), key=lambda peer: self._credit[peer])
        self._credit[chosen] -= 1.0
        return chosen
