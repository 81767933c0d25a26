"""Codecs of boundaries on a pipeline of four stages: loss against simulated time and bytes.

    python -m tests.bench.pipeline [--rows float32 int8 float32:k=16 ...] [--steps 120]
                                   [--mbits 20 500 500 500] [--learning-rate RATE] [--seed 0] [--out DIR]

The rules are those of ProtocolNanoGPT, in small (docs/decisions/0165). A byte-level Llama of four
blocks learns the Python standard library's source; every stage has one block. One process computes
all stages. Each tensor that crosses a boundary is encoded and decoded, and the receiver's meter
bills its bytes. A simulated clock gives the seconds of a step: links of 20 Mbit/s with 50 ms, one
inbound link for each stage, and processors of 50 GFLOP/s. The score is T, the steps to the target
loss times the seconds of a step. Prints one JSON object a row; in DIR come curves.json and plots.

``--mbits`` gives the inbound link of each stage another bandwidth. In the row ``auto``, each boundary
has the codec that its sender would choose from the slower of its two links.

The first row is the yardstick of the others. A row is a codec, or ``CODEC:k=K`` for a model in a
shared subspace of K dimensions. Its MLPs are wider, so that all rows have equally many parameters.
"""

import argparse
import heapq
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from swarmnet_node.training.data.corpus import open_corpus
from swarmnet_node.training.data.sampler import Batches, inputs_of, target_count
from swarmnet_node.training.model.stage_model import build_stage
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.training.codecs.boundary import (
    BoundaryCodec,
    codecs_by_size,
    fitting,
    id_bytes,
    rounding_seed,
)
from swarmnet_protocols.training.job_settings import Job, StagesSection
from tests.bench.training import standard_job
from tests.bench.training_plots import write_plots
from tests.bench.training_run import MEGABIT, Curve, Point

ROWS = ("float32", "int8", "int4", "float32:k=16", "int8:k=16")
STAGES = 4
HIDDEN, MLP, POSITIONS = 64, 128, 64
VOCABULARY = 256
SEQUENCES, MICROBATCHES = 256, 16
"""Sequences of a step, and the parts into which they are divided."""
TARGET_AT = 0.9
"""The target is the validation loss of the first row after this part of its steps. An earlier one would
measure the warm-up; at the end, a row that is a little worse would never reach it."""
LEARNING_RATE = 4e-3
WARMUP_STEPS = 20
EVAL_EVERY = 5
EVAL_BATCHES = 1
LINK = "simulated links"
MBITS = (20.0,) * STAGES
DELAY_S = 0.05
FLOP_PER_S = 50e9
"""A processor core of 2024, measured on matrices of this size. With faster ones, more of a step is
waiting for the link."""


class Visit(NamedTuple):
    """Computation of a microbatch at a stage."""

    stage: int
    seconds: float


def path_of(parameters: int, head: int) -> list[Visit]:
    """Return the visits of a microbatch: a ring forwards, the loss in stage 0, and the ring backwards.

    ``parameters``: of a block. ``head``: of the output head. Attention counts by its products of
    queries and keys, and of probabilities and values.
    """
    tokens = SEQUENCES * POSITIONS // MICROBATCHES
    forward_s = 2 * (parameters + POSITIONS * HIDDEN) * tokens / FLOP_PER_S
    out = [Visit(stage, forward_s) for stage in range(STAGES)]
    home = [Visit(stage, 2 * forward_s) for stage in reversed(range(STAGES))]
    return [*out, Visit(0, 6 * head * tokens / FLOP_PER_S), *home]


def step_seconds(
    path: Sequence[Visit], sizes: Sequence[int], microbatches: int, mbits: Sequence[float] = MBITS
) -> float:
    """Return the seconds of a step, in which ``sizes`` bytes follow each visit but the last.

    A sender stamps its clock on a tensor, so a link carries bytes while stages compute. A stage
    prefers the visit that is furthest along its path.
    """
    link_free = [0.0] * STAGES
    is_idle = [True] * STAGES
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(STAGES)]
    events = [(0.0, 0, number, False) for number in range(microbatches)]
    now = 0.0
    while events:
        now, place, number, is_done = heapq.heappop(events)
        stage = path[place].stage
        if not is_done:
            heapq.heappush(waiting[stage], (-place, number))
        else:
            is_idle[stage] = True
            if place + 1 < len(path):
                receiver = path[place + 1].stage
                link_free[receiver] = max(now, link_free[receiver]) + sizes[place] / (
                    mbits[receiver] * MEGABIT
                )
                heapq.heappush(events, (link_free[receiver] + DELAY_S, place + 1, number, False))
        if waiting[stage] and is_idle[stage]:
            is_idle[stage] = False
            furthest, number = heapq.heappop(waiting[stage])
            heapq.heappush(events, (now + path[-furthest].seconds, -furthest, number, True))
    return now


class Pipeline:
    """The trainers of all stages in one process, and the codecs between them."""

    def __init__(self, row: str, job: Job, cache_dir: Path, mbits: Sequence[float] = MBITS) -> None:
        assert job.stages is not None
        self._batches = Batches.of(job, open_corpus(job.data, cache_dir))
        machine = TrainingMachine(cache_dir, 1 << 40)
        self._stages = [
            StageTrainer(job, stage, build_stage(job, stage, cache_dir), machine) for stage in range(STAGES)
        ]
        self._id_bytes = id_bytes(VOCABULARY) if job.stages.subspace else 0
        self.parameters = sum(each.parameter_count for each in self._stages)
        self._billed = [0] * (2 * STAGES)
        """Bytes that receivers were billed in the present step, by the place in the path."""
        self.path = path_of(self._stages[1].parameter_count, HIDDEN * VOCABULARY)
        name, rank = parse_row(row)
        self._codecs: list[BoundaryCodec] = []
        """The codec of each boundary."""
        for stage in range(STAGES):
            codecs = codecs_by_size(name, SEQUENCES * POSITIONS // MICROBATCHES, rank or HIDDEN)
            slower = MEGABIT * min(mbits[stage], mbits[(stage + 1) % STAGES])
            compute_s = sum(visit.seconds for visit in self.path if visit.stage == stage)
            self._codecs.append(codecs[fitting(list(codecs), slower, compute_s, None)])

    def step(self, number: int) -> tuple[list[int], float]:
        """Take a step. Returns the bytes of each crossing and the training loss."""
        batch, loss = self._batches.take(number, 0, 0), 0.0
        for microbatch, part in enumerate(self._batches.parts(batch)):
            seeds = [rounding_seed(0, (number, microbatch), each) for each in range(STAGES)]
            loss += self._home(part, seeds)
        for stage in self._stages:
            stage.apply_gradient(number, 0, stage.gradients() / target_count(batch))
            stage.free_gradients()
        sizes, self._billed = self._billed, [0] * (2 * STAGES)
        return sizes, loss / target_count(batch)

    def loss(self) -> float:
        """Return the validation loss. Its tensors cross the boundaries, too, and are not billed."""
        billed = list(self._billed)
        with torch.no_grad():
            losses = [
                (source, float(self._stages[0].end(self._out(part)[1][-1], part)), target_count(part))
                for source, part in self._batches.held_out(EVAL_BATCHES)
            ]
        self._billed = billed
        return self._batches.mean(losses)[0]

    def _out(self, part: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of a microbatch that each stage sends, and that the next receives."""
        sent, received = [self._stages[0].begin(part)], []
        for number, stage in enumerate([*self._stages[1:], None]):
            self._billed[number] += self._id_bytes * len(sent[-1])
            received.append(self._carry(number, sent[-1]).requires_grad_())
            if stage is not None:
                sent.append(stage.forward(received[-1], len(part), inputs_of(part)))
        return sent, received

    def _home(self, part: Tensor, seeds: Sequence[int]) -> float:
        """Train on a microbatch: its activations go round, and its gradients come home. Returns its
        summed loss."""
        sent, received = self._out(part)
        loss = self._stages[0].end(received[-1], part)
        gradient = self._stages[0].accumulate(loss, None, received[-1])
        for number in reversed(range(STAGES)):
            assert gradient is not None
            arrived = self._carry(2 * STAGES - 1 - number, gradient, seeds[number])
            inputs = received[number - 1] if number else None
            gradient = self._stages[number].accumulate(sent[number], arrived, inputs)
        return float(loss.detach())

    def _carry(self, place: int, values: Tensor, seed: int | None = None) -> Tensor:
        """Return the tensor that the receiver decodes after this place of the path.

        ``seed``: of the rounding of a gradient; None for activations.
        """
        codec = self._codecs[min(place, 2 * STAGES - 1 - place)]
        payload = codec.encode(values, seed)
        self._billed[place] += len(payload)
        return codec.decode(payload, *values.shape)


def parse_row(row: str) -> tuple[str, int | None]:
    """Return the codec of a row, and the dimension of its subspace."""
    codec, _, rank = row.partition(":k=")
    return codec, int(rank) if rank else None


def pipeline_job(row: str, *, seed: int, steps: int, learning_rate: float) -> Job:
    """Return the job of a row."""
    _, rank = parse_row(row)
    job = standard_job("allreduce", {}, seed=seed, steps=steps, workers=1, learning_rate=learning_rate)
    mlp = MLP
    if rank:  # as many parameters as matrices of full rank have
        saved = (HIDDEN - rank) * (HIDDEN + VOCABULARY // STAGES)
        mlp = (3 * HIDDEN * MLP + saved) // (2 * HIDDEN + rank)
    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": mlp,
        "num_hidden_layers": STAGES,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    model = job.model.model_copy(update={"config": (job.model.config or {}) | shape})
    training = job.training.model_copy(
        update={
            "batch_size": SEQUENCES,
            "microbatch": SEQUENCES // MICROBATCHES,
            "warmup_steps": WARMUP_STEPS,
        }
    )
    stages = StagesSection(count=STAGES, cuts=tuple(range(1, STAGES)), subspace=rank)
    return job.model_copy(update={"model": model, "training": training, "stages": stages})


def train(row: str, arguments: argparse.Namespace, cache_dir: Path) -> Curve:
    """Train a row."""
    job = pipeline_job(row, seed=arguments.seed, steps=arguments.steps, learning_rate=arguments.learning_rate)
    pipeline = Pipeline(row, job, cache_dir, arguments.mbits)
    curve = Curve(row if len(set(arguments.mbits)) == 1 else f"{row} on mixed links", pipeline.parameters)
    size_bytes, seconds = 0, 0.0
    for step in range(arguments.steps + 1):
        if step % EVAL_EVERY == 0 or step == arguments.steps:
            loss = pipeline.loss()
            tokens = step * SEQUENCES * POSITIONS
            curve.points.append(Point(step, tokens, size_bytes, loss, {LINK: seconds / 3600}))
        if step < arguments.steps:
            sizes, _ = pipeline.step(step)
            size_bytes += sum(sizes)
            each_bytes = [each // MICROBATCHES for each in sizes]
            seconds += step_seconds(pipeline.path, each_bytes, MICROBATCHES, arguments.mbits)
    return curve


def report(curve: Curve, yardstick: Curve) -> dict[str, object]:
    """Return the printed summary of a row, with ratios to ``yardstick``."""
    last, other = curve.points[-1], yardstick.points[-1]
    target = next(each.val_loss for each in yardstick.points if each.step >= TARGET_AT * other.step)
    first, its_first = (
        next((each for each in points if each.val_loss <= target), None)
        for points in (curve.points, yardstick.points)
    )
    line: dict[str, object] = {
        "bench": "pipeline",
        "row": curve.label,
        "parameters": curve.parameters,
        "bytes_per_token": round(last.size_bytes / last.tokens / (2 * STAGES), 2),
        "step_s": round(last.hours[LINK] * 3600 / last.step, 3),
        "steps": last.step,
        "val_loss": round(last.val_loss, 4),
        "loss_ratio": round(last.val_loss / other.val_loss, 4),
        "bytes_ratio": round(last.size_bytes / other.size_bytes, 4),
        "steps_to_target": first and first.step,
        "T": first and round(first.hours[LINK] * 3600, 1),
    }
    if first is not None and its_first is not None:
        line["faster"] = round(its_first.hours[LINK] / first.hours[LINK], 2)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="ROW")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--mbits", nargs=STAGES, type=float, default=MBITS, metavar="MBIT/S")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for curves.json and the plots")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    curves: list[Curve] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in arguments.rows:
            started = time.perf_counter()
            curves.append(train(row, arguments, Path(folder)))
            seconds = round(time.perf_counter() - started, 1)
            print(json.dumps(report(curves[-1], curves[0]) | {"seconds": seconds}), flush=True)
    if arguments.out is not None:
        write_plots(curves, [LINK], arguments.out)


if __name__ == "__main__":
    main()
