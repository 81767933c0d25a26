"""Metrics of a node for Prometheus.

Each scrape reads the node's status, and the counters of its engine and its host.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import psutil
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from swarmnet_protocols.directory.node_reports import experts_of, rows_of
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from swarmnet_protocols.wire.report_pb2 import TrunkReport

if TYPE_CHECKING:
    from swarmnet_node.engine.engine import Engine
    from swarmnet_node.hosting.host import Host
    from swarmnet_node.supervisor import Supervisor

F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)

PREFIX = "swarmnet_node_"
STATES = ("choosing", "joining", "online", "paused", "leaving")
P2PD = "p2pd"
REASONS = tuple(name.removeprefix("REASON_").lower() for name, number in refusal_pb2.Reason.items() if number)


def registry_of(node: "Supervisor") -> CollectorRegistry:
    """Return the metrics of ``node`` and of its process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(NodeCollector(node))
    return registry


class NodeCollector(Collector):
    """Reads the node at every scrape. Every label has a fixed set of values."""

    def __init__(self, node: "Supervisor") -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        status = self._node.status()
        yield from _status_metrics(status)
        yield _gauge("p2pd_resident_memory_bytes", "Memory of the p2pd child process.", _p2pd_bytes())
        if (engine := self._node.engine) is not None:
            yield from _engine_metrics(engine)
        if (host := self._node.host) is not None:
            yield from _host_metrics(host)
            yield from _resource_metrics(host.transport.resources)


def _status_metrics(status: NodeStatus) -> Iterator[Metric]:
    host, record = status.host, status.host.record
    about = {
        "version": status.version,
        "swarm": status.swarm,
        "model": status.model,
        "manifest": record.manifest.hex()[:16],
        "blocks": f"{record.start}:{record.end}",
    }
    yield InfoMetricFamily(PREFIX.rstrip("_"), "Version, swarm, model and blocks of this node.", about)
    state = GaugeMetricFamily(
        f"{PREFIX}state", "1 for the state of the node, 0 for all others.", labels=["state"]
    )
    for each in STATES:
        state.add_metric([each], float(each == status.state))
    yield state
    yield _gauge(
        "month_sent_bytes", "Bytes sent this month, as counted for --monthly.", status.usage.up_bytes
    )
    yield _gauge(
        "month_received_bytes",
        "Bytes received this month, as counted for --monthly.",
        status.usage.down_bytes,
    )
    yield _counter(
        "refused_stores",
        "Stores of this node's announcements that other peers refused: their storage is full.",
        status.refused_stores,
    )
    yield _gauge("uptime_seconds", "Seconds since the node started.", status.uptime_s)
    yield _gauge("blocks", "Blocks hosted here.", record.end - record.start)
    yield _gauge("model_blocks", "Blocks of the whole model.", host.total_blocks)
    yield _gauge("sessions", "Sessions open now.", record.sessions)
    yield _gauge("weight_bytes", "Memory of the weights.", status.weight_bytes)
    yield _gauge("cache_bytes", "Memory of the KV caches of sessions.", host.cache_bytes)
    yield _gauge("cache_limit_bytes", "Limit of the KV caches.", host.cache_bytes_limit)
    yield _counter(
        "expert_rows", "Rows that experts here computed for other hosts.", sum(rows_of(host.experts).values())
    )
    yield _gauge("expert_streams", "Open streams of hosts to the experts here.", host.expert_streams)
    if host.HasField("trunk"):
        yield from _trunk_metrics(host.trunk)


def _trunk_metrics(trunk: TrunkReport) -> Iterator[Metric]:
    yield _gauge(
        "missing_experts",
        "Experts that no peer within reach has.",
        sum(map(len, experts_of(trunk.missing).values())),
    )
    yield _gauge("expert_peers", "Peers that compute experts of the blocks here.", len(trunk.round_trips_s))
    longest_s = max(trunk.round_trips_s, default=0.0)
    yield _gauge("expert_round_trip_seconds", "The longest round trip to an expert peer.", longest_s)
    yield _counter("asked_expert_rows", "Rows that peers with experts were asked for.", trunk.rows)
    yield _counter("failed_expert_requests", "Requests to peers with experts that failed.", trunk.failed)
    yield _counter(
        "hedged_expert_requests",
        "Requests that were slow, so that another peer was asked, too.",
        trunk.hedged,
    )
    yield _counter("loaded_experts", "Experts loaded here because no peer had them.", trunk.loaded)


def _engine_metrics(engine: "Engine") -> Iterator[Metric]:
    counters = engine.counters
    yield _counter(
        "positions", "Positions computed. A position passes all blocks hosted here.", counters.positions
    )
    yield _counter("forwards", "Forwards and passes computed.", counters.forwards)
    yield _gauge(
        "graph_bytes",
        "Memory of autograd graphs that are kept for backward passes.",
        engine.graph_cache.nbytes,
    )
    yield _gauge("queue_seconds", "How long new work of a session would wait now.", engine.queue_s)
    yield _histogram(counters.forward_s)
    yield _histogram(counters.forward_positions)
    yield _histogram(counters.wait_s)
    yield _histogram(counters.pass_s)


def _host_metrics(host: "Host") -> Iterator[Metric]:
    counters = host.counters
    yield _counter("answered_tokens", "Tokens that clients kept, as their last hop.", counters.answered)
    yield _counter(
        "rebuilt_sessions", "Sessions rebuilt here by a replay, in place of another host.", counters.rebuilt
    )
    yield _counter("lost_links", "Links to next hops that failed.", counters.links_lost)
    yield _counter("lost_clients", "Sessions whose client fell silent.", counters.clients_lost)
    refused = _labelled(CounterMetricFamily, "refusals", "Refusals of requests, by reason.", "reason")
    for name in REASONS:
        refused.add_metric([name], counters.refused[name])
    yield refused
    yield _histogram(counters.first_tokens)
    yield _histogram(counters.token_times)


def _resource_metrics(resources: ResourceManager) -> Iterator[Metric]:
    system = resources.system
    used = _labelled(GaugeMetricFamily, "resource_used", "Amount that peers hold.", "resource")
    limit = _labelled(GaugeMetricFamily, "resource_limit", "Limit for all peers together.", "resource")
    refused = _labelled(
        CounterMetricFamily, "resource_refusals", "Reservations refused at a limit.", "resource"
    )
    for resource in Resource:
        used.add_metric([resource], system.used[resource])
        refused.add_metric([resource], system.refused[resource])
        if resource in system.limits:
            limit.add_metric([resource], system.limits[resource])
    yield from (used, limit, refused)
    yield _gauge("peers", "Peers that hold resources here, or did recently.", resources.peer_count)
    for name, about, rate in (
        ("frames", "Messages received.", Rate.FRAMES),
        ("received_bytes", "Bytes of messages received.", Rate.BYTES_IN),
        ("sent_bytes", "Bytes of messages sent.", Rate.BYTES_OUT),
    ):
        yield _counter(name, about, system.spent[rate])


def _p2pd_bytes() -> int:
    """Return the resident bytes of the p2pd child process; 0 without one."""
    try:
        children = psutil.Process().children()
        return sum(child.memory_info().rss for child in children if child.name() == P2PD)
    except psutil.NoSuchProcess:
        return 0


def _labelled(kind: type[F], name: str, about: str, label: str) -> F:
    return kind(PREFIX + name, about, labels=[label])


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, about, value=value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, about, value=value)


def _histogram(histogram: Histogram) -> Metric:
    (metric,) = histogram.collect()
    metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return metric
