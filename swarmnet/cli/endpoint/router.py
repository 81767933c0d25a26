"""``swarmnet router``: routers, which choose the model for requests to ``auto``."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.lazy import command_group
from swarmnet.cli.options import JsonFlag
from swarmnet.cli.output import print_result, progress
from swarmnet_protocols.errors import ConfigError

if TYPE_CHECKING:
    from swarmnet.gateway.routing.fitting import FitReport

app = command_group("Let the endpoint choose a model for each question.")


@app.callback()
def router() -> None:
    """Let the endpoint choose a model for each question."""


@app.command("fit")
def fit_router(
    comparisons: Annotated[
        Path,
        typer.Argument(
            metavar="COMPARISONS.jsonl",
            help='A comparison on each line: {"prompt": TEXT or "messages": [...], "model_a": M, "model_b": N, "winner": "a", "b" or "tie"}.',
            show_default=False,
            dir_okay=False,
        ),
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE", help="Write the router here: router.safetensors.", show_default=False
        ),
    ],
    speed: Annotated[
        list[str],
        typer.Option(
            "--speed",
            metavar="MODEL=X",
            help="Tokens per second of a model, for the curve of quality and cost. Repeat it for each model; `swarmnet models` tells them.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Learn from comparisons which model answers which question best.

    Models are named as `swarmnet models` lists them. One question in five is held out to measure
    the router. The file is for `swarmnet serve --router`.

    \b
    Example:
      swarmnet router fit comparisons.jsonl --out router.safetensors
    """
    from swarmnet.gateway.routing.fitting import fit, measured, read_comparisons

    if out.exists() and not force:
        raise ConfigError(f"{out} already exists", hint="choose another --out, or replace it: --force")
    with progress(quiet=as_json) as report:
        data = read_comparisons(comparisons, lambda done: report("comparisons", done, None))
        speeds = speeds_of(speed, data.names) if speed else None
        report("fitting", 0, None)
        found = measured(data, speeds)
        try:
            fit(data).write(out)
        except OSError as error:
            message = f"cannot write {out}: {error.strerror}"
            raise ConfigError(message, hint="give another --out, in a folder that exists") from error
    fields = {"path": str(out), "models": list(data.names), **asdict(found)}
    print_result(fields, _in_words(found, out), as_json=as_json)


def speeds_of(given: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Return the speeds of models by name. Raises ``BadParameter`` unless each model has one."""
    speeds: dict[str, float] = {}
    for text in given:
        name, _, value = text.rpartition("=")
        try:
            speeds[name] = float(value)
        except ValueError:
            speeds[name] = math.nan
        if name not in names or not 0 < speeds[name] < math.inf:
            message = f"{text!r} is not MODEL=X, a model of the comparisons and its tokens per second"
            raise typer.BadParameter(message, param_hint="'--speed'")
    if missing := [name for name in names if name not in speeds]:
        raise typer.BadParameter(f"give the speed of {', '.join(missing)}, too", param_hint="'--speed'")
    return speeds


def _in_words(found: "FitReport", out: Path) -> str:
    named = f"{found.accuracy:.0%} of winners named, {found.baseline:.0%} by always naming the usual one"
    points = (
        f"  {point.price:g}: cost {point.cost:.2f}, wins {point.quality:.0%}, at random {point.mixed:.0%}"
        for point in found.curve
    )
    return "\n".join(
        [
            f"{found.comparisons} comparisons; on the {found.held_out} held out: {named}",
            "what each --router-cost buys there:",
            *points,
            f"next: swarmnet serve --swarm SWARM --router {out}",
        ]
    )
