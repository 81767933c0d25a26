"""Workers of a job in stages, over simulated links in virtual time."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.pipeline.microbatches import MicrobatchId
from tests.support.network.virtual_time import TimedExecutor
from tests.support.training.workers import WorkerLab

CPU = torch.device("cpu")


class _UnwrittenStage(StageTrainer):
    """A stage whose checkpoints have no model, so that a test reads none."""

    def write(self, folder: Path, parameters: torch.Tensor) -> None:
        folder.mkdir(parents=True, exist_ok=True)


@dataclass
class StageLab(WorkerLab):
    """Workers named by stage and number: "2.0" is the first worker of stage 2."""

    counted: dict[tuple[int, int], Counter[MicrobatchId]] = field(default_factory=dict)
    """Microbatches in the committed update of each stage and round, by round and stage."""

    def trainer(self, name: str, job: Job, compute: TimedExecutor) -> Trainer | StageTrainer:
        return _UnwrittenStage.open(
            job, stage_of(name), cache_dir=self.folder / "cache", available_bytes=1 << 33, device=CPU
        )

    def losses(self) -> dict[int, float]:
        """The loss of each round: the mean of all workers of stage 0, by tokens."""
        found: dict[int, float] = {}
        tokens: dict[int, int] = {}
        for name in self.events:
            if name.startswith("0."):
                for number, event in self.rounds(name).items():
                    own = event["own_tokens"]
                    if own and self.peer(name) in event["contributors"]:
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
    trainer = Trainer.open(job, cache_dir=folder / "cache", available_bytes=1 << 33, device=CPU)
    losses: list[float] = []
    for number in range(rounds):
        found: list[Any] = [trainer.gradient(number, 0, slot) for slot in range(slots)]
        tokens = sum(report.tokens for _, report in found)
        losses.append(sum(report.loss * report.tokens for _, report in found) / tokens)
        gradient = sum(values.double() * (report.tokens / tokens) for values, report in found)
        trainer.apply_gradient(number, 0, gradient.float())
    return losses
