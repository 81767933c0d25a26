"""Eight clients at once through the same three hops, against one client alone.

    python -m tests.bench.concurrency [--clients 8] [--tokens 48] [--prompt-tokens 32] [--threads 1]

Every client is a process of its own, with one thread. Nodes compute with as many as they take by
themselves unless told otherwise. Prints JSON.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.bench.generating_process import generating
from tests.support.processes.nodes import swarm

SPANS = ((0, 10), (10, 20), (20, 30))
GOAL = 2.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, help="of every node")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        # of the nodes that are started below
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(1000, 20000) for _ in range(arguments.prompt_tokens)] for _ in range(arguments.clients)
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        swarm(Path(folder) / "lab", Path(folder) / "cache", *SPANS) as lab,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        where = (str(lab.file), *lab.bootstrap)
        clients = [generating(lab.cache_dir, 1, *where) for _ in prompts]
        for client in clients:
            client.wait_until_ready()

        def generate(number: int) -> dict[str, Any]:
            return clients[number].ask(ids=[prompts[number]], tokens=arguments.tokens)

        clients[0].ask(ids=[prompts[0]], tokens=4)
        alone = [generate(number) for number in range(len(prompts))]
        forwards = lab.nodes["10-20-1"].status.host.forwards
        started = time.perf_counter()
        together = list(pool.map(generate, range(len(prompts))))
        together_s = time.perf_counter() - started
        forwards = lab.nodes["10-20-1"].status.host.forwards - forwards
        for client in clients:
            client.close()
    alone_rate = statistics.median(arguments.tokens / run["seconds"] for run in alone)
    rate = arguments.tokens * len(prompts) / together_s
    report = {
        "bench": "concurrency",
        "clients": len(prompts),
        "tokens": arguments.tokens,
        "node_threads": arguments.threads,
        "equal_tokens": [run["ids"] for run in together] == [run["ids"] for run in alone],
        "alone_tokens_per_s": round(alone_rate, 2),
        "together_tokens_per_s": round(rate, 2),
        "ratio": round(rate / alone_rate, 2),
        "goal": GOAL,
        "steps_per_forward": round(len(prompts) * arguments.tokens / forwards, 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
