"""Five real workers, one 4 and one 10 times slower: their summed tokens/s against each of them alone,
and their loss against five equal workers.

    python -m tests.bench.unequal [--methods diloco streaming sparseloco noloco] [--rounds 12] [--cpu 0.3]
                                  [--steps 20] [--alone RATE RATE RATE] [--no-loss]

Each worker may use a share of one core: ``--cpu``, a quarter, or a tenth of it. The kernel limits it
by a cgroup, so this needs root and the cpu controller of cgroup v1, and an idle machine with two
cores. Limits begin when workers are ready, so the first round is long, and rates count from the end
of round 1 on. Takes about 25 minutes a method. Prints a line of JSON for each method.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.sim.training.test_pace import METHODS, STEP_S, STEPS, settings
from tests.support.processes.worker_processes import WorkerProcess, create_job, workers
from tests.support.training.workers import copy_sources, write_job

CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000
SHARES = 1 << 18
"""A worker gives way to other programs, which would change its share of a core."""
TIMEOUT_S = 900.0
MODEL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "max_position_embeddings": 64}
DATA = {"sequence_length": 64, "batch_size": 16}
"""A step takes about 0.3 s of a core: much longer than the rest of a round."""


@contextmanager
def limited(worker: WorkerProcess, share: float) -> Iterator[None]:
    """Let a worker and its children use this share of one core."""
    group = CGROUPS / f"swarmnet-unequal-{worker.pid}"
    group.mkdir()
    members: list[psutil.Process] = []
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * share)))
        (group / "cpu.shares").write_text(str(SHARES))
        members = worker.family
        for member in members:
            (group / "cgroup.procs").write_text(str(member.pid))
        yield
    finally:
        worker.kill()
        psutil.wait_procs(members, timeout=10.0)  # the kernel keeps the group of a process that ends
        group.rmdir()


def trained(folder: Path, method: str, shares: dict[str, float], rounds: int, steps: int) -> dict[str, Any]:
    """Train until a worker has ended so many rounds after the first two."""
    folder.mkdir()
    copy_sources(folder)
    toml = write_job(folder, method, settings(method, steps), f"min_workers = {len(shares)}", rounds=100_000)
    for name, value in (MODEL | DATA | {"deadline_s": 60, "batches": 8, "every_rounds": 4}).items():
        head, _, rest = toml.partition(f"\n{name} = ")
        toml = f"{head}\n{name} = {value}\n{rest.partition(chr(10))[2]}"
    job = create_job(folder, toml)
    ended_s: dict[str, dict[int, float]] = {name: {} for name in shares}
    with workers(folder, job, *shares) as running, ExitStack() as limits:
        for name, share in shares.items():
            limits.enter_context(limited(running[name], share))
        first = next(iter(running.values()))
        while len(first.rounds()) < rounds + 2:
            first.wait_for_more(timeout_s=TIMEOUT_S)
            for name, worker in running.items():
                for number in worker.rounds():
                    ended_s[name].setdefault(number, time.monotonic())
        return summary({name: worker.events[:] for name, worker in running.items()}, ended_s)


def summary(events: dict[str, list[dict[str, Any]]], ended_s: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Return the tokens/s of all workers after round 1, their late contributions and their loss."""
    rate, late, losses, own = 0.0, 0, [], 0
    for name, happened in events.items():
        rounds = {each["round"]: each for each in happened if each["event"] == "round" and each["committed"]}
        late += sum(each["event"] == "healed" and each["round"] > 0 for each in happened)
        losses += [each["val_loss"] for each in happened if each["event"] == "eval"][-1:]
        own += sum(each["own_tokens"] for each in rounds.values())
        later = [number for number in rounds if number > 1 and number in ended_s[name]]
        if later:
            tokens = sum(rounds[number]["own_tokens"] for number in later)
            rate += tokens / (ended_s[name][max(later)] - ended_s[name].get(1, 0.0))
    return {"tokens_per_s": rate, "late": late, "val_loss": sum(losses) / max(1, len(losses)), "tokens": own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=STEPS, help="inner steps of the fastest in a round")
    parser.add_argument("--alone", type=float, nargs=3, help="tokens/s of 1, 1/4 and 1/10, of an earlier run")
    parser.add_argument("--loss", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cpu", type=float, default=0.3)
    given = parser.parse_args()
    unequal = {name: given.cpu / slower for name, slower in STEP_S.items()}
    fewer = sum(1 / slower for slower in STEP_S.values()) / len(STEP_S)
    with tempfile.TemporaryDirectory() as place:
        alone = given.alone or [
            trained(Path(place, f"alone-{name}"), "diloco", {"anna": unequal[name]}, 3, steps)["tokens_per_s"]
            for name, steps in ((name, math.ceil(STEPS / STEP_S[name])) for name in ("anna", "dora", "emil"))
        ]
        for method in given.methods:
            found = trained(Path(place, f"{method}-unequal"), method, unequal, given.rounds, given.steps)
            line = {
                "bench": "unequal",
                "method": method,
                "steps": given.steps,
                "tokens_share": found["tokens_per_s"] / (3 * alone[0] + alone[1] + alone[2]),
                "late": found["late"],
                "alone_tokens_per_s": alone,
            }
            if given.loss:
                rounds = round(fewer * (given.rounds + 2)) - 2  # as many tokens
                shares = dict.fromkeys(unequal, given.cpu / 2)
                equal = trained(Path(place, f"{method}-equal"), method, shares, rounds, given.steps)
                line["loss_share"] = found["val_loss"] / equal["val_loss"]
                line["tokens"] = [found["tokens"], equal["tokens"]]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
