"""``swarmnet adapter``: works on the folders of adapters."""

import math
from pathlib import Path
from typing import Annotated

import typer

from swarmnet.cli.lazy import command_group
from swarmnet.cli.options import JsonFlag
from swarmnet.cli.output import print_result, progress
from swarmnet_client.tuning.methods import MergeMethod
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.lean_imports import import_transformers

app = command_group("Work on adapters that `tune` or `train export` made.")


@app.callback()
def adapter() -> None:
    """Work on adapters that `tune` or `train export` made."""


@app.command("merge")
def merge_adapters(  # noqa: PLR0913 - a command line, not an interface
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR DIR ...", help="The folders of the adapters, two or more.")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the merged adapter here.")],
    method: Annotated[
        MergeMethod,
        typer.Option("--method", help="How to combine them. ties drops small changes and settles signs."),
    ] = MergeMethod.TIES,
    weights: Annotated[
        list[float] | None,
        typer.Option("--weight", metavar="W", help="Weight of an adapter, one for each.", show_default="1"),
    ] = None,
    density: Annotated[
        float,
        typer.Option(
            "--density",
            metavar="SHARE",
            help="Share of an adapter's values that ties, dare_* and magnitude_prune keep.",
        ),
    ] = 0.5,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing adapter.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Merge LoRA adapters of one model into one, with PEFT's arithmetic. The model is not
    needed."""
    if len(directories) < 2:
        raise typer.BadParameter("name two adapters or more", param_hint="'DIR DIR ...'")
    chosen = weights or [1.0] * len(directories)
    if len(chosen) != len(directories):
        raise typer.BadParameter("give one for each adapter", param_hint="'--weight'")
    if not all(map(math.isfinite, chosen)):
        raise typer.BadParameter("weights are finite numbers", param_hint="'--weight'")
    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density} is not a share", param_hint="'--density'")
    if out.exists() and not (force and (out / "adapter_config.json").is_file()):
        raise ConfigError(
            f"{out} already exists", hint="choose another --out, or replace an adapter: --force"
        )
    with progress(quiet=as_json) as report:
        report("merging adapters", 0, None)
        import_transformers()
        from swarmnet_client.tuning.adapter_merge import merge

        merge(directories, chosen, method, density, out, overwrite=force)
    fields = {"path": str(out), "method": str(method), "weights": chosen}
    print_result(fields, f"the merged adapter is in {out}", as_json=as_json)
