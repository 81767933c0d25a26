"""Eight clients at once through the same three hops, against one client alone.

    python -m tests.bench.concurrency [--clients 8] [--tokens 48] [--prompt-tokens 32] [--threads 1]

The clients are threads of this process, each with a connection and an identity of its own. Nodes compute with one thread
each: several nodes with a thread for every core of one machine mostly wait for each other. Prints JSON.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as `swarmnet run` does

import torch

from tests.bench.local_process import timed_generate
from tests.support.processes import swarm

SPANS = ((0, 10), (10, 20), (20, 30))
GOAL = 2.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="of every node")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of the nodes that are started below
    torch.set_num_threads(1)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(1000, 20000) for _ in range(arguments.prompt_tokens)] for _ in range(arguments.clients)
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        swarm(Path(folder) / "lab", Path(folder) / "cache", *SPANS) as lab,
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(lab.connect()) for _ in prompts]
        timed_generate(clients[0], [prompts[0]], 4)
        alone = [
            timed_generate(client, [ids], arguments.tokens)
            for client, ids in zip(clients, prompts, strict=True)
        ]
        forwards = lab.nodes["10-20-1"].status.forwards
        ready = threading.Barrier(len(prompts))

        def together(number: int) -> list[list[int]]:
            ready.wait()
            tokens: list[list[int]] = timed_generate(clients[number], [prompts[number]], arguments.tokens)[
                "ids"
            ]
            return tokens

        with ThreadPoolExecutor(len(prompts)) as pool:
            started = time.perf_counter()
            answers = list(pool.map(together, range(len(prompts))))
            together_s = time.perf_counter() - started
        forwards = lab.nodes["10-20-1"].status.forwards - forwards
    alone_rate = statistics.median(arguments.tokens / run["seconds"] for run in alone)
    rate = arguments.tokens * len(prompts) / together_s
    report = {
        "bench": "concurrency",
        "clients": len(prompts),
        "tokens": arguments.tokens,
        "node_threads": arguments.threads,
        "equal_tokens": answers == [run["ids"] for run in alone],
        "alone_tokens_per_s": round(alone_rate, 2),
        "together_tokens_per_s": round(rate, 2),
        "ratio": round(rate / alone_rate, 2),
        "goal": GOAL,
        "steps_per_forward": round(len(prompts) * arguments.tokens / forwards, 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
