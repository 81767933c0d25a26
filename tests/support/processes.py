"""Real nodes in real processes on this machine, for tests and benchmarks. Everything started here is stopped here."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swarmnet_node import control
from swarmnet_node.control import NodeStatus

READY_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Place:
    """Where a process runs: a prefix to its command, and the address it has there."""

    ip: str
    prefix: tuple[str, ...] = ()


LOOPBACK = Place("127.0.0.1")


class NodeProcess:
    """One ``swarmnet join`` with its data directory."""

    def __init__(self, command: Sequence[str], data_dir: Path) -> None:
        self.data_dir = data_dir
        self.log = data_dir.with_suffix(".log")
        with self.log.open("w") as log:
            # A group of its own, so that Ctrl-C on a test run reaches the nodes through ``stop`` only; if we are
            # killed they see their stdin end.
            self.process = subprocess.Popen(
                [*command, "--stop-on-eof"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
            )
        self._family: list[psutil.Process] = []
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_event(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> dict[str, Any]:
        """The event ``name``, once the node has printed it; ``RuntimeError`` with its log if it ends without."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._find(name) is not None or not self._reader.is_alive(), timeout_s
            )
        event = self._find(name)
        if event is None:
            raise RuntimeError(f"no {name}: {self.events} {self.log.read_text()[-2000:]}")
        return event

    @property
    def is_ready(self) -> bool:
        return self._find("ready") is not None

    @property
    def ready(self) -> dict[str, Any]:
        return self.wait_event("ready")

    @property
    def status(self) -> NodeStatus:
        """What the node says of itself now, over its control socket."""
        return control.status(self.data_dir)

    def send_signal(self, number: signal.Signals, *, python: bool = True, p2pd: bool = True) -> None:
        """Send a signal to the node, to its p2pd, or to both as when the machine fails."""
        if not self._family:
            main = psutil.Process(self.pid)
            self._family = [main, *main.children(recursive=True)]
        for member in self._family:
            if python if member.pid == self.pid else p2pd:
                with suppress(psutil.NoSuchProcess):
                    member.send_signal(number)

    def stop(self) -> None:
        """End it at once, whatever state it is in."""
        with suppress(psutil.NoSuchProcess):
            self.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _find(self, name: str) -> dict[str, Any] | None:
        return next((event for event in self.events if event.get("event") == name), None)

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


@dataclass
class Swarm:
    """A private corner of this machine: a swarm file, a cache, and nodes."""

    directory: Path
    cache_dir: Path
    model: str = "smollm2-135m-instruct"
    nodes: dict[str, NodeProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "swarmnet",
            "swarm",
            "create",
            "lab",
            "--open",
            "--out",
            str(self.directory),
        ]
        subprocess.run(command, check=True, capture_output=True)

    @property
    def file(self) -> Path:
        return self.directory / "swarm.toml"

    @property
    def bootstrap(self) -> list[str]:
        """TCP addresses of the nodes that serve now."""
        serving = [node for node in self.nodes.values() if node.is_ready and node.process.poll() is None]
        return [address for node in serving for address in node.ready["addresses"] if "/tcp/" in address]

    def launch(self, name: str, *options: str, place: Place = LOOPBACK) -> NodeProcess:
        """Start a node without waiting for it; the first one is everybody's bootstrap."""
        command = [*place.prefix, sys.executable, "-m", "swarmnet", "join", str(self.file), "--json"]
        command += ["--model", self.model, "--cache-dir", str(self.cache_dir)]
        command += ["--data-dir", str(self.directory / name), "--listen", f"/ip4/{place.ip}/tcp/0", *options]
        for address in self.bootstrap:
            command += ["--bootstrap", address]
        self.nodes[name] = NodeProcess(command, self.directory / name)
        return self.nodes[name]

    def relaunch(self, name: str) -> NodeProcess:
        """Start a node that ``start`` had started again, in place of what is left of it, with the same identity."""
        self.nodes[name].stop()
        start, end, _ = name.split("-")
        return self.launch(name, "--blocks", f"{start}:{end}")

    def start(self, *spans: tuple[int, int]) -> list[NodeProcess]:
        """Nodes for these spans, all ready; they are named after their span and place."""
        nodes = []
        for start, end in spans:
            node = self.launch(f"{start}-{end}-{len(self.nodes)}", "--blocks", f"{start}:{end}")
            if len(self.nodes) == 1:
                _ = node.ready
            nodes.append(node)
        for node in nodes:
            _ = node.ready
        return nodes

    def connect(self, *, bootstrap: Sequence[str] | None = None) -> Any:
        """A client of this swarm: a transformers model. It knows every node that runs, or those of ``bootstrap``."""
        from swarmnet import AutoSwarmModelForCausalLM

        known = self.bootstrap if bootstrap is None else bootstrap
        return AutoSwarmModelForCausalLM.from_pretrained(
            self.model, swarm=self.file, bootstrap=known, cache_dir=self.cache_dir
        )

    def close(self) -> None:
        for node in self.nodes.values():
            node.stop()


class RunProcess:
    """``swarmnet run --stream`` with a prompt: tokens are seen as they come."""

    def __init__(self, lab: Swarm, prompt: str, tokens: int = 200, place: Place = LOOPBACK) -> None:
        command = [*place.prefix, sys.executable, "-m", "swarmnet", "run", lab.model, prompt, "--raw"]
        command += ["-n", str(tokens), "--swarm", str(lab.file), "--cache-dir", str(lab.cache_dir)]
        command += ["--json", "--stream"]
        for address in lab.bootstrap:
            command += ["--bootstrap", address]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def await_token(self) -> None:
        """Return when the first piece of the answer is there."""
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line or json.loads(line).get("event") != "token":
            raise RuntimeError(f"no token: {line}")

    def finish(self, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Its exit code and the last thing it printed."""
        output, errors = self.process.communicate(timeout=timeout_s)
        if "Traceback" in errors or not output:
            raise RuntimeError(errors)
        last: dict[str, Any] = json.loads(output.splitlines()[-1])
        return self.process.returncode, last

    def __enter__(self) -> "RunProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def swarm(directory: Path, cache_dir: Path, *spans: tuple[int, int]) -> Iterator[Swarm]:
    """A swarm of nodes with these spans, stopped at the end."""
    lab = Swarm(directory, cache_dir)
    try:
        lab.start(*spans)
        yield lab
    finally:
        lab.close()
