"""The files of deploy/, parsed as the programs that read them parse them."""

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
ADDRESS = "/ip4/10.0.0.1/tcp/31337/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"
UNITS = sorted(path.name for path in (DEPLOY / "systemd").glob("*.service"))
COMPOSE_SCHEMA: dict[str, Any] = json.loads((ROOT / "tests/data/compose-spec.json").read_text())


class Unit(configparser.RawConfigParser):
    """A systemd unit. If a key occurs several times, its last value counts."""

    def __init__(self, name: str) -> None:
        super().__init__(strict=False)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.path = DEPLOY / "systemd" / name
        self.read_string(self.path.read_text().replace("\\\n", " "))

    @property
    def command(self) -> list[str]:
        return shlex.split(self["Service"]["ExecStart"])


def compose() -> dict[str, Any]:
    """compose.yaml, with its anchors resolved."""
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def own_services() -> dict[str, Any]:
    """The services that run the image of this project."""
    return {name: each for name, each in compose()["services"].items() if "build" in each}


def shell_commands(service: dict[str, Any]) -> Iterator[list[str]]:
    """The ``swarmnet`` commands in an entry point of the form ``sh -c SCRIPT``, with an address in
    place of each one it reads."""
    script = service["entrypoint"][2].replace("$$", "$").replace("$(head -n 1 /bootstrap/addresses)", ADDRESS)
    for call in re.findall(r"swarmnet ((?:[^\"&|;]|\"[^\"]*\")+)", script):
        yield shlex.split(call)


def instructions(containerfile: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of each instruction in a Containerfile: line continuations joined,
    comments left out."""
    text = re.sub(r"^\s*#.*\n", "", containerfile, flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [
        (word.upper(), " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines)
    ]
