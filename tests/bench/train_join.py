"""A newcomer to a job of a whole checkpoint, over a line: how long until it trains, against the time its bytes need.

    python -m tests.bench.train_join [--checkpoint smollm2-135m-instruct] [--rate-mbit 100] [--rtt-ms 50]

Two workers train on fast lines; a third joins over a slow one with nothing. Every worker is on a host of its own with emulated
links between them; needs root. Prints a JSON object.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from tests.support.training_workers import write_job
from tests.support.wan import Uplink, wan
from tests.support.worker_processes import WorkerProcess, bootstrap, create_job

FAST = Uplink(delay_s=0.001, bytes_per_s=125e6, down_bytes_per_s=125e6)
SETTINGS = "sync_every = 1"
PATIENCE_S = 1800.0


def write_checkpoint_job(folder: Path, arguments: argparse.Namespace) -> str:
    """The job: rounds of one small step, so that the newcomer's time is that of what it fetches."""
    exchange = f'min_workers = 2\ncodec = "{arguments.codec}"'
    toml = write_job(folder, "diloco", SETTINGS, exchange, rounds=100_000)
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
        worker.wait_for_more(timeout_s=PATIENCE_S)
        for event in worker.rounds().values():
            if peer in event["contributors"]:
                return event


def family_usage(worker: WorkerProcess) -> dict[str, float]:
    """Processor seconds and resident megabytes of a worker and its p2pd."""
    main = psutil.Process(worker.process.pid)
    family = [main, *main.children(recursive=True)]
    times = [member.cpu_times() for member in family]
    return {
        "cpu_s": round(sum(each.user + each.system for each in times), 1),
        "resident_mb": round(sum(member.memory_info().rss for member in family) / 1e6),
    }


def join(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    rate = arguments.rate_mbit * 125_000
    slow = Uplink(arguments.rtt_ms / 2000 - FAST.delay_s, bytes_per_s=rate, down_bytes_per_s=rate)
    job = create_job(folder, write_checkpoint_job(folder, arguments))
    running: dict[str, WorkerProcess] = {}
    with ExitStack() as stack:
        hosts = stack.enter_context(wan(FAST, FAST, slow))
        for name, host in zip(("anna", "boris"), hosts, strict=False):
            running[name] = WorkerProcess(folder, name, job, bootstrap(running), host.place)
            stack.callback(running[name].kill)
            running[name].wait("ready", timeout_s=PATIENCE_S)
        before = running["anna"].wait("round", timeout_s=PATIENCE_S, round=1)
        newcomer = WorkerProcess(folder, "clara", job, bootstrap(running), hosts[2].place)
        stack.callback(newcomer.kill)
        ready = newcomer.wait("ready", timeout_s=PATIENCE_S)
        began = time.monotonic()
        healed = newcomer.wait("healed", timeout_s=PATIENCE_S)
        healed_s = time.monotonic() - began
        contributed = first_contribution(newcomer, ready["peer_id"])
        total_s = time.monotonic() - began
        rounds = newcomer.rounds().values()
        usage = family_usage(newcomer)
    received = healed["bytes"] + sum(event["bytes_received"] for event in rounds)
    sent = sum(event["bytes_sent"] for event in rounds)
    return {
        "parameters": ready["parameters"],
        "rate_mbit": arguments.rate_mbit,
        "rtt_ms": arguments.rtt_ms,
        "state_mb": round(healed["bytes"] / 1e6, 1),
        "state_on_the_line_s": round(healed["bytes"] / rate, 2),
        "fetched_s": healed["seconds"],
        "healed_s": round(healed_s, 2),
        "first_contribution_s": round(total_s, 2),
        "received_mb": round(received / 1e6, 1),
        "sent_mb": round(sent / 1e6, 1),
        "bytes_on_the_line_s": round((received + sent) / rate, 2),
        "ratio": round(total_s / ((received + sent) / rate), 2),
        "rounds_until_it_contributed": contributed["round"] - healed["round"],
        "exchange_s_before": before["exchange_s"],
        "exchange_s_with_it": contributed["exchange_s"],
        "failed_to_fetch": sum(event["event"] == "heal_failed" for event in newcomer.events),
        **usage,
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
    parser.add_argument("--deadline", type=int, default=600, help="seconds of an exchange")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"bench": "train_join"} | join(Path(folder), arguments)), flush=True)


if __name__ == "__main__":
    main()
