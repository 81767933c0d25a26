"""The record of a worker's training: totals that survive restarts, a history of bounded size, and
curves."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnet.cli.training import plots as training_plots
from swarmnet.cli.training import record as training_record
from swarmnet.cli.training.plots import Panel, plot_histories
from swarmnet.cli.training.record import HISTORY_FILE, TrainingRecord, newest_job, read_history, read_status
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.machine.clock import Clock

READY = {"event": "ready", "peer_id": "me", "addresses": [], "name": "tiny", "round": 0, "rounds": 9}


def every_second() -> Clock:
    seconds: Iterator[int] = iter(range(1000, 1_000_000))
    return lambda: float(next(seconds))


def round_event(round: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "round",
        "round": round,
        "committed": True,
        "loss": 5.0 - round,
        "tokens": 100,
        "workers": 2,
        "bytes_sent": 10,
        "bytes_received": 20,
        "exchange_s": 0.5,
        "wait_s": 0.25,
        "params_hash": "ab",
        "contributors": ["me", "you"],
        "excluded": [],
        "reason": "committed",
        **changes,
    }


def eval_event(round: int) -> dict[str, Any]:
    return {"event": "eval", "round": round, "val_loss": 6.0 - round, "tokens": 7}


def test_a_status_has_totals_contributions_and_who_was_excluded(tmp_path: Path) -> None:
    record = TrainingRecord(tmp_path, "job", every_second())
    excluded = [{"peer_id": "liar", "reason": "NaN"}]
    for event in (
        READY,
        round_event(0),
        eval_event(0),
        round_event(1, contributors=["me"], excluded=excluded),
    ):
        record.take(event)
    status = read_status(tmp_path)
    assert status == record.status
    assert (status["round"], status["rounds"], status["state"]) == (2, 9, "training")
    assert (status["loss"], status["val_loss"]) == (4.0, 6.0)
    assert (status["tokens"], status["bytes_sent"], status["bytes_received"]) == (200, 20, 40)
    assert (status["elapsed_s"], status["wait_s"], status["wait_share"]) == (3.0, 0.5, 0.1667)
    assert status["peers"] == {"me": {"rounds": 2, "last_round": 1}, "you": {"rounds": 1, "last_round": 0}}
    assert status["excluded"] == {"liar": {"times": 1, "round": 1, "reason": "NaN"}}


def test_a_discarded_round_counts_as_a_contribution_of_no_worker(tmp_path: Path) -> None:
    record = TrainingRecord(tmp_path, "job", every_second())
    record.take(READY)
    record.take(round_event(0, committed=False, reason="too late"))
    assert record.status["peers"] == {}
    assert record.status["bytes_sent"] == 10


def test_totals_and_history_go_on_after_a_restart(tmp_path: Path) -> None:
    for round in range(3):
        record = TrainingRecord(tmp_path, "job", every_second())
        record.take({**READY, "round": round})
        record.take(round_event(round))
    assert record.status["tokens"] == 300
    assert record.status["peers"]["you"]["rounds"] == 3
    points = list(read_history(tmp_path))
    assert [point["tokens"] for point in points] == [100, 200, 300]
    assert [point["elapsed_s"] for point in points] == [1.0, 2.0, 3.0]
    assert [point["loss"] for point in points] == [5.0, 4.0, 3.0]


def test_a_line_that_a_crash_tore_costs_only_itself(tmp_path: Path) -> None:
    record = TrainingRecord(tmp_path, "job", every_second())
    for event in (READY, round_event(0), round_event(1)):
        record.take(event)
    history = tmp_path / HISTORY_FILE
    history.write_bytes(history.read_bytes()[:-20])
    again = TrainingRecord(tmp_path, "job", every_second())
    again.take(READY)
    again.take(round_event(2))
    assert [point["round"] for point in read_history(tmp_path)] == [1, 3]


@pytest.mark.parametrize("line", [b"x" * 5000, b"[" * 900, b'{"loss": "high"}', b"[1]", b"\xff"])
def test_invalid_points_of_a_history_are_ignored(tmp_path: Path, line: bytes) -> None:
    (tmp_path / HISTORY_FILE).write_bytes(line + b'\n{"loss": 1.0}\n')
    assert list(read_history(tmp_path))[-1:] == [{"loss": 1.0}]


def test_a_history_is_thinned_before_it_grows_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_record, "MAX_POINTS", 20)
    record = TrainingRecord(tmp_path, "job", every_second())
    record.take(READY)
    for round in range(200):
        record.take(round_event(round))
        record.take(eval_event(round))
        assert len((tmp_path / HISTORY_FILE).read_text().splitlines()) <= 20
    points = list(read_history(tmp_path))
    assert points[-1]["tokens"] == 200 * 100
    assert len([point for point in points if "val_loss" in point]) >= 5
    assert [point["time"] for point in points] == sorted(point["time"] for point in points)


def test_the_record_of_a_worker_names_a_limited_number_of_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_record, "MAX_PEERS", 3)
    record = TrainingRecord(tmp_path, "job", every_second())
    for round in range(10):
        stranger = f"stranger{round}"
        refused = [{"peer_id": stranger, "reason": "x" * 10_000}]
        record.take(round_event(round, contributors=["me", stranger], excluded=refused))
    assert list(record.status["peers"]) == ["stranger8", "me", "stranger9"]
    assert record.status["peers"]["me"]["rounds"] == 10
    assert len(record.status["excluded"]) == 3
    assert len(json.dumps(record.status)) < 4000


def test_a_worker_that_only_listened_has_no_loss(tmp_path: Path) -> None:
    record = TrainingRecord(tmp_path, "job", every_second())
    record.take(READY)
    record.take(round_event(0, loss=None))
    assert record.status["loss"] is None
    assert list(read_history(tmp_path)) == []


def test_a_warning_changes_no_other_field_and_ends_with_the_worker(tmp_path: Path) -> None:
    record = TrainingRecord(tmp_path, "job", every_second())
    for event in (READY, {"event": "waiting", "round": 0, "workers": 1}):
        record.take(event)
    before = {**record.status, "time": 0.0, "elapsed_s": 0.0}
    record.take({"event": "identity", "warning": "a copy of the key"})
    assert {**record.status, "time": 0.0, "elapsed_s": 0.0} == {**before, "warning": "a copy of the key"}
    record.take(round_event(0))
    assert read_status(tmp_path)["warning"] == "a copy of the key"
    record.take({"event": "identity", "warning": ""})
    assert read_status(tmp_path)["warning"] == ""
    record.take({"event": "identity", "warning": "a copy of the key"})
    assert TrainingRecord(tmp_path, "job", every_second()).status["warning"] == ""


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = TrainingRecord(tmp_path, "job", every_second())
    record.take(READY)

    def full(*_: object, **__: object) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkstemp", full)
        patch.setattr(Path, "open", full)
        record.take(round_event(0))
    record.take(round_event(1))
    assert read_status(tmp_path)["tokens"] == 200
    assert [point["round"] for point in read_history(tmp_path)] == [2]


@pytest.mark.parametrize(
    ("left_at", "state"), [(9, "done"), (3, "left")], ids=["all rounds", "before the last round"]
)
def test_a_worker_ends_as_done_or_as_left(tmp_path: Path, left_at: int, state: str) -> None:
    record = TrainingRecord(tmp_path, "job", every_second())
    record.take(READY)
    record.take({"event": "leaving"})
    record.take(round_event(left_at - 1))
    assert record.status["state"] == "leaving"
    record.take({"event": "done", "round": left_at, "revision": left_at})
    assert record.status["state"] == state


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10_000])
def test_a_missing_or_invalid_status_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="no worker of this job"):
        read_status(tmp_path)
    (tmp_path / training_record.STATUS_FILE).write_text(text)
    with pytest.raises(IntegrityError, match="not a status"):
        read_status(tmp_path)
    TrainingRecord(tmp_path, "job", every_second()).take(READY)
    assert read_status(tmp_path)["name"] == "tiny"


def test_the_newest_job_is_the_one_that_was_trained_last(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no worker has run"):
        newest_job(tmp_path)
    for job in ("bb", "aa", "bb"):
        TrainingRecord(tmp_path / "training" / job, job, every_second()).take(READY)
    assert newest_job(tmp_path) == "bb"


def _history(folder: Path) -> Callable[[], Iterator[dict[str, float]]]:
    record = TrainingRecord(folder, "job", every_second())
    for event in (READY, *(each(round) for round in range(4) for each in (round_event, eval_event))):
        record.take(event)
    return lambda: read_history(folder)


def test_curves_are_drawn_against_tokens_bytes_and_time(tmp_path: Path) -> None:
    paths = plot_histories({"tiny": _history(tmp_path)()}, tmp_path / "plots")
    assert [path.name for path in paths] == ["tokens.png", "bytes.png", "time.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_an_axis_has_the_largest_unit_of_which_its_values_have_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    monkeypatch.setattr(
        training_plots, "save_panels", lambda panels, path: labels.extend(panel.x_label for panel in panels)
    )
    for tokens, sent, seconds in ((14_080, 1_145, 298.0), (2.5e6, 3.1e9, 86_400.0)):
        point = {"loss": 3.0, "tokens": tokens, "bytes_sent": sent, "elapsed_s": seconds}
        plot_histories({"tiny": [point]}, tmp_path)
    assert labels == [
        "thousand tokens of all workers", "bytes sent by this worker", "minutes",
        "million tokens of all workers", "GB sent by this worker", "hours",
    ]  # fmt: skip


def test_several_runs_are_drawn_in_one_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Panel] = []
    monkeypatch.setattr(training_plots, "save_panels", lambda panels, path: drawn.extend(panels))
    history = list(_history(tmp_path)())
    plot_histories({"tiny": history}, tmp_path)
    assert [panel.title for panel in drawn] == [f"tiny: loss by {by}" for by in ("tokens", "bytes", "time")]
    drawn.clear()
    plot_histories({"tiny": history, "large": history[:2]}, tmp_path)
    assert drawn[0].title == "2 runs: loss by tokens"
    assert [(line.label, line.color, line.dashed) for line in drawn[0].lines] == [
        ("tiny, training", "C0", False),
        ("tiny, validation", "C0", True),
        ("large, training", "C1", False),
        ("large, validation", "C1", True),
    ]
    assert [len(line.x) for line in drawn[0].lines] == [4, 4, 1, 1]


def test_plots_without_matplotlib_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib") as caught:
        plot_histories({"tiny": _history(tmp_path)()}, tmp_path / "plots")
    assert "pip install matplotlib" in caught.value.hint
