"""The commands of a guide, run as they stand there: what a comment before a fenced block says of it decides how."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.commands import family

STARTED = "stop with Ctrl-C"
"""What every command that stays says once it does what it is for."""
PATIENCE_S = 200
PORT = re.compile(r"(?<=--port )\d+|(?<=--metrics )\d+")
"""Options that name a port, which somebody else may have."""
LOCAL_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")


@dataclass(frozen=True)
class Block:
    """``kind`` is `run`, `background`, `python`, `not run`, or, in the README, a name; ``expected`` has to be printed."""

    kind: str
    expected: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that have a comment, in order."""
    found = re.findall(r"<!-- ([^:\n]+?)(?:: (.+?))? -->\n```\w+\n(.*?)```", page.read_text(), re.DOTALL)
    return [Block(*each) for each in found]


def shell(script: str) -> str:
    """What a script prints, errors included. It has to succeed."""
    done = subprocess.run(
        ["bash", "-euc", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}"
    return done.stdout


@contextmanager
def terminal(script: str) -> Iterator[str]:
    """A shell in which a command has started to do what it is for, and what it printed; its processes end with the context."""
    shell = subprocess.Popen(
        ["bash", "-euc", script],
        stdin=subprocess.DEVNULL,  # nobody is there to be asked
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed = ""
    try:
        assert shell.stdout is not None
        for line in shell.stdout:
            printed += line
            if STARTED in line:
                break
        else:
            raise AssertionError(f"this did not start: {script}\n{printed}")
        yield printed
    finally:
        for member in family(shell.pid) if shell.poll() is None else ():
            with suppress(psutil.NoSuchProcess):
                member.kill()
        shell.communicate()


def follow(page: Path) -> None:
    """Do what a guide says, in the directory we are in, and end what it left running.

    Ports are the exception: free ones are taken in place of those that a guide names, and later blocks ask there.
    """
    ports: dict[str, str] = {}
    with ExitStack() as stack:
        for number, block in enumerate(blocks(page)):
            if block.kind == "background":
                printed = stack.enter_context(terminal(PORT.sub("0", block.text)))
                for named in PORT.findall(block.text):
                    (ports[named],) = {*LOCAL_PORT.findall(printed)}
            elif block.kind in {"run", "python"}:
                script = LOCAL_PORT.sub(lambda named: ports[named[0]], block.text)
                if block.kind == "python":
                    Path(f"{page.stem}-{number}.py").write_text(script)
                    script = f"python {page.stem}-{number}.py"
                printed = shell(script)
                assert block.expected in printed, f"{script}\n{printed}"
