"""The inner loop: equal to a plain PyTorch loop, and without hidden state between steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from swarmnet_node.training.data.corpus import Sequences
from swarmnet_node.training.data.sampler import BatchSampler, Share
from swarmnet_node.training.model.building import build_model, flatten, write_model
from swarmnet_node.training.model.checks import check_model
from swarmnet_node.training.steps.trained_model import learning_rate
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.training.job_settings import Job, JobError, TrainingSection
from swarmnet_protocols.training.job_templates import template
from swarmnet_protocols.training.jobs import parse_job
from swarmnet_protocols.training.memory_needs import activation_bytes
from swarmnet_protocols.training.pacing import StepLimit
from tests.support.models.rounding import NEAR, assert_near
from tests.support.training.tiny_job import CONFIG, tiny_job, tiny_trainer

PARAMETERS = 256 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32


def _bare_loop(job: Job, trainer: Trainer, folder: Path, steps: int) -> Tensor:
    """The reference: one optimizer over the model's own parameters. Returns the final
    parameters."""
    model: Any = build_model(job, TrainingMachine(folder, 1))
    t = job.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=t.betas, weight_decay=t.weight_decay)
    sampler = BatchSampler(
        job.job.seed, (Share(len(trainer.batches.corpus.train)),), t.batch_size, 5, job.exchange.max_workers
    )
    for step in range(steps):
        batch = trainer.batches.corpus.train.take(sampler.batch(step // 5, step % 5, 1))
        optimizer.zero_grad()
        logits = model(input_ids=batch[:, :-1]).logits
        F.cross_entropy(logits.reshape(-1, 256), batch[:, 1:].reshape(-1)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(t, step, 50)
        optimizer.step()
    return flatten(list(model.parameters()))


def test_only_tokens_that_count_are_in_the_loss(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    batch = torch.arange(1, 35).reshape(2, 17)
    with torch.no_grad():
        logits = trainer._model(input_ids=batch[:, :-1]).logits.flatten(0, 1)
        each = F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none").view(2, 16)
        asked = batch.clone()
        asked[0, :9], asked[1] = ~asked[0, :9], ~asked[1]
        assert float(trainer._loss_sum(asked)) == pytest.approx(float(each[0, 8:].sum()), rel=1e-5)
    unlearned = ~trainer.batches.corpus.train.sources[0].astype(np.int64)
    trainer.batches.corpus = replace(trainer.batches.corpus, train=Sequences((unlearned,), 16))
    assert trainer.steps(0, 0, 1).loss == 0.0  # a batch without a token that counts
    assert torch.isfinite(trainer.parameters()).all()


def test_each_source_counts_in_an_evaluation_by_its_weight(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    text = trainer.batches.corpus.validation.sources[0]
    held_out = Sequences((text[:330], text[1000:1100]), 16)
    alone = []
    for start, count in ((0, 15), (20, 5)):
        batch = held_out.take(np.arange(start, start + count))
        with torch.no_grad():
            alone.append(float(trainer._loss_sum(batch)) / (16 * count))
    trainer.batches.corpus = replace(trainer.batches.corpus, validation=held_out)
    trainer.batches.sampler = replace(
        trainer.batches.sampler, shares=(Share(9, weight=3.0), Share(9, weight=1.0))
    )
    loss, tokens = trainer.evaluate(5)  # 5 batches of 4
    assert loss == pytest.approx(0.75 * alone[0] + 0.25 * alone[1], rel=1e-5)
    assert tokens == 16 * 20


@pytest.mark.parametrize("clip_norm", [0.1, 100.0])
@pytest.mark.parametrize("tied", [True, False])
def test_steps_equal_a_plain_pytorch_loop(tmp_path: Path, clip_norm: float, tied: bool) -> None:
    changes: dict[str, Any] = {
        "training": {"clip_norm": clip_norm},
        "model": {"config": CONFIG | {"tie_word_embeddings": tied}},
    }
    trainer = tiny_trainer(tmp_path, **changes)
    started = trainer.parameters()
    trainer.steps(0, 1, 5)
    trainer.steps(1, 1, 3)
    expected = _bare_loop(tiny_job(tmp_path, **changes), trainer, tmp_path, 8)
    assert_near(trainer.parameters(), expected)
    assert (expected - started).abs().max() > 1e-3


def test_the_loss_goes_down(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    before, tokens = trainer.evaluate(8)
    report = trainer.steps(0, 0, 5)
    for round in range(1, 6):
        trainer.steps(round, 0, 5)
    after, _ = trainer.evaluate(8)
    assert tokens == 8 * 4 * 16
    assert report.tokens == 5 * 4 * 16
    assert after < before - 1
    assert report.loss == pytest.approx(before, rel=0.25)


def test_initial_weights_follow_from_the_seed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kept = torch.random.get_rng_state()
    first = tiny_trainer(tmp_path).parameters()
    assert torch.equal(torch.random.get_rng_state(), kept)
    torch.manual_seed(1)
    assert torch.equal(tiny_trainer(tmp_path).parameters(), first)
    assert not torch.equal(tiny_trainer(tmp_path, job={"seed": 4}).parameters(), first)
    assert first.shape == (PARAMETERS,)
    assert first.dtype == torch.float32


def test_a_round_in_two_parts_equals_one_in_one(tmp_path: Path) -> None:
    whole, parts = tiny_trainer(tmp_path), tiny_trainer(tmp_path)
    whole.steps(0, 1, 5)
    parts.steps(0, 1, 2)
    parts.steps(0, 1, 3, first=2)
    assert torch.equal(whole.parameters(), parts.parameters())


def test_no_step_begins_after_the_time_of_the_others(tmp_path: Path) -> None:
    cut, whole = tiny_trainer(tmp_path), tiny_trainer(tmp_path)
    report = cut.steps(0, 1, 5, limit=StepLimit(2, 0.0))
    expected = whole.steps(0, 1, 2)
    assert (report.steps, report.tokens, report.loss) == (2, expected.tokens, expected.loss)
    assert torch.equal(cut.parameters(), whole.parameters())


def test_slots_train_on_different_samples(tmp_path: Path) -> None:
    one, other = tiny_trainer(tmp_path), tiny_trainer(tmp_path)
    one.steps(0, 0, 1)
    other.steps(0, 1, 1)
    assert not torch.equal(one.parameters(), other.parameters())
    with pytest.raises(ValueError, match="no batch"):
        one.steps(0, 4, 1)


def test_applying_the_own_gradient_equals_a_step(tmp_path: Path) -> None:
    own, handed = tiny_trainer(tmp_path), tiny_trainer(tmp_path)
    for step in range(3):
        own.steps(0, 0, 1, first=step)
        before = handed.parameters()
        gradient, _ = handed.gradient(0, step, 0)
        assert torch.equal(handed.parameters(), before)
        handed.apply_gradient(0, step, gradient)
    assert torch.equal(own.parameters(), handed.parameters())


def test_microbatches_give_the_gradient_of_the_batch(tmp_path: Path) -> None:
    whole, _ = tiny_trainer(tmp_path).gradient(0, 0, 0)
    parts, _ = tiny_trainer(tmp_path, training={"microbatch": 1}).gradient(0, 0, 0)
    assert_near(parts, whole)


def test_training_resumes_from_parameters_and_optimizer_state(tmp_path: Path) -> None:
    straight, resumed = tiny_trainer(tmp_path), tiny_trainer(tmp_path)
    straight.steps(0, 0, 5)
    resumed.load(straight.parameters())
    resumed.load_optimizer_state(straight.optimizer_state())
    straight.steps(1, 0, 5)
    resumed.steps(1, 0, 5)
    assert torch.equal(straight.parameters(), resumed.parameters())

    forgetful = tiny_trainer(tmp_path)
    forgetful.steps(0, 0, 5)
    forgetful.load_optimizer_state({})
    assert forgetful.optimizer_state() == {}


def test_parameters_is_a_copy_and_view_is_not(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.steps(0, 0, 1)
    parameters, view = trainer.parameters(), trainer.view()
    kept = parameters.clone()
    trainer.steps(0, 0, 1, first=1)
    assert torch.equal(parameters, kept)
    assert not torch.equal(view, kept)
    assert torch.equal(view, trainer.parameters())


def _bad_states() -> dict[str, dict[str, Tensor]]:
    good = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.zeros(PARAMETERS),
        "exp_avg_sq": torch.zeros(PARAMETERS),
    }
    nan = torch.zeros(PARAMETERS)
    nan[7] = torch.nan
    return {
        "missing": {name: value for name, value in good.items() if name != "step"},
        "more": good | {"more": torch.zeros(1)},
        "shape": good | {"exp_avg": torch.zeros(3)},
        "dtype": good | {"exp_avg": torch.zeros(PARAMETERS, dtype=torch.float64)},
        "nan": good | {"exp_avg_sq": nan},
        "steps": good | {"step": torch.zeros(PARAMETERS)},
        "endless": good | {"step": torch.tensor(torch.inf)},
    }


@pytest.mark.parametrize("fault", ["missing", "more", "shape", "dtype", "nan", "steps", "endless"])
def test_a_foreign_optimizer_state_is_refused(tmp_path: Path, fault: str) -> None:
    with pytest.raises(IntegrityError):
        tiny_trainer(tmp_path).load_optimizer_state(_bad_states()[fault])


def test_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    for wrong in (torch.zeros(3), torch.zeros(PARAMETERS, dtype=torch.float64)):
        with pytest.raises(IntegrityError):
            trainer.load(wrong)
        with pytest.raises(IntegrityError):
            trainer.apply_gradient(0, 0, wrong)


def test_probes_are_at_shifted_weights_which_stay_as_they_are(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    start = trainer.parameters()
    direction = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(0))

    def probe(by: float) -> float:
        return trainer.loss(0, 0, 0, lambda part, at: part + by * direction[at : at + len(part)])

    probes = [probe(1e-3), probe(-1e-3)]
    assert trainer._flat._gradients is None
    assert torch.equal(trainer.parameters(), start)
    gradient, report = trainer.gradient(0, 0, 0)
    assert (probes[0] - probes[1]) / 2e-3 == pytest.approx(float(gradient @ direction), rel=0.02)
    assert probe(0.0) == pytest.approx(report.loss, rel=NEAR)
    trainer.load(start + 1e-3 * direction)
    assert probe(0.0) == pytest.approx(probes[0], rel=NEAR)


def test_probes_copy_one_layer_at_a_time(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, method={"name": "zo", "settings": {}})
    parameters, sizes, seen = list(trainer._model.parameters()), [], set[int]()
    own = {parameter.data_ptr() for parameter in parameters}

    def shift(part: torch.Tensor, place: int) -> torch.Tensor:
        assert part.dtype == torch.bfloat16
        seen.add(place)
        sizes.append(sum(each.numel() for each in parameters if each.data_ptr() not in own) + len(part))
        return part.clone()

    before = trainer.parameters()
    trainer.loss(0, 0, 0, shift)
    assert len(seen) == len(parameters)
    layer = sum(each.numel() for each in trainer._model.model.layers[0].parameters())
    assert max(sizes) == max(layer, 256 * 32)
    assert {parameter.data_ptr() for parameter in parameters} == own
    assert torch.equal(trainer.parameters(), before)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    section = TrainingSection(batch_size=1, learning_rate=1.0, warmup_steps=10)
    rates = [learning_rate(section, step, 110) for step in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)
    assert learning_rate(section, 10_000, 110) == pytest.approx(0.1)
    assert learning_rate(section.model_copy(update={"schedule": "constant"}), 100, 110) == 1.0


def test_fine_tuning_starts_from_a_checkpoint(tmp_path: Path) -> None:
    trained = tiny_trainer(tmp_path)
    trained.steps(0, 0, 2)
    trained.write(tmp_path / "model", trained.parameters())
    tuned = tiny_trainer(tmp_path, model={"config": None, "checkpoint": str(tmp_path / "model")})
    assert torch.equal(tuned.parameters(), trained.parameters())
    tuned.steps(0, 0, 1)
    assert not torch.equal(tuned.parameters(), trained.parameters())


def test_the_standard_task_has_the_documented_size(tmp_path: Path) -> None:
    job = parse_job(template("diloco").encode()).job
    needs = check_model(job, TrainingMachine(tmp_path, 1 << 40), vocab_size=256)
    assert needs.trained == pytest.approx(1.3e6, rel=0.02)
    assert needs.trained_bytes == 24 * needs.trained
    needed = needs.total_bytes
    file = parse_job(template("diloco").encode())
    line = 1 + template("diloco").splitlines().index("[model.config]")
    with pytest.raises(ConfigError, match=rf"job\.toml:{line}: .*GiB of memory"), file.naming_lines():
        check_model(job, TrainingMachine(tmp_path, needed - 1), vocab_size=256)


def test_a_job_without_gradients_needs_less_memory(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, method={"name": "zo", "settings": {}})
    needs = check_model(job, TrainingMachine(tmp_path, 1 << 40), vocab_size=256)
    assert (needs.trained, needs.trained_bytes) == (PARAMETERS, 3 * PARAMETERS)
    with pytest.raises(JobError, match="GiB of memory"):
        check_model(job, TrainingMachine(tmp_path, needs.total_bytes - 1), vocab_size=256)


def test_the_stated_activations_are_those_that_a_pass_keeps(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    own = {each.untyped_storage().data_ptr() for each in trainer._model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(values: Tensor) -> Tensor:
        kept[values.untyped_storage().data_ptr()] = values
        return values

    batch = trainer.batches.corpus.train.take(torch.arange(4).numpy())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
        trainer._loss_sum(batch)
    found = sum(each.untyped_storage().nbytes() for pointer, each in kept.items() if pointer not in own)
    job, config = tiny_job(tmp_path), trainer._model.config
    logits = 4 * 4 * 16 * config.vocab_size
    assert activation_bytes(job, config) - 2 * logits == pytest.approx(found, rel=0.15)
    assert activation_bytes(job, config, recompute=True) < activation_bytes(job, config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"config": CONFIG | {"model_type": "lama"}}}, "'config' in .model. is wrong"),
        ({"model": {"config": CONFIG | {"model_type": "lama"}}}, "there is no model_type 'lama'$"),
        (
            {"model": {"config": CONFIG | {"num_attenton_heads": 2}}},
            "'num_attenton_heads' in .model.config. is an unknown key$",
        ),
        ({"model": {"config": CONFIG | {"model_type": "clip"}}}, "'config' in .model. is wrong"),
        ({"model": {"config": CONFIG | {"num_attention_heads": 5}}}, "'config' in .model. is wrong"),
        ({"model": {"config": CONFIG | {"hidden_size": -32}}}, "'config' in .model. is wrong"),
        ({"model": {"config": CONFIG | {"hidden_size": "wide"}}}, "'config' in .model. is wrong"),
        ({"model": {"config": CONFIG | {"vocab_size": 255}}}, "has 255 tokens"),
        ({"model": {"config": None, "checkpoint": "no-such-model"}}, "'checkpoint' in .model. is wrong"),
        ({"data": {"sequence_length": 65}}, "more than the 64 positions"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_it_is_built(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobError, match=words):
        tiny_trainer(tmp_path, **changes)


def test_a_huge_model_is_refused_without_allocating_it(tmp_path: Path) -> None:
    huge = CONFIG | {"hidden_size": 1 << 14, "intermediate_size": 1 << 16, "num_hidden_layers": 100}
    with pytest.raises(JobError, match="parameters: training takes"):
        tiny_trainer(tmp_path, model={"config": huge})


def test_transformers_loads_a_written_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = tiny_trainer(tmp_path)
    values = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(1))
    write_model(trainer._model, values, tmp_path / "out")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(flatten(list(loaded.parameters())), values)


def test_timing_a_step_changes_nothing(tmp_path: Path) -> None:
    trainer, other = tiny_trainer(tmp_path), tiny_trainer(tmp_path)
    trainer.time_step()
    assert trainer.step_s > 0
    assert torch.equal(trainer.parameters(), other.parameters())
    assert trainer.steps(0, 0, 2).loss == other.steps(0, 0, 2).loss
