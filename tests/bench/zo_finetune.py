"""Zeroth-order fine-tuning of SmolLM2-135M with shared randomness: held-out loss against steps and
bytes.

    python -m tests.bench.zo_finetune [--workers 2] [--rounds 4] [--steps 100] [--learning-rate 5e-5] [--epsilon 1e-3] [--text PATH]

One replica stands for all workers: they are equal during a round. Slopes travel as they do in
a job, a byte each; the bytes of a round with all its messages are those of a simulated round.
Prints one JSON object a round.

The loss is taken on two disjoint samples of the held-out text: how far their improvements differ is
how far to trust them.
"""

import argparse
import encodings
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from swarmnet_node.training.data.corpus import Sequences
from swarmnet_node.training.replica import Replica
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.methods import Average
from swarmnet_protocols.training.rounds.aggregation_rules import weighted_mean
from tests.support.training.round_bytes import bytes_of_a_round

HELD_OUT = 32
"""Number of sequences in each sample of the held-out text."""


def finetuning_job(arguments: argparse.Namespace) -> Job:
    return Job.model_validate(
        {
            "job": {"name": "zo", "rounds": arguments.rounds},
            "model": {"checkpoint": "smollm2-135m-instruct"},
            "data": {
                "path": arguments.text,
                "tokenizer": "smollm2-135m-instruct",
                "sequence_length": 128,
                "validation": 0.2,
            },
            "training": {"batch_size": arguments.batch, "learning_rate": arguments.learning_rate},
            "method": {
                "name": "zo",
                "settings": {
                    "sync_every": arguments.steps,
                    "epsilon": arguments.epsilon,
                    "learning_rate": arguments.learning_rate,
                },
            },
            "eval": {"batches": max(1, HELD_OUT // arguments.batch)},
        }
    )


@dataclass(frozen=True)
class Sample(Sequences):
    """Sequences whose first ``HELD_OUT`` are spread evenly over the text, from number ``first``
    on."""

    first: int

    def take(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        return super().take(self.first + numbers * (len(self) // HELD_OUT))


def losses_of_samples(replica: Replica) -> list[float]:
    """The loss on two disjoint samples of the held-out text."""
    trainer = replica.trainer
    whole = trainer.corpus
    held_out, losses = whole.validation, []
    if len(held_out) < 2 * HELD_OUT:
        raise ConfigError(f"{len(held_out)} held-out sequences are not two samples", hint="name more text")
    for first in (0, len(held_out) // HELD_OUT // 2):
        sample = Sample(held_out.sources, held_out.length, first)
        trainer.corpus = replace(whole, validation=sample)
        losses.append(replica.evaluate()[0])
    trainer.corpus = whole
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="of a worker in a round")
    parser.add_argument("--batch", type=int, default=2, help="sequences of 128 tokens")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--epsilon", type=float, default=1e-3)
    parser.add_argument("--text", default=str(Path(encodings.__file__).parent / "*.py"), help="what to learn")
    parser.add_argument("--cache-dir", type=Path)
    arguments = parser.parse_args()
    job = finetuning_job(arguments)
    codec = get_codec("log8")
    with tempfile.TemporaryDirectory() as folder:
        cache = arguments.cache_dir or Path(folder)
        trainer = Trainer.open(job, TrainingMachine(cache, 1 << 40))
        replica = Replica(job, trainer)
        first = losses_of_samples(replica)
        round_bytes = bytes_of_a_round(arguments.workers, arguments.steps)
        print(json.dumps({"bench": "zo_finetune", "steps": 0, "val_loss": first}), flush=True)
        for number in range(arguments.rounds):
            began = time.perf_counter()
            rows = []
            for slot in range(arguments.workers):
                slopes, report = replica.contribution(number, slot)
                rows.append(codec.decode(codec.encode(slopes), len(slopes)))
            mean = weighted_mean(torch.stack(rows), torch.ones(len(rows)))
            replica.apply(number, Average(mean, tuple(map(str, range(len(rows))))))
            seconds = time.perf_counter() - began
            losses = losses_of_samples(replica)
            line = {
                "bench": "zo_finetune",
                "steps": (number + 1) * arguments.steps,
                "train_loss": report.loss,
                "val_loss": losses,
                "improved_by": [before - after for before, after in zip(first, losses, strict=True)],
                "slopes_rms": float(torch.stack(rows)[torch.stack(rows) != 0].square().mean().sqrt()),
                "bytes_per_step_in_all": round_bytes / arguments.steps,
                "seconds_per_step": seconds / arguments.steps,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
