"""Estimate the speed of hosts from the time that steps take through whole chains."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_view import Hop, View
from swarmnet_protocols.routing.host_info import HostInfo

GAIN = 0.5
"""Share of the difference between measured and expected time that one measurement corrects. A
larger share follows noise, a smaller one follows changes late."""
MEMORY_S = 600.0
"""Seconds until an estimate is dropped, so that a host that has become faster gets another
chance."""
MAX_BLOCK_S = 3600.0


class Speeds:
    """Estimates the seconds per block of each host by normalised least mean squares.

    The method is Kaczmarz's. The client measures whole chains itself and ignores reports of hops.
    It divides the difference to the expected time among the hops, in proportion to their blocks.
    One chain cannot tell which of its hops was slow. Chains that share some of its hops can.
    """

    def __init__(self) -> None:
        self._measured: dict[PeerId, tuple[float, float]] = {}
        """Seconds per block, and the time of the measurement."""

    def measured(self, view: View, chain: Sequence[Hop], step_s: float, now: float) -> None:
        """Correct the estimates after a step of one token through ``chain`` and back took
        ``step_s``.

        ``view`` comes from ``chain_view.credible``, and contains the speeds that :meth:`at`
        returned. Hosts outside ``view`` are ignored.
        """
        hops = [hop for hop in chain if hop.peer in view.block_s]
        if not hops or not 0 <= step_s < math.inf:
            return
        ends = [None, *(hop.peer for hop in chain), None]
        expected_s = sum(view.delay_between(one, other) for one, other in pairwise(ends))
        for hop in hops:
            expected_s += view.queue_s.get(hop.peer, 0.0)
            expected_s += view.block_s[hop.peer] * (hop.end - hop.start)
        norm = sum((hop.end - hop.start) ** 2 for hop in hops)
        for hop in hops:
            correction = GAIN * (step_s - expected_s) * (hop.end - hop.start) / norm
            block_s = view.block_s[hop.peer] + correction
            self._measured[hop.peer] = min(max(block_s, 0.0), MAX_BLOCK_S), now

    def at(self, hosts: Mapping[PeerId, HostInfo], now: float) -> dict[PeerId, float]:
        """Return the seconds per block of the measured hosts among ``hosts``.

        Also forgets estimates that are older than ``MEMORY_S``.
        """
        self._measured = {
            peer: (block_s, at) for peer, (block_s, at) in self._measured.items() if now - at < MEMORY_S
        }
        return {peer: block_s for peer, (block_s, _) in self._measured.items() if peer in hosts}
