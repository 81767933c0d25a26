"""The swarm of a demo: swarmnet commands in processes that print events as JSON, and end with the
demo."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from swarmnet import swarm_file
from swarmnet.cli.output import print_json, print_text, progress
from swarmnet_protocols.errors import DeadlineExceeded, SwarmnetError
from swarmnet_protocols.machine.platform import APART

_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 5.0
_MAX_LINE_BYTES = 1 << 20
_STDERR_TAIL_CHARS = 2000


@dataclass(frozen=True)
class Child:
    """A swarmnet command that runs with ``--json``."""

    name: str
    process: Process
    log: Path

    async def wait_for(
        self,
        is_wanted: Callable[[dict[str, Any]], bool],
        seconds: float,
        what: str,
        on_other: Callable[[dict[str, Any]], object] = lambda event: None,
    ) -> dict[str, Any]:
        """Return the first event that is wanted; ``on_other`` gets the events before it.

        Raises ``SwarmnetError`` for an error event, or if the process ends first, and
        ``DeadlineExceeded`` with ``what`` if it takes longer than ``seconds``.
        """
        try:
            async with asyncio.timeout(seconds):
                async for event in self.events():
                    if is_wanted(event):
                        return event
                    on_other(event)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{what} within {seconds:g} s", hint="free some memory and processor time, then try again"
            ) from error
        raise self._failure()

    async def fail_at_end(self) -> NoReturn:
        """Wait for the end of the process, then raise ``SwarmnetError``."""
        await self.process.wait()
        raise self._failure()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events until the process ends. Raises ``SwarmnetError`` for an error event."""
        if self.process.stdout is None:
            raise RuntimeError("started without a pipe")
        async for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event.get("event") == "error":
                raise SwarmnetError(f"{self.name}: {event['message']}", hint=event["hint"])
            yield event

    def _failure(self) -> SwarmnetError:
        tail = self.log.read_text(errors="replace")[-_STDERR_TAIL_CHARS:].strip()
        return SwarmnetError(f"{self.name} stopped unexpectedly: {tail or 'it printed nothing'}")


@dataclass(frozen=True)
class DemoSwarm:
    """The processes of a demo, and what it prints. Leaving the context stops all processes.

    ``directory``: the swarm file, the logs and the nodes' data. ``as_json``: print events.
    """

    directory: Path
    cache_dir: Path
    as_json: bool
    _running: list[Process] = field(default_factory=list)

    @property
    def file(self) -> str:
        return str(self.directory / swarm_file.FILE_NAME)

    async def __aenter__(self) -> "DemoSwarm":
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._running:
            with suppress(ProcessLookupError):
                process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                for process in self._running:
                    await process.wait()
        except TimeoutError:
            pass
        finally:
            for process in self._running:
                with suppress(ProcessLookupError):
                    process.kill()

    async def spawn(self, name: str, *arguments: str) -> Child:
        """Start a swarmnet command. Its stderr goes to a file."""
        log = self.directory / f"{name}.log"
        with log.open("wb") as stderr:
            # Nodes and gateways stop at the end of their stdin, so they also stop if the demo is
            # killed.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "swarmnet", *arguments),
                *("--cache-dir", str(self.cache_dir), "--json"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=stderr,
                limit=_MAX_LINE_BYTES,
                **APART,  # Ctrl-C is for the demo, which stops its nodes itself
            )
        self._running.append(process)
        return Child(name, process, log)

    async def start(self, name: str, *arguments: str) -> tuple[Child, dict[str, Any]]:
        """Start a command that serves; returns it and its event "ready", with the address of its
        ``page`` if it serves one."""
        child = await self.spawn(name, *arguments, "--stop-on-eof")
        pages: dict[str, str] = {}

        def look(event: dict[str, Any]) -> None:
            if event.get("event") == "dashboard":
                pages["page"] = event["url"]

        ready = await child.wait_for(
            lambda event: event.get("event") == "ready", _START_TIMEOUT_S, f"{name} did not start", look
        )
        return child, ready | pages

    async def start_node(self, name: str, bootstrap: str, *options: str) -> tuple[Child, dict[str, Any]]:
        """Start a node; returns it and its event "ready". ``bootstrap``: empty for the first
        node."""
        where = ("--data-dir", str(self.directory / name), "--listen", "/ip4/127.0.0.1/tcp/0")
        enter = ("--bootstrap", bootstrap) if bootstrap else ()
        child, ready = await self.start(name, "join", self.file, *where, *enter, *options)
        self.event(ready)
        return child, ready

    async def ask(
        self,
        model: str,
        prompt: str,
        bootstrap: str,
        *options: str,
        on_piece: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """Ask the model and print its answer piece by piece; returns the answer."""

        def show(event: dict[str, Any]) -> None:
            if event.get("event") == "token":
                waiting.close()
                self.event(event)
                self.text(event["text"])
                on_piece()

        enter = ("--swarm", self.file, "--bootstrap", bootstrap)
        with ExitStack() as waiting:
            waiting.enter_context(progress(quiet=self.as_json, first="a client enters the swarm and asks"))
            child = await self.spawn("client", "run", model, prompt, *enter, "--stream", *options)
            answer = await child.wait_for(
                lambda event: "token_ids" in event, _ANSWER_TIMEOUT_S, "no answer came", show
            )
        self.event({"event": "answer"} | answer)
        self.text("\n")
        return answer

    def event(self, fields: Mapping[str, object]) -> None:
        """Print an event for programs."""
        if self.as_json:
            print_json(fields)

    def text(self, text: str) -> None:
        """Print a text for people."""
        if not self.as_json:
            print_text(text, end="")
