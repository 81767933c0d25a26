"""Jobs that train an adapter: as PEFT in one process, on frozen weights in every form."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from swarmnet_node.training.checkpoint import CheckpointStore, WorkerCheckpoint
from swarmnet_node.training.model.building import build_model, trained_parameters
from swarmnet_node.training.model.checks import check_model
from swarmnet_node.training.model.config import checkpoint_of
from swarmnet_node.training.steps.trained_model import learning_rate
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.partial_model import weight_bytes
from swarmnet_protocols.quantization.formats import PRECISIONS
from swarmnet_protocols.training.job_settings import JobError
from swarmnet_protocols.training.memory_needs import MemoryNeeds
from tests.support.models.rounding import assert_near
from tests.support.network.virtual_time import run
from tests.support.swarm.weight_swarm import weight_swarm
from tests.support.training.tiny_job import CONFIG, tiny_job, tiny_trainer
from tests.support.training.workers import WorkerLab, train, write_job

WIDE = CONFIG | {"hidden_size": 64, "intermediate_size": 96}
RANK = 4
TRAINED = 2 * RANK * (64 + 64 + 64 + 32)
"""Parameters of an adapter for the queries and values of two layers."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in Hugging Face layout, in bfloat16."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("base")
    model = AutoModelForCausalLM.from_config(LlamaConfig(**WIDE)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def lora(base: Path, **changes: object) -> dict[str, Any]:
    targets = ["q_proj", "v_proj"]
    return {
        "config": None,
        "checkpoint": str(base),
        "train": "lora",
        "rank": RANK,
        "targets": targets,
        **changes,
    }


def dense(base: Path, weights: str, folder: Path) -> Any:
    """The model with the frozen weights of a job, as plain numbers."""
    local = resolve(str(base), cache_dir=folder)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    plain = local.load_whole(**options)
    packed: Any = local.load_whole(**options, packed=True, quantized=PRECISIONS.get(weights))
    for name, module in packed.named_modules():
        if hasattr(module, "packed"):
            plain.get_submodule(name).weight.data = module._products.dequantize(module.packed)
    return plain


@pytest.mark.parametrize("weights", ["stored", *PRECISIONS])
def test_steps_equal_peft_on_the_plain_model(base: Path, tmp_path: Path, weights: str) -> None:
    job = tiny_job(tmp_path, model=lora(base, weights=weights))
    trainer = tiny_trainer(tmp_path, model=lora(base, weights=weights))
    assert trainer.parameter_count == TRAINED

    config = LoraConfig(r=RANK, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    plain: Any = get_peft_model(dense(base, weights, tmp_path / "cache"), config)
    learned = [parameter for _, parameter in trained_parameters(plain)]
    with torch.no_grad():
        for parameter, (_, begun) in zip(learned, trained_parameters(trainer._model), strict=True):
            parameter.copy_(begun)
    t = job.training
    optimizer = torch.optim.AdamW(learned, lr=1.0, betas=t.betas, weight_decay=t.weight_decay)
    losses = []
    for step in range(5):
        batch = trainer.batches.corpus.train.take(trainer.batches.sampler.batch(0, step, 1))
        optimizer.zero_grad()
        logits = plain(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, t.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(t, step, 50)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert trainer.steps(0, 1, 5).loss == pytest.approx(sum(losses) / 5, rel=1e-4)
    expected = torch.cat([parameter.detach().flatten() for parameter in learned])
    assert (trainer.parameters() - expected).abs().max() < 1e-3


def test_peft_loads_checkpoints_and_exports(base: Path, tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, model=lora(base))
    trainer.steps(0, 0, 3)
    checkpoints = CheckpointStore(tmp_path / "checkpoints")
    saved = WorkerCheckpoint("a job", 1, 1, trainer.parameters(), trainer.optimizer_state(), {})
    checkpoints.save(saved, trainer.write)
    loaded = checkpoints.load_newest("a job")
    assert loaded is not None
    assert torch.equal(loaded.parameters, saved.parameters)
    (copy := tmp_path / "copy").mkdir()
    checkpoints.copy_model(copy)
    plain: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base).float(), copy)
    assert plain.peft_config["default"].base_model_name_or_path == base.name, "no path of this machine"
    ids = torch.arange(1, 17)[None]
    with torch.no_grad():
        assert_near(plain(input_ids=ids).logits, trainer._model.eval()(input_ids=ids).logits)


def test_an_adapter_begins_from_the_seed(base: Path, tmp_path: Path) -> None:
    def begun(seed: int, weights: str) -> torch.Tensor:
        return tiny_trainer(tmp_path, job={"seed": seed}, model=lora(base, weights=weights)).parameters()

    assert torch.equal(begun(3, "stored"), begun(3, "int4"))
    assert not torch.equal(begun(3, "stored"), begun(4, "stored"))


@pytest.mark.parametrize("weights", ["stored", *PRECISIONS])
def test_the_stated_bytes_are_those_of_the_model(base: Path, tmp_path: Path, weights: str) -> None:
    told: list[MemoryNeeds] = []
    job = tiny_job(tmp_path, model=lora(base, weights=weights))
    machine = TrainingMachine(tmp_path / "cache", 1 << 30, tell=told.append)
    trainer = Trainer.open(job, machine)
    frozen = weight_bytes(trainer._model) - 4 * TRAINED
    assert (told[0].trained, told[0].frozen_bytes) == (TRAINED, pytest.approx(frozen, rel=0.1))
    with pytest.raises(JobError, match=f"an adapter of {TRAINED:,} parameters: .*GiB are available"):
        Trainer.open(job, replace(machine, available_bytes=told[0].total_bytes - 1))


def test_unknown_targets_and_packed_weights_are_refused(base: Path, tmp_path: Path) -> None:
    def check(model: dict[str, Any]) -> Callable[[], MemoryNeeds]:
        job = tiny_job(tmp_path, model=model)
        return lambda: check_model(job, TrainingMachine(tmp_path / "cache", 1 << 30), vocab_size=2)

    with pytest.raises(JobError, match=r"'targets' in .model. is wrong") as caught:
        check(lora(base, targets=["nowhere"]))()
    assert "q_proj" in caught.value.hint
    with pytest.raises(JobError, match=r"'weights' in .model. is 'int4', but .* is quantised already: q4_1"):
        check(lora(Path("smollm2-135m-instruct"), weights="int4"))()


@pytest.mark.parametrize("codec", ["float32", "int4"])
def test_workers_exchange_the_adapter_alone(base: Path, tmp_path: Path, codec: str) -> None:
    written = write_job(tmp_path, "diloco", "sync_every = 2", f'min_workers = 2\ncodec = "{codec}"')
    before, _, after = written.partition("[model.config]")
    model = f'[model]\ncheckpoint = "{base}"\ntrain = "lora"\nrank = {RANK}\ntargets = ["q_proj", "v_proj"]\n'
    lab = WorkerLab(tmp_path, before + model + after[after.index("[data]") :])
    run(train(lab, "anna", "boris"))
    lab.check_equal()
    events = list(lab.rounds("anna").values())
    assert all(len(event["contributors"]) == 2 for event in events)
    assert max(event["bytes_sent"] for event in events) < 3 * 4 * TRAINED


def test_workers_fetch_the_checkpoint_from_each_other(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub does not answer, and only the manifest of the checkpoint is known."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    theirs = resolve(str(base), cache_dir=tmp_path / "theirs")
    theirs.verify()
    published = {"checkpoint": f"org/base@{'a' * 40}", "manifest": theirs.manifest.hash.hex()}
    job = tiny_job(tmp_path, model=lora(base) | published)
    with weight_swarm() as swarm:
        swarm.host(theirs.shared())
        ours = checkpoint_of(job.model, tmp_path / "ours", peers=swarm.peers({}))
        fetched: Any = build_model(job, TrainingMachine(tmp_path / "ours", 1), ours)
    at_hand: Any = build_model(job, TrainingMachine(tmp_path / "theirs", 1), theirs)
    ids = torch.arange(1, 17)[None]
    assert torch.equal(fetched(input_ids=ids).logits, at_hand(input_ids=ids).logits)
