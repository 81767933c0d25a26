"""Output of `tune`: progress bars on a terminal, sentences elsewhere."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swarmnet.cli.training.displays import Lines, bars
from swarmnet.cli.training.tune import Words, _train

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
DONE = {
    "event": "done",
    "step": 8,
    "val_loss": 2.5,
    "accuracy": 0.75,
    "path": "out",
    "curve": None,
    "run": "swarmnet run M",
}


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
    assert "lora: 12,345 parameters, 90 rows, 8 steps; held out for evaluation: 10 rows" in shots[0]
    assert "cut off at --max-length: 3 rows" in shots[0]
    assert "continuing after step 4" in shots[0]
    assert "finding" not in shots[0]
    assert re.search(r"steps.*50%", shots[0])
    assert "step 4: held-out loss 3.0000, accuracy 50.0%" in shots[1]
    assert re.search(r"steps.*62%", shots[2])
    assert "loss 3.2500, 42 tokens/s, 2 MB sent, 2 MB received" in shots[2]
    assert "3.5 MB sent, 4 MB received, 1 host replaced" in shots[3]
    assert "saved" not in shots[4]
    assert "stopped; the same command continues after step 6, which is saved" in shots[5]


def test_without_a_terminal_lines_tell_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    lines, words = Lines(), Words()
    lines.progress("finding the swarm", 0, None)
    for event in (BEGIN, step(5), {"event": "saved", "step": 5}, DONE):
        lines.show(event, words.tell(event))
    told = capsys.readouterr().err
    assert told.startswith("finding the swarm\nlora: ")
    assert "step 5 of 8: loss 3.2500" in told
    assert "saved after step 5\n" in told
    assert "the adapter is in out. Held-out loss 2.5000, accuracy 75.0%." in told
    assert "pip install matplotlib" in told


class InterruptedTuner:
    """Is interrupted after step 2 and the evaluation that follows it."""

    def __init__(self) -> None:
        self.step = 0
        self.is_whole = True
        self.history: list[int] = []

    def run(self, *, evaluate_every: int) -> Iterator[dict[str, Any]]:
        for number in (1, 2):
            self.step = number
            self.history.append(number)
            yield step(number)
        self.history.append(2)
        yield evaluation(2)
        raise KeyboardInterrupt


class SavedSteps:
    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []

    def save(self, tuner: InterruptedTuner) -> Path:
        self.saved.append((tuner.step, len(tuner.history)))
        return Path("checkpoint")


@pytest.mark.parametrize(("save_every", "saved"), [(2, [(2, 2), (2, 3)]), (5, [(2, 3)])])
def test_an_interrupt_after_a_checkpoint_says_once_that_it_is_saved(
    save_every: int, saved: list[tuple[int, int]]
) -> None:
    """The evaluation after the checkpoint is saved as well."""
    tuner: Any = InterruptedTuner()
    folder: Any = SavedSteps()
    events: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        _train(tuner, folder, events.append, evaluate_every=2, save_every=save_every)
    assert folder.saved == saved
    assert [event["step"] for event in events if event["event"] == "saved"] == [2]
    assert events[-1]["event"] == "stopped"
