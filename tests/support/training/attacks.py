"""Sixteen replicas of one job that average over simulated links, some of them sending false
contributions."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType

import torch
from torch import Tensor

from swarmnet_node.training.data.corpus import open_corpus
from swarmnet_node.training.model.building import build_model
from swarmnet_node.training.replica import Replica
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.codecs.floats import FloatCodec
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.jobs import parse_job
from swarmnet_protocols.training.methods import Average
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.round_runner import Outcome
from tests.support.network.virtual_time import run
from tests.support.training.lab import TrainingLab
from tests.support.training.workers import write_job

WORKERS = 16

Attack = Callable[[Tensor, int, Sequence[Tensor]], Tensor]
"""The contributions of ``bad`` workers [bad, n]. They are computed from the honest contributions of
all workers [workers, n] in this round and in all earlier rounds. The bad workers come first."""


def sign_flip(honest: Tensor, bad: int, past: Sequence[Tensor]) -> Tensor:
    return -honest[:bad]


def thousandfold(honest: Tensor, bad: int, past: Sequence[Tensor]) -> Tensor:
    return 1000 * honest[:bad]


def not_a_number(honest: Tensor, bad: int, past: Sequence[Tensor]) -> Tensor:
    return torch.full_like(honest[:bad], math.nan)


def constant(honest: Tensor, bad: int, past: Sequence[Tensor]) -> Tensor:
    return torch.full_like(honest[:bad], 100.0)


def stale_replay(honest: Tensor, bad: int, past: Sequence[Tensor]) -> Tensor:
    return (past[0] if past else honest)[:bad]


def a_little_is_enough(honest: Tensor, bad: int, past: Sequence[Tensor], z: float | None = None) -> Tensor:
    """Baruch et al. 2019, "A Little Is Enough", section 3: ``z`` standard deviations from the mean.

    By default the largest ``z`` that enough honest workers exceed to form a majority with the bad
    ones.
    """
    good = honest[bad:]
    if z is None:
        needed = len(honest) // 2 + 1 - bad
        z = NormalDist().inv_cdf((len(good) - needed) / len(good))
    return (good.mean(0) - z * good.std(0)).expand(bad, -1)


ATTACKS: Mapping[str, Attack] = MappingProxyType(
    {
        "sign-flip": sign_flip,
        "x1000": thousandfold,
        "nan": not_a_number,
        "constant": constant,
        "stale replay": stale_replay,
        "alie": a_little_is_enough,
        "alie, z = 6": partial(a_little_is_enough, z=6.0),
    }
)


class Unchecked(FloatCodec):
    """Encodes float32 values that an honest worker refuses to send: those that are not finite."""

    def encode(self, values: Tensor) -> bytes:
        return values.numpy().astype("<f4").tobytes()


UNCHECKED = Unchecked("float32", torch.float32, biased=False)


@dataclass(frozen=True)
class Trained:
    """The result of a run. ``excluded``: for every round, the workers that the others left out,
    with the reasons."""

    loss: float
    excluded: tuple[Mapping[PeerId, str], ...]
    bad: frozenset[PeerId]


def attack_job(folder: Path, aggregator: str, *, rounds: int, steps: int, eval_batches: int = 2) -> Job:
    """A tiny job of ``WORKERS`` workers, with its data in ``folder``."""
    toml = write_job(
        folder, "diloco", f"sync_every = {steps}", f'aggregate = "{aggregator}"', rounds=rounds
    ).replace("max_workers = 8", f"max_workers = {WORKERS}")
    toml = toml.replace("batches = 2", f"batches = {eval_batches}")
    return parse_job(toml.encode()).job


def train(
    job: Job, folder: Path, bad: int, attack: Attack, *, rules: AggregationRules | None = None
) -> Trained:
    """Train ``job`` to its last round; the first ``bad`` workers alter all their contributions.
    ``rules`` replace those of the job."""
    rules = rules or AggregationRules.named(job.exchange.aggregate, float(job.round_tokens))
    return run(_train(job, folder, bad, attack, rules))


async def _train(job: Job, folder: Path, bad: int, attack: Attack, rules: AggregationRules) -> Trained:
    replicas = _replicas(job, folder)
    past: list[Tensor] = []
    excluded: list[Mapping[PeerId, str]] = []
    async with TrainingLab(WORKERS, rules=rules) as lab:
        for round in range(job.job.rounds):
            honest = torch.stack([_work(replica, round, slot) for slot, replica in enumerate(replicas)])
            sent = torch.cat([attack(honest, bad, past), honest[bad:]])
            past.append(honest)
            outcomes = await _exchange(lab, round, sent, bad)
            average = outcomes[-1].average
            assert average is not None, outcomes[-1].reason
            for replica, outcome in zip(replicas, outcomes, strict=True):
                assert outcome.average is not None, outcome.reason
                assert torch.equal(outcome.average, average)
                replica.apply(round, Average(average, tuple(lab.peers)))
            excluded.append(dict(outcomes[-1].excluded))
        return Trained(replicas[-1].evaluate()[0], tuple(excluded), frozenset(lab.peers[:bad]))


def _work(replica: Replica, round: int, slot: int) -> Tensor:
    replica.steps(round, slot, 0, replica.method.steps_per_round)
    return replica.contribution(round, slot)[0][:]


async def _exchange(lab: TrainingLab, exchange_number: int, sent: Tensor, bad: int) -> list[Outcome]:
    codecs = [UNCHECKED] * bad + [get_codec("float32")] * (WORKERS - bad)
    return await asyncio.gather(
        *(
            lab.exchanges[peer].average(exchange_number, lab.members(), values, weight=1.0, codec=codec)
            for peer, values, codec in zip(lab.peers, sent, codecs, strict=True)
        )
    )


def _replicas(job: Job, folder: Path) -> list[Replica]:
    """Replicas at the job's first parameters that share one copy of the data."""
    corpus = open_corpus(job.data, folder / "cache")
    machine = TrainingMachine(folder / "cache", 1 << 33)
    models = [build_model(job, machine) for _ in range(WORKERS)]
    return [Replica(job, Trainer(job, corpus, model, machine)) for model in models]
