"""Swarms behind routers: every pair of routers as the two hosts of a chain, faults of relays and
routers, and twenty hosts.

    python -m tests.bench.nat [--runs 5] [--clients cone symmetric] [--pairs cone-cone ...] [--faults relay mappings address] [--many 20] [--steady 300]

Root and network namespaces only.

1. Pairs: one public bootstrap peer, two hosts and a client. Each run is a new client process, whose
   tokens are compared with those of the first pair. ``first_s``: from the moment that both hosts
   are ready to the end of the first answer, the client's start included. ``direct``: whether the
   link between the hosts went without a relay in the last run.
2. Faults: three public bootstrap peers; hosts and client behind symmetric routers, so that
   everything is relayed. ``relay``: the relay of the session is killed in mid-answer. ``mappings``:
   the routers of both hosts lose their tables. ``address``: the router of a host gets another
   address. ``s``: the longest wait for a token, or the time from the fault to the end of the next
   answer.
3. Many hosts: hosts behind cone routers with three public bootstrap peers, of which two compute.
   One starts each 3 s, as all of them share the machine. ``reserved_s``: from the start of
   connecting to the reservation.

4. Steady: hosts and a client behind cone routers; the client asks every 3 s for ``--steady``
   seconds.

Prints one line of JSON for each pair and client, for each fault, for the many hosts and for the
steady client.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from tests.support.processes.commands import Place
from tests.support.processes.nat_lab import forget_mappings, move, why_not
from tests.support.processes.nat_swarm import NatSwarm, nat_swarm

KINDS = ("open", "cone", "symmetric", "tcponly")
GOAL_S = 15.0
TOKENS = 20
FAULT_TOKENS = 60
PERIOD_S = 3.0


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
        row = {
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
        }
        return row | ({"punch_s": round(reach.punch_s, 2)} if reach.punched else {})


def fault(cache_dir: Path, kind: str, runs: int) -> dict[str, Any]:
    """One kind of fault, ``runs`` times, each in a swarm of its own."""
    seconds, exact = [], True
    for _ in range(runs):
        with (
            tempfile.TemporaryDirectory() as folder,
            nat_swarm(Path(folder) / "lab", cache_dir, ["symmetric"] * 3, public=3) as swarm,
        ):
            for number, blocks in enumerate(("0:15", "15:30")):
                swarm.start_host(f"host{number}", swarm.places[3 + number], blocks)
            for number in range(2):
                swarm.processes[f"host{number}"].wait("ready")
            client = swarm.places[5]
            expected, _ = swarm.answer("before", client, FAULT_TOKENS)
            if kind == "relay":
                answer = kill_relay(swarm, client)
                seconds.append(answer["longest_stall_s"])
            else:
                if kind == "mappings":
                    for number in 4, 5:
                        forget_mappings(number)
                else:
                    move(4, "25.0.0.104")
                answer, answered_s = swarm.answer("after", client, FAULT_TOKENS)
                seconds.append(answered_s)
            exact = exact and answer["token_ids"] == expected["token_ids"]
    return {"fault": kind, "s": [round(each, 2) for each in seconds], "exact": exact}


def kill_relay(swarm: NatSwarm, client: Place) -> dict[str, Any]:
    """The answer during which the relay of the session with the last host was killed."""
    asking = swarm.ask("during", client, FAULT_TOKENS)
    while len(asking.events) < FAULT_TOKENS // 4:
        asking.wait_for_more(timeout_s=30)
    relays = re.findall(rf"{SESSION.id} with \S+ goes through the relay (\S+)", swarm.log("during"))
    number = next(number for number, each in enumerate(swarm.bootstrap) if each.endswith(relays[-1]))
    swarm.processes[f"bootstrap{number}"].kill()
    if asking.wait_for_end():
        raise RuntimeError(swarm.log("during"))
    return asking.events[-1]


def many_hosts(cache_dir: Path, hosts: int) -> dict[str, Any]:
    """Measure ``hosts`` hosts behind cone routers, two of which compute."""
    with (
        tempfile.TemporaryDirectory() as folder,
        nat_swarm(Path(folder) / "lab", cache_dir, ["cone"] * (hosts + 1), public=3) as swarm,
    ):
        *places, client = swarm.places[3:]
        peers = []
        for number, place in enumerate(places[2:]):
            command = [sys.executable, "-m", "tests.bench.light_peer", str(swarm.lab.file)]
            peers.append(
                subprocess.Popen(
                    [*place.prefix, *command, str(swarm.path(f"peer{number}")), *swarm.bootstrap],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            time.sleep(3.0)
        first = [json.loads(peer.stdout.readline()) for peer in peers if peer.stdout]
        for number, blocks in enumerate(("0:15", "15:30")):
            swarm.start_host(f"host{number}", places[number], blocks)
        for number in range(2):
            swarm.processes[f"host{number}"].wait("ready")
        reaches = [swarm.status(f"host{number}").reach for number in range(2)]
        answer, _ = swarm.answer("run", client, TOKENS)
        for peer in peers:
            peer.communicate("\n")
        held = Counter(relay for each in first for relay in each["relays"])
        held.update(relay for reach in reaches for relay in reach.relays)
        return {
            "hosts": hosts,
            "reserved_s": sorted(round(each["after_s"], 2) for each in first),
            "without_relay": sum(not each["relays"] for each in first),
            "reservations": sorted(held.values()),
            "direct": not swarm.relayed("host0", LINK.id) and not swarm.relayed("run", SESSION.id),
            "tokens": len(answer["token_ids"]),
        }


def steady(cache_dir: Path, total_s: float) -> dict[str, Any]:
    """A client that asks again and again."""
    with (
        tempfile.TemporaryDirectory() as folder,
        nat_swarm(Path(folder) / "lab", cache_dir, ["cone"] * 3) as swarm,
    ):
        for number, blocks in enumerate(("0:15", "15:30")):
            swarm.start_host(f"host{number}", swarm.places[1 + number], blocks)
        for number in range(2):
            swarm.processes[f"host{number}"].wait("ready")
        command = [
            sys.executable,
            "-m",
            "tests.support.processes.asking_client",
            str(swarm.lab.file),
            str(cache_dir),
        ]
        asking = subprocess.run(
            [*swarm.places[3].prefix, *command, str(PERIOD_S), str(total_s), *swarm.bootstrap],
            capture_output=True,
            text=True,
            check=True,
        )
        rows = [json.loads(line) for line in asking.stdout.splitlines()]
        return {
            "steady_s": total_s,
            "asked": len(rows),
            "steady_failures": sum("error" in row for row in rows),
            "different": len({tuple(row["tokens"]) for row in rows if "tokens" in row}) - 1,
            "slowest_s": max(row["s"] for row in rows),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--clients", nargs="+", default=["cone", "symmetric"])
    parser.add_argument(
        "--pairs", nargs="*", default=["-".join(each) for each in itertools.product(KINDS, KINDS)]
    )
    parser.add_argument("--faults", nargs="*", default=["relay", "mappings", "address"])
    parser.add_argument("--many", type=int, default=20)
    parser.add_argument("--steady", type=float, default=300)
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
    for kind in options.faults:
        print(json.dumps(fault(options.cache_dir, kind, options.runs)), flush=True)
    if options.many:
        print(json.dumps(many_hosts(options.cache_dir, options.many)), flush=True)
    if options.steady:
        print(json.dumps(steady(options.cache_dir, options.steady)), flush=True)
    if not rows:
        return
    pairs = {row["hosts"]: row["direct"] for row in rows}
    summary = {
        "pairs": len(pairs),
        "direct_pairs": sum(pairs.values()),
        "failed_answers": sum(row["failures"] for row in rows),
        "exact": all(row["exact"] for row in rows),
        "slowest_first_s": max(row["first_s"] for row in rows),
        "goal_s": GOAL_S,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
