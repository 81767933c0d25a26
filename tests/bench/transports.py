"""Decode over p2pd and over py-libp2p, on loopback, in turns: two swarms of three hosts each, with
a client process of each kind.

    python -m tests.bench.transports [--rounds 5] [--tokens 48]

Prints JSON. The ratio is of the medians.
"""

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swarmnet.paths import TRANSPORT_VARIABLE
from tests.bench.generating_process import generating
from tests.support.processes.nodes import swarm

SPANS = ((0, 10), (10, 20), (20, 30))
KINDS = ("p2pd", "libp2p")
PROMPT = list(range(1000, 1032))
GOAL = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    if find_spec("libp2p") is None:
        print(json.dumps({"skipped": "py-libp2p is not installed"}))
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of the nodes that are started below
    clients: dict[str, Any] = {}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    answers: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for kind in KINDS:
            os.environ[TRANSPORT_VARIABLE] = kind
            lab = stack.enter_context(swarm(Path(folder) / kind, Path(folder) / "cache", *SPANS))
            clients[kind] = generating(lab.cache_dir, 1, str(lab.file), *lab.bootstrap)
            clients[kind].wait_until_ready()
            clients[kind].ask(ids=[PROMPT], tokens=4)
        for number in range(arguments.rounds):
            for kind in KINDS if number % 2 else reversed(KINDS):
                run = clients[kind].ask(ids=[PROMPT], tokens=arguments.tokens)
                rates[kind].append(arguments.tokens / run["seconds"])
                answers[kind].append(run["ids"])
        for client in clients.values():
            client.close()
    ratio = statistics.median(rates["libp2p"]) / statistics.median(rates["p2pd"])
    report = {
        "bench": "transports",
        "tokens": arguments.tokens,
        "equal_tokens": answers["p2pd"] == answers["libp2p"],
        "tokens_per_s": {kind: [round(rate, 2) for rate in rates[kind]] for kind in KINDS},
        "ratio": round(ratio, 3),
        "goal": GOAL,
        "met": ratio >= GOAL,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
