"""``swarmnet`` commands in processes of their own, run to their end or observed while they run."""

import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import typer

from swarmnet.paths import default_cache_dir
from tests.support.compiled import lend_libraries

SWARMNET = (sys.executable, "-m", "swarmnet")
TIMEOUT_S = 120.0
"""Seconds to wait for the next output or action of a process: the machine may be busy."""
LOG_TAIL_CHARS = 2000


@dataclass(frozen=True)
class Place:
    """Where a process runs: a prefix to its command, and the address it has there."""

    ip: str
    prefix: tuple[str, ...] = ()


LOOPBACK = Place("127.0.0.1")


def lend_compiled_code(arguments: Sequence[str]) -> None:
    """Spare a command the compiling of what tests have compiled before."""
    at = arguments.index("--cache-dir") if "--cache-dir" in arguments else None
    lend_libraries(default_cache_dir() if at is None else Path(arguments[at + 1]))


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    lend_compiled_code(arguments)
    return subprocess.run(
        [*SWARMNET, *arguments], input=stdin, capture_output=True, text=True, timeout=200, check=False
    )


def call(*arguments: str) -> Any:
    """The JSON that a command prints with ``--json``. Raises ``RuntimeError`` if the command fails.

    It runs in this process: a new one would spend most of its time on imports.
    ``e2e/test_guides.py`` starts these commands as users do.
    """
    from swarmnet.cli import execute

    with redirect_stdout(io.StringIO()) as out:
        code = execute([*arguments, "--json"])
    if code:
        raise RuntimeError(f"{arguments}: {out.getvalue()}")
    return json.loads(out.getvalue())


def family(pid: int) -> list[psutil.Process]:
    """The process ids of a process and all its descendants."""
    main = psutil.Process(pid)
    return [main, *main.children(recursive=True)]


class RunningCommand:
    """A running command with ``--json`` and the ``events`` it has printed so far. Leaving the
    context or ``kill`` stops it."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        place: Place = LOOPBACK,
        *,
        stdin: int = subprocess.DEVNULL,
        program: Sequence[str] = SWARMNET,
    ) -> None:
        self.log = log
        self.events: list[dict[str, Any]] = []
        if program == SWARMNET:
            lend_compiled_code(arguments)
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [*place.prefix, *program, *arguments, "--json"],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                process_group=0,  # Ctrl-C on a test run reaches it through ``kill`` only
            )
        self._family: list[psutil.Process] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def family(self) -> list[psutil.Process]:
        """The process ids of the command and its descendants; after its end, the last ones that
        were seen."""
        if self.process.poll() is None:
            self._family = family(self.pid)
        return self._family

    def wait(self, kind: str, *, timeout_s: float = TIMEOUT_S, **fields: object) -> dict[str, Any]:
        """The first event of this kind with these fields.

        Raises ``RuntimeError`` with the log if the command ends first, or prints nothing for
        ``timeout_s``.
        """
        wanted = {"event": kind, **fields}.items()

        def found() -> dict[str, Any] | None:
            return next((event for event in self.events if wanted <= event.items()), None)

        with self._changed:
            while not (self._ended or found()) and self._changed.wait(timeout_s):
                pass
        event = found()
        if event is None:
            raise RuntimeError(f"no {kind}: {self.events[-3:]} {self.log.read_text()[-LOG_TAIL_CHARS:]}")
        return event

    def wait_for_more(self, *, timeout_s: float) -> None:
        """Return at the next event, at the end of the command, or after ``timeout_s``."""
        with self._changed:
            if not self._ended:
                self._changed.wait(timeout_s)

    def wait_for_end(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code. ``events`` then has everything that the command printed."""
        code = self.process.wait(timeout_s)
        self._reader.join()
        return code

    def send_signal(self, number: signal.Signals, *, python: bool = True, children: bool = True) -> None:
        """Send a signal to the command, to its children, or to both, as when the machine fails."""
        for member in self.family:
            if python if member.pid == self.pid else children:
                with suppress(psutil.NoSuchProcess):
                    member.send_signal(number)

    def kill(self) -> None:
        """Kill the command and its children at once."""
        self.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self) -> None:
        try:
            with self.process.stdout as lines:  # type: ignore[union-attr]
                for line in lines:
                    with self._changed:
                        self.events.append(json.loads(line))
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def every_command() -> list[list[str]]:
    """The words of each command and command group, such as ``swarm create``; none for the program
    itself."""
    from swarmnet.cli import app

    root: Any = typer.main.get_command(app)
    context = root.make_context("swarmnet", [], resilient_parsing=True)
    found: list[list[str]] = [[]]
    for name in root.list_commands(context):
        found.append([name])
        command: Any = root.get_command(context, name)
        found.extend([name, below] for below in getattr(command, "commands", ()))
    return found
