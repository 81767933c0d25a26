"""What `tune` shows: bars on a terminal, sentences elsewhere."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from swarmnet.cli.progress.displays import Lines, bars
from swarmnet.cli.progress.tuning import Words

BEGIN = {
    "event": "begin",
    "model": "m",
    "method": "lora",
    "rows": 90,
    "held_out": 10,
    "cut": 3,
    "trained_parameters": 12345,
    "step": 4,
    "steps": 8,
}
DONE = {"event": "done", "step": 8, "val_loss": 2.5, "accuracy": 0.75, "path": "out", "curve": None}


def step(number: int, *, failovers: int = 0) -> dict[str, Any]:
    used = {"bytes_sent": 1_500_000, "bytes_received": 2_000_000, "failovers": failovers}
    return {"event": "step", "step": number, "loss": 3.25, "tokens_per_s": 41.7, **used}


def evaluation(number: int) -> dict[str, Any]:
    used = {"bytes_sent": 500_000, "bytes_received": 0, "failovers": 0}
    return {"event": "eval", "step": number, "val_loss": 3.0, "accuracy": 0.5, **used}


def test_bars_show_the_last_step_and_keep_evaluations_above() -> None:
    screen, shots, words = io.StringIO(), [], Words()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with bars(console) as shown:
        shown.progress("finding the swarm", 0, None)
        for event in (
            BEGIN,
            evaluation(4),
            step(5),
            step(6, failovers=1),
            {"event": "saved", "step": 6},
            {"event": "stopped", "step": 6},
        ):
            screen.seek(0)
            screen.truncate()
            shown.show(event, words.tell(event))
            shown.refresh()  # type: ignore[attr-defined]
            shots.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()))
    assert "lora: 12,345 parameters learn from 90 rows in 8 steps; held out: 10 rows" in shots[0]
    assert "cut off at --max-length: 3 rows" in shots[0]
    assert "going on after step 4" in shots[0]
    assert "finding" not in shots[0]
    assert re.search(r"steps.*50%", shots[0])
    assert "step 4: held-out loss 3.0000, accuracy 50.0%" in shots[1]
    assert re.search(r"steps.*62%", shots[2])
    assert "loss 3.2500, 42 tokens/s, 2 MB sent, 2 MB received" in shots[2]
    assert "3.5 MB sent, 4 MB received, 1 host replaced" in shots[3]
    assert "saved" not in shots[4]
    assert "stopped; the same command goes on after step 6, which is saved" in shots[5]


def test_lines_tell_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    lines, words = Lines(), Words()
    lines.progress("finding the swarm", 0, None)
    for event in (BEGIN, step(5), {"event": "saved", "step": 5}, DONE):
        lines.show(event, words.tell(event))
    told = capsys.readouterr().err
    assert told.startswith("finding the swarm\nlora: ")
    assert "step 5 of 8: loss 3.2500" in told
    assert "saved after step 5\n" in told
    assert "the adapter is in out. Held-out loss 2.5000, accuracy 75.0%." in told
    assert "pip install 'swarmnet-p2p[plots]'" in told
