"""Metrics for Prometheus about commands that run for long.

Each scrape reads the status of the command's peer, and for a node the counters of its engine and
its host. Names begin with ``swarmnet_peer_`` for every peer, ``swarmnet_node_`` for nodes and
``swarmnet_worker_`` for training workers.
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
from swarmnet_protocols.net import ReachKind
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from swarmnet_protocols.wire.report_pb2 import TrunkReport, WorkerReport

if TYPE_CHECKING:
    from swarmnet_node.engine.engine import Engine
    from swarmnet_node.hosting.host import Host
    from swarmnet_node.owner.control import Watched

F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)

PEER, NODE, WORKER = "swarmnet_peer_", "swarmnet_node_", "swarmnet_worker_"
STATES = ("choosing", "joining", "online", "paused", "leaving")
P2PD = "p2pd"
REASONS = tuple(name.removeprefix("REASON_").lower() for name, number in refusal_pb2.Reason.items() if number)


def registry_of(peer: "Watched") -> CollectorRegistry:
    """Return the metrics of ``peer`` and of its process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(StatusCollector(peer))
    return registry


class StatusCollector(Collector):
    """Reads the peer of a command at every scrape. Every label has a fixed set of values."""

    def __init__(self, peer: "Watched") -> None:
        self._peer = peer

    def collect(self) -> Iterator[Metric]:
        status = self._peer.status()
        yield from _peer_metrics(status)
        yield from _resource_metrics(self._peer.resources)
        if status.HasField("worker"):
            yield from _worker_metrics(status.worker)
        if status.HasField("host"):
            yield from _node_metrics(status)
        if (engine := getattr(self._peer, "engine", None)) is not None:
            yield from _engine_metrics(engine)
        if (host := getattr(self._peer, "host", None)) is not None:
            yield from _host_metrics(host)


def _peer_metrics(status: NodeStatus) -> Iterator[Metric]:
    reach = status.reach
    about = {"version": status.version, "swarm": status.swarm, "command": status.command}
    yield InfoMetricFamily(PEER.rstrip("_"), "Version, swarm and command of this peer.", about)
    kind = _labelled(GaugeMetricFamily, PEER, "reach", "1 for how others reach this peer.", "kind")
    for each in ReachKind:
        kind.add_metric([each], float(each == reach.kind))
    yield kind
    yield _gauge("uptime_seconds", "Seconds since the command started.", status.uptime_s, PEER)
    yield _gauge("known_peers", "Other peers of the swarm that this one can ask.", status.known_peers, PEER)
    yield _gauge("p2pd_resident_memory_bytes", "Memory of the p2pd child process.", _p2pd_bytes(), PEER)
    up_bytes, down_bytes = status.usage.up_bytes, status.usage.down_bytes
    yield _gauge("month_sent_bytes", "Bytes sent this month, as counted for --monthly.", up_bytes, PEER)
    yield _gauge(
        "month_received_bytes", "Bytes received this month, as counted for --monthly.", down_bytes, PEER
    )
    yield _counter(
        "refused_stores",
        "Stores of this peer's announcements that others refused: their storage is full.",
        status.refused_stores,
        PEER,
    )
    yield _gauge(
        "relay_reservations", "Peers that others reach through this relay.", reach.reservations, PEER
    )
    yield _gauge("relay_circuits", "Streams that this relay forwards now.", reach.forwarded_circuits, PEER)
    yield _counter(
        "relay_forwarded_bytes", "Bytes that this relay has forwarded.", reach.forwarded_bytes, PEER
    )


def _worker_metrics(worker: WorkerReport) -> Iterator[Metric]:
    about = {"name": worker.name, "method": worker.method, "state": worker.state}
    yield InfoMetricFamily(WORKER.rstrip("_"), "Name, method and state of the training job.", about)
    yield _gauge("round", "Rounds that this worker has finished.", worker.round, WORKER)
    yield _gauge("rounds", "Rounds of the whole job.", worker.rounds, WORKER)
    if worker.HasField("loss"):
        yield _gauge("loss", "Loss of the last round of this worker.", worker.loss, WORKER)
    if worker.HasField("val_loss"):
        yield _gauge("val_loss", "Loss of the last evaluation.", worker.val_loss, WORKER)
    yield _counter("tokens", "Tokens of all workers in the rounds of this one.", worker.tokens, WORKER)
    yield _counter("sent_bytes", "Bytes sent in exchanges.", worker.bytes_sent, WORKER)
    yield _counter("received_bytes", "Bytes received in exchanges.", worker.bytes_received, WORKER)


def _node_metrics(status: NodeStatus) -> Iterator[Metric]:
    host, record = status.host, status.host.record
    about = {
        "version": status.version,
        "swarm": status.swarm,
        "model": status.model,
        "manifest": record.manifest.hex()[:16],
        "blocks": f"{record.start}:{record.end}",
    }
    yield InfoMetricFamily(NODE.rstrip("_"), "Version, swarm, model and blocks of this node.", about)
    state = _labelled(
        GaugeMetricFamily, NODE, "state", "1 for the state of the node, 0 for all others.", "state"
    )
    for each in STATES:
        state.add_metric([each], float(each == status.state))
    yield state
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
    yield _counter("answered_tokens", "Tokens sent as the last hop, and kept by clients.", counters.answered)
    yield _counter(
        "rebuilt_sessions", "Sessions rebuilt here by a replay, in place of another host.", counters.rebuilt
    )
    yield _counter("lost_links", "Links to next hops that failed.", counters.links_lost)
    yield _counter("lost_clients", "Sessions whose client fell silent.", counters.clients_lost)
    refused = _labelled(CounterMetricFamily, NODE, "refusals", "Refusals of requests, by reason.", "reason")
    for name in REASONS:
        refused.add_metric([name], counters.refused[name])
    yield refused
    yield _histogram(counters.first_tokens)
    yield _histogram(counters.token_times)


def _resource_metrics(resources: ResourceManager) -> Iterator[Metric]:
    system = resources.system
    used = _labelled(GaugeMetricFamily, PEER, "resource_used", "Amount that peers hold.", "resource")
    limit = _labelled(GaugeMetricFamily, PEER, "resource_limit", "Limit for all peers together.", "resource")
    refused = _labelled(
        CounterMetricFamily, PEER, "resource_refusals", "Reservations refused at a limit.", "resource"
    )
    for resource in Resource:
        used.add_metric([resource], system.used[resource])
        refused.add_metric([resource], system.refused[resource])
        if resource in system.limits:
            limit.add_metric([resource], system.limits[resource])
    yield from (used, limit, refused)
    yield _gauge(
        "served_peers", "Peers that hold resources here, or did recently.", resources.peer_count, PEER
    )
    for name, about, rate in (
        ("frames", "Messages received.", Rate.FRAMES),
        ("received_bytes", "Bytes of messages received.", Rate.BYTES_IN),
        ("sent_bytes", "Bytes of messages sent.", Rate.BYTES_OUT),
    ):
        yield _counter(name, about, system.spent[rate], PEER)


def _p2pd_bytes() -> int:
    """Return the resident bytes of the p2pd child process; 0 without one."""
    try:
        children = psutil.Process().children()
        return sum(child.memory_info().rss for child in children if child.name() == P2PD)
    except psutil.NoSuchProcess:
        return 0


def _labelled(kind: type[F], prefix: str, name: str, about: str, label: str) -> F:
    return kind(prefix + name, about, labels=[label])


def _gauge(name: str, about: str, value: float, prefix: str = NODE) -> Metric:
    return GaugeMetricFamily(prefix + name, about, value=value)


def _counter(name: str, about: str, value: float, prefix: str = NODE) -> Metric:
    return CounterMetricFamily(prefix + name, about, value=value)


def _histogram(histogram: Histogram) -> Metric:
    (metric,) = histogram.collect()
    metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return metric
