"""A job goes on from checkpoints of a job with other cuts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.pipeline.recut import recut
from swarmnet_node.training.replica import Replica
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.job_settings import Job
from tests.support.training.tiny_job import CONFIG, tiny_job

DILOCO: dict[str, Any] = {
    "model": {"config": CONFIG | {"num_hidden_layers": 4}},
    "method": {"name": "diloco", "settings": {"sync_every": 2}},
}


def cut(folder: Path, cuts: tuple[int, ...]) -> Job:
    stages = {"stages": {"count": len(cuts) + 1, "cuts": cuts}} if cuts else {}
    return tiny_job(folder, **DILOCO, **stages)


def replicas(job: Job, folder: Path) -> list[Replica]:
    machine = TrainingMachine(folder / "cache", 1 << 30)
    if job.stages is None:
        return [Replica(job, Trainer.open(job, machine))]
    return [Replica(job, StageTrainer.open(job, stage, machine)) for stage in range(job.stages.count)]


def drawn(replica: Replica, seed: int) -> torch.Tensor:
    """A gradient that depends on the names of the tensors alone."""
    parts = []
    for name, shape in replica.trainer.shapes.items():
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        parts.append(torch.randn(shape.numel(), generator=generator) * 1e-3)
    return torch.cat(parts)


def take_round(replica: Replica, round: int) -> None:
    from swarmnet_protocols.training.methods import Average

    for step in range(2):
        replica.trainer.apply_gradient(round, step, drawn(replica, 2 * round + step))
    difference = replica.method.contribution(round, replica.trainer.view())
    replica.apply(round, Average(difference.clone(), ("me",)))


def named(found: list[Replica]) -> dict[str, torch.Tensor]:
    """All tensors, with the moments of the optimizer and the outer momentum."""
    values: dict[str, torch.Tensor] = {}
    for replica in found:
        saved = replica.checkpoint("job", 2)
        vectors = {"values": replica.trainer.view(), **saved.optimizer, **saved.outer}
        for key, vector in vectors.items():
            done = 0
            for name, shape in replica.trainer.shapes.items() if vector.dim() else ():
                values[f"{key} of {name}"] = vector[done : (done := done + shape.numel())].clone()
    return values


@pytest.mark.parametrize("after", [(), (2,), (0, 3)], ids=["whole", "two", "three"])
@pytest.mark.parametrize("before", [(1, 2, 3), ()], ids=["four", "whole"])
def test_a_job_goes_on_under_other_cuts(
    before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path
) -> None:
    """Parameters, moments and outer momentum go on as if the cuts had never changed."""
    old, stores = replicas(cut(tmp_path, before), tmp_path), []
    for number, replica in enumerate(old):
        take_round(replica, 0)
        store = CheckpointStore(tmp_path / str(number))
        store.save(replica.checkpoint("old", 1), replica.trainer.write)
        stores.append(tmp_path / str(number))
    new = replicas(cut(tmp_path, after), tmp_path)
    for replica in new:
        saved = recut(stores, replica.trainer.shapes, "new")
        assert (saved.job_id, saved.round, saved.revision) == ("new", 1, 1)
        replica.restore(saved)
    assert named(new).keys() == named(old).keys()
    for replica in [*old, *new]:
        take_round(replica, 1)

    expected = named(old)
    for name, values in named(new).items():
        assert torch.equal(values, expected[name]), name


def test_checkpoints_that_make_up_no_part_are_refused(tmp_path: Path) -> None:
    found = replicas(cut(tmp_path, (2,)), tmp_path)
    stores = [CheckpointStore(tmp_path / str(number)) for number in range(2)]
    paths = [tmp_path / "0", tmp_path / "1"]
    shapes = found[0].trainer.shapes | found[1].trainer.shapes
    with pytest.raises(ConfigError, match="has no checkpoint"):
        recut(paths, shapes, "new")
    for replica, store in zip(found, stores, strict=True):
        store.save(replica.checkpoint("old", 1), replica.trainer.write)
    with pytest.raises(ConfigError, match="these checkpoints have no"):
        recut(paths[1:], shapes, "new")
    stores[1].save(replace(found[1].checkpoint("old", 2)), found[1].trainer.write)
    with pytest.raises(ConfigError, match="different jobs or rounds"):
        recut(paths, shapes, "new")
