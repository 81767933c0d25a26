"""Workers of a job in stages, over simulated links in virtual time."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from swarmnet_node.training.pipeline.pipeline import Pipeline
from swarmnet_node.training.pipeline.stage_choice import StageMover
from swarmnet_node.training.pipeline.stage_passes import KeptMicrobatch, StagePasses
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.training.pipeline.microbatches import MicrobatchId
from tests.support.network.memory_directory import MemoryDirectory
from tests.support.network.virtual_time import TimedExecutor
from tests.support.training.workers import WorkerLab

CPU = torch.device("cpu")
_JOB = """
[job]
name = "tiny"
rounds = {rounds}
[model.config]
vocab_size = 256
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 4
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
{family}
[data]
path = "{data}"
sequence_length = 16
validation = 0.2
[training]
batch_size = {batch}
microbatch = 2
learning_rate = 3e-3
clip_norm = 0.5
[method]
name = "{method}"
{settings}
[exchange]
deadline_s = 15
max_workers = {most}
min_workers = {least}
[stages]
count = {stages}
cuts = {cuts}
[eval]
every_rounds = 100
"""
LLAMA = 'model_type = "llama"\ntie_word_embeddings = true'
MOE = (
    'model_type = "qwen3_moe"\ntie_word_embeddings = false\nnum_experts = 4\nnum_experts_per_tok = 2\n'
    "moe_intermediate_size = 16\nhead_dim = 8"
)


def staged_job(
    folder: Path,
    *,
    family: str = LLAMA,
    rounds: int = 5,
    workers: int = 1,
    least: int | None = None,
    stages: int = 4,
    batch: int = 4,
    method: str = "allreduce",
    settings: str = "",
) -> str:
    data = folder / "data"
    if not data.exists():
        data.mkdir()
        for number in range(40):
            (data / f"{number}.txt").write_text(f"{number} squared is {number**2}, " * 40)
    return _JOB.format(
        rounds=rounds,
        family=family,
        data=data,
        most=workers,
        least=workers if least is None else least,
        stages=stages,
        batch=batch,
        method=method,
        settings=settings,
        cuts=[*range(1, stages)],
    )


class _UnwrittenStage(StageTrainer):
    """A stage whose checkpoints have no model, so that a test reads none. Its passes take virtual
    time."""

    def takes(self, block_s: float, executor: TimedExecutor) -> None:
        """Take ``block_s`` for the forward pass of each block, and twice as long backwards."""
        self._block_s, self._executor = block_s, executor

    def _spend(self, passes: int) -> None:
        self._executor.owed_s += passes * (self.block_range[1] - self.block_range[0]) * self._block_s

    def begin(self, batch: torch.Tensor) -> torch.Tensor:
        self._spend(1)
        return super().begin(batch)

    def forward(self, hidden: torch.Tensor, sequences: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        self._spend(1)
        return super().forward(hidden, sequences, ids)

    def accumulate(
        self,
        outputs: torch.Tensor,
        grad_outputs: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        if grad_outputs is not None:  # the graph of the loss has no block
            self._spend(2)
        return super().accumulate(outputs, grad_outputs, inputs)

    def write(self, folder: Path, parameters: torch.Tensor) -> None:
        folder.mkdir(parents=True, exist_ok=True)


@dataclass
class StageLab(WorkerLab):
    """Workers named by stage and number: "2.0" is the first worker of stage 2."""

    settled: dict[str, set[MicrobatchId]] = field(default_factory=dict)
    """The microbatches in the last contribution of each worker of a later stage."""
    counted: dict[tuple[int, int], Counter[MicrobatchId]] = field(default_factory=dict)
    """The microbatches in a committed update, by stage and round."""

    begun: dict[tuple[int, PeerId], int] = field(default_factory=dict)
    """How many microbatches an origin sent in a round."""
    moves: bool = False
    """Whether workers move to other stages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wanted = self.observer
        self.observer = self._observe

    def _observe(self, name: str, event: dict[str, Any]) -> None:
        stage = event["at"] = self.stage(name)
        if event["event"] == "ready" and stage:
            self._record(name, self.pipeline(name)._passes)
        if event["event"] == "round" and event["committed"]:
            for each in self.workers:
                origin = self.pipeline(each)._origin
                if origin is not None and (step := origin._steps.get(event["round"])) is not None:
                    self.begun[event["round"], self.peer(each)] = len(step.batches)
        if event["event"] == "round" and event["committed"] and stage:
            inside = [each for each in self.settled if self.peer(each) in event["contributors"]]
            counted = Counter(id for each in inside for id in self.settled[each] if self.stage(each) == stage)
            before = self.counted.setdefault((stage, event["round"]), counted)
            assert before == counted, "all workers of a stage count the same"
        self.wanted(name, event)

    def _record(self, name: str, passes: StagePasses) -> None:
        settle = passes.settle

        def recorded(
            counted: Mapping[MicrobatchId, int], kept: Mapping[MicrobatchId, KeptMicrobatch]
        ) -> None:
            self.settled[name] = set(counted)
            settle(counted, kept)

        passes.settle = recorded  # type: ignore[method-assign]

    def check_books(self) -> None:
        """Assert that each stage counted each microbatch of each round once, and that its workers
        have equal parameters."""
        origins: dict[int, set[str]] = {}
        hashes: dict[tuple[int, int], set[str]] = {}
        for name in self.events:
            for number, event in self.rounds(name).items():
                hashes.setdefault((event["at"], number), set()).add(event["params_hash"])
                if not event["at"]:
                    origins.setdefault(number, set()).update(event["contributors"])
        for (stage, number), counted in self.counted.items():
            all_ids = {
                MicrobatchId(number, PeerId(each), part)
                for each in origins[number]
                for part in range(self.begun[number, PeerId(each)])
            }
            assert counted == Counter(all_ids), f"stage {stage}, round {number}"
        assert {key: len(values) for key, values in hashes.items()} == dict.fromkeys(hashes, 1)

    def trainer(self, name: str, job: Job, compute: TimedExecutor) -> Trainer | StageTrainer:
        machine = TrainingMachine(self.folder / "cache", 1 << 33)
        trainer = _UnwrittenStage.open(job, self.stage(name), machine)
        trainer.takes(self.step_s.get(name, 0.0), compute)
        return trainer

    def pipeline(self, name: str) -> Pipeline:
        stages = self.workers[name]._stages
        assert stages is not None
        return stages.pipeline

    def stage(self, name: str) -> int:
        """Return the stage that a worker trains now."""
        return self.moved[name][0] if name in self.moved else stage_of(name)

    def place(self, name: str) -> str:
        return f"{name}/{self.stage(name)}"

    def mover(
        self, name: str, directory: MemoryDirectory, addresses: Callable[[], Sequence[str]]
    ) -> StageMover | None:
        opened = open_job(self.sealed)
        if not self.moves:
            return None
        moved_s = self.moved[name][1] if name in self.moved else -math.inf
        rng = random.Random(name)

        async def may_take(stage: int) -> bool:
            return True

        return StageMover(directory, opened.id, addresses, rng, may_take, moved_s)

    def losses(self) -> dict[int, float]:
        """The loss of each round: the mean of all workers of stage 0, by tokens."""
        found: dict[int, float] = {}
        tokens: dict[int, int] = {}
        for name in self.events:
            for number, event in self.rounds(name).items():
                own = event["own_tokens"]
                if not event["at"] and own and self.peer(name) in event["contributors"]:
                    found[number] = found.get(number, 0.0) + event["loss"] * own
                    tokens[number] = tokens.get(number, 0) + own
        return {number: found[number] / tokens[number] for number in sorted(found)}


def stage_of(name: str) -> int:
    return int(name.partition(".")[0])


def names(workers: Mapping[int, int]) -> list[str]:
    """The names of as many workers of each stage."""
    return [f"{stage}.{number}" for stage, count in workers.items() for number in range(count)]


def whole_losses(job: Job, folder: Path, slots: int, rounds: int) -> list[float]:
    """The losses of one process that trains on the batches of all slots."""
    trainer = Trainer.open(job, TrainingMachine(folder / "cache", 1 << 33))
    losses: list[float] = []
    for number in range(rounds):
        found: list[Any] = [trainer.gradient(number, 0, slot) for slot in range(slots)]
        tokens = sum(report.tokens for _, report in found)
        losses.append(sum(report.loss * report.tokens for _, report in found) / tokens)
        gradient = sum(values.double() * (report.tokens / tokens) for values, report in found)
        trainer.apply_gradient(number, 0, gradient.float())
    return losses
