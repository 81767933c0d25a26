"""Consent: the owner of a machine sees what will be used, and agrees once, before it is shared or
trains a job.

The estimate of memory and disk takes the size of the weights from the model's files. Its other
numbers were measured with the default model on two cores. ``tests/e2e/test_light_host.py`` measures
the memory again.
"""

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarmnet.cli.output import folded, note, print_json
from swarmnet.units import show_memory, show_size
from swarmnet_protocols.models.public_names import DEFAULT_MODEL, DEFAULT_MODEL_BYTES

if TYPE_CHECKING:
    from swarmnet_node.config import NodeConfig


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


PROGRAM_BYTES = 480_000_000
"""Resident memory of a node and p2pd without weights and sessions, with torch in the process.
Later starts with a model whose blocks need no torch take 170 MB."""
IDLE_CORE_SHARE = 0.003
"""Share of one core that a node and p2pd take while nobody asks."""


def estimate(config: "NodeConfig") -> str:
    """Return what the node will use, as far as it is known before the model is read."""
    rest = f"{IDLE_CORE_SHARE:.1%} of a core when idle; clients' sessions take up to {show_memory(config.max_cache_bytes)} more"
    files = weight_bytes(config.model, config.cache_dir)
    if files is None:
        return f"about {show_size(PROGRAM_BYTES)} of memory, and memory and disk for the weights of its blocks; {rest}"
    if config.dtype != "auto":
        return f"about {show_size(PROGRAM_BYTES)} of memory and the weights as {config.dtype}, {show_size(files)} of disk, {rest}"
    part = "at most" if config.blocks or config.num_blocks else "about"
    return f"{part} {show_size(PROGRAM_BYTES + files)} of memory, {show_size(files)} of disk, {rest}"


def weight_bytes(model: str, cache_dir: Path) -> int | None:
    """Return the bytes of all weight files of a model. None if it was never read here."""
    if model == DEFAULT_MODEL:
        return DEFAULT_MODEL_BYTES
    path = Path(model).expanduser()
    if path.is_dir():
        files = [each for each in path.iterdir() if each.suffix in {".safetensors", ".gguf"}]
    elif path.is_file():
        split = re.sub(r"-[0-9]{5}-of-([0-9]{5})\.gguf$", r"-[0-9][0-9][0-9][0-9][0-9]-of-\1.gguf", path.name)
        files = [path] if split == path.name else list(path.parent.glob(split))
    else:
        from swarmnet_protocols.models.inventory import stored_models

        return next((each.total_bytes for each in stored_models(cache_dir) if each.name == model), None)
    return sum(each.stat().st_size for each in files)
