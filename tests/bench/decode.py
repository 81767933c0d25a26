"""One stream of greedy decoding through three loopback hops, against one local transformers process.

    python -m tests.bench.decode [--hops 3] [--rounds 5] [--tokens 64]

Both in float32 with two threads, in turn, medians. Prints JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "300")  # as `swarmnet run` does

import torch

from tests.bench.generating_process import generating, timed_generate
from tests.support.processes import swarm

BLOCKS = 30
PROMPT_TOKENS = 32
THREADS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    ids = [list(range(100, 100 + PROMPT_TOKENS))]
    cuts = [BLOCKS * hop // arguments.hops for hop in range(arguments.hops + 1)]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        local = generating(cache, THREADS)
        local.wait_until_ready()
        with (
            swarm(Path(folder) / "lab", cache, *pairwise(cuts)) as lab,
            lab.connect() as model,
        ):
            local_s, swarm_s, equal = [], [], True
            for number in range(arguments.rounds + 1):
                mine = local.ask(ids=ids, tokens=arguments.tokens)
                theirs = timed_generate(model, ids, arguments.tokens)
                equal = equal and mine["ids"] == theirs["ids"]
                if number:  # the first round warms up
                    local_s.append(mine["seconds"])
                    swarm_s.append(theirs["seconds"])
        local.close()
    rates = [arguments.tokens / statistics.median(times) for times in (local_s, swarm_s)]
    report = {
        "bench": "decode",
        "hops": arguments.hops,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "equal_tokens": equal,
        "local_tokens_per_s": round(rates[0], 2),
        "swarm_tokens_per_s": round(rates[1], 2),
        "ratio": round(rates[1] / rates[0], 3),
        "ratio_by_round": [round(a / b, 3) for a, b in zip(local_s, swarm_s, strict=True)],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
