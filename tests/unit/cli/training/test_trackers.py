"""Curves for TensorBoard and Weights & Biases, which are optional packages."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swarmnet.cli.training.trackers import curves_of, trackers
from swarmnet_protocols.errors import ConfigError
from tests.unit.cli.training.test_training_record import READY, eval_event, round_event

Points = list[tuple[str, float, int]]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def test_every_event_with_numbers_adds_points() -> None:
    assert curves_of(READY) == (0, {})
    step, values = curves_of(round_event(2, loss=None))
    assert step == 3
    assert "loss" not in values
    assert values["tokens"] == 100.0
    assert curves_of(eval_event(2)) == (3, {"val_loss": 4.0, "tokens": 7.0})
    tuned = {"event": "step", "step": 5, "loss": float("nan"), "learning_rate": 0.5}
    assert curves_of(tuned) == (5, {"learning_rate": 0.5})


def test_tensorboard_gets_the_curves_of_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points: Points = []
    opened: list[str] = []

    class Writer:
        def __init__(self, folder: str, flush_secs: int) -> None:
            opened.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            points.append((name, value, step))

        def close(self) -> None:
            opened.append("closed")

    stand_in(monkeypatch, "tensorboardX", SummaryWriter=Writer)
    with trackers("tiny-attic", {}, tmp_path, None) as log:
        log(READY)
        log(eval_event(1))
    assert opened == [str(tmp_path / "tiny-attic"), "closed"]
    assert points == [("val_loss", 5.0, 2), ("tokens", 7.0, 2)]


def test_weights_and_biases_get_curves_and_nothing_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(log=logged.append, finish=lambda: logged.append({}))

    def init(**options: Any) -> Any:
        asked.update(options)
        return run

    stand_in(
        monkeypatch,
        "wandb",
        Settings=dict,
        init=init,
        errors=SimpleNamespace(UsageError=KeyError, Error=OSError),
    )
    with trackers("tiny", {"rank": 8}, None, "lab") as log:
        log(eval_event(0))
    assert (asked["project"], asked["name"], asked["config"]) == ("lab", "tiny", {"rank": 8})
    quiet = {"console": "off", "save_code": False, "disable_git": True, "x_disable_stats": True}
    assert quiet.items() <= asked["settings"].items()
    assert logged == [{"val_loss": 6.0, "tokens": 7.0, "step": 1}, {}]


@pytest.mark.parametrize(
    ("tensorboard", "wandb", "package"), [(Path("x"), None, "tensorboardX"), (None, "lab", "wandb")]
)
def test_a_tracker_that_is_not_installed_says_what_to_install(
    tensorboard: Path | None, wandb: str | None, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=package) as caught, trackers("tiny", {}, tensorboard, wandb):
        pass
    assert f"pip install {package}" in caught.value.hint
