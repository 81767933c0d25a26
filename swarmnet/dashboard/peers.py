"""The JSON of peers, and of the edges between them along which positions flow. Pure functions of
observations."""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from swarmnet.dashboard.experts import peer_experts, trunk_entry
from swarmnet.dashboard.observing.counts import MAX_PER_SECOND, hosts_blocks, rows_computed
from swarmnet.dashboard.observing.observations import GONE_SHOWN_S, PeerObservation, TimedReport
from swarmnet_protocols.directory.host_announcements import host_info, state_name
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.multiaddr import PEER_ID
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.wire import report_pb2

STALE_S = 20.0
"""Seconds after which a report is too old for rates."""
START_TOLERANCE_S = 5.0
"""Seconds that two start times of one run may differ. Each is a clock reading minus an uptime."""
RECORD_AFTER_FAILURE_S = 2.0
"""A record that arrives at least this many seconds after a failed poll shows that the peer runs,
although the observer cannot reach it. An earlier one may have been on its way."""
CLIENT = "client"
"""The node of the graph that stands for all clients."""
MAX_EDGES = 1000
NO_ENDINGS: Mapping[PeerId, str] = MappingProxyType({})

_CONNECTIONS = {
    "open": "direct",
    "forwarded": "forwarded",
    "relayed": "relayed",
    "unreachable": "unreachable",
}
_STATES = {"choosing": "joining"}
_IN_GOOD_ORDER = {"leaving", "paused", "left"}
"""States that a host or a worker announces before it stops."""


def peer_entry(
    seen: PeerObservation,
    now_s: float,
    previous: Mapping[str, Any] | None,
    endings: Mapping[PeerId, str] = NO_ENDINGS,
) -> dict[str, Any]:
    """Return the JSON of one peer. ``previous``: its JSON in the last state, None for a new peer.
    ``endings``: "finished" or "left" for workers that were not lost."""
    state, silent = state_of(seen)
    report = seen.newest.report if seen.newest else None
    entry: dict[str, Any] = {
        "name": None,
        "version": report.version if report else "",
        "role": _role_of(seen),
        "state": state,
        "model": None,
        "blocks": None,
        "experts": None,
        "trunk": None,
        "job": None,
        "dtype": None,
        "arithmetic": None,
        "positions_per_s": 0.0,
        "step_s": None,
        "delay_s": None if seen.delay_s is None else round(seen.delay_s, 3),
        "connection": "unknown",
        "relays": [],
        "punched": 0,
        "queue_s": 0.0,
        "cache_bytes_free": 0,
        "cache_bytes_limit": 0,
        "started_s": None,
        "sessions": 0,
        "positions": 0,
        "last_seen_s": round(_last_seen_s(seen), 1) if silent or state == "gone" else None,
        "silent": silent,
        "ending": None,
    }
    if seen.announced is not None:
        entry |= _announced(seen.announced)
    if seen.newest is not None:
        entry |= _reported(seen.newest, seen.peer)
        known_s = previous["started_s"] if previous else None
        if known_s is not None and abs(entry["started_s"] - known_s) < START_TOLERANCE_S:
            entry["started_s"] = known_s
    entry["experts"] = peer_experts(seen, rate_of(seen, now_s, rows_computed))
    if state == "gone":
        entry |= {"sessions": 0, "queue_s": 0.0, "ending": _ending(seen, previous, endings)}
    else:
        entry["positions_per_s"] = round(rate_of(seen, now_s, lambda report: report.host.positions), 1)
    return entry


def _role_of(seen: PeerObservation) -> str:
    if seen.newest is not None:
        report = seen.newest.report
        if report.HasField("worker"):
            return "worker"
        return "host" if hosts_blocks(report) else "experts"
    return "experts" if seen.announced is not None and not seen.announced.end else "host"


def state_of(seen: PeerObservation) -> tuple[str, bool]:
    """Return the state of a peer, and whether it is silent. A silent peer does not answer, so its
    state is the announced one."""
    if seen.announced is not None and seen.announced.state == "incompatible":
        return "incompatible", not seen.answers
    if seen.answers and seen.newest is not None:
        report = seen.newest.report
        if report.HasField("worker"):
            said = report.worker.state
            return (said if said in {"leaving", "finished"} else "online"), False
        state = state_name(report.host.record.state)
        return _STATES.get(state, state), False
    announced = seen.announced
    if announced is None or announced.state == "leaving":
        return "gone", False
    if announced.state == "paused":
        return "paused", True
    if seen.newest is not None and seen.announced_at_s < (seen.failed_at_s or 0.0) + RECORD_AFTER_FAILURE_S:
        return "gone", False
    return _STATES.get(announced.state, announced.state), True


def _ending(seen: PeerObservation, previous: Mapping[str, Any] | None, endings: Mapping[PeerId, str]) -> str:
    """Return how a peer that is gone ended: "finished" its job, "left" in good order, or "lost"."""
    if seen.announced is not None and seen.announced.state in _IN_GOOD_ORDER:
        return "left"
    if seen.peer in endings:
        return endings[seen.peer]
    if previous is not None and previous["ending"] is not None:
        return str(previous["ending"])
    if previous is not None and previous["state"] in _IN_GOOD_ORDER:
        return "left"
    report = seen.newest.report if seen.newest is not None else report_pb2.NodeReport()
    states = {report.worker.state, state_name(report.host.record.state)}
    return "left" if states & _IN_GOOD_ORDER else "lost"


def is_shown(seen: PeerObservation, now_s: float) -> bool:
    """Return whether a peer is in the swarm, or was within the last ``GONE_SHOWN_S``. A worker is
    shown once it has answered."""
    if seen.newest is None and seen.announced is None:
        return False
    return state_of(seen)[0] != "gone" or now_s - _last_seen_s(seen) < GONE_SHOWN_S


def rate_of(seen: PeerObservation, now_s: float, count: Callable[[report_pb2.NodeReport], int]) -> float:
    """Return the increase of ``count`` per second between the last two reports; 0 if the newest is
    stale."""
    newest, before = seen.newest, seen.before
    if newest is None or before is None or seen.failed_at_s is not None or now_s - newest.at_s > STALE_S:
        return 0.0
    if newest.at_s <= before.at_s:
        return 0.0
    added = max(0, count(newest.report) - count(before.report))
    return min(added / (newest.at_s - before.at_s), float(MAX_PER_SECOND))


def name_of(entry: Mapping[str, Any], peer: PeerId | str) -> str:
    """Return the name that a peer chose, or the end of its id, because all ids begin with the same
    characters."""
    return entry["name"] or f"…{peer[-6:]}"


def _last_seen_s(seen: PeerObservation) -> float:
    return max(seen.first_seen_s, seen.announced_at_s, seen.newest.at_s if seen.newest else 0.0)


def _facts(host: HostInfo) -> dict[str, Any]:
    """Return the JSON of the facts that are in a host's announcement and also in its report."""
    return {
        "model": host.manifest.hex(),
        "blocks": [host.start, host.end] if host.end else None,
        "dtype": host.precision or None,
        "arithmetic": host.arithmetic or None,
        "step_s": float(f"{host.step_s:.3g}") or None,
        "cache_bytes_free": host.cache_bytes_free,
        "sessions": host.sessions,
    }


def _announced(host: HostInfo) -> dict[str, Any]:
    is_relayed = any("/p2p-circuit" in each for each in host.addresses)
    return _facts(host) | {
        "name": host.public_name or None,
        "version": host.version,
        "connection": ("relayed" if is_relayed else "direct") if host.addresses else "unknown",
    }


def _reported(reported: TimedReport, peer: PeerId) -> dict[str, Any]:
    report = reported.report
    common = {
        "name": report.public_name or None,
        "version": report.version,
        "started_s": round(reported.at_s - report.uptime_s),
        "relays": [each for each in report.reach.relays[:2] if PEER_ID.fullmatch(each)],
        "punched": report.reach.punched,
    }
    if report.reach.kind in _CONNECTIONS:
        common["connection"] = _CONNECTIONS[report.reach.kind]
    if report.HasField("worker"):
        return common | {"job": report.worker.job.hex()}
    host = report.host
    return (
        _facts(host_info(host.record, peer))
        | common
        | {
            "trunk": trunk_entry(report),
            "queue_s": float(f"{host.queue_s:.2g}"),
            "cache_bytes_limit": host.cache_bytes_limit,
            "positions": host.positions,
        }
    )


def edge_entries(
    observations: Iterable[PeerObservation], known: Collection[PeerId], now_s: float
) -> dict[str, Any]:
    """Return the JSON of the busiest ``MAX_EDGES`` edges by ``SOURCE>TARGET``, between ``known``
    peers and clients.

    An edge between two hosts is taken from the report of the receiver, which knows the sender from
    the connection.
    """
    edges: dict[str, dict[str, Any]] = {}

    def add(source: str, target: str, model: str, sessions: int, positions_per_s: float) -> None:
        edge = edges.setdefault(
            f"{source}>{target}",
            {"source": source, "target": target, "model": model, "sessions": 0, "positions_per_s": 0.0},
        )
        edge["sessions"] += sessions
        edge["positions_per_s"] += positions_per_s

    for seen in observations:
        newest = seen.newest
        if newest is None or seen.failed_at_s is not None or now_s - newest.at_s > STALE_S:
            continue
        rates = _edge_rates(newest, seen.before)
        model = newest.report.host.record.manifest.hex()
        for flow in newest.report.host.flows:
            rate = rates.get((flow.upstream, flow.downstream), 0.0)
            if not flow.upstream or flow.upstream in known:
                add(flow.upstream or CLIENT, seen.peer, model, flow.sessions, rate)
            if not flow.downstream:
                add(seen.peer, CLIENT, model, flow.sessions, rate)
    busy = [edge for edge in edges.values() if edge["sessions"] or edge["positions_per_s"] >= 0.05]
    busy.sort(key=lambda edge: (-edge["positions_per_s"], -edge["sessions"], edge["source"], edge["target"]))
    return {
        f"{edge['source']}>{edge['target']}": edge | {"positions_per_s": round(edge["positions_per_s"], 1)}
        for edge in busy[:MAX_EDGES]
    }


def _edge_rates(newest: TimedReport, before: TimedReport | None) -> dict[tuple[str, str], float]:
    """Return positions per second on each (upstream, downstream) of a host, between its last two
    reports."""
    if before is None or newest.at_s <= before.at_s:
        return {}
    earlier = {(flow.upstream, flow.downstream): flow.positions for flow in before.report.host.flows}
    rates = {}
    for flow in newest.report.host.flows:
        edge = (flow.upstream, flow.downstream)
        added = max(0, flow.positions - earlier.get(edge, flow.positions))
        rates[edge] = min(added / (newest.at_s - before.at_s), MAX_PER_SECOND)
    return rates
