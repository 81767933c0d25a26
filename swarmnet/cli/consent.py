"""The first time a machine is shared: what will be used is shown, and its owner is asked once."""

import sys
from collections.abc import Mapping
from pathlib import Path

import typer

from swarmnet.cli.output import note

AGREED_NAME = "agreed"


def ask_once(data_dir: Path, facts: Mapping[str, str], *, asking: bool) -> None:
    """Show ``facts`` unless they were agreed to in ``data_dir`` before; ``asking`` or not, a person at a terminal decides.

    Without a terminal nobody can be asked: whoever wrote the script has decided. Raises ``Abort`` for a no.
    """
    agreed = data_dir / AGREED_NAME
    if agreed.exists():
        return
    note("this machine is about to be shared; the node will use")
    width = max(map(len, facts))
    for name, fact in facts.items():
        note(f"  {name:<{width}}  {fact}")
    note("change any of it at any time with `swarmnet limits`; `swarmnet pause` gives the memory back")
    if asking and sys.stdin.isatty() and not typer.confirm("share it?", default=True, err=True):
        raise typer.Abort
    agreed.touch(mode=0o600)
