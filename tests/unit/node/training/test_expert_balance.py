"""The biases by which routers choose experts are trained towards an even load, exchanged, and
written into checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from swarmnet_node.training.data.sampler import BatchSampler, Share
from swarmnet_node.training.model import expert_balance
from swarmnet_node.training.model.building import build_model, read_model, write_model
from swarmnet_node.training.model.expert_balance import BIAS, STEP
from swarmnet_node.training.steps.trained_model import learning_rate
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.models.checkpoints.conversion import experts_modules
from tests.support.models.hub_families import FAMILIES
from tests.support.models.rounding import assert_near
from tests.support.training.tiny_job import CONFIG, tiny_job, tiny_trainer

EXPERTS = 4


def with_experts(family: str = "glm4_moe") -> dict[str, Any]:
    """The changes that make the tiny job train a mixture of experts with biases, its first block
    dense."""
    kept = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "pad_token_id": None, "eos_token_id": None}
    config = {**CONFIG, **FAMILIES[family].config, "vocab_size": 256, "max_position_embeddings": 64, **kept}
    return {"model": {"config": config}}


def biases(trainer: Trainer) -> Tensor:
    """The biases of all blocks, ``[blocks with experts, EXPERTS]``."""
    return torch.stack(
        [each.detach().clone() for name, each in trainer._model.named_parameters() if BIAS in name]
    )


def loads(model: Any, tokens: Tensor) -> Tensor:
    """How many rows choose each expert, ``[blocks with experts, EXPERTS]``."""
    found = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args: found.append(args[1].flatten().bincount(minlength=EXPERTS))
        )
        for _, module in experts_modules(model)
    ]
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_steps_equal_a_plain_loop_with_the_published_update(family: str, tmp_path: Path) -> None:
    """AdamW for the weights and b += u * sign(mean load - load) for the biases, of buffers of
    transformers' own model."""
    from transformers import AutoModelForCausalLM

    changes = with_experts(family)
    trainer = tiny_trainer(tmp_path, **changes)
    job = tiny_job(tmp_path, **changes)
    write_model(trainer._model, trainer.parameters(), tmp_path / "begin")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "begin", dtype=torch.float32).train()
    t = job.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=t.betas, weight_decay=t.weight_decay)
    sampler = BatchSampler(
        job.job.seed, (Share(len(trainer.batches.corpus.train)),), t.batch_size, 5, job.exchange.max_workers
    )
    buffers = [each for name, each in model.named_buffers() if BIAS in name]
    assert len(buffers) == 2
    for step in range(5):
        batch = trainer.batches.corpus.train.take(sampler.batch(0, step, 1))
        rows = loads(model, batch[:, :-1]).float()
        optimizer.zero_grad()
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.reshape(-1, 256), batch[:, 1:].reshape(-1)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(t, step, 50)
        optimizer.step()
        for buffer, of_block in zip(buffers, rows, strict=True):
            buffer.add_(STEP * torch.sign(of_block.mean() - of_block))
    trainer.steps(0, 1, 5)
    assert torch.equal(biases(trainer), torch.stack(buffers))
    assert biases(trainer).abs().max() > 2 * STEP
    mine = dict(trainer._model.named_parameters())
    for name, parameter in model.named_parameters():
        assert_near(mine[name], parameter)


def test_workers_that_exchange_gradients_move_biases_by_all_loads(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, **with_experts())
    sampler = trainer.batches.sampler
    tokens = [trainer.batches.corpus.train.take(sampler.batch(0, 0, slot))[:, :-1] for slot in range(2)]
    rows = sum(loads(trainer._model, each) for each in tokens).float()  # type: ignore[union-attr]
    gradients = [trainer.gradient(0, 0, slot)[0] for slot in range(2)]
    before = biases(trainer)
    trainer.apply_gradient(0, 0, (gradients[0] + gradients[1]) / 2)
    expected = STEP * torch.sign(rows.mean(1, keepdim=True) - rows)
    assert torch.equal(biases(trainer), before + expected)


def test_the_own_gradient_in_parts_equals_a_step(tmp_path: Path) -> None:
    changes = with_experts() | {"training": {"microbatch": 1}}
    one, other = tiny_trainer(tmp_path, **with_experts()), tiny_trainer(tmp_path, **changes)
    one.steps(0, 0, 1)
    other.apply_gradient(0, 0, other.gradient(0, 0, 0)[0])
    assert torch.equal(biases(one), biases(other))


def test_evaluation_counts_no_loads(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, **with_experts())
    before = trainer.gradient(0, 0, 0)[0]
    trainer.evaluate(1)
    trainer.loss(0, 0, 0, lambda part, _: part)
    assert not trainer._balance._loads.any()
    assert torch.equal(trainer.gradient(0, 0, 0)[0], before)


def test_biases_make_the_load_even(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for step in (0.0, 0.01):  # the job is short, so the steps are long
        monkeypatch.setattr(expert_balance, "STEP", step)
        trainer = tiny_trainer(tmp_path, **with_experts())
        for number in range(8):
            trainer.steps(number, 0, 5)
        tokens = trainer.batches.corpus.train.take(torch.arange(64).numpy())[:, :-1]
        rows = loads(trainer._model, tokens).float()
        found[step] = (rows.amax(1) / rows.mean(1)).tolist()
    assert max(found[0.01]) < 1.5 < min(found[0.0])


def test_transformers_loads_the_biases_that_were_trained(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = tiny_trainer(tmp_path, **with_experts())
    trainer.steps(0, 0, 3)
    write_model(trainer._model, trainer.parameters(), tmp_path / "out")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    found = torch.stack([each for name, each in loaded.named_buffers() if BIAS in name])
    assert found.any()
    assert torch.equal(found, biases(trainer))
    assert torch.equal(read_model(tmp_path / "out"), trainer.parameters())


def test_fine_tuning_begins_with_the_biases_of_the_checkpoint(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, **with_experts())
    trainer.steps(0, 0, 3)
    write_model(trainer._model, trainer.parameters(), tmp_path / "out")
    job = tiny_job(tmp_path, model={"config": None, "checkpoint": str(tmp_path / "out")})
    model = build_model(job, TrainingMachine(tmp_path / "cache", 1))
    found = [each for name, each in model.named_parameters() if BIAS in name]
    assert torch.equal(torch.stack(found), biases(trainer))
