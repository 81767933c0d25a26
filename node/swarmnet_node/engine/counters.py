"""Counters and histograms of an engine, cumulative since its start, as Prometheus and node reports read them."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of durations."""
POSITIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper bounds of the buckets of batch sizes."""


class Histogram:
    """Counts observed values in buckets with the upper bounds ``bounds``, and beyond the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        """The sum of all values."""
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """For every bound the number of values up to it, and last the number of all values."""
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
    """The measurements of one engine."""

    forward_s: Histogram = field(default_factory=_seconds)
    """Durations of the forwards of sessions."""
    forward_positions: Histogram = field(default_factory=_positions)
    """Positions of each such forward."""
    wait_s: Histogram = field(default_factory=_seconds)
    """Times that work of sessions waited for its first forward."""
    pass_s: Histogram = field(default_factory=_seconds)
    """Durations of passes, without their wait."""
