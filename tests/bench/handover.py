"""The stalls that clients see when a node that serves them is told to finish.

    python -m tests.bench.handover [--times 20] [--moves 0] [--clients 2] [--seed 0]

Two nodes for each third of the model. Clients generate without a pause; again and again one of the
nodes that serve them is told to finish, and is started again once it has stopped. A stall is the
longest wait for one token between the command and the end of the process; it should be at most two
steps, by the median of that answer's steps, and 0.2 s. With ``--moves`` there is one node for each
third, and another that moves from third to third; then a stall is the longest wait from a second
before it serves other blocks to ``MOVE_S`` after. ``undisturbed_s`` are the longest waits in as
long a time before each command, by which the machine's own pauses are known. Prints one line of
JSON for each.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from swarmnet_node.owner import control
from tests.support.processes.nodes import NodeProcess, Swarm, swarm
from tests.support.swarm.generation import greedy

SPANS = ((0, 10), (10, 20), (20, 30)) * 2
TOKENS = 96
MOVE_S = 5.0
"""Seconds after a move within which most sessions are handed over."""
LOOK_S = 12.0
"""Mean seconds between two moves."""
RESTLESS = (sys.executable, "-m", "tests.bench.restless_node", str(LOOK_S))
GOAL_S = 0.2
"""Goal for the seconds by which a stall exceeds two steps."""


@dataclass
class Watch:
    """A transformers streamer that notes when each token came."""

    times: list[float] = field(default_factory=list)

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.monotonic())

    def end(self) -> None:
        pass


@dataclass
class Client:
    """A client that asks again and again until ``stopping`` is set, on a thread of its own."""

    ids: list[int]
    expected: list[int]
    stopping: threading.Event
    answers: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    handovers: int = 0
    failovers: int = 0
    waits: list[tuple[float, float, float]] = field(default_factory=list)
    """Each wait for a token after the first: when it began, when it ended, and the median step of
    its answer."""

    def run(self, model: Any) -> None:
        while not self.stopping.is_set():
            self._ask(model)

    def _ask(self, model: Any) -> None:
        watch = Watch()
        try:
            (tokens,) = greedy(model, [self.ids], TOKENS, watch)
        except Exception as error:  # noqa: BLE001 - any failure of a request is what this measures
            self.failed.append(f"{type(error).__name__}: {error}")
            return
        self.answers += 1
        self.wrong += tokens != self.expected
        self.handovers += model.last_run.handovers
        self.failovers += model.last_run.failovers
        steps = list(pairwise(watch.times[2:]))  # the prompt, then the first token
        usual_s = statistics.median(after - before for before, after in steps)
        self.waits += [(before, after, usual_s) for before, after in steps]


def finish_one(lab: Swarm, rng: random.Random) -> tuple[str, float, float]:
    """Have a node that serves clients finish; returns its name, and when it was told to and when it
    ended."""
    serving: list[NodeProcess] = []
    while not serving:
        serving = [node for node in lab.nodes.values() if node.status.host.record.sessions]
    node = rng.choice(serving)
    began = time.monotonic()
    control.finish(node.data_dir, grace_s=30.0)
    code = node.wait_for_end()
    if code:
        raise RuntimeError(f"{node.name} ended with {code}: {node.log.read_text()[-2000:]}")
    return node.name, began, time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--moves", type=int, default=0)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    if arguments.times:
        with tempfile.TemporaryDirectory() as folder:
            clients, windows = measure(
                Path(folder), SPANS, arguments, lambda lab: finish(lab, arguments.times, rng)
            )
        report("finish", clients, windows)
    if arguments.moves:
        with tempfile.TemporaryDirectory() as folder:
            clients, windows = measure(
                Path(folder), SPANS[:3], arguments, lambda lab: move(lab, arguments.moves)
            )
        report("move", clients, windows)


Window = tuple[float, float]
"""The times at which an action on a node began and ended."""


def measure(
    folder: Path,
    spans: Sequence[tuple[int, int]],
    arguments: argparse.Namespace,
    act: Callable[[Swarm], list[Window]],
) -> tuple[list[Client], list[Window]]:
    """Clients that ask nodes of these spans while ``act`` does something to the nodes."""
    rng = random.Random(arguments.seed)
    prompts = [
        [rng.randrange(1000, 20000) for _ in range(arguments.prompt_tokens)] for _ in range(arguments.clients)
    ]
    with swarm(folder / "lab", folder / "cache", *spans) as lab, ExitStack() as stack:
        models = [stack.enter_context(lab.connect()) for _ in prompts]
        expected = [greedy(model, [ids], TOKENS)[0] for ids, model in zip(prompts, models, strict=True)]
        stopping = threading.Event()
        clients = [Client(*each, stopping) for each in zip(prompts, expected, strict=True)]
        threads = [
            threading.Thread(target=client.run, args=(model,))
            for client, model in zip(clients, models, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            windows = act(lab)
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
    return clients, windows


def finish(lab: Swarm, times: int, rng: random.Random) -> list[Window]:
    windows = []
    for _ in range(times):
        name, began, ended = finish_one(lab, rng)
        windows.append((began, ended))
        _ = lab.relaunch(name).ready
        time.sleep(1.0 + ended - began)  # the directory shows it; then the undisturbed time
    return windows


def move(lab: Swarm, times: int) -> list[Window]:
    mover = lab.launch("mover", "--num-blocks", "10", program=RESTLESS)
    _ = mover.ready
    windows = []
    seen = 0
    while len(windows) < times:
        mover.wait_for_more(timeout_s=60.0)
        moves = [event for event in list(mover.events) if event["event"] == "moved"]
        if len(moves) > seen:
            seen = len(moves)
            windows.append((time.monotonic() - 1.0, time.monotonic() + MOVE_S))
            time.sleep(MOVE_S)
        elif mover.process.poll() is not None:
            raise RuntimeError(f"the node ended: {mover.log.read_text()[-2000:]}")
    return windows


def longest(clients: list[Client], began: float, ended: float) -> tuple[float, float]:
    """The longest wait for a token between two moments, and the most by which one was longer than
    two steps of its answer."""
    met = [
        (after - before, after - before - 2 * usual_s)
        for client in clients
        for before, after, usual_s in client.waits
        if before < ended and after > began
    ]
    return max((wait_s for wait_s, _ in met), default=0.0), max(
        (excess_s for _, excess_s in met), default=0.0
    )


def report(what: str, clients: list[Client], windows: list[Window]) -> None:
    stalls, excesses = zip(*(longest(clients, *window) for window in windows), strict=True)
    calm, calm_excesses = zip(
        *(longest(clients, 2 * began - ended, began) for began, ended in windows), strict=True
    )
    print(
        json.dumps(
            {
                "bench": "handover",
                "what": what,
                "times": len(windows),
                "clients": len(clients),
                "answers": sum(client.answers for client in clients),
                "failed": [error for client in clients for error in client.failed],
                "wrong_answers": sum(client.wrong for client in clients),
                "handovers": sum(client.handovers for client in clients),
                "failovers": sum(client.failovers for client in clients),
                "step_s": round(
                    statistics.median(usual_s for client in clients for *_, usual_s in client.waits), 4
                ),
                "bad_answers": sum(client.wrong + len(client.failed) for client in clients),
                "beyond_s": [round(excess_s, 3) for excess_s in excesses],
                "undisturbed_beyond_s": [round(excess_s, 3) for excess_s in calm_excesses],
                "stall_s_median": round(statistics.median(stalls), 3),
                "stall_s_max": round(max(stalls), 3),
                "beyond_two_steps_s_max": round(max(excesses), 3),
                "stalls_beyond_goal": sum(excess_s > GOAL_S for excess_s in excesses),
                "undisturbed_s_median": round(statistics.median(calm), 3),
                "undisturbed_s_max": round(max(calm), 3),
                "undisturbed_beyond_goal": sum(excess_s > GOAL_S for excess_s in calm_excesses),
                "drain_s_median": round(statistics.median(ended - began for began, ended in windows), 2),
                "goal_s": GOAL_S,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
