"""A swarm of real processes in which something happens to a node every few seconds, while clients
stream.

    python -m tests.bench.chaos [--minutes 2] [--nodes 12] [--every 5] [--clients 3] [--seed 0]

Nodes for each third of the model, and one that chooses its blocks. What happens, at random:
``kill`` (SIGKILL), ``stop`` (SIGSTOP of both processes for some seconds), ``cut`` (SIGSTOP of p2pd
only: connections stay open and carry nothing), ``slow`` (stopped most of the time), ``finish``, and
``join``; nodes that ended are started again. At least one node of each third is left alone. Clients
are processes of their own.

Prints one line of JSON: the share of answers that completed, the answers with wrong tokens, and the
99th percentile of the longest stall of an answer. The first node and one client live all the time.
The line has their memory, file descriptors and tasks in the first and the last quarter.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swarmnet_node.owner import control
from swarmnet_protocols.errors import SwarmnetError
from tests.support.processes.faults import kill, resume, stop, stop_python
from tests.support.processes.nodes import NodeProcess, Swarm, swarm
from tests.support.swarm.generation import are_greedy, greedy

THIRDS = ((0, 10), (10, 20), (20, 30))
TOKENS = 64
PROMPT_TOKENS = 24
SILENT_S = (1.0, 8.0)
"""Seconds for which a node is stopped, cut off or slow."""
SLOW_S = 0.08, 0.02
"""A slow node is stopped for the first, and runs for the second."""
JOINED = 2
"""Most nodes that have joined and not left again."""
START_S = 60.0
"""Seconds within which a node starts on a busy machine."""


def client_main(file: str, cache_dir: str, seed: str, *bootstrap: str) -> None:
    """A client that asks until its stdin ends: one JSON object a line for each answer."""
    from swarmnet import AutoSwarmModelForCausalLM

    stopping = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopping.set()), daemon=True).start()
    rng = random.Random(int(seed))
    with AutoSwarmModelForCausalLM.from_pretrained(
        "smollm2-135m-instruct", swarm=file, bootstrap=bootstrap, cache_dir=Path(cache_dir)
    ) as model:
        loop = model._runtime._loop
        while not stopping.is_set():
            prompt = [rng.randrange(1000, 20000) for _ in range(PROMPT_TOKENS)]
            row: dict[str, Any] = {"prompt": prompt}
            try:
                (row["tokens"],) = greedy(model, [prompt], TOKENS)
                row["stall_s"] = model.last_run.longest_stall_s
                row["failovers"] = model.last_run.failovers
            except SwarmnetError as error:
                row["error"] = f"{type(error).__name__}: {error}"
            row["tasks"] = len(asyncio.all_tasks(loop)) if loop is not None else 0
            print(json.dumps(row), flush=True)


@dataclass
class ClientProcess:
    """A client in a process of its own, and its answers so far."""

    process: subprocess.Popen[str]
    answers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, lab: Swarm, seed: int) -> "ClientProcess":
        arguments = ["--client", str(lab.file), str(lab.cache_dir), str(seed), *lab.bootstrap]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.chaos", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        client = cls(process)
        threading.Thread(target=client._read, daemon=True).start()
        return client

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self.answers.append(json.loads(line))

    def end(self) -> None:
        """Close its stdin: it ends after its present answer."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(300)


@dataclass
class Chaos:
    """Injects a random fault into a random node now and then."""

    lab: Swarm
    rng: random.Random
    most_nodes: int
    """Nodes with those that join, at most: each shares the cores of this machine."""
    hurt: set[str] = field(default_factory=set)
    """Nodes to which something is happening, or that start again."""
    events: Counter[str] = field(default_factory=Counter)
    joined: int = 0

    def happen(self) -> None:
        kinds: list[Callable[[NodeProcess], None]] = [self.kill, self.stop, self.cut, self.slow, self.finish]
        names = [name for name in self.lab.nodes if self._may_be_hurt(name)]
        if self.rng.random() < 1 / 6 or not names:
            if len(self.lab.nodes) < self.most_nodes:
                self._on_a_thread("join", self.join)
            return
        name, kind = self.rng.choice(names), self.rng.choice(kinds)
        self.hurt.add(name)
        self._on_a_thread(kind.__name__, lambda: self._hurt(name, kind))

    def _on_a_thread(self, kind: str, work: Callable[[], None]) -> None:
        self.events[kind] += 1
        threading.Thread(target=work, daemon=True).start()

    def _may_be_hurt(self, name: str) -> bool:
        """Whether a fault may hit this node: only while another node with the same blocks has none.
        The first node is never hurt: it is the bootstrap peer of all."""
        if name in self.hurt or name == next(iter(self.lab.nodes)) or not self.lab.nodes[name].is_ready:
            return False
        blocks = name.rpartition("-")[0]
        same = [other for other in self.lab.nodes if other.rpartition("-")[0] == blocks and other != name]
        return not blocks or any(other not in self.hurt for other in same)

    def _hurt(self, name: str, kind: Callable[[NodeProcess], None]) -> None:
        node = self.lab.nodes[name]
        kind(node)
        if node.process.poll() is not None:
            if name.count("-") == 2:
                node = self.lab.relaunch(name)
            else:
                del self.lab.nodes[name]
                self.hurt.discard(name)
                return
        deadline = time.monotonic() + START_S
        while not node.is_ready and time.monotonic() < deadline:
            time.sleep(0.5)
        self.hurt.discard(name)

    def kill(self, node: NodeProcess) -> None:
        kill(node)
        node.wait_for_end()

    def stop(self, node: NodeProcess) -> None:
        stop(node)
        time.sleep(self.rng.uniform(*SILENT_S))
        resume(node)

    def cut(self, node: NodeProcess) -> None:
        node.send_signal(signal.SIGSTOP, python=False)
        time.sleep(self.rng.uniform(*SILENT_S))
        resume(node)

    def slow(self, node: NodeProcess) -> None:
        until = time.monotonic() + self.rng.uniform(*SILENT_S)
        while time.monotonic() < until:
            stop_python(node)
            time.sleep(SLOW_S[0])
            resume(node)
            time.sleep(SLOW_S[1])

    def finish(self, node: NodeProcess) -> None:
        control.finish(node.data_dir, grace_s=20.0)
        node.wait_for_end()

    def join(self) -> None:
        self.joined += 1
        name = f"joined{self.joined}"
        self.lab.launch(name, "--num-blocks", "10")


def use_of(pid: int) -> dict[str, int]:
    """Memory, file descriptors and threads of a process and its children."""
    main = psutil.Process(pid)
    family = [main, *main.children(recursive=True)]
    return {
        "rss_mib": sum(each.memory_info().rss for each in family) >> 20,
        "fds": sum(each.num_fds() for each in family),
        "threads": sum(each.num_threads() for each in family),
    }


def means(samples: list[dict[str, int]]) -> dict[str, list[float]]:
    """For each figure, its median over the first quarter of the samples and over the last
    quarter."""
    part = max(1, len(samples) // 4)
    return {
        key: [statistics.median(each[key] for each in some) for some in (samples[:part], samples[-part:])]
        for key in samples[0]
    }


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        client_main(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    spans = [THIRDS[number % 3] for number in range(arguments.nodes)]
    with (
        tempfile.TemporaryDirectory() as folder,
        swarm(Path(folder) / "lab", Path(folder) / "cache", *spans) as lab,
        ExitStack() as stack,
    ):
        clients = [ClientProcess.start(lab, rng.randrange(1 << 30)) for _ in range(arguments.clients)]
        for client in clients:
            stack.callback(client.process.kill)
        while not all(client.answers for client in clients):
            time.sleep(0.5)
        chaos = Chaos(lab, rng, arguments.nodes + JOINED)
        first = next(iter(lab.nodes.values()))
        uses: list[dict[str, int]] = []
        client_uses: list[dict[str, int]] = []
        until = time.monotonic() + 60 * arguments.minutes
        while time.monotonic() < until:
            chaos.happen()
            time.sleep(rng.uniform(0.5, 1.5) * arguments.every)
            uses.append(use_of(first.pid))
            client_uses.append(use_of(clients[0].process.pid) | {"tasks": clients[0].answers[-1]["tasks"]})
        for client in clients:
            client.end()
        lab.close()  # what follows takes the cores
        report(arguments, lab, clients, chaos, means(uses), means(client_uses))


def report(
    arguments: argparse.Namespace,
    lab: Swarm,
    clients: list[ClientProcess],
    chaos: Chaos,
    node_use: dict[str, list[float]],
    client_use: dict[str, list[float]],
) -> None:
    import torch

    from swarmnet_protocols.models import resolve

    whole = resolve(lab.model, cache_dir=lab.cache_dir).load_whole(
        dtype=torch.float32, device=torch.device("cpu")
    )
    answers = [each for client in clients for each in client.answers]
    done = [each for each in answers if "tokens" in each]
    wrong = sum(not are_greedy(whole, [each["prompt"]], [each["tokens"]])[0] for each in done)
    stalls = sorted(each["stall_s"] for each in done)
    print(
        json.dumps(
            {
                "bench": "chaos",
                "minutes": arguments.minutes,
                "nodes": arguments.nodes,
                "events": dict(chaos.events),
                "answers": len(answers),
                "completed_share": round(len(done) / len(answers), 4),
                "errors": dict(Counter(each["error"][:120] for each in answers if "error" in each)),
                "wrong_answers": wrong,
                "failovers": sum(each["failovers"] for each in done),
                "stall_s_p50": round(statistics.median(stalls), 2),
                "stall_s_p99": round(stalls[int(0.99 * (len(stalls) - 1))], 2),
                "node": node_use,
                "client": client_use,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
