"""Whether a node stays within what its owner set, under load, and how soon a pause frees its
memory.

    python -m tests.bench.limits [--parts up down ram pause] [--seconds 40] [--mbit 4] [--sessions 4]

Bandwidth is counted by the interface of the network namespace that the node has for itself (needs
root), headers included; memory is what the node and p2pd have resident. Each is sampled five times
a second; the report has the worst of any ten seconds: the highest rate from before the first
session on, the lowest rate once all sessions have begun. Prints JSON.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from swarmnet.paths import default_cache_dir
from swarmnet_node.owner import control
from tests.support.processes.commands import Place, family
from tests.support.processes.nodes import NodeProcess, Swarm
from tests.support.processes.wan import Uplink, wan

SAMPLE_S = 0.2
WINDOW_S = 10.0
WARM_UP_S = 15.0
MIB = 1 << 20


@contextlib.contextmanager
def clients(lab: Swarm, node: NodeProcess, place: Place, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run clients at ``place`` that send prompts as soon as they have started."""
    manifest = node.status.host.record.manifest.hex()
    command = [*place.prefix, sys.executable, "-m", "tests.bench.session_load", str(lab.file), manifest]
    process = subprocess.Popen([*command, *lab.bootstrap_options, *options])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def loaded(lab: Swarm, node: NodeProcess, place: Place, *options: str) -> Iterator[None]:
    """Run clients as ``clients`` does, and begin once the node has a session."""
    with clients(lab, node, place, *options) as process:
        while not node.status.host.record.sessions:
            if process.poll() is not None:
                raise RuntimeError(f"the clients ended with {process.returncode}")
            time.sleep(SAMPLE_S)
        yield


def sample(read: Callable[[], float], seconds: float) -> list[tuple[float, float]]:
    """The values that ``read`` gives over ``seconds``, each with its time."""
    began = time.monotonic()
    samples = []
    while (now := time.monotonic()) - began < seconds:
        samples.append((now, read()))
        time.sleep(SAMPLE_S)
    return samples


def rates(samples: Sequence[tuple[float, float]]) -> list[float]:
    """The bytes per second of a counter over every window of ``WINDOW_S``."""
    found = []
    first = 0
    for at, count in samples:
        while at - samples[first + 1][0] >= WINDOW_S if first + 1 < len(samples) else False:
            first += 1
        if at - samples[first][0] >= WINDOW_S:
            found.append((count - samples[first][1]) / (at - samples[first][0]))
    return found


def interface_bytes(pid: int) -> tuple[int, int]:
    """Bytes received and sent by the interface in the network namespace of a process."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip().startswith("swarmnet"):
            fields = counters.split()
            return int(fields[0]), int(fields[8])
    raise RuntimeError("the node has no interface of its own")


def rss_bytes(pid: int) -> float:
    return float(sum(process.memory_info().rss for process in family(pid)))


def measure_bandwidth(
    folder: Path, cache_dir: Path, direction: str, mbit: float, seconds: float, sessions: int
) -> None:
    """Measure the first of two hosts while clients send prompts as fast as they can."""
    lab = Swarm(folder / f"{direction}-{mbit}-{sessions}", cache_dir)
    fast = Uplink(delay_s=0.005, bytes_per_s=125_000_000.0)
    with wan(fast, fast, fast) as (client, limited, other), contextlib.ExitStack() as stack:
        stack.callback(lab.close)
        limit = (f"--{direction}", f"{mbit}mbit", "--priority", "normal")
        node = lab.launch("limited", "--blocks", "0:2", *limit, place=limited.place)
        _ = node.ready
        _ = lab.launch("other", "--blocks", "2:4", place=other.place).ready
        pid = family(node.process.pid)[0].pid
        which = ("down", "up").index(direction)
        with clients(lab, node, client.place, "--sessions", str(sessions), "--blocks", "4"):
            beginning = sample(lambda: interface_bytes(pid)[which], WARM_UP_S)
            before = node.status.usage
            samples = sample(lambda: interface_bytes(pid)[which], seconds)
            used = getattr(node.status.usage, f"{direction}_bytes") - getattr(before, f"{direction}_bytes")
    found = rates(samples)
    limit_bytes_per_s = mbit * 125_000
    seen = samples[-1][1] - samples[0][1]
    report = {
        "bench": "limits",
        "part": direction,
        "limit_mbit": mbit,
        "sessions": sessions,
        "most_of_limit": round(max(rates(beginning + samples)) / limit_bytes_per_s, 3),
        "least_of_limit": round(min(found) / limit_bytes_per_s, 3),
        "mean_of_limit": round(seen / (samples[-1][0] - samples[0][0]) / limit_bytes_per_s, 3),
        "counted_of_seen": round(used / seen, 3),
    }
    print(json.dumps(report), flush=True)


def measure_ram(folder: Path, cache_dir: Path, mib: int, seconds: float) -> None:
    """Measure a host while sessions fill caches and logs until there is no room, and go on
    trying."""
    lab = Swarm(folder / "ram", cache_dir)
    with contextlib.ExitStack() as stack:
        stack.callback(lab.close)
        node = lab.launch("limited", "--blocks", "0:15", "--max-ram", f"{mib}MiB")
        _ = node.ready
        _ = lab.launch("other", "--blocks", "15:30").ready
        idle = rss_bytes(node.process.pid)
        with loaded(lab, node, Place("127.0.0.1"), "--sessions", "16", "--positions", "2048", "--keep"):
            samples = sample(lambda: rss_bytes(node.process.pid), seconds)
            status = node.status
    report = {
        "bench": "limits",
        "part": "ram",
        "limit_mib": mib,
        "idle_mib": round(idle / MIB),
        "most_of_limit": round(max(value for _, value in samples) / (mib * MIB), 3),
        "last_of_limit": round(samples[-1][1] / (mib * MIB), 3),
        "cache_mib": round(status.host.cache_bytes / MIB),
        "sessions": status.host.record.sessions,
    }
    print(json.dumps(report), flush=True)


def measure_pause(folder: Path, cache_dir: Path) -> None:
    """A node with sessions that have nowhere to go."""
    lab = Swarm(folder / "pause", cache_dir)
    with contextlib.ExitStack() as stack:
        stack.callback(lab.close)
        node = lab.launch("only", "--blocks", "0:30")
        _ = node.ready
        with loaded(lab, node, Place("127.0.0.1"), "--sessions", "2", "--positions", "2048", "--keep"):
            while node.status.host.cache_bytes < 64 * MIB:
                time.sleep(SAMPLE_S)
            before, held = rss_bytes(node.process.pid), node.status
            began = time.monotonic()
            control.pause(node.data_dir)
            while node.status.state != "paused":
                time.sleep(0.05)
            paused_s = time.monotonic() - began
            least = [(at - began, value) for at, value in sample(lambda: rss_bytes(node.process.pid), 5.0)]
            settled = min(value for _, value in least)
            freed_s = next(at for at, value in least if value <= settled + 8 * MIB)
        began = time.monotonic()
        control.resume(node.data_dir)
        while node.status.state != "online":
            time.sleep(0.05)
        resumed_s = time.monotonic() - began
    report = {
        "bench": "limits",
        "part": "pause",
        "before_mib": round(before / MIB),
        "weights_and_caches_mib": round((held.weight_bytes + held.host.cache_bytes) / MIB),
        "after_mib": round(settled / MIB),
        "paused_s": round(paused_s, 2),
        "freed_s": round(freed_s, 2),
        "resumed_s": round(resumed_s, 2),
    }
    print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", default=["up", "down", "ram", "pause"])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--mbit", type=float, nargs="+", default=[4.0])
    parser.add_argument("--mib", type=int, nargs="+", default=[1400])
    parser.add_argument("--sessions", type=int, nargs="+", default=[4], help="that send prompts at a time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, cache_dir = Path(name), default_cache_dir()
        for part in arguments.parts:
            if part in {"up", "down"}:
                for mbit, sessions in itertools.product(arguments.mbit, arguments.sessions):
                    measure_bandwidth(folder, cache_dir, part, mbit, arguments.seconds, sessions)
            elif part == "ram":
                for mib in arguments.mib:
                    measure_ram(folder, cache_dir, mib, arguments.seconds)
            else:
                measure_pause(folder, cache_dir)


if __name__ == "__main__":
    main()
