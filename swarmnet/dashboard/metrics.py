"""Metrics of the whole swarm for Prometheus, from the state of the page."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swarmnet_protocols.directory.catalog import MAX_MODELS

PREFIX = "swarmnet_swarm_"
STATES = ("joining", "online", "paused", "leaving", "finished", "incompatible")
"""States of peers that are counted: every state but "gone"."""
Body = Mapping[str, Any]
_OF_MODELS: tuple[tuple[str, str, Callable[[Body], float]], ...] = (
    ("missing_blocks", "Blocks that no host has.", lambda model: model["replicas"].count(0)),
    ("fewest_hosts", "Hosts of the block with the fewest.", lambda model: model["weakest"]["replicas"]),
    ("sessions", "Sessions of clients.", lambda model: model["sessions"]),
    ("tokens_per_second", "Tokens that clients receive.", lambda model: model["tokens_per_s"]),
)


class SwarmCollector(Collector):
    """Reads the state of the page at every scrape. Reports of peers are unverified claims."""

    def __init__(self, state: Callable[[], Body]) -> None:
        """``state`` returns the JSON of `/api/v1/state`."""
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        counts = Counter(peer["state"] for peer in state["peers"].values())
        peers = GaugeMetricFamily(f"{PREFIX}peers", "Peers of the swarm, by state.", labels=["state"])
        for each in STATES:
            peers.add_metric([each], counts[each])
        yield peers
        # Each model adds time series, and any peer of an open swarm may announce a model.
        most = sorted(state["models"].items(), key=lambda item: (-item[1]["peers"], item[0]))[:MAX_MODELS]
        for name, about, read in _OF_MODELS:
            metric = GaugeMetricFamily(PREFIX + name, about, labels=["model", "manifest"])
            for manifest, model in most:
                metric.add_metric([model["name"], manifest[:16]], read(model))
            yield metric
