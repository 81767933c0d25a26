"""Runs the commands of a guide as they stand; a comment before each fenced block decides how."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.processes.commands import family

STARTED = "stop with Ctrl-C"
"""Text that every long-running command prints when it is ready."""
TIMEOUT_S = 200
PORT = re.compile(r"(?<=--port )\d+|(?<=--metrics )\d+")
"""Options that name a port, which another process may have taken."""
LOCAL_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``kind`` is `run`, `background`, `python`, `not run` or, in the README, a
    name; ``expected`` must be printed."""

    kind: str
    expected: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that have such a comment, in order."""
    found = re.findall(r"<!-- ([^:\n]+?)(?:: (.+?))? -->\n```\w+\n(.*?)```", page.read_text(), re.DOTALL)
    return [Block(*each) for each in found]


def code_blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def shell(script: str) -> str:
    """The output of a script, errors included. The script must succeed."""
    done = subprocess.run(
        ["bash", "-euc", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}"
    return done.stdout


@contextmanager
def terminal(script: str) -> Iterator[str]:
    """A shell that runs a command until it prints that it is ready, and the output so far. Its
    processes end with the context."""
    shell = subprocess.Popen(
        ["bash", "-euc", script],
        stdin=subprocess.DEVNULL,  # commands must not ask
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


@dataclass(frozen=True)
class Step:
    """A block that a reader typed, and what it printed."""

    typed: str
    printed: str


def follow(page: Path) -> Iterator[Step]:
    """Run the blocks of a guide in the current directory, and yield each. Then end the processes
    that they left running.

    Free ports replace the ports that a guide names, in later blocks too.
    """
    ports: dict[str, str] = {}
    with ExitStack() as stack:
        for number, block in enumerate(blocks(page)):
            if block.kind == "background":
                printed = stack.enter_context(terminal(PORT.sub("0", block.text)))
                for named in PORT.findall(block.text):
                    (ports[named],) = {*LOCAL_PORT.findall(printed)}
                yield Step(block.text, printed)
            elif block.kind in {"run", "python"}:
                script = LOCAL_PORT.sub(lambda named: ports[named[0]], block.text)
                if block.kind == "python":
                    Path(f"{page.stem}-{number}.py").write_text(script)
                    script = f"python {page.stem}-{number}.py"
                printed = shell(script)
                assert block.expected in printed, f"{script}\n{printed}"
                yield Step(block.text, printed)
