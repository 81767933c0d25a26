"""A swarm of real processes on hosts behind routers: public bootstrap peers, hosts, and a
client."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnet_node.owner import control
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from tests.support.processes.commands import Place, RunningCommand
from tests.support.processes.nat_lab import nat_lab
from tests.support.processes.nodes import Swarm

PROMPT = "Once upon a time there was a"
LISTEN = ("--listen", "/ip4/0.0.0.0/tcp/4100", "--listen", "/ip4/0.0.0.0/udp/4100/quic-v1")


@dataclass
class NatSwarm:
    """``places``: first those of the bootstrap peers, which have no router."""

    lab: Swarm
    places: Sequence[Place]
    bootstrap: list[str] = field(default_factory=list)
    processes: dict[str, RunningCommand] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        return self.lab.directory / name

    @property
    def bootstrap_options(self) -> list[str]:
        return [option for address in self.bootstrap for option in ("--bootstrap", address)]

    def start(self, name: str, place: Place, *arguments: str) -> RunningCommand:
        """Start a command, with its messages in ``NAME.log``."""
        command = ("--log-level", "info", *arguments, *self.bootstrap_options)
        log = self.path(f"{name}.log")
        self.processes[name] = RunningCommand(command, log, place)
        return self.processes[name]

    def start_bootstrap(self, number: int) -> RunningCommand:
        place, name = self.places[number], f"bootstrap{number}"
        listen = ("--listen", f"/ip4/{place.ip}/tcp/4001", "--listen", f"/ip4/{place.ip}/udp/4001/quic-v1")
        command = self.start(
            name, place, "bootstrap", str(self.lab.file), "--data-dir", str(self.path(name)), *listen
        )
        address = next(each for each in command.wait("ready")["addresses"] if "/tcp/" in each)
        self.bootstrap.append(address)
        return command

    def start_host(self, name: str, place: Place, blocks: str, *options: str) -> RunningCommand:
        where = ("--data-dir", str(self.path(name)), "--cache-dir", str(self.lab.cache_dir), *LISTEN)
        return self.start(
            name,
            place,
            "join",
            str(self.lab.file),
            "--blocks",
            blocks,
            *where,
            "--priority",
            "normal",
            *options,
        )

    def ask(self, name: str, place: Place, tokens: int = 30) -> RunningCommand:
        """Start ``swarmnet run`` of ``PROMPT``."""
        where = ("--data-dir", str(self.path("client")), "--cache-dir", str(self.lab.cache_dir))
        swarm = ("--swarm", str(self.lab.file), *where)
        return self.start(
            name, place, "run", self.lab.model, PROMPT, "--raw", "--stream", "-n", str(tokens), *swarm
        )

    def answer(self, name: str, place: Place, tokens: int = 30) -> tuple[dict[str, Any], float]:
        """The answer, and the seconds from the start of the command to its end. Raises
        ``RuntimeError`` if it failed."""
        began = time.monotonic()
        command = self.ask(name, place, tokens)
        if command.wait_for_end() or not command.events:
            raise RuntimeError(f"no answer: {command.events[-1:]} {command.log.read_text()[-2000:]}")
        return command.events[-1], time.monotonic() - began

    def status(self, name: str) -> NodeStatus:
        return control.status(self.path(name))

    def log(self, name: str) -> str:
        return self.path(f"{name}.log").read_text()

    def relayed(self, name: str, protocol_id: str, *, after: int = 0) -> bool:
        """Whether a process opened a stream of a protocol through a relay, since its log had
        ``after`` characters."""
        return f"{protocol_id} with" in self.log(name)[after:]

    def close(self) -> None:
        for each in self.processes.values():
            each.kill()


@contextmanager
def nat_swarm(
    directory: Path, cache_dir: Path, kinds: Sequence[str], *, public: int = 1
) -> Iterator[NatSwarm]:
    """``public`` bootstrap peers, ready, and places of the given kinds after theirs."""
    with nat_lab([*["open"] * public, *kinds]) as places:
        swarm = NatSwarm(Swarm(directory, cache_dir), places)
        try:
            for number in range(public):
                swarm.start_bootstrap(number)
            yield swarm
        finally:
            swarm.close()
