"""``swarmnet swarm``: make a swarm and look at its file."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from swarmnet import swarm_file
from swarmnet.cli.options import BootstrapOption, JsonFlag, SwarmPath
from swarmnet.cli.output import print_json, print_table
from swarmnet.swarm_file import NewSwarm, SwarmFile
from swarmnet_protocols.clock import wall_clock

app = typer.Typer(help="Create swarms and look at their files.")


@app.command("create")
def create(  # noqa: PLR0913 - a command line, not an interface
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    *,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the files go.", show_default=False)
    ],
    is_open: Annotated[
        bool, typer.Option("--open", help="No authority: everybody who has the file may change it.")
    ] = False,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    days: Annotated[
        int | None, typer.Option(min=1, max=36500, help="The file expires after so many days.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace swarm.toml, damaged or not. An authority key stays as it is."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write DIR/swarm.toml, to publish, and DIR/authority.key, to keep secret (none with --open)."""
    now = wall_clock()
    not_after = datetime.fromtimestamp(int(now), UTC) + timedelta(days=days) if days else None
    new = NewSwarm(name, bootstrap=tuple(bootstrap), not_after=not_after, is_open=is_open)
    file = swarm_file.create(out, new, now=now, overwrite=force)
    path = out / swarm_file.FILE_NAME
    if as_json:
        print_json(_summary(file) | {"path": str(path)})
        return
    typer.echo(f"wrote {path}: give it to everybody who takes part")
    if not is_open:
        typer.echo(f"wrote {out / swarm_file.KEY_NAME}: keep it secret, and keep a copy")
    typer.echo(f"next: swarmnet join {path}")


@app.command("show")
def show(swarm: SwarmPath, *, as_json: JsonFlag = False) -> None:
    """Print what a swarm file says."""
    file = swarm_file.load(swarm)
    if as_json:
        print_json(_summary(file))
    else:
        summary = _summary(file)
        print_table(f"swarm {file.name}", summary | {"bootstrap": "\n".join(file.bootstrap) or "none"})


@app.command("verify")
def verify(swarm: SwarmPath, *, as_json: JsonFlag = False) -> None:
    """Check that a swarm file is unchanged and still valid."""
    file = swarm_file.load_valid(swarm, wall_clock())
    if as_json:
        print_json(_summary(file) | {"valid": True})
    else:
        how = (
            "an open swarm: only its bootstrap list may be edited"
            if file.is_open
            else "signed by its authority"
        )
        typer.echo(f"{file.name} is valid ({how})")


def _summary(file: SwarmFile) -> dict[str, object]:
    return {
        "name": file.name,
        "swarm_id": f"sha256:{file.swarm_id.hex()}",
        "open": file.is_open,
        "serial": file.serial,
        "created": file.created.isoformat(),
        "not_after": file.not_after.isoformat() if file.not_after else None,
        "bootstrap": list(file.bootstrap),
        "authority": f"ed25519:{file.authority.hex()}" if file.authority else None,
    }
