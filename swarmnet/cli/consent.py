"""Consent: before a machine is shared or trains a job for the first time, its owner sees what will be used and agrees once."""

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
    """A question and the texts before and after its facts. ``event``: its name in JSON output.

    ``of_scripts``: a script has to answer it too, with ``--yes``.
    """

    before: str
    asked: str
    after: str
    event: str
    of_scripts: bool = False


SHARING = Question(
    "this machine is about to be shared; the node will use",
    "share it?",
    "change any of it at any time with `swarmnet limits`; `swarmnet pause` gives the memory back",
    "sharing",
)
TRAINING = Question(
    "this machine is about to train a job that another peer may have written",
    "train it?",
    "Ctrl-C ends it in good order at any time",
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
    """Show ``facts`` unless the owner agreed to them in ``data_dir`` before. With ``asking`` and at a terminal, ask the owner.

    Without a terminal nothing is asked: the author of the script agrees, and has to pass ``--yes`` if the question is ``of_scripts``. As
    JSON the facts are an event and nothing is asked, so a user at a terminal has to have agreed before. Raises ``Abort`` for a no and
    ``BadParameter`` for a missing answer.
    """
    agreed = data_dir / AGREED_NAME
    if agreed.exists():
        return
    at_terminal = sys.stdin.isatty()
    must_agree = asking and (at_terminal or question.of_scripts)
    if must_agree and as_json:
        raise typer.BadParameter(
            "nothing is asked with --json, and this job was not agreed to on this machine: add --yes, or leave out --json",
            param_hint="'--json'",
        )
    if as_json:
        print_json({"event": question.event, "uses": dict(facts)})
    else:
        _show(facts, question)
        if must_agree and not at_terminal:
            raise typer.BadParameter(
                "nothing can be asked without a terminal, and this job was not agreed to on this machine: add --yes",
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
