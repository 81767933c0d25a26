"""Ten thousand hostile frames a second at one node, for a minute, while an honest client generates.

    python -m tests.bench.hostile [--seconds 60] [--frames-per-s 10000] [--identities 4] [--tiny]

The times between the client's tokens before, during and after the attack, and the memory of the
node and of its p2pd. Prints JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.support.models.tiny import BLOCKS
from tests.support.processes.nodes import NodeProcess, Swarm
from tests.support.swarm.tiny_swarm import load_tiny

PROMPT = list(range(5, 37))


class Stopwatch:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def token_times(model: Any, seconds: float) -> list[float]:
    """The seconds between tokens of greedy answers, generated one after another for ``seconds``."""
    gaps: list[float] = []
    ids = torch.tensor([PROMPT])
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        watch = Stopwatch()
        model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False, streamer=watch)
        gaps += [later - earlier for earlier, later in zip(watch.times[1:], watch.times[2:], strict=False)]
    return gaps


def rss_bytes(node: NodeProcess) -> tuple[int, int]:
    """Resident memory of the node and of its p2pd."""
    process = psutil.Process(node.pid)
    return process.memory_info().rss, sum(child.memory_info().rss for child in process.children())


def milliseconds(gaps: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(gaps, n=20)
    return {"p50": round(1e3 * cuts[9], 1), "p95": round(1e3 * cuts[18], 1), "tokens": len(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--frames-per-s", type=float, default=10_000.0)
    parser.add_argument("--identities", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab = Swarm(folder / "lab", folder / "cache")
        blocks = 30
        if arguments.tiny:
            load_tiny(folder)
            lab.model, blocks = str(folder / "model"), BLOCKS
        try:
            (node,) = lab.start((0, blocks))
            with lab.connect() as model:
                token_times(model, 5.0)
                before = token_times(model, arguments.seconds / 3)
                quiet = rss_bytes(node)
                how = (str(arguments.seconds), str(arguments.frames_per_s), str(arguments.identities))
                command = [sys.executable, "-m", "tests.support.attacks.hostile", *how, lab.bootstrap[0]]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
                    if attacker.stdout is None:
                        raise RuntimeError("no pipe")
                    attacker.stdout.readline()
                    during = token_times(model, arguments.seconds - 2)
                    busy = rss_bytes(node)
                    sent = json.loads(attacker.stdout.readline())["sent"]
                after = token_times(model, arguments.seconds / 3)
                rested = rss_bytes(node)
        finally:
            lab.close()
    frames = sum(count for kind, count in sent.items() if "stream" not in kind)
    report = {
        "bench": "hostile",
        "identities": arguments.identities,
        "frames_per_s": round(frames / arguments.seconds),
        "sent": sent,
        "token_ms": {
            "before": milliseconds(before),
            "during": milliseconds(during),
            "after": milliseconds(after),
        },
        "p95_ratio": round(milliseconds(during)["p95"] / milliseconds(before)["p95"], 2),
        "growth_mib": [round((b - a) / (1 << 20), 1) for a, b in zip(quiet, busy, strict=True)],
        "growth_afterwards_mib": [round((b - a) / (1 << 20), 1) for a, b in zip(quiet, rested, strict=True)],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
