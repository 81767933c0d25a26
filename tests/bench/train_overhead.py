"""A worker alone in a job of the standard task, against a bare PyTorch loop over the same model and
data.

    python -m tests.bench.train_overhead [--rounds 5] [--steps 50] [--threads 2]
                                         [--cpu-time] [--checkpoints]

The worker does whole DiLoCo rounds: inner steps, contribution, outer step on its own contribution,
loading the result. The loop has its data in memory and its optimizer fused. In turn, float32 on the
CPU. Prints JSON. ``--cpu-time`` counts the process's CPU seconds, for a machine that others use
too; then let it have one thread. ``--checkpoints`` instead compares rounds during which the worker
writes a checkpoint with rounds without one; the time includes the copy.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from swarmnet_node.training.checkpoint import CheckpointStore, WorkerCheckpoint
from swarmnet_node.training.model.building import build_model
from swarmnet_node.training.replica import Replica
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.job_templates import template
from swarmnet_protocols.training.jobs import parse_job
from swarmnet_protocols.training.methods import Average, Method


class BareLoop:
    """A plain training loop for this model on one machine."""

    def __init__(self, job: Job, tokens: Tensor, cache_dir: Path) -> None:
        self._model: Any = build_model(job, TrainingMachine(cache_dir, 1 << 40))
        self._training, self._length = job.training, job.data.sequence_length
        self._rows = tokens[: len(tokens) // self._length * self._length].view(-1, self._length)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=job.training.learning_rate,
            betas=job.training.betas,
            weight_decay=job.training.weight_decay,
            fused=True,
        )
        self._generator = torch.Generator().manual_seed(0)

    def steps(self, count: int) -> None:
        for _ in range(count):
            chosen = torch.randint(len(self._rows), (self._training.batch_size,), generator=self._generator)
            rows = self._rows[chosen]
            logits = self._model(input_ids=rows, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._training.clip_norm)
            self._optimizer.step()


def _worker_round(trainer: Trainer, method: Method, number: int, steps: int) -> float:
    """A round alone; returns the seconds that were not inner steps."""
    report = trainer.steps(number, 0, steps)
    started = time.perf_counter()
    parameters = trainer.parameters()
    average = Average(method.contribution(number, parameters), ("me",))
    trainer.load(method.apply(number, parameters, average))
    if report.tokens <= 0:
        raise RuntimeError("nothing was trained")
    return time.perf_counter() - started


def with_checkpoints(job: Job, trainer: Trainer, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of rounds with a checkpoint, relative to the rounds before them without one."""
    replica, store = Replica(job, trainer), CheckpointStore(folder / "checkpoints")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    copying_s, writing_s = [], []
    with ThreadPoolExecutor(1) as writer:
        for number in range(2 * rounds + 2):
            saves = bool(number % 2)
            started = time.perf_counter()
            if saves:
                checkpoint = replica.checkpoint("a job", number)
                copying_s.append(time.perf_counter() - started)

                def write(saved: WorkerCheckpoint = checkpoint) -> None:
                    began = time.perf_counter()
                    store.save(saved, trainer.write)
                    writing_s.append(time.perf_counter() - began)

                writing = writer.submit(write)
            _worker_round(trainer, replica.method, number, steps)
            if number > 1:
                seconds[saves].append(time.perf_counter() - started)
            if saves:
                writing.result()
    ratios = [one / other for one, other in zip(seconds[True], seconds[False], strict=True)]
    return {
        "round_s": round(statistics.median(seconds[False]), 3),
        "copying_s": round(statistics.median(copying_s), 4),
        "writing_s": round(statistics.median(writing_s), 4),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--checkpoints", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    text = template("diloco").replace("sync_every = 50", f"sync_every = {arguments.steps}")
    job = parse_job(text.encode()).job
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        trainer = Trainer.open(job, TrainingMachine(cache, 1 << 40))
        if arguments.checkpoints:
            found = with_checkpoints(job, trainer, cache, arguments.rounds, arguments.steps)
            print(json.dumps({"bench": "train_overhead --checkpoints", **found}))
            return
        tokens = torch.from_numpy(trainer.corpus.train.sources[0].astype("int64"))
        bare = BareLoop(job, tokens, cache)
        method = job.make_method()
        method.begin(trainer.parameters())
        worker_s, bare_s, outside_s = [], [], []
        for number in range(arguments.rounds + 1):
            started = clock()
            outside = _worker_round(trainer, method, number, arguments.steps)
            between = clock()
            bare.steps(arguments.steps)
            ended = clock()
            if number:  # the first round warms up
                worker_s.append(between - started)
                bare_s.append(ended - between)
                outside_s.append(outside)
    per_round = job.training.batch_size * job.data.sequence_length * arguments.steps
    ratios = [one / other for one, other in zip(bare_s, worker_s, strict=True)]
    report = {
        "bench": "train_overhead",
        "parameters": trainer.parameter_count,
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "threads": arguments.threads,
        "clock": clock.__name__,
        "worker_tokens_per_s": round(per_round / statistics.median(worker_s)),
        "bare_tokens_per_s": round(per_round / statistics.median(bare_s)),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "outside_steps_s": round(statistics.median(outside_s), 4),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
