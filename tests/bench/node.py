"""What a node takes of its machine: how soon it is ready, its memory at rest and after serving, and
its processor time at rest.

    python -m tests.bench.node [--starts 5] [--rest-s 120] [--serve-s 60]

Three nodes host ten blocks each of the default model. First the last of them is started again and
again, one start at a time; then all rest; then one stream after another goes through them. Memory
is in MiB, resident in a node and in its p2pd; ``own`` is what no other process shares; ``peak`` is
the most that was resident at any time. Prints JSON.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from swarmnet.paths import default_cache_dir
from tests.support.processes.nodes import NodeProcess, RunProcess, Swarm, swarm

SPANS = ((0, 10), (10, 20), (20, 30))
MIB = 1 << 20
SETTLED_S = 10.0
READY_GOAL_S = 6.0
MEMORY_GOAL_MIB = 600
REST_GOAL = 0.005
PROMPT = "Once upon a time there was a tree that could talk to the wind. " * 20


def report(part: str, **fields: object) -> None:
    print(json.dumps({"bench": "node", "part": part, **fields}), flush=True)


def measure_start(lab: Swarm) -> float:
    """Seconds until a node with the last blocks is ready; it is ended again."""
    start, end = SPANS[-1]
    began = time.monotonic()
    node = lab.launch("started", "--blocks", f"{start}:{end}")
    _ = node.ready
    ready_s = time.monotonic() - began
    node.kill()
    del lab.nodes["started"]
    return ready_s


def memory_mib(node: NodeProcess) -> dict[str, int]:
    python, p2pd = node.family
    resident = {"python": python.memory_info().rss, "p2pd": p2pd.memory_info().rss}
    resident["own"] = python.memory_full_info().uss + p2pd.memory_full_info().uss
    resident["peak"] = peak_bytes(python) + peak_bytes(p2pd)
    resident["together"] = resident["python"] + resident["p2pd"]
    return {name: round(value / MIB) for name, value in resident.items()}


def peak_bytes(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def cpu_s(node: NodeProcess) -> list[float]:
    """Processor time of a node with its child processes, and of its p2pd."""
    times = [process.cpu_times() for process in node.family]
    return [each.user + each.system + each.children_user + each.children_system for each in times]


def measure_rest(nodes: list[NodeProcess], seconds: float) -> list[dict[str, float]]:
    """Share of one core, for each node."""
    before = [cpu_s(node) for node in nodes]
    began = time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - began
    shares = []
    for node, (python, p2pd) in zip(nodes, before, strict=True):
        python_now, p2pd_now = cpu_s(node)
        share = {"python": (python_now - python) / passed_s, "p2pd": (p2pd_now - p2pd) / passed_s}
        shares.append({name: round(value, 5) for name, value in share.items()})
    return shares


def serve(lab: Swarm, seconds: float) -> dict[str, Any]:
    """Run one stream after another for ``seconds``; returns the summary of the first."""
    began = time.monotonic()
    answers = []
    while not answers or time.monotonic() - began < seconds:
        with RunProcess(lab, PROMPT, tokens=100) as asking:
            code, answer = asking.finish()
        if code:
            raise RuntimeError(f"run ended with {code}: {answer}")
        answers.append(answer)
    return {
        "answers": len(answers),
        "first_token_s": median(answer["first_token_s"] for answer in answers),
        "tokens_per_s": median(answer["tokens_per_s"] for answer in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--rest-s", type=float, default=120.0)
    parser.add_argument("--serve-s", type=float, default=60.0)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        swarm(Path(name) / "lab", default_cache_dir(), *SPANS) as lab,
    ):
        nodes = list(lab.nodes.values())
        starts = [measure_start(lab) for _ in range(arguments.starts)]
        report("start", goal_s=READY_GOAL_S, ready_s=[round(each, 2) for each in starts])
        time.sleep(SETTLED_S)
        report("memory at rest", goal_mib=MEMORY_GOAL_MIB, nodes=[memory_mib(node) for node in nodes])
        report("rest", goal=REST_GOAL, share_of_a_core=measure_rest(nodes, arguments.rest_s))
        served = serve(lab, arguments.serve_s)
        report("memory after serving", nodes=[memory_mib(node) for node in nodes], **served)


if __name__ == "__main__":
    main()
