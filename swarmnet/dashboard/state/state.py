"""The whole state of a swarm as JSON, from what was seen of it; and the changes from one state to the next. Pure."""

import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from swarmnet.dashboard.observing.sightings import Look, Sighting
from swarmnet.dashboard.state.coverage import model_entry
from swarmnet.dashboard.state.events import MAX_EVENTS, model_events, peer_events
from swarmnet.dashboard.state.flows import CLIENT, flow_entries
from swarmnet.dashboard.state.jobs import job_entry
from swarmnet.dashboard.state.peers import is_shown, peer_entry, rate_of
from swarmnet_protocols.net import PeerId

MAX_PEERS = 2000


@dataclass(frozen=True)
class State:
    """``body`` is what `/api/v1/state` answers; ``new_events`` are those of its events that the state before did not have."""

    body: Mapping[str, Any]
    new_events: tuple[Mapping[str, Any], ...] = ()


def derive(
    look: Look, previous: State | None = None, old_events: tuple[Mapping[str, Any], ...] = ()
) -> State:
    """The state at one look. ``old_events``, newest first, are what is remembered where there is no state before."""
    before: Mapping[str, Any] = {"peers": {}, "models": {}, "events": list(old_events)}
    if previous is not None:
        before = previous.body
    shown = [seen for seen in look.peers if is_shown(seen, look.now_s)][:MAX_PEERS]
    peers: dict[str, Any] = {
        seen.peer: peer_entry(seen, look.now_s, before["peers"].get(seen.peer)) for seen in shown
    }
    here = {PeerId(peer) for peer, entry in peers.items() if entry["state"] != "gone"}
    flows = flow_entries(shown, here, look.now_s)
    models = _models(look, peers, flows)
    by_id = {seen.peer: seen for seen in shown}
    new = peer_events(before["peers"], peers, look)
    if previous is not None:
        new += model_events(before["models"], models, look.now_s)
    body = {
        "swarm": {
            "name": look.swarm.name,
            "id": look.swarm.id,
            "admission": look.swarm.admission,
            "join": shlex.join(look.swarm.join),
            "now_s": round(look.now_s, 1),
            "version": version("swarmnet-p2p"),
            "observed_from": look.swarm.observer[-6:],
        },
        "models": models,
        "peers": peers,
        "flows": flows,
        "jobs": {job.id: job_entry(job, by_id) for job in look.jobs},
        "events": [*reversed(new), *before["events"]][:MAX_EVENTS],
    }
    return State(body, tuple(new))


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON Merge Patch (RFC 7386) that makes ``new`` of ``old``.

    No value of ``new`` that ``old`` has in another form may be None: such a patch removes the member, and a reader takes
    what is missing for null.
    """
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        known = old.get(name)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            if inner := merge_patch(known, value):
                patch[name] = inner
        elif name not in old or value != known:
            patch[name] = value
    return patch


def _models(look: Look, peers: Mapping[str, Mapping[str, Any]], flows: Mapping[str, Any]) -> dict[str, Any]:
    hosts: dict[str, list[tuple[str, Mapping[str, Any]]]] = defaultdict(list)
    for peer, entry in peers.items():
        if entry["model"] is not None and entry["state"] != "gone":
            hosts[entry["model"]].append((peer, entry))
    answered: dict[str, float] = defaultdict(float)
    for seen in look.peers:
        answered[_model_of(seen)] += rate_of(seen, look.now_s, lambda report: report.host.answered)
    sessions: dict[str, int] = defaultdict(int)
    for flow in flows.values():
        if flow["target"] == CLIENT:
            sessions[flow["model"]] += flow["sessions"]
    return {
        (key := model.manifest.hex()): model_entry(model, look, hosts[key], answered[key], sessions[key])
        for model in look.models
    }


def _model_of(seen: Sighting) -> str:
    return seen.newest.report.host.manifest.hex() if seen.newest else ""
