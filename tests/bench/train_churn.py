"""Real workers of one job, of which one is killed, stopped or replaced every few seconds, against
the same job without faults.

    python -m tests.bench.train_churn [--workers 8] [--rounds 30] [--every 20] [--steps 300] [--deadline 15]

The text is the standard library's source. Faults come in turn: a worker is killed, another takes
its place with an empty folder, a third is stopped for half of the time until the next fault. Prints
a JSON object a run and one that compares them.
"""

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

from tests.support.processes.worker_processes import WorkerProcess, bootstrap, create_job, workers
from tests.support.training.workers import copy_sources, write_job

TIMEOUT_S = 3600.0
NAMES = ("anna", "boris", "clara", "dora", "emil", "frida", "gustav", "hanna")


@dataclass
class JobWorkers:
    """All workers that have been in the job: ``running`` by name, and those that were killed."""

    folder: Path
    job: str
    running: dict[str, WorkerProcess]
    every_s: float
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    gone: list[WorkerProcess] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def all(self) -> list[WorkerProcess]:
        return [*self.gone, *self.running.values()]

    def disturb(self, over: Event) -> None:
        """A fault every ``every_s`` until ``over``."""
        for number in count():
            if over.wait(self.every_s):
                return
            match number % 3:
                case 0:
                    self.kill()
                case 1:
                    self.join(f"newcomer-{number // 3}")
                case 2:
                    self.stop(over)

    def kill(self) -> None:
        victim = self.running.pop(self.rng.choice(sorted(self.running)))
        self.gone.append(victim)
        self.faults.append(f"kill {victim.name}")
        victim.kill()

    def join(self, name: str) -> None:
        self.faults.append(f"join {name}")
        self.running[name] = WorkerProcess(self.folder, name, self.job, bootstrap(self.running))

    def stop(self, over: Event) -> None:
        victim = self.running[self.rng.choice(sorted(self.running))]
        self.faults.append(f"stop {victim.name}")
        victim.send_signal(signal.SIGSTOP)
        over.wait(self.every_s / 2)
        victim.send_signal(signal.SIGCONT)


@contextmanager
def beside(function: Callable[[Event], None]) -> Iterator[None]:
    """Run ``function`` in a thread; at the end its event is set."""
    over = Event()
    thread = Thread(target=function, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def resident_bytes(worker: WorkerProcess) -> int:
    """Memory of the worker without its p2pd; 0 after its end."""
    try:
        return int(psutil.Process(worker.process.pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def run(arguments: argparse.Namespace, folder: Path, *, disturbed: bool) -> dict[str, Any]:
    """Run the job to its end; returns the observations."""
    toml = write_job(
        folder,
        "diloco",
        f"sync_every = {arguments.steps}",
        f"min_workers = {max(2, arguments.workers // 2)}",
        rounds=arguments.rounds,
    ).replace("deadline_s = 15", f"deadline_s = {arguments.deadline}")
    toml = toml.replace("max_workers = 8", "max_workers = 16").replace("batches = 2", "batches = 200")
    job = create_job(folder, toml)
    with workers(folder, job, *NAMES[: arguments.workers]) as running:
        job_workers = JobWorkers(folder, job, running, arguments.every)
        last = arguments.rounds - 1
        job_workers.running["anna"].wait("round", timeout_s=TIMEOUT_S)
        began = time.monotonic()
        before = {worker.process.pid: resident_bytes(worker) for worker in running.values()}
        with beside(job_workers.disturb if disturbed else lambda _: None):
            while not any(last in worker.rounds() for worker in job_workers.all()):
                survivor = max(list(running.values()), key=lambda worker: len(worker.events))
                survivor.wait_for_more(timeout_s=arguments.deadline)
        wall_s = time.monotonic() - began
        after = {worker.process.pid: resident_bytes(worker) for worker in running.values()}
        summary = summarize(job_workers, wall_s)
    growth = [after[pid] - before[pid] for pid in after if after[pid] and before.get(pid)]
    return {
        "run": "churn" if disturbed else "undisturbed",
        "faults": job_workers.faults,
        **summary,
        "resident_mb": round(max(after.values()) / 1e6),
        "resident_growth_mb": [round(each / 1e6, 1) for each in growth],
    }


def summarize(job_workers: JobWorkers, wall_s: float) -> dict[str, Any]:
    """A summary of the events of all workers. A round counts as committed, or as discarded, if any
    worker reported it so."""
    everyone = job_workers.all()
    committed = [event for worker in everyone for event in worker.rounds().values()]
    discarded = {number for worker in everyone for number in worker.rounds(committed=False)}
    hashes: dict[int, set[str]] = {}
    for event in committed:
        hashes.setdefault(event["round"], set()).add(event["params_hash"])
    others = [event for worker in everyone for event in worker.events if event["event"] != "round"]
    losses = {event["round"]: event["val_loss"] for event in others if event["event"] == "eval"}
    return {
        "wall_s": round(wall_s, 1),
        "rounds_committed": len(hashes),
        "rounds_discarded": len(discarded - hashes.keys()),
        "rounds_decided_twice": sorted(discarded & hashes.keys()),
        "share_committed": round(len(hashes) / max(1, len(hashes.keys() | discarded)), 3),
        "rounds_with_two_hashes": [number for number, values in hashes.items() if len(values) > 1],
        "behind": [event["reason"] for event in others if event["event"] == "behind"],
        "healed": sum(event["event"] == "healed" for event in others),
        "heal_failed": sum(event["event"] == "heal_failed" for event in others),
        "discarded_because": sorted(
            {e["reason"] for w in everyone for e in w.rounds(committed=False).values()}
        ),
        "workers_in_a_round": round(statistics.fmean(event["workers"] for event in committed), 2),
        "longest_exchange_s": max(event["exchange_s"] for event in committed),
        "median_exchange_s": statistics.median(event["exchange_s"] for event in committed),
        "longest_wait_s": max(event["wait_s"] for event in committed),
        "wait_share": round(
            statistics.fmean(
                sum(event["wait_s"] for event in worker.rounds().values()) / wall_s
                for worker in job_workers.running.values()
                if len(worker.rounds()) > len(hashes) // 2
            ),
            3,
        ),
        "val_loss_first": losses[min(losses)],
        "val_loss": losses[max(losses)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--steps", type=int, default=300, help="inner steps of a round")
    parser.add_argument("--deadline", type=int, default=15, help="seconds of an exchange")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for disturbed in (True, False):
            place = Path(folder) / ("churn" if disturbed else "undisturbed")
            copy_sources(place)
            results[disturbed] = run(arguments, place, disturbed=disturbed)
            print(json.dumps({"bench": "train_churn"} | results[disturbed]), flush=True)
    ratio = results[True]["val_loss"] / results[False]["val_loss"]
    print(json.dumps({"bench": "train_churn", "loss_ratio": round(ratio, 4)}))


if __name__ == "__main__":
    main()
