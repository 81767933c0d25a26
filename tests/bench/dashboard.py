"""The dashboard: its first view of a large swarm, how soon it shows a death, and what it costs at
rest.

    python -m tests.bench.dashboard [--rest-s 60]

The first view is every file and the state, fetched as a browser would: cold, over one connection,
with gzip. At rest three nodes host the model without a client. Prints JSON.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from tests.support.dashboard.dashboards import DashboardProcess, state_of, states, watch
from tests.support.processes.nodes import swarm

SPANS = ((0, 10), (10, 20), (20, 30))
FIRST_VIEW_GOAL_S = 1.0
SEEN_GOAL_S = 10.0
REST_GOAL = 0.02
VIEWS = 5


@contextmanager
def recorded(kind: str) -> Iterator[str]:
    """The URL of a dashboard that shows a simulated swarm."""
    command = [sys.executable, "-m", "tests.support.dashboard.recorded_swarm", "--port", "0", "--kind", kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def first_view(url: str) -> dict[str, Any]:
    """Seconds and bytes of one cold view."""
    with httpx.Client(base_url=url, headers={"accept-encoding": "gzip"}) as client:
        started = time.perf_counter()  # the client reads certificates first, which no browser does
        seen: dict[str, int] = {}
        wanted = ["/", "/api/v1/state"]
        while wanted:
            path = wanted.pop()
            answer = client.get(path).raise_for_status()
            seen[path] = answer.num_bytes_downloaded
            if path == "/" or path.endswith((".js", ".css")):
                found = {
                    str(httpx.URL(path).join(each))
                    for each in re.findall(r"""["'(]([./][\w./-]+\.(?:js|css|svg|woff2))["')]""", answer.text)
                }
                wanted += [each for each in found if each not in seen and each not in wanted]
    return {
        "seconds": time.perf_counter() - started,
        "bytes": sum(seen.values()),
        "requests": len(seen),
        "state_bytes": seen["/api/v1/state"],
    }


def cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of a process, and of p2pd, its child."""
    main = psutil.Process(pid)
    spent = {"python": sum(main.cpu_times()[:2])}
    spent["p2pd"] = sum(sum(child.cpu_times()[:2]) for child in main.children(recursive=True))
    return spent


def real(rest_s: float) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        swarm(Path(folder) / "lab", Path(folder) / "cache", *SPANS) as lab,
        DashboardProcess(lab, Path(folder) / "watcher") as dashboard,
    ):
        url = dashboard.url
        watch(url, lambda state: list(states(state).values()) == ["online"] * 3)
        time.sleep(10.0)
        before = cpu_s(dashboard.pid)
        time.sleep(rest_s)
        after = cpu_s(dashboard.pid)
        victim = lab.nodes["20-30-2"]
        peer = victim.ready["peer_id"]
        victim.send_signal(signal.SIGKILL)
        killed = time.perf_counter()
        watch(url, lambda state: states(state)[peer] == "gone")
        seen_s = time.perf_counter() - killed
    return {
        "rest_core_share": {name: round((after[name] - before[name]) / rest_s, 4) for name in before},
        "rest_goal": REST_GOAL,
        "killed_node_seen_s": round(seen_s, 2),
        "seen_goal_s": SEEN_GOAL_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rest-s", type=float, default=60.0)
    arguments = parser.parse_args()
    with recorded("large") as url:
        state = state_of(url)
        views = [first_view(url) for _ in range(VIEWS)]
    report: dict[str, Any] = {
        "bench": "dashboard",
        "peers": len(state["peers"]),
        "blocks": max(model["blocks"] for model in state["models"].values()),
        "first_view_s": round(views[0]["seconds"], 3),
        "later_views_s": round(median(view["seconds"] for view in views[1:]), 3),
        "first_view_goal_s": FIRST_VIEW_GOAL_S,
        "bytes": views[0]["bytes"],
        "state_bytes": views[0]["state_bytes"],
        "requests": views[0]["requests"],
    }
    print(json.dumps(report | real(arguments.rest_s)))


if __name__ == "__main__":
    main()
