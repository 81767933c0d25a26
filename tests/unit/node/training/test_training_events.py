"""The report of a training worker, made from its events."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarmnet_node.owner.given import Given
from swarmnet_node.training.events import WorkerReporter
from swarmnet_protocols.directory.node_reports import MAX_CONTRIBUTIONS, check
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.jobs import open_job, seal_job
from swarmnet_protocols.wire import report_pb2
from tests.support.training.tiny_job import for_others, tiny_job

ME, OTHER = (Identity.from_seed(name).peer_id for name in (b"me", b"other"))
READY = {"event": "ready", "round": 2}


def trained(round: int, *peers: str, loss: float | None = 3.0, committed: bool = True) -> dict[str, Any]:
    exchanged = {
        "bytes_sent": 100,
        "bytes_received": 300,
        "contributors": list(peers),
        "committed": committed,
    }
    work = {"own_tokens": 160, "round_s": 4.0, "compute_s": 3.0, "forward_bytes": 80, "backward_bytes": 0}
    return {"event": "round", "round": round, "loss": loss, "tokens": 320, **exchanged, **work}


def report_after(tmp_path: Path, *events: dict[str, Any]) -> report_pb2.WorkerReport:
    """The report after these events, all of which are passed on."""

    async def run() -> report_pb2.WorkerReport:
        handed_on: list[dict[str, Any]] = []
        sealed = open_job(seal_job(for_others(tiny_job(tmp_path)), Identity.from_seed(b"owner")))
        reporter = WorkerReporter(
            sealed, "0.1.0", handed_on.append, report_pb2.Reach, Given(), public_name="attic"
        )
        for event in events:
            reporter.handle(event)
        assert handed_on == list(events)
        report = reporter.report()
        check(report)
        assert report.public_name == "attic"
        assert reporter.report().worker == report.worker, "reading the report does not change it"
        assert report.worker.job.hex() == sealed.id
        return report.worker

    return asyncio.run(run())


def test_the_report_sums_rounds(tmp_path: Path) -> None:
    report = report_after(tmp_path, READY, trained(2, ME, OTHER), trained(3, OTHER, loss=None))
    assert (report.name, report.method, report.round, report.rounds) == ("tiny", "diloco", 4, 10)
    assert (report.loss, report.HasField("val_loss"), report.tokens) == (3.0, False, 640)
    assert (report.bytes_sent, report.bytes_received) == (200, 600)
    assert {each.peer: each.rounds for each in report.contributions} == {OTHER: 2, ME: 1}


def test_the_report_has_recent_work_of_a_stage(tmp_path: Path) -> None:
    ready = READY | {"stage": 1, "stages": 3, "blocks": [2, 5]}
    report = report_after(tmp_path, ready, trained(2), trained(3))
    assert (report.stage.number, report.stage.start, report.stage.end) == (1, 2, 5)
    recent = report.recent
    assert (recent.seconds, recent.tokens) == pytest.approx((4 * 1.8, 160 * 1.8))
    assert recent.compute_s / recent.seconds == pytest.approx(0.75)
    assert recent.forward_bytes / recent.tokens == pytest.approx(0.5)


def test_discarded_rounds_are_not_contributions(tmp_path: Path) -> None:
    report = report_after(
        tmp_path, READY, trained(2, ME, committed=False), {"event": "eval", "val_loss": 2.5, "tokens": 64}
    )
    assert (len(report.contributions), report.val_loss, report.val_tokens) == (0, 2.5, 64)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "starting"),
        ([READY], "training"),
        ([READY, {"event": "waiting"}], "waiting"),
        ([READY, {"event": "waiting"}, trained(2)], "training"),
        ([READY, {"event": "leaving"}, trained(2)], "leaving"),
        ([READY, {"event": "leaving"}, {"event": "done", "round": 3}], "left"),
        ([READY, {"event": "finished", "round": 10}], "finished"),
        ([READY, {"event": "done", "round": 10}], "done"),
        ([READY, {"event": "healed"}], "training"),
    ],
)
def test_the_report_has_the_workers_state(tmp_path: Path, events: list[dict[str, Any]], state: str) -> None:
    assert report_after(tmp_path, *events).state == state


def test_contributors_are_bounded_in_number(tmp_path: Path) -> None:
    peers = [Identity.from_seed(f"{number}".encode()).peer_id for number in range(MAX_CONTRIBUTIONS + 20)]
    report = report_after(
        tmp_path, READY, trained(2, ME), trained(3, ME), *(trained(4, peer) for peer in peers)
    )
    assert len(report.contributions) == MAX_CONTRIBUTIONS
    assert (report.contributions[0].peer, report.contributions[0].rounds) == (ME, 2)
