"""Processes of a demo: swarmnet commands that print events as JSON, and end with the demo."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from swarmnet_protocols.errors import DeadlineExceeded, SwarmnetError
from swarmnet_protocols.machine.platform import APART

_STOP_TIMEOUT_S = 5.0
_MAX_LINE_BYTES = 1 << 20
_STDERR_TAIL_CHARS = 2000


@dataclass(frozen=True)
class Child:
    """A swarmnet command that runs with ``--json``."""

    name: str
    process: Process
    log: Path

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events that the process prints, until it ends. Raises ``SwarmnetError`` for an error
        event."""
        if self.process.stdout is None:
            raise RuntimeError("started without a pipe")
        async for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event.get("event") == "error":
                raise SwarmnetError(f"{self.name}: {event['message']}", hint=event["hint"])
            yield event

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of that name. Raises ``SwarmnetError`` for an error event, or if the
        process ends first."""
        async for event in self.events():
            if event.get("event") == name:
                return event
        raise self.failure()

    async def fail_at_end(self) -> NoReturn:
        """Wait for the end of the process, then raise ``SwarmnetError``."""
        await self.process.wait()
        raise self.failure()

    def failure(self) -> SwarmnetError:
        tail = self.log.read_text(errors="replace")[-_STDERR_TAIL_CHARS:].strip()
        return SwarmnetError(f"{self.name} stopped unexpectedly: {tail or 'it printed nothing'}")


async def spawn(directory: Path, running: list[Process], name: str, arguments: Sequence[str]) -> Child:
    """Start a swarmnet command with ``--json``; its stderr goes to a file in ``directory``. It is
    added to ``running``."""
    log = directory / f"{name}.log"
    with log.open("wb") as stderr:
        # Nodes and gateways stop at the end of their stdin, so they also stop if the demo is
        # killed.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarmnet", *arguments, "--json"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            limit=_MAX_LINE_BYTES,
            **APART,  # Ctrl-C is for the demo, which stops its nodes itself
        )
    running.append(process)
    return Child(name, process, log)


@asynccontextmanager
async def processes() -> AsyncIterator[list[Process]]:
    """An empty list of processes; those added are terminated when the context ends, and killed
    ``_STOP_TIMEOUT_S`` later."""
    running: list[Process] = []
    try:
        yield running
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                for process in running:
                    await process.wait()
        except TimeoutError:
            pass
        finally:
            for process in running:
                with suppress(ProcessLookupError):
                    process.kill()


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Raise ``DeadlineExceeded`` if the context takes longer. ``what``: the beginning of its
    message, such as "no answer came"."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{what} within {seconds:g} s", hint="free some memory and processor time, then try again"
        ) from error
