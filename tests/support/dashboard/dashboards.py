"""``swarmnet dashboard`` in its own process, and the state that it serves."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes.commands import TIMEOUT_S, RunningCommand
from tests.support.processes.nodes import Swarm

State = dict[str, Any]


class DashboardProcess(RunningCommand):
    """A dashboard of a swarm, with its own data directory."""

    def __init__(self, lab: Swarm, data_dir: Path) -> None:
        arguments = ("dashboard", "--swarm", str(lab.file), "--port", "0", "--data-dir", str(data_dir))
        super().__init__(
            (*arguments, *lab.bootstrap_options), data_dir.with_suffix(".log"), stdin=subprocess.DEVNULL
        )

    @property
    def url(self) -> str:
        url: str = self.wait("ready")["url"]
        return url


def state_of(url: str) -> State:
    """The state that a dashboard serves now."""
    state: State = httpx.get(f"{url}/api/v1/state", timeout=TIMEOUT_S).raise_for_status().json()
    return state


def watch(url: str, holds: Callable[[State], bool]) -> State:
    """Wait for a state for which ``holds`` is true. Raises ``TimeoutError`` if none comes."""
    with _changes(url) as changes:
        for _ in changes:
            state = state_of(url)
            if holds(state):
                return state
    raise TimeoutError(f"{url} never had the expected state: {json.dumps(state_of(url))[:2000]}")


@contextmanager
def _changes(url: str) -> Iterator[Iterator[str]]:
    with httpx.stream("GET", f"{url}/api/v1/events", timeout=TIMEOUT_S) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("event:"))
        yield (line for line, _ in zip(lines, range(int(TIMEOUT_S)), strict=False))


def states(state: State) -> dict[str, str]:
    """The state of every peer."""
    return {peer: entry["state"] for peer, entry in state["peers"].items()}
