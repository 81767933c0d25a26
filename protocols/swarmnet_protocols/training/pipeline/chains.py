"""The choice of a microbatch's workers: one of each stage. Pure.

Smooth weighted round robin (as in nginx), for each stage: every worker earns its weight with each
microbatch, and the worker that has the most is chosen and pays the sum. So a worker of twice the
speed gets every second microbatch of three, and never two bursts in a row.
"""

from collections.abc import Collection, Mapping

from swarmnet_protocols.net import PeerId

USUAL_WEIGHT = 1.0
FORGET = 0.7
"""Share of the old speed in the next estimate. With less, one slow microbatch turns many away from
a worker. With more, a worker that became slow keeps too many."""


class Chains:
    """Chooses workers by observed speed."""

    def __init__(self) -> None:
        self._credit: dict[PeerId, float] = {}
        self._weight: dict[PeerId, float] = {}

    def observe(self, peer: PeerId, seconds: float) -> None:
        """Note that a microbatch took ``peer`` and the workers after it this long."""
        weight = 1.0 / max(seconds, 1e-3)
        old = self._weight.get(peer, weight)
        self._weight[peer] = FORGET * old + (1 - FORGET) * weight

    def choose(self, workers: Collection[PeerId]) -> PeerId:
        """Return the worker for the next microbatch. Raises ``ValueError`` if there is none."""
        known = [self._weight[peer] for peer in workers if peer in self._weight]
        usual = sum(known) / len(known) if known else USUAL_WEIGHT
        weights: Mapping[PeerId, float] = {peer: self._weight.get(peer, usual) for peer in sorted(workers)}
        for peer, weight in weights.items():
            self._credit[peer] = self._credit.get(peer, 0.0) + weight
        chosen = max(weights, key=lambda peer: self._credit[peer])
        self._credit[chosen] -= sum(weights.values())
        return chosen
