"""Who sends to whom: the edges along which tokens move. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from swarmnet.dashboard.observing.sightings import Sighting
from swarmnet.dashboard.observing.tally import MAX_PER_SECOND, is_same_run
from swarmnet.dashboard.state.peers import STALE_S
from swarmnet_protocols.net import PeerId

CLIENT = "client"
"""Stands for all clients: nothing tells one from another."""
MAX_EDGES = 1000


@dataclass
class _Edge:
    model: str
    sessions: int = 0
    positions_per_s: float = 0.0


def flow_entries(sightings: Iterable[Sighting], known: Collection[PeerId], now_s: float) -> dict[str, Any]:
    """The JSON of all edges by ``SOURCE>TARGET``, between peers that are ``known``.

    An edge between two hosts is told by the one that receives, which has seen who sends.
    """
    edges: dict[tuple[str, str], _Edge] = {}
    for seen in sightings:
        newest = seen.newest
        if newest is None or seen.failed_at_s is not None or now_s - newest.at_s > STALE_S:
            continue
        rates = _rates(seen)
        model = newest.report.host.manifest.hex()
        for flow in newest.report.host.flows:
            rate = rates.get((flow.upstream, flow.downstream), 0.0)
            if not flow.upstream or flow.upstream in known:
                _add(edges, (flow.upstream or CLIENT, seen.peer), _Edge(model, flow.sessions, rate))
            if not flow.downstream:
                _add(edges, (seen.peer, CLIENT), _Edge(model, flow.sessions, rate))
    busy = {pair: edge for pair, edge in edges.items() if edge.sessions or edge.positions_per_s >= 0.05}
    busiest = sorted(busy, key=lambda pair: (-busy[pair].positions_per_s, -busy[pair].sessions, pair))
    return {
        f"{source}>{target}": _entry(source, target, busy[source, target])
        for source, target in busiest[:MAX_EDGES]
    }


def _rates(seen: Sighting) -> dict[tuple[str, str], float]:
    newest, before = seen.newest, seen.before
    if newest is None or before is None or not is_same_run(before.report, newest.report):
        return {}
    elapsed_s = newest.at_s - before.at_s
    if elapsed_s <= 0:
        return {}
    then = {(flow.upstream, flow.downstream): flow.positions for flow in before.report.host.flows}
    return {
        (flow.upstream, flow.downstream): min(
            max(0, flow.positions - then.get((flow.upstream, flow.downstream), flow.positions)) / elapsed_s,
            MAX_PER_SECOND,
        )
        for flow in newest.report.host.flows
    }


def _add(edges: dict[tuple[str, str], _Edge], pair: tuple[str, str], more: _Edge) -> None:
    edge = edges.setdefault(pair, _Edge(more.model))
    edge.sessions += more.sessions
    edge.positions_per_s += more.positions_per_s


def _entry(source: str, target: str, edge: _Edge) -> dict[str, Any]:
    return {
        "source": source,
        "target": target,
        "model": edge.model,
        "sessions": edge.sessions,
        "tokens_per_s": round(edge.positions_per_s, 1),
    }
