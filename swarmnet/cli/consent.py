"""Consent: the owner of a machine sees what will be used, and agrees once, before it is shared or
trains a job."""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from swarmnet.cli.output import folded, note, print_json

AGREED_NAME = "agreed"


@dataclass(frozen=True)
class Question:
    """A question, and the texts before and after the facts that the owner is shown. ``event``: its
    name in JSON output.

    ``of_scripts``: scripts must answer it with ``--yes``; otherwise running the command without a
    terminal counts as consent.
    """

    before: str
    asked: str
    after: str
    event: str
    of_scripts: bool = False


SHARING = Question(
    "this machine is about to be shared; the node will use",
    "share it?",
    "`swarmnet limits` changes this at any time; `swarmnet pause` frees the memory",
    "sharing",
)
VOLUNTEERING = Question(
    "this machine is about to work for a swarm: to host blocks, or to train jobs that other peers may have written",
    "volunteer?",
    "`swarmnet limits` changes this at any time; `swarmnet pause` frees the memory",
    "volunteering",
    of_scripts=True,
)
TRAINING = Question(
    "this machine is about to train a job that another peer may have written",
    "train it?",
    "Ctrl-C stops it cleanly at any time",
    "training",
    of_scripts=True,
)


def ask_once(
    data_dir: Path,
    facts: Mapping[str, str],
    question: Question = SHARING,
    *,
    asking: bool,
    as_json: bool = False,
) -> None:
    """Show ``facts``, and with ``asking`` ask the owner at the terminal. Do nothing if ``data_dir``
    says that the owner agreed before.

    With ``as_json`` the facts are an event, and nothing is asked. Raises ``typer.Abort`` if the
    owner refuses. Raises ``typer.BadParameter`` if consent is needed and cannot be asked for: at a
    terminal with ``as_json``, or without a terminal for a question ``of_scripts``.
    """
    agreed = data_dir / AGREED_NAME
    if agreed.exists():
        return
    at_terminal = sys.stdin.isatty()
    must_agree = asking and (at_terminal or question.of_scripts)
    if must_agree and as_json:
        raise typer.BadParameter(
            "--json asks no question, and consent is not stored on this machine: add --yes, or leave out --json",
            param_hint="'--json'",
        )
    if as_json:
        print_json({"event": question.event, "uses": dict(facts)})
    else:
        _show(facts, question)
        if must_agree and not at_terminal:
            raise typer.BadParameter(
                "there is no terminal to ask for consent, and none is stored on this machine: add --yes",
                param_hint="'--yes'",
            )
        if must_agree and not typer.confirm(question.asked, default=True, err=True):
            raise typer.Abort
    agreed.parent.mkdir(parents=True, exist_ok=True)
    agreed.touch(mode=0o600)


def _show(facts: Mapping[str, str], question: Question) -> None:
    note(question.before)
    width = max(map(len, facts)) + 4
    room = shutil.get_terminal_size().columns - width if sys.stderr.isatty() else None
    for name, fact in facts.items():
        note(f"  {name}".ljust(width) + f"\n{' ' * width}".join(folded(fact, room)))
    note(question.after)
