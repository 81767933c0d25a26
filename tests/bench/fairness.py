"""Clients next to a client that floods a node, and short requests next to long prompts: one node,
every client a process of its own.

    python -m tests.bench.fairness [--rounds 3] [--seconds 12] [--prompts 8] [--flood 10]

In turns: two clients with one request after another while a third one does the same, and while the
third one has ``--flood`` times as many at once; a client with short requests alone, and while
another one has ``--prompts`` prompts of 2,000 positions at once. Prints JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.bench.answering_process import AnsweringProcess
from tests.bench.requesting_process import requesting
from tests.support.processes.nodes import swarm

BLOCKS = (0, 30)
SHORT = {"prompt": 32, "tokens": 8}
LONG = {"prompt": 2000, "tokens": 1}
LEAD_S = 2.0
"""Seconds for which the load goes on after the clients that are measured have ended."""
SETTLE_S = 3.0
"""Seconds after each measurement, in which the node computes what is left of it."""


def together(pool: ThreadPoolExecutor, questions: list[tuple[AnsweringProcess, dict[str, Any]]]) -> list[Any]:
    """The answers of different processes that are asked at once."""
    answers = list(pool.map(lambda each: each[0].ask(**each[1]), questions))
    time.sleep(SETTLE_S)
    return answers


def p95(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=20)[-1]


def ratio(loaded: float, alone: float) -> float:
    return round(loaded / alone, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement in a round")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--flood", type=int, default=10)
    arguments = parser.parse_args()
    for_s = arguments.seconds
    shares: dict[int, dict[str, list[float]]] = {}
    firsts: dict[int, list[float]] = {}
    flood_requests = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        swarm(Path(folder) / "lab", Path(folder) / "cache", BLOCKS) as lab,
        ThreadPoolExecutor(3) as pool,
    ):
        clients = [requesting(lab.cache_dir, lab.file, *lab.bootstrap) for _ in range(3)]
        for client in clients:
            client.wait_until_ready()
        *others, flooding = clients
        together(pool, [(client, {"streams": 1, "for_s": LEAD_S, **SHORT}) for client in clients])
        for _ in range(arguments.rounds):
            for streams in (1, arguments.flood):
                usual = {"streams": 1, "for_s": for_s, **SHORT}
                *answers, own = together(
                    pool, [(each, usual) for each in others] + [(flooding, usual | {"streams": streams})]
                )
                found = shares.setdefault(streams, {"first_s": [], "request_s": []})
                for name, samples in found.items():
                    samples += [each for answer in answers for each in answer[name]]
                flood_requests += len(own["request_s"]) if streams > 1 else 0
            for prompts in (0, arguments.prompts):
                asked = {"streams": 1, "for_s": for_s, "pause_s": 1.0, **SHORT, "tokens": 1}
                load = {"streams": prompts, "for_s": for_s + LEAD_S, **LONG}
                answer, *_ = together(pool, [(others[0], asked)] + [(flooding, load)] * (prompts > 0))
                firsts.setdefault(prompts, []).extend(answer["first_s"])
        for client in clients:
            client.close()
    usual_times, flooded = shares[1], shares[arguments.flood]
    alone, among = firsts[0], firsts[arguments.prompts]
    report = {
        "bench": "fairness",
        "load": round(os.getloadavg()[0], 1),
        "flood": arguments.flood,
        "requests": [len(usual_times["request_s"]), len(flooded["request_s"])],
        "flood_requests": flood_requests,
        "request_p95_s": [round(p95(each["request_s"]), 3) for each in (usual_times, flooded)],
        "first_p95_s": [round(p95(each["first_s"]), 3) for each in (usual_times, flooded)],
        "p95_ratio": ratio(p95(flooded["request_s"]), p95(usual_times["request_s"])),
        "p95_goal": 1.3,
        "prompts": arguments.prompts,
        "short_requests": [len(alone), len(among)],
        "first_s": [round(statistics.median(each), 3) for each in (alone, among)],
        "first_ratio": ratio(statistics.median(among), statistics.median(alone)),
        "first_goal": 2.0,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
