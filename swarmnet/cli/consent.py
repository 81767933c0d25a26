"""The first time a machine is shared: what will be used is shown, and its owner is asked once."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import typer

from swarmnet.cli.output import folded, note, print_json

AGREED_NAME = "agreed"


def ask_once(data_dir: Path, facts: Mapping[str, str], *, asking: bool, as_json: bool = False) -> None:
    """Show ``facts`` unless they were agreed to in ``data_dir`` before; where ``asking``, a person at a terminal decides.

    Without a terminal nobody can be asked: whoever wrote the script has decided. As JSON the facts are an event and nothing is
    asked, so a person who is at a terminal has to have agreed already. Raises ``Abort`` for a no, ``BadParameter`` where it is
    missing.
    """
    agreed = data_dir / AGREED_NAME
    if agreed.exists():
        return
    must_agree = asking and sys.stdin.isatty()
    if as_json:
        if must_agree:
            raise typer.BadParameter(
                "nothing is asked, and this machine was not shared before: add --yes, or leave out --json",
                param_hint="'--json'",
            )
        print_json({"event": "sharing", "uses": dict(facts)})
    else:
        _show(facts)
        if must_agree and not typer.confirm("share it?", default=True, err=True):
            raise typer.Abort
    agreed.touch(mode=0o600)


def _show(facts: Mapping[str, str]) -> None:
    note("this machine is about to be shared; the node will use")
    width = max(map(len, facts)) + 4
    room = shutil.get_terminal_size().columns - width if sys.stderr.isatty() else None
    for name, fact in facts.items():
        note(f"  {name}".ljust(width) + f"\n{' ' * width}".join(folded(fact, room)))
    note("change any of it at any time with `swarmnet limits`; `swarmnet pause` gives the memory back")
