"""Counts of what a node measures, as Prometheus and the reports of nodes read them: cumulative, since the start."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
POSITIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """How many of the values seen are no larger than each of ``bounds``."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        """The sum of all values."""
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """For every bound, and last for all of them, how many values are no larger."""
        counts, so_far = [], 0
        for count in self._counts:
            so_far += count
            counts.append(so_far)
        return counts


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _positions() -> Histogram:
    return Histogram(POSITIONS)


@dataclass(frozen=True)
class EngineCounters:
    """What an engine has done."""

    forward_s: Histogram = field(default_factory=_seconds)
    """How long forwards of sessions' work took."""
    forward_positions: Histogram = field(default_factory=_positions)
    """How many positions one such forward computed."""
    wait_s: Histogram = field(default_factory=_seconds)
    """How long sessions' work waited for its first forward."""
    pass_s: Histogram = field(default_factory=_seconds)
    """How long passes took, without their wait."""
