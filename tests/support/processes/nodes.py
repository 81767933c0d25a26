"""Real nodes in processes on this machine, for tests and benchmarks. All processes started here are
stopped here."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnet_node.owner import control
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from tests.support.processes.commands import LOOPBACK, SWARMNET, TIMEOUT_S, Place, RunningCommand, call


class NodeProcess(RunningCommand):
    """One ``swarmnet join`` or ``swarmnet volunteer`` with its data directory."""

    def __init__(
        self,
        arguments: Sequence[str],
        data_dir: Path,
        place: Place = LOOPBACK,
        program: Sequence[str] = SWARMNET,
        command: str = "join",
    ) -> None:
        self.data_dir = data_dir
        # If this process is killed, the stdin of the node ends, and the node with it.
        where = ("--data-dir", str(data_dir), "--listen", f"/ip4/{place.ip}/tcp/0", "--stop-on-eof")
        where += ("--priority", "normal")  # a node at low priority would be slow on a busy machine
        log = data_dir.with_suffix(".log")
        super().__init__((command, *arguments, *where), log, place, stdin=subprocess.PIPE, program=program)

    @property
    def name(self) -> str:
        return self.data_dir.name

    @property
    def is_ready(self) -> bool:
        return any(event["event"] == "ready" for event in list(self.events))

    @property
    def ready(self) -> dict[str, Any]:
        return self.wait("ready")

    @property
    def status(self) -> NodeStatus:
        """The status that the node reports over its control socket."""
        return control.status(self.data_dir)


@dataclass
class Swarm:
    """A swarm file, a cache and nodes, in a directory of their own."""

    directory: Path
    cache_dir: Path
    model: str = "smollm2-135m-instruct"
    nodes: dict[str, NodeProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        call("swarm", "create", "lab", "--open", "--out", str(self.directory))

    @property
    def file(self) -> Path:
        return self.directory / "swarm.toml"

    @property
    def bootstrap(self) -> list[str]:
        """TCP addresses of the nodes that serve now."""
        serving = [node for node in self.nodes.values() if node.is_ready and node.process.poll() is None]
        return [address for node in serving for address in node.ready["addresses"] if "/tcp/" in address]

    @property
    def bootstrap_options(self) -> list[str]:
        return [option for address in self.bootstrap for option in ("--bootstrap", address)]

    def launch(
        self,
        name: str,
        *options: str,
        place: Place = LOOPBACK,
        program: Sequence[str] = SWARMNET,
        command: str = "join",
    ) -> NodeProcess:
        """Start a node without waiting for it. The first node is the bootstrap peer of all."""
        arguments = (str(self.file), "--model", self.model, "--cache-dir", str(self.cache_dir), *options)
        self.nodes[name] = NodeProcess(
            (*arguments, *self.bootstrap_options), self.directory / name, place, program, command
        )
        return self.nodes[name]

    def relaunch(self, name: str) -> NodeProcess:
        """Kill what is left of a node that ``start`` had started, and start it once more with the
        same identity."""
        self.nodes[name].kill()
        start, end, _ = name.split("-")
        return self.launch(name, "--blocks", f"{start}:{end}")

    def start(self, *spans: tuple[int, int]) -> list[NodeProcess]:
        """Start nodes for these spans and wait until all are ready; they are named after their span
        and place."""
        nodes = []
        for start, end in spans:
            node = self.launch(f"{start}-{end}-{len(self.nodes)}", "--blocks", f"{start}:{end}")
            if len(self.nodes) == 1:
                _ = node.ready
            nodes.append(node)
        for node in nodes:
            _ = node.ready
        return nodes

    def connect(self, *, bootstrap: Sequence[str] | None = None, **options: Any) -> Any:
        """A client of this swarm: a transformers model that knows every running node, or those of
        ``bootstrap``. ``options``: those of ``from_pretrained``."""
        from swarmnet import AutoSwarmModelForCausalLM

        known = self.bootstrap if bootstrap is None else bootstrap
        return AutoSwarmModelForCausalLM.from_pretrained(
            self.model, swarm=self.file, bootstrap=known, cache_dir=self.cache_dir, **options
        )

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()


class RunProcess(RunningCommand):
    """``swarmnet run --stream`` with a prompt: tokens are seen as they arrive."""

    def __init__(
        self, lab: Swarm, prompt: str, tokens: int = 200, place: Place = LOOPBACK, *options: str
    ) -> None:
        arguments = ("run", lab.model, prompt, "--raw", "--stream", "-n", str(tokens))
        where = ("--swarm", str(lab.file), "--cache-dir", str(lab.cache_dir), *lab.bootstrap_options)
        super().__init__((*arguments, *options, *where), lab.directory / "run.log", place)

    def finish(self) -> tuple[int, dict[str, Any]]:
        """The exit code and the last event that it printed."""
        code = self.wait_for_end()
        errors = self.log.read_text()
        if "Traceback" in errors or not self.events:
            raise RuntimeError(errors)
        return code, self.events[-1]


def await_idle(*nodes: NodeProcess) -> None:
    """Wait until every node that runs has freed all its sessions."""
    deadline = time.monotonic() + TIMEOUT_S
    busy = [node for node in nodes if node.process.poll() is None]
    while busy:
        state = busy[-1].status.host
        if (state.record.sessions, state.cache_bytes) == (0, 0):
            busy.pop()
        elif time.monotonic() > deadline:
            raise AssertionError(state)
        else:
            time.sleep(0.05)


@contextmanager
def swarm(directory: Path, cache_dir: Path, *spans: tuple[int, int]) -> Iterator[Swarm]:
    """A swarm of nodes with these spans, stopped at the end."""
    lab = Swarm(directory, cache_dir)
    try:
        lab.start(*spans)
        yield lab
    finally:
        lab.close()
