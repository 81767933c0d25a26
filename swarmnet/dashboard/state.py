"""The state of a swarm as JSON, derived from a snapshot; and the JSON Merge Patch from one state to
the next. Pure functions."""

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from swarmnet.dashboard.events import MAX_EVENTS, model_events, peer_events
from swarmnet.dashboard.experts import ExpertCoverage
from swarmnet.dashboard.models import model_entry
from swarmnet.dashboard.observing.observations import JobObservation, PeerObservation, Snapshot
from swarmnet.dashboard.peers import CLIENT, edge_entries, is_shown, peer_entry, rate_of, state_of
from swarmnet_protocols.averages import pooled
from swarmnet_protocols.directory.host_announcements import MAX_NUMBER
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.pipeline.stage_rows import stage_rows
from swarmnet_protocols.wire import report_pb2

MAX_PEERS = 2000
MAX_CONTRIBUTORS = 64
JOB_SHOWN_S = 30 * 24 * 3600.0
"""Seconds that a job stays on the page after its last worker left. The history is as long."""
MAX_JOBS = 64
"""Most jobs without workers that stay on the page. The jobs that ended last stay."""
NO_JOBS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class State:
    """``body``: the JSON of `/api/v1/state`. ``new_events``: its events that the state before did
    not have, oldest first."""

    body: Mapping[str, Any]
    new_events: tuple[Mapping[str, Any], ...] = ()


def known_before(events: Sequence[Mapping[str, Any]] = (), jobs: Mapping[str, Any] = NO_JOBS) -> State:
    """Return the state before the first snapshot, from the history. ``events``: newest first."""
    return State({"peers": {}, "models": {}, "events": [*events], "jobs": dict(jobs)})


def derive(snapshot: Snapshot, previous: State | None = None) -> State:
    """Return the state of a snapshot. ``previous``: the state before it."""
    before = (previous or known_before()).body
    shown = [seen for seen in snapshot.peers if is_shown(seen, snapshot.now_s)][:MAX_PEERS]
    jobs = _jobs(snapshot, before["jobs"])
    endings = _endings(snapshot, jobs)
    peers: dict[str, Any] = {
        seen.peer: peer_entry(seen, snapshot.now_s, before["peers"].get(seen.peer), endings) for seen in shown
    }
    present = {PeerId(peer) for peer, entry in peers.items() if entry["state"] != "gone"}
    edges = edge_entries(shown, present, snapshot.now_s)
    models = _models(snapshot, peers, edges)
    new = peer_events(before["peers"], peers, snapshot)
    new += model_events(before["models"], models, snapshot.now_s)
    body = {
        "swarm": {
            "name": snapshot.swarm.name,
            "id": snapshot.swarm.id,
            "admission": snapshot.swarm.admission,
            "join": shlex.join(snapshot.swarm.join),
            "now_s": round(snapshot.now_s, 1),
            "version": version("swarmnet-p2p"),
            "observed_from": snapshot.swarm.observer[-6:],
        },
        "models": models,
        "peers": peers,
        "flows": edges,
        "jobs": jobs,
        "events": [*reversed(new), *before["events"]][:MAX_EVENTS],
    }
    return State(body, tuple(new))


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Merge Patch (RFC 7386) that turns ``old`` into ``new``.

    A patch cannot set a member to null, it removes the member; readers take a missing member for
    null.
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


def _models(
    snapshot: Snapshot, peers: Mapping[str, Mapping[str, Any]], edges: Mapping[str, Any]
) -> dict[str, Any]:
    hosts: dict[str, list[tuple[str, Mapping[str, Any]]]] = defaultdict(list)
    for peer, entry in peers.items():
        if entry["model"] is not None and entry["state"] != "gone":
            hosts[entry["model"]].append((peer, entry))
    answered: dict[str, float] = defaultdict(float)
    for seen in snapshot.peers:
        manifest = seen.newest.report.host.record.manifest.hex() if seen.newest else ""
        answered[manifest] += rate_of(seen, snapshot.now_s, lambda report: report.host.answered)
    coverages = {model.manifest.hex(): ExpertCoverage(model.blocks) for model in snapshot.models}
    for seen in snapshot.peers:
        shown = peers.get(seen.peer)
        if shown is not None and shown["state"] in {"online", "joining"} and shown["model"] in coverages:
            is_online = shown["state"] == "online"
            coverages[shown["model"]].add(seen, is_online=is_online)
    sessions: dict[str, int] = defaultdict(int)
    for edge in edges.values():
        if edge["target"] == CLIENT:
            sessions[edge["model"]] += edge["sessions"]
    return {
        (key := model.manifest.hex()): model_entry(
            model, snapshot, hosts[key], answered[key], sessions[key], coverages[key]
        )
        for model in snapshot.models
    }


def _jobs(snapshot: Snapshot, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of the jobs in the catalog. Jobs that left the catalog stay for
    ``JOB_SHOWN_S``."""
    by_id = {seen.peer: seen for seen in snapshot.peers}
    reports: dict[str, list[report_pb2.WorkerReport]] = defaultdict(list)
    for seen in snapshot.peers:
        if seen.newest is not None and seen.newest.report.HasField("worker"):
            reports[seen.newest.report.worker.job.hex()].append(seen.newest.report.worker)
    jobs = {
        job.id: _job_entry(job, by_id, reports[job.id], snapshot.now_s, before.get(job.id))
        for job in snapshot.jobs
    }
    ended = {
        job: entry
        | {"workers": 0, "state": "done" if entry["round"] >= entry["rounds"] else "idle"}
        | {"ended_s": entry["ended_s"] or round(snapshot.now_s)}
        for job, entry in before.items()
        if job not in jobs
    }
    latest = sorted(ended, key=lambda job: -ended[job]["ended_s"])[:MAX_JOBS]
    return jobs | {job: ended[job] for job in latest if snapshot.now_s - ended[job]["ended_s"] < JOB_SHOWN_S}


def _endings(snapshot: Snapshot, jobs: Mapping[str, Any]) -> dict[PeerId, str]:
    """Return "finished" or "left" for each worker that was not lost.

    A worker announces its leave, or its last report is from the last round of a job that is done.
    """
    rounds = {job.id: job.rounds for job in snapshot.jobs}
    endings = {
        peer: "finished" if round >= job.rounds else "left"
        for job in snapshot.jobs
        for peer, round in job.left.items()
    }
    for seen in snapshot.peers:
        report = seen.newest.report.worker if seen.newest is not None else report_pb2.WorkerReport()
        job_id = report.job.hex()
        if job_id in rounds and jobs[job_id]["state"] == "done" and report.round >= rounds[job_id] - 1:
            endings[seen.peer] = "finished"
    return endings


def _job_entry(
    job: JobObservation,
    peers: Mapping[PeerId, PeerObservation],
    reports: Sequence[report_pb2.WorkerReport],
    now_s: float,
    before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the JSON of one job. ``reports``: the last report of each worker, gone or not.
    ``before``: the job's JSON in the last state. Its numbers stay until a worker reports newer
    ones."""
    known = before or {}
    there = [
        seen
        for peer in job.workers
        if (seen := peers.get(peer)) is not None and (seen.newest is None or state_of(seen)[0] != "gone")
    ]
    latest = [seen.newest.report.worker for seen in there if seen.newest is not None]
    present = [report for report in latest if report.job.hex() == job.id]
    round_ = min(job.rounds, max([job.round, known.get("round", 0), *(report.round for report in reports)]))
    loss = _mean([report.loss for report in present or reports if report.HasField("loss")])
    held_out = [
        (report.val_loss, report.val_tokens) for report in present or reports if report.HasField("val_loss")
    ]
    val_loss = pooled(held_out, most=job.evaluation_tokens)
    sent = min(MAX_NUMBER, sum(report.bytes_sent for report in reports))
    waited = max([each for each in present if each.waited_for], key=lambda each: each.round, default=None)
    return {
        "name": job.name,
        "method": job.method,
        "round": round_,
        "rounds": job.rounds,
        "workers": len(there),
        "loss": known.get("loss") if loss is None else loss,
        "val_loss": known.get("val_loss") if val_loss is None else round(val_loss, 5),
        "tokens": max([known.get("tokens", 0), *(report.tokens for report in reports)]),
        "bytes_sent": max(known.get("bytes_sent", 0), sent),
        "contributors": _contributors(reports) or known.get("contributors", []),
        "state": _job_state(job, round_, len(there), [report.state for report in present]),
        "waited_for": waited
        and {"peer_id": waited.waited_for, "why": waited.waited_why, "seconds": waited.waited_s},
        "stages": None if job.stages is None else _stages(job.stages, there, job.id),
        "ended_s": None if there else known.get("ended_s") or round(now_s),
    }


def _stages(count: int, workers: Sequence[PeerObservation], job_id: str) -> list[dict[str, Any]]:
    """Return the stages of a job from the reports of its workers."""
    found: list[dict[PeerId, report_pb2.WorkerReport | None]] = [{} for _ in range(count)]
    for seen in workers:
        report = report_pb2.WorkerReport() if seen.newest is None else seen.newest.report.worker
        if report.job.hex() == job_id and report.stage.number < count:
            found[report.stage.number][seen.peer] = report
    return stage_rows(found)


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 5) if values else None


def _contributors(reports: Sequence[report_pb2.WorkerReport]) -> list[dict[str, Any]]:
    """Return each worker's share of the contributions to committed rounds, from the report that
    counts the most of them."""
    longest = max(reports, key=lambda report: sum(each.rounds for each in report.contributions), default=None)
    if longest is None:
        return []
    total = sum(each.rounds for each in longest.contributions) or 1
    most = sorted(longest.contributions, key=lambda each: (-each.rounds, each.peer))[:MAX_CONTRIBUTORS]
    return [{"peer_id": each.peer, "share": round(each.rounds / total, 4)} for each in most]


def _job_state(job: JobObservation, round: int, workers: int, states: Sequence[str]) -> str:
    if round >= job.rounds:
        return "done"
    if not workers:
        return "idle"
    return "waiting" if states and all(state == "waiting" for state in states) else "training"
