"""One training method with all its workers in one process. The network is not simulated; its
traffic is computed.

Replicas are the real ones, with their trainers, methods, codecs and error feedback. An exchange is
a butterfly, as in ``rounds.averaging``. A worker sends to every other worker that worker's slice of
its contribution. It sends the result of its own slice to all workers. The result is the encoded
mean, or all contributions to the slice if the codec is sparse. Only payloads are counted. All
workers compute at one speed and have the same link.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from swarmnet_node.training.data.corpus import Corpus, open_corpus
from swarmnet_node.training.model.building import build_model
from swarmnet_node.training.replica import Replica
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.codecs import result_codec
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.methods import Average
from swarmnet_protocols.training.rounds.aggregation_rules import aggregate

MEGABIT = 1e6 / 8


@dataclass(frozen=True)
class Link:
    """The link from every worker to all others."""

    name: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    one_way_s: float


LINKS = (
    Link("home 20/5 Mbit/s 40 ms", 5 * MEGABIT, 20 * MEGABIT, 0.040),
    Link("fibre 1 Gbit/s 20 ms", 1000 * MEGABIT, 1000 * MEGABIT, 0.020),
    Link("datacenter 100 Gbit/s 0.1 ms", 100_000 * MEGABIT, 100_000 * MEGABIT, 0.0001),
)


@dataclass(frozen=True)
class Traffic:
    """The bytes that one worker sends, and the same number that it receives, in one exchange of
    ``trips`` one-way delays."""

    size_bytes: float = 0.0
    trips: int = 0

    def seconds(self, link: Link) -> float:
        slower = min(link.up_bytes_per_s, link.down_bytes_per_s)
        return self.size_bytes / slower + self.trips * link.one_way_s


@dataclass(frozen=True)
class Absence:
    """``worker`` is away in inner steps [start, end)."""

    worker: int
    start: int
    end: int


def absences(seed: int, *, workers: int, steps: int, count: int) -> tuple[Absence, ...]:
    """A churn trace: ``count`` absences of a tenth of the run each. Worker 0 stays, so that there
    is a state to recover from."""
    rng = random.Random(f"{seed}/absences")
    length = max(1, steps // 10)
    starts = [rng.randrange(max(1, steps - length)) for _ in range(count)]
    return tuple(Absence(rng.randrange(1, workers), start, start + length) for start in starts)


@dataclass(frozen=True)
class Point:
    """The progress of a run: ``size_bytes`` are those that the busiest worker sent; ``hours`` is by
    the name of the link."""

    step: int
    tokens: int
    size_bytes: float
    val_loss: float
    hours: Mapping[str, float]


@dataclass
class Curve:
    """A run. ``peak_bytes_per_step``: the bytes of the largest exchange, divided by the inner steps
    that it may take."""

    label: str
    parameters: int
    peak_bytes_per_step: float = 0.0
    points: list[Point] = field(default_factory=list)


class Worker:
    """The replica of one worker, and whether the worker is away."""

    def __init__(self, name: str, job: Job, corpus: Corpus, cache_dir: Path) -> None:
        self.name = name
        self.away = False
        machine = TrainingMachine(cache_dir, 1 << 40)
        trainer = Trainer(job, corpus, build_model(job, machine), machine)
        self.replica = Replica(job, trainer)

    def contribute(self, round: int, slot: int) -> tuple[bytes, torch.Tensor]:
        """The payload, and the values that all workers decode from it."""
        values, _ = self.replica.contribution(round, slot)
        payload = bytes(self.replica.codec.encode(values[:]))
        return payload, self.replica.codec.decode(payload, len(values))

    def apply(self, round: int, average: Average) -> None:
        self.replica.apply(round, average, [(0, len(average.values))])

    def heal(self, donor: "Worker") -> None:
        """Return with the shared state of ``donor``."""
        self.replica.load_shared(bytearray(b"".join(donor.replica.pack_shared())))


Pending = Mapping[str, Average]


class Simulation:
    """A swarm of ``workers`` on one job."""

    def __init__(self, label: str, job: Job, workers: int, trace: Sequence[Absence], cache_dir: Path) -> None:
        corpus = open_corpus(job.data, cache_dir)
        self.job = job
        self.workers = [Worker(f"worker-{number:03}", job, corpus, cache_dir) for number in range(workers)]
        self.method = self.workers[0].replica.method
        if self.method.kind == "scalars":
            raise ConfigError(f"{self.method.name} is for fine-tuning: it is not measured here")
        self.codec = self.workers[0].replica.codec
        self.curve = Curve(label, self.workers[0].replica.trainer.parameter_count)
        self._trace = trace
        self._size_bytes = 0.0
        self._waited_s = dict.fromkeys((link.name for link in LINKS), 0.0)

    def run(self, *, step_s: float, eval_every: int) -> Curve:
        """Train; validate every ``eval_every`` steps and at the end. An inner step takes ``step_s``
        simulated seconds."""
        steps, overlap = self.method.steps_per_round, self.method.overlap_steps
        pending: Pending = {}
        self._measure(0, step_s)
        for round in range(self.job.job.rounds):
            present = self._return(round)
            first = 0
            if pending and overlap < steps:
                self._steps(present, round, 0, overlap)
                pending, first = self._apply(present, round - 1, pending), overlap
            self._steps(present, round, first, steps)
            averages, traffic = self._exchange(present, round)
            self._account(traffic, step_s)
            self._apply(present, round - 1, pending)
            pending = averages
            if overlap == 0:
                pending = self._apply(present, round, pending)
            done = (round + 1) * steps
            if round + 1 == self.job.job.rounds:
                self._apply(present, round, pending)
                self._measure(done, step_s)
            elif done // eval_every > (done - steps) // eval_every:
                self._measure(done, step_s)
        return self.curve

    def _return(self, round: int) -> list[Worker]:
        """The workers that are present for a whole round. Returning workers take the state of one
        that stayed."""
        start = round * self.method.steps_per_round
        end = start + self.method.steps_per_round
        gone = {each.worker for each in self._trace if each.start < end and start < each.end}
        donor = next(worker for worker in self.workers if not worker.away)
        for number, worker in enumerate(self.workers):
            if worker.away and number not in gone:
                worker.heal(donor)
            worker.away = number in gone
        return [worker for worker in self.workers if not worker.away]

    def _steps(self, present: Sequence[Worker], round: int, first: int, end: int) -> None:
        if self.method.kind == "parameters":
            for worker in present:
                slot = self.workers.index(worker)
                worker.replica.steps(round, slot, first, end)

    def _exchange(self, present: Sequence[Worker], round: int) -> tuple[Pending, Traffic]:
        """Every worker's average, and the traffic of the busiest."""
        sent = {worker.name: worker.contribute(round, self.workers.index(worker)) for worker in present}
        roster = sorted(sent)
        averages: dict[str, Average] = {}
        busiest = Traffic()
        for worker in present:
            group = worker.replica.method.partners(round, roster, worker.name)
            if group[0] in averages:
                averages[worker.name] = averages[group[0]]
                continue
            rows = torch.stack([sent[name][1] for name in group])
            mean = aggregate("mean", rows, torch.ones(len(group)))
            largest = max(len(sent[name][0]) for name in group)
            others = len(group) - 1
            if self.codec.sparse:
                result_bytes = len(group) * largest
            else:
                codec = result_codec(self.codec)
                payload = codec.encode(mean)
                mean = codec.decode(payload, len(mean))
                result_bytes = len(payload)
            traffic = Traffic(others / len(group) * (largest + result_bytes), 2)
            averages[worker.name] = Average(mean, group)
            busiest = max(busiest, traffic, key=lambda each: each.size_bytes)
        return averages, busiest

    def _apply(self, present: Sequence[Worker], round: int, averages: Pending) -> Pending:
        """Apply the pending averages; nothing is pending afterwards. A worker that has returned
        meanwhile applies the average of the first group."""
        for worker in present if averages else ():
            average = averages.get(worker.name) or next(iter(averages.values()))
            worker.apply(round, average)
        return {}

    def _account(self, traffic: Traffic, step_s: float) -> None:
        overlap = self.method.overlap_steps
        self._size_bytes += traffic.size_bytes
        self.curve.peak_bytes_per_step = max(
            self.curve.peak_bytes_per_step, traffic.size_bytes / max(1, overlap)
        )
        for link in LINKS:
            self._waited_s[link.name] += max(0.0, traffic.seconds(link) - overlap * step_s)

    def _measure(self, step: int, step_s: float) -> None:
        """Validate the mean of the agreed weights: the weights that all workers have or, if they
        differ, those that a final merge would give."""
        agreed = torch.stack([worker.replica.method.agreed() for worker in self.workers if not worker.away])
        judge = self.workers[0].replica.trainer
        own = judge.parameters()
        judge.load(aggregate("mean", agreed, torch.ones(len(agreed))))
        loss, _ = judge.evaluate(self.job.eval.batches)
        judge.load(own)
        tokens = step * self.job.training.batch_size * self.job.data.sequence_length * len(self.workers)
        hours = {name: (step * step_s + waited_s) / 3600 for name, waited_s in self._waited_s.items()}
        self.curve.points.append(Point(step, tokens, self._size_bytes, loss, hours))
