"""Bandwidth of workers, as measured by the workers that receive from them. Pure.

A member's rate in a roster is the median of the other members' measurements. The member's own
report is ignored.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.rounds.terms import UNMEASURED_BYTES_PER_S

MIN_BYTES = 512 << 10
"""Bytes of the shortest payload that counts.

The transfer time of a shorter payload measures buffers and latency rather than bandwidth.
"""
DECAY = 0.5
"""Weight that earlier measurements keep at each new payload."""
MAX_PEERS = 256

Measured = Mapping[PeerId, float]
"""Peer → measured rate in bytes per second."""


@dataclass(frozen=True)
class Arrival:
    """A payload that arrived from ``peer``: the bytes of its timed parts, and their seconds."""

    peer: PeerId
    size_bytes: int
    seconds: float


class ArrivalRates:
    """The rate at which bulk data of each peer arrives here.

    An exponentially decayed sum of bytes, divided by a decayed sum of seconds.
    """

    def __init__(self) -> None:
        self._sums: Latest[PeerId, tuple[float, float]] = Latest(MAX_PEERS)

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """Add measurements. Ignores payloads under ``MIN_BYTES``."""
        for arrival in arrivals:
            if arrival.size_bytes < MIN_BYTES or arrival.seconds <= 0:
                continue
            size_bytes, seconds = self._sums.get(arrival.peer, (0.0, 0.0))
            self._sums[arrival.peer] = (
                size_bytes * DECAY + arrival.size_bytes,
                seconds * DECAY + arrival.seconds,
            )

    def bytes_per_s(self) -> dict[PeerId, float]:
        """Return the rate of every measured peer, the most recently measured last."""
        return {peer: size_bytes / seconds for peer, (size_bytes, seconds) in self._sums.items()}


class LinkRates:
    """The bandwidth of one worker's links to the workers of other stages, in both directions."""

    def __init__(self) -> None:
        self.told: Latest[PeerId, float] = Latest(MAX_PEERS)
        """Bytes per second at which each peer says that it receives from here. 0 if unknown."""
        self.arriving: dict[PeerId, float] = {}
        """Bytes per second at which data of each peer arrived here until the last round."""
        self._rates = ArrivalRates()
        self._sums: Latest[PeerId, Arrival] = Latest(MAX_PEERS)

    def add(self, peer: PeerId, size_bytes: int, seconds: float) -> None:
        """Add the timed parts of a tensor that arrived in this round."""
        before = self._sums.get(peer, Arrival(peer, 0, 0.0))
        self._sums[peer] = Arrival(peer, before.size_bytes + size_bytes, before.seconds + seconds)

    def of_round(self) -> dict[PeerId, float]:
        """Begin the next round. Return the rate of the slower direction of each link.

        Links that only one end has measured are left out. Bytes of several rounds add up until a
        peer has sent ``MIN_BYTES``.
        """
        for peer, each in list(self._sums.items()):
            if each.size_bytes >= MIN_BYTES:
                self._rates.add([self._sums.pop(peer)])
        self.arriving = self._rates.bytes_per_s()
        return {
            peer: min(rate, self.told[peer]) for peer, rate in self.arriving.items() if self.told.get(peer)
        }


def agreed_rates(members: Sequence[PeerId], reports: Mapping[PeerId, Measured]) -> dict[PeerId, float]:
    """Return the rate of every member in bytes per second: the median of the others' measurements.

    Every reporter has a median of its measurements; the swarm's median is the median of these. An
    even number of measurements has two middle values: the rate is then the swarm's median, limited
    to the range between them. A member gets the swarm's median if at most half of the others
    measured it. This limits what false reports can do:

    - One false report among three members moves a rate at most to the swarm's median.
    - A minority among more members moves no rate beyond the reports of honest members.
    - No member moves its own rate.
    """
    here = frozenset(members)
    by_reporter = {
        reporter: {
            peer: rate for peer, rate in reports[reporter].items() if peer in here and peer != reporter
        }
        for reporter in members
        if reporter in reports
    }
    medians = [statistics.median_low(rates.values()) for rates in by_reporter.values() if rates]
    swarm_median = statistics.median_low(medians) if medians else UNMEASURED_BYTES_PER_S
    agreed = {}
    for member in members:
        measured = [rates[member] for rates in by_reporter.values() if member in rates]
        enough = 2 * len(measured) > len(members) - 1
        agreed[member] = _nearest_median(measured, swarm_median) if enough else swarm_median
    return agreed


def _nearest_median(values: Sequence[float], target: float) -> float:
    return min(max(target, statistics.median_low(values)), statistics.median_high(values))
