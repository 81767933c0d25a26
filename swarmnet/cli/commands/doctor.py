"""``swarmnet doctor``: examines this machine and prints findings, each with the command that fixes
it."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.failures import EXIT_FAILED
from swarmnet.cli.options import (
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    JsonFlag,
    ListenOption,
)
from swarmnet.cli.output import folded, print_json, progress
from swarmnet.terminal import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnet.doctor.checks import Finding

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("·", "dim")}


def doctor(  # noqa: PLR0913 - options of the command line
    *,
    swarm: Annotated[
        str | None,
        typer.Option(
            "--swarm",
            metavar="SWARM",
            help="Also ask this swarm's peers whether they reach this machine and whether its clock is right.",
            show_default="this machine only",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="M",
            help="Also check whether this model runs here, and how much memory its weights take.",
            show_default=False,
        ),
    ] = None,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    listen: ListenOption = [],  # noqa: B006
    data_dir: DataDirOption,
    cache_dir: CacheDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Check this machine: versions, memory, disk, keys, ports, clock, and whether other peers reach
    it. Takes up to 10 seconds.

    The exit code is 1 if a check fails.
    """
    import asyncio

    from swarmnet.doctor.checks import Level, examine, worst
    from swarmnet.doctor.gather import DoctorOptions, gather

    options = DoctorOptions(
        data_dir=data_dir,
        cache_dir=cache_dir,
        swarm=swarm,
        model=model,
        bootstrap=tuple(bootstrap),
        listen=tuple(listen),
    )
    with progress(quiet=as_json) as report:
        report("examining this machine", 0, None)
        findings = examine(asyncio.run(gather(options)))
    if as_json:
        print_json({"worst": worst(findings), "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    if worst(findings) is Level.FAIL:
        raise typer.Exit(EXIT_FAILED)


def _print(findings: "Sequence[Finding]") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        line = Text.assemble((f"{mark} {finding.level:<4} ", style), (f"{finding.check:<11} ", "bold"))
        room = console.width - len(line) if console.is_terminal else None
        text = f"\n{' ' * len(line)}".join(folded(shown(finding.text), room))
        console.print(line.append(text), soft_wrap=True)
        if finding.fix:
            console.print(Text(shown(f"                   fix it: {finding.fix}")), soft_wrap=True)
