"""Rounds of many workers in groups: bytes, decisions and states, while workers leave. The protocols
in virtual time, without models.

    python -m tests.bench.train_groups [--workers 1000] [--size 262144] [--leave 0.1] [--rounds 2]

In every round but the first, a share of the workers crashes within the first seconds. Workers are
at four sites. ``vectors`` is what a worker sends, matchmaking included, divided by the size of the
vector; ``far`` is the share that travels between sites. A thousand workers take 8 GB and minutes a
round. Prints one JSON object a round.
"""

import argparse
import asyncio
import gc
import json
import random
import time

from tests.support.training.crowd import Crowd, simulate

LEAVING_S = 2.5
"""Workers leave within so many seconds of a round, which takes about as long."""


async def rounds(crowd: Crowd, arguments: argparse.Namespace) -> None:
    rng, clock = random.Random(0), asyncio.get_running_loop().time
    vector_bytes = 4 * arguments.size
    for number in range(arguments.rounds):
        crowd.network.sent.clear()
        crowd.network.far_bytes = 0
        start_s, cpu_s = clock(), time.process_time()
        if number:
            for peer in rng.sample(sorted(crowd.members), round(arguments.leave * len(crowd.members))):
                asyncio.get_running_loop().call_later(rng.uniform(0.0, LEAVING_S), crowd.leave, peer)
        await crowd.round(number)
        sent = sorted(crowd.network.sent[peer] / vector_bytes for peer in crowd.members)
        about = {
            "bench": "train_groups",
            "round": number,
            "vectors": round(sum(sent) / len(sent), 3),
            "vectors_of_90_percent": round(sent[len(sent) * 9 // 10], 3),
            "most_vectors": round(sent[-1], 3),
            "far": round(crowd.network.far_bytes / sum(crowd.network.sent.values()), 3),
            "virtual_s": round(clock() - start_s, 1),
            "cpu_s": round(time.process_time() - cpu_s, 1),
        }
        print(json.dumps(about | crowd.about()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--size", type=int, default=1 << 18, help="values in the vector")
    parser.add_argument("--leave", type=float, default=0.1, help="share that leaves in each round")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    gc.set_threshold(500_000, 50, 100)
    simulate(Crowd(arguments.workers, arguments.size), lambda crowd: rounds(crowd, arguments))


if __name__ == "__main__":
    main()
