"""Counters and histograms of an engine since its start, and the share of time that it is busy.

Prometheus and node reports read them.
"""

import math
from collections.abc import Sequence

from prometheus_client import Histogram

from swarmnet_node.owner.given import Given

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets for durations, in seconds."""
POSITIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper bounds of the buckets for batch sizes."""
BUSY_S = 5.0
"""Seconds to average the busy share of time. With fewer than most steps take, the share would jump.
With more than most sessions last, clients would not notice what others have begun."""
LOAD_S = 120.0
"""Seconds to average the load that a host announces. Hosts may switch models for load that lasts
for minutes, so short bursts must not count."""


def node_histogram(name: str, about: str, buckets: Sequence[float] = SECONDS) -> Histogram:
    """Return a histogram ``swarmnet_node_NAME`` outside any registry.

    Its owner, such as an engine, may be replaced while the node runs.
    """
    return Histogram(f"swarmnet_node_{name}", about, registry=None, buckets=buckets)


def cumulative_counts(histogram: Histogram) -> list[int]:
    """Return the number of values up to the bound of each bucket, and last the number of all
    values."""
    (metric,) = histogram.collect()
    return [int(sample.value) for sample in metric.samples if sample.name.endswith("_bucket")]


def total(histogram: Histogram) -> float:
    """Return the sum of all values."""
    (metric,) = histogram.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_sum"))


class BusyShare:
    """The share of recent time that an engine was computing.

    Work done t seconds ago counts in proportion to exp(-t / ``over_s``).
    """

    def __init__(self, over_s: float = BUSY_S) -> None:
        self._over_s = over_s
        self._share = 0.0
        self._at = 0.0

    def computed(self, elapsed_s: float, now: float) -> None:
        """Note that the engine computed for the ``elapsed_s`` seconds before ``now``."""
        self._share = min(self.at(now) + 1 - math.exp(-elapsed_s / self._over_s), 1.0)
        self._at = now

    def at(self, now: float) -> float:
        return self._share * math.exp(-(now - self._at) / self._over_s)


class EngineCounters:
    """Forwards, passes and positions that one engine has computed, and their durations in
    seconds."""

    def __init__(self, given: Given | None = None) -> None:
        self.given = given or Given()
        """Totals of the work of this machine since its data directory exists."""
        self.forwards = 0
        """Forwards and passes computed."""
        self.positions = 0
        """Positions computed in forwards and passes."""
        self.forward_s = node_histogram("forward_seconds", "How long one forward of sessions' work took.")
        self.forward_positions = node_histogram(
            "forward_positions", "Positions in one such forward.", POSITIONS
        )
        self.wait_s = node_histogram("wait_seconds", "How long work of sessions waited for its forward.")
        self.pass_s = node_histogram(
            "pass_seconds", "How long one training pass took to compute, without its wait."
        )
