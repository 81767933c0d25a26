"""What a worker says of its job to whoever watches the swarm, from the events it reports anyway."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from swarmnet_node.training.dependencies import Report
from swarmnet_protocols.directory.reports import MAX_CONTRIBUTIONS
from swarmnet_protocols.training.jobs import SealedJob
from swarmnet_protocols.wire import report_pb2 as pb

_STATES = {"ready": "training", "waiting": "waiting", "leaving": "leaving", "round": "training"}


class WorkerNumbers:
    """Takes a worker's events on their way to ``report``."""

    def __init__(self, sealed: SealedJob, version: str, report: Report) -> None:
        self._job = sealed.job
        self._version = version
        self._report = report
        self._began_s = asyncio.get_running_loop().time()
        self._contributions: Counter[str] = Counter()
        self._now = pb.WorkerReport(
            job=bytes.fromhex(sealed.id),
            name=sealed.job.job.name,
            method=sealed.job.method.name,
            state="starting",
            rounds=sealed.job.job.rounds,
        )

    def take(self, event: dict[str, Any]) -> None:
        """Count one event and hand it on."""
        kind = event["event"]
        if self._now.state != "leaving":
            self._now.state = _STATES.get(kind, self._now.state)
        if kind == "ready":
            self._now.round = event["round"]
        elif kind in {"round", "merge"}:
            self._count(event)
        elif kind == "eval":
            self._now.val_loss = event["val_loss"]
        elif kind == "done":
            self._now.state = "done" if event["round"] >= self._job.job.rounds else "left"
        self._report(event)

    def describe(self) -> pb.NodeReport:
        """The report of this moment."""
        del self._now.contributions[:]
        for peer, rounds in self._contributions.most_common(MAX_CONTRIBUTIONS):
            self._now.contributions.add(peer=peer, rounds=rounds)
        uptime_s = asyncio.get_running_loop().time() - self._began_s
        return pb.NodeReport(version=self._version, uptime_s=uptime_s, worker=self._now)

    def _count(self, event: Mapping[str, Any]) -> None:
        self._now.bytes_sent += event.get("bytes_sent", 0)
        self._now.bytes_received += event.get("bytes_received", 0)
        if event["event"] == "round":
            self._now.round = event["round"] + 1
            self._now.tokens += event["tokens"]
            if event["loss"] is not None:
                self._now.loss = event["loss"]
        if event["committed"]:
            self._contributions.update(event["contributors"])
            while len(self._contributions) > MAX_CONTRIBUTIONS:
                del self._contributions[min(self._contributions, key=self._contributions.__getitem__)]
