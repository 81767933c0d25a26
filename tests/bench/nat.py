"""Every pair of routers as the two hosts of a chain, with a client behind a cone and behind a symmetric router.

    python -m tests.bench.nat [--runs 5] [--clients cone symmetric] [--pairs cone-cone ...]

Root and network namespaces only. One public bootstrap peer; each run is a new client process whose tokens are compared with those of a chain
of open hosts. ``first_s``: from the moment that both hosts are ready to the end of the first answer. ``direct``: whether the link between the
hosts went without a relay in the last run. Prints one line of JSON for each pair and client.
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from tests.support.nat_lab import why_not
from tests.support.nat_swarm import nat_swarm

KINDS = ("open", "cone", "symmetric", "tcponly")
GOAL_S = 15.0
TOKENS = 20


def measure(cache_dir: Path, kinds: tuple[str, str], client: str, runs: int) -> dict[str, Any]:
    """One pair of hosts and one client."""
    with (
        tempfile.TemporaryDirectory() as folder,
        nat_swarm(Path(folder) / "lab", cache_dir, [*kinds, client]) as swarm,
    ):
        first, second, asking = swarm.places[1:]
        began = time.monotonic()
        hosts = [swarm.start_host("host0", first, "0:15"), swarm.start_host("host1", second, "15:30")]
        for host in hosts:
            host.wait("ready")
        ready = time.monotonic()
        answers, seconds, failures, first_s, logged = set(), [], 0, 0.0, 0
        for number in range(runs):
            logged = len(swarm.log("host0"))
            try:
                answer, answer_s = swarm.answer(f"run{number}", asking, TOKENS)
            except RuntimeError:
                failures += 1
                continue
            answers.add(tuple(answer["token_ids"]))
            seconds.append(answer_s)
            first_s = first_s or time.monotonic() - ready
        last = f"run{runs - 1}"
        reach = swarm.status("host0").reach
        return {
            "hosts": "-".join(kinds),
            "client": client,
            "runs": runs,
            "failures": failures,
            "first_s": round(first_s, 2),
            "answer_s": [round(each, 2) for each in seconds],
            "ready_s": round(ready - began, 2),
            "answers": sorted(map(list, answers)),
            "direct": not swarm.relayed("host0", LINK.id, after=logged),
            "client_direct": not swarm.relayed(last, SESSION.id),
            "punch_s": round(reach.punch_s, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--clients", nargs="+", default=["cone", "symmetric"])
    parser.add_argument(
        "--pairs", nargs="+", default=["-".join(each) for each in itertools.product(KINDS, KINDS)]
    )
    parser.add_argument(
        "--cache-dir", type=Path, default=Path(tempfile.gettempdir()) / "swarmnet-bench-cache"
    )
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    options.cache_dir.mkdir(exist_ok=True)
    expected = None
    rows = []
    for client, pair in itertools.product(options.clients, options.pairs):
        first, _, second = pair.partition("-")
        row = measure(options.cache_dir, (first, second), client, options.runs)
        answers = row.pop("answers")
        expected = expected or (answers[0] if answers else None)
        row["exact"] = answers == [expected]
        rows.append(row)
        print(json.dumps(row), flush=True)
    pairs = {row["hosts"]: row["direct"] for row in rows}
    summary = {
        "pairs": len(pairs),
        "direct": sum(pairs.values()),
        "failures": sum(row["failures"] for row in rows),
        "exact": all(row["exact"] for row in rows),
        "slowest_first_s": max(row["first_s"] for row in rows),
        "goal_s": GOAL_S,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
