"""Forward and backward of 8 x 128 tokens through three loopback hops, against one local transformers process.

    python -m tests.bench.tuning [--hops 3] [--rounds 5] [--rows 8] [--tokens 128]

What learns is the input embeddings; all weights are frozen. Both in float32 with two threads, in turn, medians. Prints JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as `swarmnet run` does

import torch

from swarmnet_protocols.models import resolve
from tests.support.processes import swarm

MODEL = "smollm2-135m-instruct"
BLOCKS = 30
THREADS = 2


def timed_step(model: Any, rows: int, tokens: int) -> dict[str, float]:
    """Seconds of a forward with its loss and a backward; the loss, and the size of the gradients at the inputs."""
    ids = torch.randint(0, 10_000, (rows, tokens), generator=torch.Generator().manual_seed(0))
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    started = time.perf_counter()
    loss = model(inputs_embeds=inputs, labels=ids).loss
    loss.backward()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "loss": float(loss.detach()), "gradients": float(inputs.grad.norm())}


class LocalProcess:
    """Plain transformers in a process of its own, with default OpenMP settings."""

    def __init__(self, cache_dir: Path, rows: int, tokens: int) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        command = [sys.executable, "-m", __spec__.name, "--local", str(cache_dir)]
        self._process = subprocess.Popen(
            [*command, "--rows", str(rows), "--tokens", str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def step(self) -> dict[str, float]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipe")
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


def answer_locally(cache_dir: Path, rows: int, tokens: int) -> None:
    model = resolve(MODEL, cache_dir=cache_dir).load_whole(dtype=torch.float32, device=torch.device("cpu"))
    for _ in sys.stdin:
        print(json.dumps(timed_step(model, rows, tokens)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--local", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = (arguments.rows, arguments.tokens)
    torch.set_num_threads(THREADS)
    if arguments.local is not None:
        answer_locally(arguments.local, *shape)
        return
    cuts = [BLOCKS * hop // arguments.hops for hop in range(arguments.hops + 1)]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        local = LocalProcess(cache, *shape)
        local.step()
        with swarm(Path(folder) / "lab", cache, *pairwise(cuts)) as lab, lab.connect() as model:
            timed_step(model, *shape)
            rounds = [(local.step(), timed_step(model, *shape)) for _ in range(arguments.rounds)]
        local.close()
    ours = statistics.median(theirs["seconds"] for _, theirs in rounds)
    alone = statistics.median(mine["seconds"] for mine, _ in rounds)
    report = {
        "bench": "tuning",
        "hops": arguments.hops,
        "rows": arguments.rows,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "largest_relative_difference": max(
            abs(mine[name] - theirs[name]) / abs(mine[name])
            for mine, theirs in rounds
            for name in ("loss", "gradients")
        ),
        "local_s": round(alone, 3),
        "swarm_s": round(ours, 3),
        "ratio": round(alone / ours, 3),
        "ratio_by_round": [round(mine["seconds"] / theirs["seconds"], 3) for mine, theirs in rounds],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
