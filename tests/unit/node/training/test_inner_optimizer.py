"""Muon, and optimizer states of 8 bits: steps, states, and what a worker says without them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from swarmnet_node.training.model.building import build_model, flatten
from swarmnet_node.training.steps.flat_model import FlatModel
from swarmnet_node.training.steps.inner_optimizer import InnerOptimizer
from swarmnet_node.training.steps.memory_options import AUTOMATIC, MemoryOptions
from swarmnet_node.training.steps.trained_model import learning_rate
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.training.job_settings import JobError, TrainingSection
from swarmnet_protocols.training.job_templates import template
from swarmnet_protocols.training.jobs import parse_job
from tests.support.models.hub_families import FAMILIES
from tests.support.training.tiny_job import CONFIG, tiny_job, tiny_trainer

MUON = {"training": {"optimizer": "muon"}}


def test_steps_by_muon_equal_a_plain_pytorch_loop(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, **MUON)
    started = trainer.parameters()
    trainer.steps(0, 1, 5)
    job = tiny_job(tmp_path, **MUON)
    model: Any = build_model(job, TrainingMachine(tmp_path, 1))
    t = job.training
    hidden = [each for name, each in model.named_parameters() if each.dim() == 2 and "embed" not in name]
    others = [each for name, each in model.named_parameters() if each.dim() != 2 or "embed" in name]
    optimizers = (
        torch.optim.Muon(hidden, weight_decay=t.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=t.betas, weight_decay=t.weight_decay),
    )
    for step in range(5):
        batch = trainer.batches.corpus.train.take(trainer.batches.sampler.batch(0, step, 1))
        model.zero_grad()
        logits = model(input_ids=batch[:, :-1]).logits
        F.cross_entropy(logits.reshape(-1, 256), batch[:, 1:].reshape(-1)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), t.clip_norm)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(t, step, 50)
            optimizer.step()
    # Muon computes in bfloat16, where the smallest difference of gradients may change a digit.
    expected = flatten(list(model.parameters()))
    assert (trainer.parameters() - expected).norm() < 0.03 * (expected - started).norm()
    assert set(trainer.optimizer_state()) == {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}


def test_hidden_matrices_are_neither_embeddings_nor_biases(tmp_path: Path) -> None:
    config = CONFIG | FAMILIES["gpt_oss"].config | {"vocab_size": 256, "tie_word_embeddings": False}
    job = tiny_job(tmp_path, model={"config": config})
    model = build_model(job, TrainingMachine(tmp_path, 1))
    flat = FlatModel(model, torch.device("cpu"), AUTOMATIC)
    starts, done = {}, 0
    for name, parameter in model.named_parameters():
        starts[done] = name
        done += parameter.numel()
    named = {starts[start].rpartition(".layers.")[2] for start in flat.matrices if start in starts}
    experts = {"gate_up_proj", "down_proj"}
    assert {
        name.removeprefix("0.mlp.experts.") for name in named if name.startswith("0.mlp.experts")
    } == experts
    assert not {
        name for name in named if "bias" in name or "norm" in name or "embed" in name or "head" in name
    }
    assert sum(shape == (32, 32) for shape in flat.matrices.values()) >= 2
    rows = [shape for start, shape in flat.matrices.items() if start not in starts]
    assert rows  # every expert after the first of a layer


def _vector(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def test_states_of_eight_bits_follow_adamw() -> None:
    section = TrainingSection(batch_size=1, learning_rate=1e-2)
    count = 10_000
    exact, small = _vector(count), _vector(count)
    one = InnerOptimizer(section, exact, {})
    other = InnerOptimizer(section, small, {}, eight_bit=True)
    for step in range(20):
        gradient = _vector(count) + step / 20
        one.step(gradient, 1e-2)
        other.step(gradient, 1e-2)
    moved = (exact - _vector(count)).norm()
    assert (exact - small).norm() < 0.05 * moved
    kept = next(iter(other._groups[0].optimizer.state.values()))
    assert kept["state1"].dtype == kept["state2"].dtype == torch.uint8
    again = small.clone()
    resumed = InnerOptimizer(section, again, {}, eight_bit=True)
    resumed.load(other.state())
    before = small.clone()
    for optimizer in (other, resumed):
        optimizer.step(gradient, 1e-2)
    # A block whose largest value is negative gets another scale when it is quantised again.
    assert (again - small).norm() < 2**-7 * (small - before).norm()


@pytest.mark.parametrize("name", ["momentum_buffer", "step", "exp_avg"])
def test_a_state_of_muon_without_a_part_is_refused(tmp_path: Path, name: str) -> None:
    trainer = tiny_trainer(tmp_path, **MUON)
    trainer.steps(0, 0, 1)
    state = trainer.optimizer_state()
    trainer.load_optimizer_state(state)
    with pytest.raises(IntegrityError):
        trainer.load_optimizer_state({key: values for key, values in state.items() if key != name})


def test_a_torch_without_muon_is_told_to_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(JobError, match=r"torch 2\.9 or newer") as refused:
        tiny_trainer(tmp_path, **MUON)
    assert refused.value.hint == "pip install --upgrade torch"


def test_packages_are_checked_before_data_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    job = tiny_job(tmp_path, data={"path": "nowhere"})
    machine = TrainingMachine(tmp_path, 1, memory=MemoryOptions(optimizer_states="8bit"))
    with pytest.raises(ConfigError, match="bitsandbytes") as refused:
        Trainer.open(job, machine)
    assert "pip install bitsandbytes" in refused.value.hint


@pytest.mark.parametrize("method", ["allreduce", "zo"])
def test_muon_is_refused_if_no_parameters_are_exchanged(method: str) -> None:
    text = template(method).replace('# optimizer = "muon"', 'optimizer = "muon"')
    with pytest.raises(ConfigError, match=r"'optimizer' in .training. is 'muon', but workers exchange"):
        parse_job(text.encode())
    parse_job(template("diloco").replace('# optimizer = "muon"', 'optimizer = "muon"').encode())
