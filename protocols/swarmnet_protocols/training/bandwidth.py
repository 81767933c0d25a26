"""At what rate workers send, as those who receive measure it. Pure.

Nobody is asked about itself: a member's rate in a roster follows from what the others measured of it.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.rounds.terms import UNMEASURED_BYTES_PER_S

MIN_BYTES = 512 << 10
"""What is shorter says more of buffers and delays than of a link."""
KEPT = 0.5
"""Share of what was measured before that still counts when the next payload has come."""
MAX_PEERS = 256

Measured = Mapping[PeerId, float]
"""Bytes a second of each peer that was measured."""


@dataclass(frozen=True)
class Arrival:
    """A payload that came in parts: those that its sender did not hold back, but for the first, and the seconds they took."""

    peer: PeerId
    size_bytes: int
    seconds: float


class ArrivalRates:
    """At what rate the bulk data of each peer arrives here: bytes over seconds, both decayed with every payload."""

    def __init__(self) -> None:
        self._sums: dict[PeerId, tuple[float, float]] = {}

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """Take in what came. Payloads too short to mean something are left out."""
        for arrival in arrivals:
            if arrival.size_bytes < MIN_BYTES or arrival.seconds <= 0:
                continue
            size_bytes, seconds = self._sums.pop(arrival.peer, (0.0, 0.0))
            self._sums[arrival.peer] = (
                size_bytes * KEPT + arrival.size_bytes,
                seconds * KEPT + arrival.seconds,
            )
            if len(self._sums) > MAX_PEERS:
                del self._sums[next(iter(self._sums))]

    def bytes_per_s(self) -> dict[PeerId, float]:
        return {peer: size_bytes / seconds for peer, (size_bytes, seconds) in self._sums.items()}


def agreed_rates(members: Sequence[PeerId], reports: Mapping[PeerId, Measured]) -> dict[PeerId, float]:
    """The rate of every member: the median of what the other members measured of it.

    Of two middle values it is the one nearer to the swarm's own middle, the median of the reporters' medians; that is also
    the rate of a member of whom no more than half of the others say anything. So one liar among three members moves no rate
    further than from its true value to the swarm's middle, and a minority among more no rate beyond what honest members
    report; nobody moves its own.
    """
    voices = {
        reporter: {
            peer: rate for peer, rate in reports[reporter].items() if peer in members and peer != reporter
        }
        for reporter in members
        if reporter in reports
    }
    medians = [statistics.median_low(voice.values()) for voice in voices.values() if voice]
    middle = statistics.median_low(medians) if medians else UNMEASURED_BYTES_PER_S
    rates = {}
    for member in members:
        said = [voice[member] for voice in voices.values() if member in voice]
        believed = 2 * len(said) > len(members) - 1
        rates[member] = _nearest_median(said, middle) if believed else middle
    return rates


def _nearest_median(values: Sequence[float], middle: float) -> float:
    return min(max(middle, statistics.median_low(values)), statistics.median_high(values))
