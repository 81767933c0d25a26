"""Stages of a model: together they are the whole model, and each is made alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.stage_model import build_stage
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_protocols.training.job_settings import Job, JobError
from swarmnet_protocols.training.pipeline.stages import balanced_cuts, spans
from tests.support.models.rounding import assert_near
from tests.support.training.tiny_job import CONFIG, tiny_job, tiny_trainer

CPU = torch.device("cpu")
BLOCKS = {"num_hidden_layers": 4}
LLAMA = CONFIG | BLOCKS
MOE = (
    CONFIG
    | BLOCKS
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "tie_word_embeddings": False,
    }
)
GRANITE = LLAMA | {"model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 8.0}


def stages_of(job: Job, folder: Path) -> list[StageTrainer]:
    assert job.stages is not None
    trainers = []
    for stage, span in enumerate(spans(job.stages.cuts, 4)):  # type: ignore[arg-type]
        model = build_stage(
            job.model, span=span, has_ends=stage == 0, seed=job.job.seed, cache_dir=folder / "cache"
        )
        trainers.append(StageTrainer(job, stage, model, device=CPU))
    return trainers


def around(trainers: list[StageTrainer], batch: torch.Tensor) -> torch.Tensor:
    """The summed loss of a microbatch that has been all the way round, and home again."""
    first, *later = trainers
    outputs = [first.begin(batch)]
    inputs = []
    for trainer in later:
        inputs.append(outputs[-1].detach().requires_grad_())
        outputs.append(trainer.forward(inputs[-1], len(batch)))
    inputs.append(outputs[-1].detach().requires_grad_())
    loss = first.end(inputs[-1], batch)
    gradient = first.accumulate(loss, None, inputs.pop())
    for trainer, sent in zip(reversed(trainers), reversed(outputs), strict=True):
        gradient = trainer.accumulate(sent, gradient, inputs.pop() if inputs else None)
    assert gradient is None
    return loss.detach()


@pytest.mark.parametrize("config", [LLAMA, MOE, GRANITE], ids=["llama", "moe", "granite"])
@pytest.mark.parametrize("cuts", [(1, 2, 3), (0, 3)], ids=str)
def test_stages_train_like_the_whole_model(
    tmp_path: Path, config: dict[str, Any], cuts: tuple[int, ...]
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "model": {"config": config},
        "training": {"batch_size": 4, "microbatch": 2, "clip_norm": 0.5},
        "method": {"name": "allreduce", "settings": {}},
        "stages": {"count": len(cuts) + 1, "cuts": cuts},
    }
    job, whole = tiny_job(tmp_path, **changes), tiny_trainer(tmp_path, **changes)
    stages = stages_of(job, tmp_path)
    names = [name for name, _ in whole._model.named_parameters()]
    for step in range(3):
        batch = whole.batches.take(step, 0, 1)
        losses = sum(float(around(stages, part)) for part in whole.batches.parts(batch))
        gradient, report = whole.gradient(step, 0, 1)
        assert losses / report.tokens == pytest.approx(report.loss, rel=1e-6)
        whole.apply_gradient(step, 0, gradient)
        for trainer in stages:
            trainer.apply_gradient(step, 0, trainer.gradients() / report.tokens)
            trainer.free_gradients()
        found = {name: each for stage in stages for name, each in stage._model.named_parameters()}
        assert found.keys() == set(names)
        assert_near(whole.parameters(), torch.cat([found[name].detach().flatten() for name in names]))


def test_a_stage_is_drawn_alone_from_the_seed(tmp_path: Path) -> None:
    changes = {"model": {"config": MOE}, "stages": {"count": 2, "cuts": (2,)}}
    whole = dict(tiny_trainer(tmp_path, **changes)._model.named_parameters())
    for trainer in stages_of(tiny_job(tmp_path, **changes), tmp_path):
        for name, parameter in trainer._model.named_parameters():
            assert torch.equal(parameter, whole[name]), name


def test_a_stage_is_loaded_alone_from_a_checkpoint(tmp_path: Path) -> None:
    trained = tiny_trainer(tmp_path, model={"config": MOE})
    trained.write(tmp_path / "checkpoint", trained.parameters() + 0.25)
    changes = {
        "model": {"config": None, "checkpoint": str(tmp_path / "checkpoint")},
        "stages": {"count": 3, "cuts": (1, 2)},
    }
    whole = dict(tiny_trainer(tmp_path, **changes)._model.named_parameters())
    assert torch.equal(torch.cat([each.flatten() for each in whole.values()]), trained.parameters() + 0.25)
    for trainer in stages_of(tiny_job(tmp_path, **changes), tmp_path):
        for name, parameter in trainer._model.named_parameters():
            assert torch.equal(parameter, whole[name]), name
            assert parameter.requires_grad


def test_a_model_that_is_not_blocks_is_not_cut(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 4, "n_head": 4}
    job = tiny_job(tmp_path, model={"config": config}, stages={"count": 2, "cuts": (2,)})
    with pytest.raises(JobError, match="cannot be trained in stages"):
        stages_of(job, tmp_path)


@pytest.mark.parametrize("ends", [0, 1, 5, 30, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_cuts_make_the_largest_stage_smallest(ends: int, count: int) -> None:
    blocks = [5, 5, 9, 1, 7, 2]

    def largest(cuts: tuple[int, ...]) -> int:
        sizes = [sum(blocks[start:end]) for start, end in spans(cuts, len(blocks))]
        return max(ends + sizes[0], *sizes[1:], 0)

    def every(stages: int, first: int) -> list[tuple[int, ...]]:
        if stages == 0:
            return [()]
        return [(cut, *rest) for cut in range(first, len(blocks)) for rest in every(stages - 1, cut + 1)]

    cuts = balanced_cuts(blocks, ends, count)
    assert len(cuts) == count - 1
    assert all(one < other for one, other in pairwise((-1, *cuts, len(blocks))))
    assert largest(cuts) == min(map(largest, every(count - 1, 0)))
