"""A newcomer to a job of a whole checkpoint, over a line: how long until it trains, against the
time its bytes need.

    python -m tests.bench.train_join [--checkpoint smollm2-135m-instruct] [--rate-mbit 100] [--rtt-ms 50]

Two workers train on fast lines; a third joins over a slow one with nothing. Every worker is on a
host of its own with emulated links between them; needs root. Prints a JSON object.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.processes.wan import Uplink, wan
from tests.support.processes.worker_processes import WorkerProcess, bootstrap, create_job
from tests.support.training.round_memory import status_bytes
from tests.support.training.workers import write_job

FAST = Uplink(delay_s=0.001, bytes_per_s=125e6, down_bytes_per_s=125e6)
TIMEOUT_S = 1800.0


def write_checkpoint_job(folder: Path, arguments: argparse.Namespace) -> str:
    """The job: a batch is small, and a round should be a little longer than an exchange."""
    exchange = f'min_workers = 2\ncodec = "{arguments.codec}"'
    toml = write_job(folder, "diloco", f"sync_every = {arguments.steps}", exchange, rounds=100_000)
    start, end = toml.index("[model.config]"), toml.index("[data]")
    toml = f'{toml[:start]}[model]\ncheckpoint = "{arguments.checkpoint}"\n{toml[end:]}'
    toml = toml.replace("deadline_s = 15", f"deadline_s = {arguments.deadline}")
    toml = toml.replace(
        "[training]", f'tokenizer = "{arguments.tokenizer or arguments.checkpoint}"\n[training]'
    )
    return toml.replace("every_rounds = 2", "every_rounds = 1000")


def first_contribution(worker: WorkerProcess, peer: str) -> dict[str, Any]:
    """The first committed round that the worker contributed to, as soon as it is over."""
    while True:
        worker.wait_for_more(timeout_s=TIMEOUT_S)
        for event in worker.rounds().values():
            if peer in event["contributors"]:
                return event


def usage(worker: WorkerProcess) -> dict[str, float]:
    """Processor seconds of a worker and its p2pd, and the most memory that each has had
    resident."""
    times = [member.cpu_times() for member in worker.family]
    peaks = [status_bytes("VmHWM", member.pid) for member in worker.family]
    return {
        "cpu_s": round(sum(each.user + each.system for each in times), 1),
        "peak_mb": round(peaks[0] / 1e6),
        "p2pd_peak_mb": round(sum(peaks[1:]) / 1e6),
    }


def join(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    rate: float = arguments.rate_mbit * 125_000
    slow = Uplink(arguments.rtt_ms / 2000 - FAST.delay_s, bytes_per_s=rate, down_bytes_per_s=rate)
    job = create_job(folder, write_checkpoint_job(folder, arguments))
    running: dict[str, WorkerProcess] = {}
    with ExitStack() as stack:
        hosts = stack.enter_context(wan(FAST, FAST, slow))
        for name, host in zip(("anna", "boris"), hosts, strict=False):
            running[name] = WorkerProcess(folder, name, job, bootstrap(running), host.place)
            stack.callback(running[name].kill)
            running[name].wait("ready", timeout_s=TIMEOUT_S)
        running["anna"].wait("round", timeout_s=TIMEOUT_S, round=1)
        round_began = time.monotonic()
        before = running["anna"].wait("round", timeout_s=TIMEOUT_S, round=2)
        before_s = time.monotonic() - round_began
        newcomer = WorkerProcess(folder, "clara", job, bootstrap(running), hosts[2].place)
        stack.callback(newcomer.kill)
        ready = newcomer.wait("ready", timeout_s=TIMEOUT_S)
        began = time.monotonic()
        healed = newcomer.wait("healed", timeout_s=TIMEOUT_S)
        newcomer.wait("round", timeout_s=TIMEOUT_S)
        training_s = time.monotonic() - began
        contributed = first_contribution(newcomer, ready["peer_id"])
        contributed_s = time.monotonic() - began
        usages = {"newcomer": usage(newcomer), "other": usage(running["boris"])}
    first, *later = newcomer.rounds().values()

    def line_s(*events: dict[str, Any]) -> float:
        """Seconds that the bytes of these rounds and of the state take on the newcomer's link."""
        moved: int = sum(event["bytes_sent"] + event["bytes_received"] for event in events)
        return (int(healed["bytes"]) + moved) / rate

    return {
        "parameters": ready["parameters"],
        "rate_mbit": arguments.rate_mbit,
        "rtt_ms": arguments.rtt_ms,
        "steps": arguments.steps,
        "state_mb": round(healed["bytes"] / 1e6, 1),
        "state_on_the_line_s": round(healed["bytes"] / rate, 2),
        "fetched_s": healed["seconds"],
        "training_s": round(training_s, 2),
        "ratio": round(training_s / line_s(first), 2),
        "contributed_s": round(contributed_s, 2),
        "ratio_until_it_contributed": round(contributed_s / line_s(first, *later), 2),
        "rounds_until_it_contributed": contributed["round"] - healed["round"],
        "round_before_s": round(before_s, 1),
        "exchanges_s": [before["exchange_s"], first["exchange_s"], contributed["exchange_s"]],
        "failed_to_fetch": sum(event["event"] == "heal_failed" for event in newcomer.events),
        "fetched": sum(event["event"] == "healed" for event in newcomer.events),
        **usages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--checkpoint", default="smollm2-135m-instruct", help="a model that workers know, or a directory"
    )
    parser.add_argument("--tokenizer", default="", help="without it the checkpoint's")
    parser.add_argument("--codec", default="float32")
    parser.add_argument("--rate-mbit", type=float, default=100.0, help="of the newcomer's line, both ways")
    parser.add_argument("--rtt-ms", type=float, default=50.0, help="between the newcomer and the others")
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--deadline", type=int, default=600, help="seconds of an exchange")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"bench": "train_join"} | join(Path(folder), arguments)), flush=True)


if __name__ == "__main__":
    main()
