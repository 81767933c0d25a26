"""Ways to save memory: each changes the memory, and what a worker learns hardly or not at all."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.steps.memory_options import MemoryOptions
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import ConfigError
from tests.support.training.tiny_job import CONFIG, tiny_job, tiny_trainer
from tests.unit.node.training.test_expert_balance import biases, with_experts

STEPS = 5


def _trainer(folder: Path, memory: MemoryOptions, **changes: dict[str, Any]) -> Trainer:
    machine = TrainingMachine(folder / "cache", 1 << 30, memory=memory)
    return Trainer.open(tiny_job(folder, **changes), machine)


@pytest.mark.parametrize("memory", [MemoryOptions(recompute=True), MemoryOptions(optimizer_states="cpu")])
def test_recomputing_and_offloading_change_no_bit(tmp_path: Path, memory: MemoryOptions) -> None:
    plain, saving = tiny_trainer(tmp_path), _trainer(tmp_path, memory)
    calls: list[object] = []
    for trainer in (plain, saving):
        layer = trainer._model.get_submodule("model.layers.0.mlp")
        layer.register_forward_pre_hook(lambda module, _: calls.append(module))
        trainer.steps(0, 0, STEPS)
    assert torch.equal(plain.parameters(), saving.parameters())
    assert plain.evaluate(2) == saving.evaluate(2)
    own = next(saving._model.parameters()).untyped_storage().data_ptr()
    shares = own == saving.storage().untyped_storage().data_ptr()
    if memory.recompute:
        assert calls.count(layer) > 2 * STEPS
    assert shares is (memory.optimizer_states != "cpu")


def test_bfloat16_learns_as_float32_does(tmp_path: Path) -> None:
    plain, half = tiny_trainer(tmp_path), _trainer(tmp_path, MemoryOptions(precision="bfloat16"))
    assert {each.dtype for each in half._model.parameters()} == {torch.bfloat16}
    for trainer in (plain, half):
        for round in range(4):
            trainer.steps(round, 0, STEPS)
    assert half.evaluate(4)[0] == pytest.approx(plain.evaluate(4)[0], rel=0.01)
    assert half.parameters().dtype == torch.float32
    assert not torch.equal(half.parameters(), half.parameters().bfloat16().float())
    half.load(plain.parameters())
    assert torch.equal(half.parameters(), plain.parameters())
    assert half.evaluate(4)[0] == pytest.approx(plain.evaluate(4)[0], rel=0.002)


def _live_bytes() -> int:
    """Bytes of all tensors of this process, each memory once."""
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter):
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu":
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize(
    ("memory", "optimizer", "expected"),
    [
        (MemoryOptions("float32"), "adamw", 16),
        (MemoryOptions("bfloat16"), "adamw", 18),
        (MemoryOptions("bfloat16", optimizer_states="cpu"), "adamw", 18),
        (MemoryOptions("float32"), "muon", 12),
    ],
)
def test_the_documented_bytes_are_those_of_all_tensors(
    tmp_path: Path, memory: MemoryOptions, optimizer: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a backward pass and an update: weights, gradients and optimizer states."""
    gc.collect()
    before = _live_bytes()
    wide = CONFIG | {"hidden_size": 256, "intermediate_size": 512}
    trainer = _trainer(tmp_path, memory, model={"config": wide}, training={"optimizer": optimizer})
    found: list[int] = []
    monkeypatch.setattr(trainer._flat, "free_gradients", lambda: found.append(_live_bytes()))
    trainer.steps(0, 0, 2)
    assert (found[0] - before) / trainer.parameter_count == pytest.approx(expected, abs=0.5)


def test_gradients_of_bfloat16_are_summed_in_float32(tmp_path: Path) -> None:
    memory = MemoryOptions(precision="bfloat16")
    parts, _ = _trainer(tmp_path, memory, training={"microbatch": 1}).gradient(0, 0, 0)
    half = _trainer(tmp_path, memory)
    whole, _ = half.gradient(0, 0, 0)
    exact, _ = tiny_trainer(tmp_path).gradient(0, 0, 0)
    for found in (parts, whole):
        assert (found - exact).norm() < 0.02 * exact.norm()
    assert all(parameter.grad is None for parameter in half._model.parameters())


def test_a_worker_of_bfloat16_writes_float32(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = _trainer(tmp_path, MemoryOptions("bfloat16"))
    trainer.steps(0, 0, 1)
    trainer.write(tmp_path / "out", trainer.parameters())
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(torch.cat([each.flatten() for each in loaded.parameters()]), trainer.parameters())


@pytest.mark.parametrize(
    "memory",
    [MemoryOptions("bfloat16", recompute=True), MemoryOptions(recompute=True, optimizer_states="cpu")],
)
def test_biases_of_routers_are_balanced_all_the_same(tmp_path: Path, memory: MemoryOptions) -> None:
    plain, saving = tiny_trainer(tmp_path, **with_experts()), _trainer(tmp_path, memory, **with_experts())
    for trainer in (plain, saving):
        trainer.steps(0, 0, 1)
    agree = (biases(plain) == biases(saving)).float().mean()
    assert biases(plain).any()
    assert agree == 1.0 if memory.precision != "bfloat16" else agree > 0.7


def test_workers_that_share_adamw_keep_it_in_float32(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all workers keep the same optimizer states"):
        _trainer(
            tmp_path, MemoryOptions(optimizer_states="8bit"), method={"name": "allreduce", "settings": {}}
        )


@pytest.mark.parametrize("memory", [MemoryOptions("bfloat16"), MemoryOptions(recompute=True)])
def test_a_job_of_forward_passes_refuses_ways_to_save(tmp_path: Path, memory: MemoryOptions) -> None:
    with pytest.raises(ConfigError, match="zo takes forward passes only"):
        _trainer(tmp_path, memory, method={"name": "zo", "settings": {}})


def test_an_adapter_refuses_a_precision(tmp_path: Path) -> None:
    model = {"config": None, "checkpoint": str(tmp_path), "train": "lora"}
    with pytest.raises(ConfigError, match="frozen weights"):
        _trainer(tmp_path, MemoryOptions("bfloat16"), model=model)


def test_a_model_that_cannot_recompute_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="cannot compute its activations again"):
        _trainer(tmp_path, MemoryOptions(recompute=True))


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("cpu", False), ("mps", False)])
def test_cuda_computes_in_bfloat16_unless_told_otherwise(device: str, expected: bool) -> None:
    assert MemoryOptions().computes_in_bfloat16(device) is expected
    assert MemoryOptions("bfloat16").computes_in_bfloat16(device)
    assert not MemoryOptions("float32").computes_in_bfloat16(device)
