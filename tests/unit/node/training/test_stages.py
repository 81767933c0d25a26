"""Stages of a model: together they are the whole model, and each is made alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swarmnet_node.training.job_store import check_job
from swarmnet_node.training.model.building import STAGE_FILE, read_model
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.training.job_settings import Job, JobError
from swarmnet_protocols.training.memory_needs import MemoryNeeds
from swarmnet_protocols.training.pipeline.stages import balanced_cuts
from tests.support.models.rounding import assert_near
from tests.support.training.tiny_job import CONFIG, tiny_job, tiny_trainer

CPU = torch.device("cpu")
ALLREDUCE: dict[str, dict[str, Any]] = {"method": {"name": "allreduce", "settings": {}}}
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
SIGMOID = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GRANITE = LLAMA | {"model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 8.0}


def stages_of(job: Job, folder: Path) -> list[StageTrainer]:
    assert job.stages is not None
    machine = TrainingMachine(folder / "cache", 1 << 30)
    return [StageTrainer.open(job, stage, machine) for stage in range(job.stages.count)]


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


@pytest.mark.parametrize(
    ("stages", "config", "message"),
    [
        ({"count": 2}, {"model_type": "gpt2", "n_embd": 32}, "cannot be trained in stages"),
        ({"count": 2}, {"model_type": "deepseek_v3", **SIGMOID}, "biases of its routers"),
        ({"count": 6}, LLAMA, "4 blocks make at most 5 stages"),
        ({"count": 2, "cuts": [4]}, LLAMA, "has block 4"),
    ],
)
def test_a_job_whose_model_has_no_such_stages_is_refused(
    tmp_path: Path, stages: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    job = tiny_job(tmp_path, model={"config": {"vocab_size": 256, **config}}, stages=stages, **ALLREDUCE)
    with pytest.raises(JobError, match=message):
        check_job(job, tmp_path / "cache", lambda *_: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": {"count": 3, "cuts": [1]}}, "3 stages need 2"),
        ({"stages": {"count": 3, "cuts": [2, 2]}}, "increase"),
        ({"stages": {"count": 2}, "method": {"name": "zo", "settings": {}}}, "needs gradients"),
    ],
)
def test_stages_that_contradict_the_job_are_refused(
    tmp_path: Path, changes: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        tiny_job(tmp_path, **changes).check()


def test_create_states_the_memory_of_the_largest_stage(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {"model": {"config": LLAMA}, **ALLREDUCE}
    told: list[MemoryNeeds] = []
    job = tiny_job(tmp_path, stages={"count": 3}, **changes)
    checked = check_job(job, tmp_path / "cache", lambda *_: None, told.append)
    check_job(tiny_job(tmp_path, **changes), tmp_path / "cache", lambda *_: None, told.append)
    assert checked.stages is not None
    assert checked.stages.cuts == (0, 2)
    assert told[0].parameters == told[1].trained
    assert told[0].trained_bytes < told[1].trained_bytes / 2
    with pytest.raises(JobError, match="a stage of"):
        StageTrainer.open(
            job.model_copy(update={"stages": checked.stages}),
            1,
            TrainingMachine(tmp_path / "cache", told[0].total_bytes - 1),
        )


@pytest.mark.parametrize("ends", [0, 1, 5, 30, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_cuts_make_the_largest_stage_smallest(ends: int, count: int) -> None:
    blocks = [5, 5, 9, 1, 7, 2]

    def largest(cuts: tuple[int, ...]) -> int:
        sizes = [sum(blocks[start:end]) for start, end in pairwise((0, *cuts, len(blocks)))]
        return max(ends + sizes[0], *sizes[1:], 0)

    def every(stages: int, first: int) -> list[tuple[int, ...]]:
        if stages == 0:
            return [()]
        return [(cut, *rest) for cut in range(first, len(blocks)) for rest in every(stages - 1, cut + 1)]

    cuts = balanced_cuts(blocks, ends, count)
    assert len(cuts) == count - 1
    assert all(one < other for one, other in pairwise((-1, *cuts, len(blocks))))
    assert largest(cuts) == min(map(largest, every(count - 1, 0)))


def test_a_checkpoint_of_a_stage_names_tensors_of_the_whole_model(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "model": {"config": LLAMA},
        "stages": {"count": 2, "cuts": [2]},
        **ALLREDUCE,
    }
    job, whole = tiny_job(tmp_path, **changes), tiny_trainer(tmp_path, **changes)._model
    later = stages_of(job, tmp_path)[1]
    later.write(tmp_path, later.parameters() + 1)
    assert torch.equal(read_model(tmp_path), later.parameters() + 1)
    for name, values in load_file(tmp_path / STAGE_FILE).items():
        assert torch.equal(values, whole.get_parameter(name) + 1)
