"""The output of `train join`: progress bars on a terminal, lines elsewhere."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swarmnet.cli.training.displays import Lines, bars, display
from swarmnet.cli.training.record import TrainingRecord
from swarmnet.cli.training.train_words import facts_of, sentence, summary, tell
from tests.support.training.tiny_job import tiny_job
from tests.unit.cli.training.test_training_record import READY, eval_event, every_second, round_event


def shown_on_a_terminal(folder: Path, *steps: dict[str, Any] | tuple[str, int, int | None]) -> list[str]:
    """The text of the progress bars after each step: an event, or progress of a task."""
    screen, shots = io.StringIO(), []
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    record = TrainingRecord(folder, "job", every_second())
    with bars(console) as shown:
        for step in steps:
            if isinstance(step, tuple):
                shown.progress(*step)
            else:
                record.take(step)
                shown.show(step, tell(step, record.status))
            screen.seek(0)
            screen.truncate()
            shown.refresh()  # type: ignore[attr-defined]
            shots.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()))
    return shots


def test_bars_show_long_steps_then_rounds(tmp_path: Path) -> None:
    shots = shown_on_a_terminal(
        tmp_path,
        ("tokenising the data", 1, 4),
        ("tokenising the data", 4, 4),
        ("loading a model", 0, None),
        READY,
        round_event(0),
        eval_event(0),
        ("inner steps", 5, 20),
        ("fetching the state", 3, 4),
    )
    assert "tokenising the data" in shots[0]
    assert "25%" in shots[0]
    assert "tokenising" not in shots[1]
    assert "loading a model" in shots[2]
    assert "loading" not in shots[3]
    assert re.search(r"rounds +\S* +11% \d+:\d\d:\d\d|rounds.*11%", shots[4])
    assert (
        "round 1 of 9, loss 5.0000, 2 workers, 10 B sent, 20 B received, 25% of the time waiting" in shots[4]
    )
    assert "validation 6.0000" in shots[5]
    assert re.search(r"inner steps.*25%", shots[6])
    assert re.search(r"fetching the state.*75%", shots[7])


def test_important_lines_stay_above_the_bars(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    record = TrainingRecord(tmp_path, "job", every_second())
    refused = [{"peer_id": "liar", "reason": "its values are not finite"}]
    with bars(console) as shown:
        for event in (
            READY,
            round_event(0),
            round_event(1, committed=False, reason="too late"),
            round_event(2, excluded=refused),
            {"event": "leaving"},
            {"event": "finished", "round": 9, "rounds": 9, "stays_s": 600.0},
        ):
            record.take(event)
            shown.show(event, tell(event, record.status))
    text = screen.getvalue()
    assert "round 0 committed" not in text
    assert "round 1 discarded (too late)" in text
    assert "excluded liar: its values are not finite" in text
    assert "press Ctrl-C again to leave at once" in text


def test_without_a_terminal_there_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = TrainingRecord(tmp_path, "job", every_second())
    with display(as_json=False) as shown:
        assert isinstance(shown, Lines)
        shown.progress("tokenising the data", 0, 4)
        shown.progress("tokenising the data", 1, 4)
        for event in (READY, round_event(0)):
            record.take(event)
            shown.show(event, tell(event, record.status))
            shown.progress("inner steps", 1, 4)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tokenising the data"
    assert lines[1].startswith("training tiny as me")
    assert lines[2].startswith("round 0 committed: loss 5.0000, 2 workers")
    assert len(lines) == 3


@pytest.mark.parametrize(
    "event",
    [
        READY,
        round_event(0, loss=None),
        eval_event(3),
        {"event": "waiting", "round": 0, "workers": 1},
        {
            "event": "healed",
            "round": 3,
            "bytes": 10,
            "seconds": 1.0,
            "dropped": [{"peer_id": "a", "reason": "b"}],
        },
        {"event": "heal_failed", "round": 3, "reason": "no worker offers it"},
        {"event": "behind", "round": 3, "reason": "no majority"},
        {"event": "lost", "round": 3, "tokens": 32, "counted": 96},
        {"event": "merge", "round": 3, "committed": False, "reason": "late"},
        {"event": "merge", "round": 3, "committed": True, "reason": "", "workers": 2},
        {"event": "leaving"},
        {"event": "done", "round": 3, "rounds": 3, "revision": 2},
        {"event": "done", "round": 2, "rounds": 3, "revision": 2},
    ],
    ids=lambda event: event["event"],
)
def test_every_event_has_a_line(event: dict[str, Any], tmp_path: Path) -> None:
    assert len(sentence(event)) > 10
    assert not sentence(event).startswith(f"{event['event']}: ")  # as an event without a sentence
    record = TrainingRecord(tmp_path, "job", every_second())
    record.take(READY)
    record.take(event)
    assert summary(record.status).startswith("round ")


def test_a_worker_that_leaves_or_is_done_prints_the_next_command() -> None:
    done = {"event": "done", "rounds": 3, "revision": 2}
    assert "the same command continues" in sentence(done | {"round": 2})
    assert "swarmnet train export" in sentence(done | {"round": 3})


def test_a_job_with_own_data_says_what_its_changes_reveal(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, data={"source": "own", "path": "/home/ada/notes"})
    facts = facts_of(job, id="ab" * 32, name="", device="cpu", disk=tmp_path)
    assert facts["reads"] == "/home/ada/notes, files of your own, which stay here"
    assert "with allreduce word for word" in facts["sends"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"path": "python-stdlib"}, "standard library"),
        ({"path": "/home/ada/texts"}, "/home/ada/texts, as you chose"),
        ({"path": None, "hub": f"org/name@{40 * '0'}"}, "dataset org/name@"),
    ],
)
def test_a_job_shows_what_it_reads_sends_and_uses_before_it_trains(
    data: dict[str, str | None], said: str, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, data=data | {"digest": "00" * 32, "size_bytes": 3_100_000})
    facts = facts_of(job, id="ab" * 32, name="attic", device="cpu", disk=tmp_path)
    assert "ab" * 32 in facts["job"]
    assert "to everybody the name attic" in facts["sends"]
    assert said in facts["reads"]
    assert "3.1 MB at most" in facts["reads"]
    assert "reconstructed" in facts["sends"]
    assert facts["computes on"] == "cpu"
