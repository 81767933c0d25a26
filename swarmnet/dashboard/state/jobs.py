"""Training jobs as the page shows them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from swarmnet.dashboard.observing.sightings import JobSighting, Sighting
from swarmnet.dashboard.state.peers import state_of
from swarmnet_protocols.directory.node_reports import MAX_NUMBER
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import report_pb2

MAX_CONTRIBUTORS = 64


def job_entry(job: JobSighting, peers: Mapping[PeerId, Sighting]) -> dict[str, Any]:
    """The JSON of one job, by what its workers say."""
    reports = [
        seen.newest.report.worker
        for peer in job.workers
        if (seen := peers.get(peer)) is not None
        and seen.newest is not None
        and state_of(seen)[0] != "gone"
        and seen.newest.report.worker.job.hex() == job.id
    ]
    round_number = max([job.round, *(report.round for report in reports)])
    return {
        "name": job.name,
        "method": job.method,
        "round": min(round_number, job.rounds),
        "rounds": job.rounds,
        "workers": len(job.workers),
        "loss": _mean([report.loss for report in reports if report.HasField("loss")]),
        "val_loss": _mean([report.val_loss for report in reports if report.HasField("val_loss")]),
        "tokens": max((report.tokens for report in reports), default=0),
        "bytes_sent": min(MAX_NUMBER, sum(report.bytes_sent for report in reports)),
        "contributors": _contributors(reports),
        "state": _state(job, round_number, [report.state for report in reports]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 5) if values else None


def _contributors(reports: Sequence[report_pb2.WorkerReport]) -> list[dict[str, Any]]:
    """Shares of the rounds that were committed, as the worker saw it that saw most."""
    longest = max(reports, key=lambda report: sum(each.rounds for each in report.contributions), default=None)
    if longest is None:
        return []
    total = sum(each.rounds for each in longest.contributions) or 1
    most = sorted(longest.contributions, key=lambda each: (-each.rounds, each.peer))[:MAX_CONTRIBUTORS]
    return [{"peer_id": each.peer, "share": round(each.rounds / total, 4)} for each in most]


def _state(job: JobSighting, round_number: int, states: Sequence[str]) -> str:
    if round_number >= job.rounds:
        return "done"
    if not job.workers:
        return "idle"
    return "waiting" if states and all(state == "waiting" for state in states) else "training"
