"""The events of a training worker, and the report for dashboards that is made from them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import TYPE_CHECKING, Any

from swarmnet_node.hosting.reports import describe_reach
from swarmnet_node.owner.given import Given
from swarmnet_protocols.directory.node_reports import MAX_CONTRIBUTIONS
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.training.jobs import SealedJob
from swarmnet_protocols.wire import report_pb2 as pb

if TYPE_CHECKING:
    from swarmnet_node.training.exchanges import Exchange
    from swarmnet_protocols.training.pacing import WorkerPace
    from swarmnet_protocols.training.pipeline.microbatches import BoundaryBytes
    from swarmnet_protocols.training.rounds.round_runner import Outcome

EventHandler = Callable[[dict[str, Any]], None]
"""Receives each event as a JSON object, with the fields of ``swarmnet train join --json``."""

RECENT = 0.8
"""Weight of a round in the report's recent work, relative to the next round. With less, one slow
round hides the usual rate. With more, a change of the rate shows late."""
_STATES = {
    "ready": "training",
    "waiting": "waiting",
    "stage_missing": "waiting",
    "stage_lost": "waiting",
    "restored": "training",
    "paused": "paused",
    "spare": "spare",
    "leaving": "leaving",
    "round": "training",
    "finished": "finished",
}


@dataclass
class RoundMeter:
    """Measures the time of a worker's rounds, and the ``traffic`` of its stage's boundaries."""

    pace: "WorkerPace"
    traffic: "BoundaryBytes"
    _before: Sequence[float] = ()

    def begin(self) -> Sequence[Any]:
        """Begin to measure a round. Return the increase of all readings in the round before."""
        now, traffic, before = loop_time(), self.traffic, self._before
        self._before = now, self.pace.computed_s, traffic.forward, traffic.backward, traffic.received
        return list(map(sub, self._before, before))

    def fields(self, exchange: "Exchange", outcome: "Outcome", stage: int | None) -> dict[str, Any]:
        """Return the fields of the event "round", which ends with this ``exchange``.

        ``stage``: the worker's stage, in a job with stages. There only origins, in stage 0, have
        the loss. All seconds without computation count as waiting, because a worker also waits for
        other stages.
        """
        round_s, computed_s, forward, backward, received = self.begin()
        compute_s = min(computed_s, round_s)
        report, waited = exchange.report, exchange.waited
        return {
            "round": exchange.round,
            "loss": round(report.loss, 6) if report.tokens and not stage else None,
            "tokens": round(outcome.tokens),
            "own_tokens": report.tokens,
            "workers": exchange.workers,
            **exchange_fields(outcome),
            "round_s": round(round_s, 3),
            "compute_s": round(compute_s, 3),
            "wait_s": round(exchange.wait_s if stage is None else round_s - compute_s, 3),
            "forward_bytes": forward,
            "backward_bytes": backward,
            "bytes_sent": outcome.bytes_sent + forward + backward,
            "bytes_received": outcome.bytes_received + received,
            "exchange_s": round(loop_time() - exchange.start_s, 3),
            "waited_for": waited
            and {"peer_id": waited.peer, "why": waited.why, "seconds": round(waited.seconds, 3)},
        }


def exchange_fields(outcome: "Outcome") -> dict[str, Any]:
    """Return the fields that describe an exchange in an event."""
    return {
        "committed": outcome.committed,
        "bytes_sent": outcome.bytes_sent,
        "bytes_received": outcome.bytes_received,
        "contributors": list(outcome.all_contributors()),
        "excluded": [{"peer_id": peer, "reason": why} for peer, why in outcome.excluded],
        "reason": outcome.reason,
    }


class WorkerReporter:
    """Passes a worker's events on to ``handler``, and keeps the totals for its report."""

    def __init__(
        self,
        sealed: SealedJob,
        version: str,
        handler: EventHandler,
        reach: Callable[[], pb.Reach],
        given: Given,
        *,
        public_name: str = "",
    ) -> None:
        self._job = sealed.job
        self._version = version
        self._public_name = public_name
        self._handler = handler
        self._reach = reach
        self._given = given
        self._start_s = loop_time()
        self._contributions: Counter[str] = Counter()
        self._report = pb.WorkerReport(
            job=bytes.fromhex(sealed.id),
            name=sealed.job.job.name,
            method=sealed.job.method.name,
            state="starting",
            rounds=sealed.job.job.rounds,
        )

    def handle(self, event: dict[str, Any]) -> None:
        """Add ``event`` to the report and pass it on."""
        kind = event["event"]
        if self._report.state != "leaving":
            self._report.state = _STATES.get(kind, self._report.state)
        if kind == "ready":
            self._report.round = event["round"]
            if event.get("stage") is not None:
                start, end = event["blocks"]
                self._report.stage.CopyFrom(pb.WorkerStage(number=event["stage"], start=start, end=end))
        elif kind in {"round", "merge"}:
            self._add_exchange(event)
        elif kind == "eval":
            self._report.val_loss, self._report.val_tokens = event["val_loss"], event["tokens"]
        elif kind == "done":
            self._report.state = "done" if event["round"] >= self._job.job.rounds else "left"
        self._handler(event)

    def report(self) -> pb.NodeReport:
        """Return the current report."""
        del self._report.contributions[:]
        for peer, rounds in self._contributions.most_common(MAX_CONTRIBUTIONS):
            self._report.contributions.add(peer=peer, rounds=rounds)
        uptime_s = loop_time() - self._start_s
        return pb.NodeReport(
            version=self._version,
            public_name=self._public_name,
            uptime_s=uptime_s,
            worker=self._report,
            reach=describe_reach(self._reach()),
            given=self._given.message(),
        )

    def _add_exchange(self, event: Mapping[str, Any]) -> None:
        self._report.bytes_sent += event.get("bytes_sent", 0)
        self._report.bytes_received += event.get("bytes_received", 0)
        if event["event"] == "round":
            self._report.round = event["round"] + 1
            self._report.tokens += event["tokens"]
            waited = event.get("waited_for") or {"peer_id": "", "why": "", "seconds": 0.0}
            self._report.waited_for, self._report.waited_why = waited["peer_id"], waited["why"]
            self._report.waited_s = waited["seconds"]
            recent = self._report.recent
            work = {**event, "seconds": event["round_s"], "tokens": event["own_tokens"]}
            for field in recent.DESCRIPTOR.fields:
                setattr(recent, field.name, RECENT * getattr(recent, field.name) + work[field.name])
            if event["loss"] is not None:
                self._report.loss = event["loss"]
        if event["committed"]:
            self._contributions.update(event["contributors"])
            while len(self._contributions) > MAX_CONTRIBUTIONS:
                del self._contributions[min(self._contributions, key=self._contributions.__getitem__)]
