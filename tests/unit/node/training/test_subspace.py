"""Boundaries in a shared subspace: stages equal the whole model, and an export is an ordinary
model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.model.building import build_model
from swarmnet_node.training.model.checks import check_model, with_cuts
from swarmnet_node.training.model.stage_model import build_stage
from swarmnet_node.training.model.subspace import FAMILIES, enter_subspace
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.training.job_settings import Job, JobError
from tests.support.models.rounding import assert_near
from tests.support.training.tiny_job import CONFIG, tiny_job

RANK = 6
BLOCKS = 3


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    untied = {"model_type": family, "num_hidden_layers": BLOCKS, "tie_word_embeddings": False}
    return CONFIG | untied | changes


def job_of(folder: Path, config: dict[str, Any], rank: int = RANK) -> Job:
    """A job of four stages. Stage 0 has only the ends."""
    stages = {"count": 4, "cuts": (0, 1, 2), "subspace": rank}
    return tiny_job(folder, model={"config": config}, stages=stages)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_a_subspace_are_an_ordinary_model(family: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, config_of(family))
    first, *later = (build_stage(job, stage, tmp_path) for stage in range(4))
    seed, machine = job.job.seed, TrainingMachine(tmp_path, 1)
    other = job.model_copy(update={"job": job.job.model_copy(update={"seed": seed + 1})})
    ordinary: Any = build_model(other, machine)
    entered: Any = build_model(job, machine)
    subspace = enter_subspace(entered, entered.named_modules(), rank=RANK, seed=seed)
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(3))

    sent = first.begin(ids)
    assert sent.shape == (2, 9, RANK)
    for stage in later:
        sent = stage(sent, ids)
    logits = first.end(sent, ids)
    assert_near(logits, entered(input_ids=ids).logits)
    named = {name: each for stage in (first, *later) for name, each in stage.named_parameters()}
    ordinary.load_state_dict(subspace.fold(named))
    assert_near(logits, ordinary(input_ids=ids).logits)

    logits.square().mean().backward()
    entered(input_ids=ids).logits.square().mean().backward()
    for name, parameter in entered.named_parameters():
        assert parameter.grad is not None
        assert_near(parameter.grad, named[name].grad)


def test_stated_memory_is_that_of_a_stage_in_its_subspace(tmp_path: Path) -> None:
    job = job_of(tmp_path, config_of("llama"))
    positions = 2 * job.training.batch_size * job.data.sequence_length
    for stage in range(4):
        needs = check_model(job, TrainingMachine(tmp_path, 1 << 40), vocab_size=256, stage=stage)
        model = build_stage(job, stage, tmp_path)
        assert needs.trained == sum(each.numel() for each in model.parameters())
        assert model.subspace is not None
        frozen = sum(each.numel() for each in model.subspace.buffers())
        assert needs.boundary_bytes == 4 * (4 * positions * RANK + frozen)


@pytest.mark.parametrize(
    ("changes", "rank", "why"),
    [
        ({"model_type": "granite"}, RANK, "another type"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16}, RANK, "another type"),
        ({"tie_word_embeddings": True}, RANK, "output head of its own"),
        ({"attention_bias": True}, RANK, "without biases"),
        ({"mlp_bias": True}, RANK, "without biases"),
        ({}, CONFIG["hidden_size"], "less than the hidden size"),
    ],
)
def test_models_that_would_leave_the_subspace_are_refused(
    changes: dict[str, Any], rank: int, why: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=why):
        with_cuts(job_of(tmp_path, config_of("llama", **changes), rank), tmp_path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": {"path": None, "source": "own", "format": "text"}}, "stays on its machine"),
        ({"model": {"config": None, "checkpoint": "org/name"}}, "starts from a checkpoint"),
        ({"stages": {"codec": "auto"}}, "chooses for whole tensors"),
    ],
)
def test_a_subspace_needs_a_new_model_and_a_fixed_codec(
    changes: dict[str, dict[str, Any]], why: str, tmp_path: Path
) -> None:
    stages = {"count": 4, "cuts": (0, 1, 2), "subspace": RANK} | changes.get("stages", {})
    job = {"model": {"config": config_of("llama")}, "method": {"name": "allreduce", "settings": {}}}
    with pytest.raises(JobError, match=why):
        tiny_job(tmp_path, **(job | changes | {"stages": stages})).check()
