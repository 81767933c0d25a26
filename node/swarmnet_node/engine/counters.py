"""Counters and histograms of an engine, cumulative since its start, as Prometheus and node reports read them."""

from collections.abc import Sequence

from prometheus_client import Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of durations."""
POSITIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper bounds of the buckets of batch sizes."""


def node_histogram(name: str, about: str, buckets: Sequence[float] = SECONDS) -> Histogram:
    """A histogram ``swarmnet_node_NAME`` outside any registry: its owner, such as an engine, may be replaced while the node runs."""
    return Histogram(f"swarmnet_node_{name}", about, registry=None, buckets=buckets)


def cumulative_counts(histogram: Histogram) -> list[int]:
    """The number of values up to the bound of each bucket, and last the number of all values."""
    (metric,) = histogram.collect()
    return [int(sample.value) for sample in metric.samples if sample.name.endswith("_bucket")]


def total(histogram: Histogram) -> float:
    """The sum of all values."""
    (metric,) = histogram.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_sum"))


class EngineCounters:
    """Forwards, passes and positions that one engine has computed since its start, and their durations in seconds."""

    def __init__(self) -> None:
        self.forwards = 0
        """Forwards and passes computed."""
        self.positions = 0
        """Positions computed in them."""
        self.forward_s = node_histogram("forward_seconds", "How long one forward of sessions' work took.")
        self.forward_positions = node_histogram(
            "forward_positions", "Positions in one such forward.", POSITIONS
        )
        self.wait_s = node_histogram("wait_seconds", "How long work of sessions waited for its forward.")
        self.pass_s = node_histogram(
            "pass_seconds", "How long one training pass took to compute, without its wait."
        )
