"""Curves for other programs: TensorBoard's event files, and Weights & Biases."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnet_protocols.errors import ConfigError, Unreachable, how_to_add

Log = Callable[[Mapping[str, Any]], None]
"""Takes each event of a run."""

TensorboardOption = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        help="Also write the curves for TensorBoard, into a folder of this run in DIR: tensorboard --logdir DIR.",
    ),
]
WandbOption = Annotated[
    str | None,
    typer.Option(
        "--wandb",
        metavar="PROJECT",
        help="Also send the curves to this project of Weights & Biases. WANDB_MODE=offline keeps them on this machine.",
    ),
]
_CURVES = (
    "loss",
    "val_loss",
    "accuracy",
    "learning_rate",
    "tokens",
    "tokens_per_s",
    "workers",
    "bytes_sent",
    "bytes_received",
    "wait_s",
)


@contextmanager
def trackers(
    run: str, settings: Mapping[str, Any], tensorboard: Path | None, wandb: str | None
) -> Iterator[Log]:
    """Yield a function that logs a run's events under the name ``run``. The function does nothing
    if neither program is wanted.

    Raises ``ConfigError`` that says what to install.
    """
    with ExitStack() as stack:
        logs = []
        if tensorboard is not None:
            logs.append(stack.enter_context(_tensorboard(tensorboard / run)))
        if wandb is not None:
            logs.append(stack.enter_context(_wandb(wandb, run, settings)))

        def log(event: Mapping[str, Any]) -> None:
            step, values = curves_of(event)
            for each in logs if values else ():
                each(step, values)

        yield log


def curves_of(event: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Return the position of an event on the curves, and the values that it adds. The position
    counts finished steps of a tuning run, or finished rounds of a training job."""
    if event["event"] not in {"round", "eval", "step"}:
        return 0, {}
    step = event["step"] if "step" in event else event["round"] + 1
    found = {name: event[name] for name in _CURVES if event.get(name) is not None}
    return step, {name: float(value) for name, value in found.items() if math.isfinite(value)}


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError("--tensorboard needs tensorboardX", hint=how_to_add("tensorboardX")) from error
    try:
        writer = SummaryWriter(str(folder), flush_secs=10)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}", hint="name another folder"
        ) from error

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _wandb(
    project: str, run: str, settings: Mapping[str, Any]
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("--wandb needs wandb", hint=how_to_add("wandb")) from error
    # Nothing of this machine is sent but the curves: no output, code, git state or measurements.
    quiet = wandb.Settings(
        console="off",
        save_code=False,
        disable_git=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_save_requirements=False,
        silent=True,
    )
    try:
        found = wandb.init(project=project, name=run, config=dict(settings), settings=quiet)
    except wandb.errors.UsageError as error:
        raise ConfigError(
            f"Weights & Biases: {error}", hint="`wandb login`, or set WANDB_MODE=offline"
        ) from error
    except wandb.errors.Error as error:
        raise Unreachable(f"Weights & Biases: {error}", hint="set WANDB_MODE=offline") from error
    try:
        yield lambda step, values: found.log({**values, "step": step})
    finally:
        found.finish()
