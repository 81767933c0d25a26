"""PEFT and transformers' Trainer give the same results on a swarm model and on the plain model."""

import copy
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

from swarmnet import AutoSwarmModelForCausalLM
from swarmnet_client.tuning.adapter_dir import load_adapter
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net.protocol_ids import PING
from tests.support.models.rounding import NEAR, assert_near
from tests.support.swarm.generation import padded
from tests.support.swarm.swarm_lab import Reference
from tests.support.swarm.tiny_swarm import TinySwarm, load_tiny, tiny_swarm

TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22], [90, 3, 90, 3, 90, 3]]
TOKENS = 6
pytestmark = pytest.mark.filterwarnings("ignore:Position ids are not supported")

LORA = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
METHODS = {
    "lora": LORA,
    "prompt": PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "p-tuning": PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, task_type="CAUSAL_LM"),
    "prefix": PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}
methods = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(reference: Reference) -> Iterator[TinySwarm]:
    with tiny_swarm(reference) as running:
        yield running


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """PEFT draws its parameters from torch's own generator."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def whole(tiny: TinySwarm) -> Any:
    return tiny.reference.local.load_whole(dtype=torch.float32, device=torch.device("cpu"))


def shaken(model: Any, seed: int = 1) -> Any:
    """Trainable parameters as after some training: far enough from the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


@contextmanager
def tuned(tiny: TinySwarm, method: str) -> Iterator[Any]:
    """PEFT on the swarm model, for as long as the context."""
    model = shaken(get_peft_model(tiny.model, METHODS[method]))
    try:
        yield model
    finally:
        if method == "lora":
            model.unload()


def learning_twin(tiny: TinySwarm, method: str, model: Any) -> Any:
    """PEFT on the plain model, with the same parameters."""
    twin = get_peft_model(whole(tiny), METHODS[method])
    with torch.no_grad():
        for parameter, source in zip(learning(twin), learning(model), strict=True):
            parameter.copy_(source)
    return twin


def saved_twin(tiny: TinySwarm, model: Any, directory: Path) -> Any:
    """The adapter that ``model`` saves, loaded by PEFT on the plain model."""
    model.save_pretrained(directory)
    return PeftModel.from_pretrained(whole(tiny), directory)


def labelled(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    batch = padded(texts, left=False)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def learning(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def greedy(model: Any, texts: list[list[int]], **options: Any) -> list[list[int]]:
    """The new tokens of each row."""
    batch = padded(texts, left=True)
    answer = model.generate(
        **batch, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0, **options
    )
    new: list[list[int]] = answer[:, batch["input_ids"].shape[1] :].tolist()
    return new


@methods
def test_loss_and_gradients_are_those_of_the_plain_model(calm: TinySwarm, method: str) -> None:
    with tuned(calm, method) as ours:
        models = (ours, learning_twin(calm, method, ours))
        losses = []
        for model in models:
            loss = model(**labelled(TEXTS)).loss
            loss.backward()
            losses.append(loss.detach())
        assert_near(*losses)
        for mine, theirs in zip(*map(learning, models), strict=True):
            assert theirs.grad.any()
            assert_near(mine.grad, theirs.grad)
        with torch.inference_mode():
            assert_near(*(model.eval()(**labelled(TEXTS)).loss for model in models))


@methods
def test_generation_equals_that_of_the_saved_adapter(tiny: TinySwarm, method: str, tmp_path: Path) -> None:
    """Padding in a batch changes no row; plain PEFT is asked for rows alone, as it counts padding
    behind prompts."""
    with tuned(tiny, method) as ours:
        theirs = saved_twin(tiny, ours, tmp_path)
        expected = [greedy(theirs, [text])[0] for text in TEXTS]
        assert greedy(ours, TEXTS) == expected
        beams = [greedy(theirs, [text], num_beams=3)[0] for text in TEXTS]
        assert greedy(ours, TEXTS, num_beams=3) == beams


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers:UserWarning")
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_an_adapter_of_embeddings_or_head_generates_as_peft_does(
    tiny: TinySwarm, module: str, tmp_path: Path
) -> None:
    """PEFT stores the weight of such a module next to its LoRA pair."""
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", module], init_lora_weights=False)
    theirs = get_peft_model(whole(tiny), config)
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(tiny.model, tmp_path)
    try:
        assert greedy(ours, TEXTS) == greedy(theirs.eval(), TEXTS)
    finally:
        ours.unload()


@methods
def test_without_its_adapter_a_model_is_the_plain_one(tiny: TinySwarm, method: str) -> None:
    expected = greedy(whole(tiny), TEXTS)
    with tuned(tiny, method) as ours:
        assert greedy(ours, TEXTS) != expected
        with ours.disable_adapter():
            assert greedy(ours, TEXTS) == expected
    assert greedy(tiny.model, TEXTS) == expected


@methods
def test_a_session_goes_on_with_the_adapter(tiny: TinySwarm, method: str, tmp_path: Path) -> None:
    with tuned(tiny, method) as ours, tiny.model.session():
        theirs = saved_twin(tiny, ours, tmp_path)
        first = [*TEXTS[0], *greedy(theirs, TEXTS[:1])[0]]
        assert [*TEXTS[0], *greedy(ours, TEXTS[:1])[0]] == first
        longer = [*first, 30, 31]
        assert greedy(ours, [longer]) == greedy(theirs, [longer])
        if method != "lora":
            with ours.disable_adapter():
                assert greedy(ours, [longer]) == greedy(whole(tiny), [longer])


def test_eight_clients_with_eight_adapters_at_once(tiny: TinySwarm, tmp_path: Path) -> None:
    """Each generates, again and again, what its own saved adapter gives alone."""
    answers: dict[int, list[list[list[int]]]] = {}
    expected = {}
    barrier = threading.Barrier(8)

    def ask(number: int, model: Any) -> None:
        barrier.wait()
        answers[number] = [greedy(model, TEXTS) for _ in range(3)]

    with ExitStack() as stack:
        models = {n: stack.enter_context(tiny.another_client(f"client {n}")) for n in range(8)}
        tuned_models = {n: shaken(get_peft_model(model, LORA), seed=n) for n, model in models.items()}
        threads = [threading.Thread(target=ask, args=item) for item in tuned_models.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n, model in tuned_models.items():
            twin = saved_twin(tiny, model, tmp_path / str(n))
            expected[n] = [[greedy(twin, [text])[0] for text in TEXTS]] * 3
    assert answers == expected
    assert len({str(answer) for answer in answers.values()}) == 8


def test_a_session_does_not_outlive_its_adapter(tiny: TinySwarm) -> None:
    with tuned(tiny, "lora") as ours, tiny.model.session() as cache, torch.no_grad():
        ours(torch.tensor(TEXTS[:1]), past_key_values=cache)
        ours(torch.tensor([[3]]), past_key_values=cache)
        learning(ours)[0].add_(1)
        with pytest.raises(ValueError, match="adapter has changed"):
            ours(torch.tensor([[3]]), past_key_values=cache)
        cache.rewind(0)
        ours(torch.tensor(TEXTS[:1]), past_key_values=cache)


def test_a_change_that_autograd_does_not_count_is_noticed(tiny: TinySwarm) -> None:
    """Fused optimizers, the Trainer's default, change parameters without increasing autograd's
    version counter."""
    with tuned(tiny, "lora") as ours, tiny.model.session():
        before = greedy(ours, TEXTS[:1])
        with torch.no_grad():
            for parameter in learning(ours):
                version = parameter._version
                parameter.data.mul_(-2)
                assert parameter._version == version
        with pytest.raises(ValueError, match="adapter has changed"):
            greedy(ours, [[*TEXTS[0], *before[0]]])
        for parameter in learning(ours):
            parameter.data.div_(-2)
        assert greedy(ours, TEXTS[:1]) == before


def test_a_cache_that_is_continued_is_looked_at_again(tiny: TinySwarm) -> None:
    with tuned(tiny, "lora") as ours, tiny.model.session() as cache:
        before = greedy(ours, TEXTS[:1], past_key_values=cache)
        for parameter in learning(ours):
            parameter.data.mul_(-2)
        with pytest.raises(ValueError, match="adapter has changed"):
            greedy(ours, [[*TEXTS[0], *before[0]]], past_key_values=cache)


def test_a_mask_does_not_hide_a_prefix(tiny: TinySwarm) -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    with tuned(tiny, "prefix") as ours:
        prefix = ours.get_prompt(1)
        with pytest.raises(ValueError, match="ones for the 4 positions"):
            tiny.model(torch.tensor([[5, 6]]), attention_mask=mask, past_key_values=prefix)


def test_requests_that_hosts_cannot_serve_are_refused_before_sending(tiny: TinySwarm) -> None:
    said: list[Any] = []
    with tuned(tiny, "lora") as ours:
        tiny.lab.network.observers.append(said.append)
        ids = torch.tensor(TEXTS[:1])
        for module in tiny.model.modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = torch.nn.Dropout(0.1)
        with pytest.raises(ConfigError, match="lora_dropout=0"):
            ours.train()(ids, labels=ids)
        with pytest.raises(ConfigError, match="adapter_names"):
            ours.eval()(ids, adapter_names=["default"])
        with pytest.raises(ConfigError, match="merge"):
            ours.merge_and_unload()
        tiny.lab.network.observers.remove(said.append)
    assert {delivery.protocol.id for delivery in said} <= {PING.id}


def test_the_example_in_the_page_on_tuning_runs(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    *_, example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    with tiny_swarm(reference) as running:
        monkeypatch.setattr(AutoSwarmModelForCausalLM, "from_pretrained", lambda *_, **__: running.model)
        exec(example, names)
    assert names["loss"].isfinite()
    assert names["answer"].shape[1] > names["batch"].input_ids.shape[1]
    assert {path.name for path in (tmp_path / "haiku").iterdir()} >= {"adapter_model.safetensors"}


# ---- a classifier ------------------------------------------------------------------------------


def test_a_classifier_learns_as_on_the_plain_model(calm_reference: Reference, tmp_path: Path) -> None:
    """LoRA in the blocks and a head on the client; the saved adapter gives the same classes on the
    plain model."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
    batch = padded(TEXTS, left=False) | {"labels": torch.tensor([2, 0, 1])}
    with tiny_swarm(calm_reference, labels=3) as running:
        assert running.model.score.weight.isfinite().all()
        ours = shaken(get_peft_model(running.model, config))
        ours.save_pretrained(tmp_path / "adapter")

        def loaded(**options: Any) -> Any:
            plain = AutoModelForSequenceClassification.from_pretrained(
                calm_reference.local.path, num_labels=3, dtype=torch.float32
            )
            plain.config.pad_token_id = 0
            return PeftModel.from_pretrained(plain, tmp_path / "adapter", **options)

        theirs = loaded(is_trainable=True)
        losses = []
        for model in (ours, theirs):
            output = model(**batch)
            output.loss.backward()
            losses.append(output.loss.detach())
        assert_near(*losses)
        named = [dict(model.named_parameters()) for model in (ours, theirs)]
        names = [name for name, parameter in named[0].items() if parameter.requires_grad]
        assert any("score" in name for name in names)
        for name in names:
            assert_near(*(parameters[name].grad for parameters in named))
        with torch.inference_mode():
            assert_near(*(model.eval()(**batch).logits for model in (ours, loaded())))


# ---- transformers' Trainer ---------------------------------------------------------------------


def train(model: Any, directory: Path, *, resume: bool = False, **options: Any) -> list[float]:
    """The losses of all steps of a Trainer over six rows, in a shuffled order."""
    rows = [{"input_ids": text, "labels": text} for text in (*TEXTS, *(text[::-1] for text in TEXTS))]
    settings = {
        "output_dir": str(directory),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.padding_side = "right"
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**settings | options),
        train_dataset=rows,
        eval_dataset=rows[:3],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return [
        entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry
    ]


@methods
def test_the_trainer_trains_as_on_the_plain_model_and_resumes(
    calm: TinySwarm, method: str, tmp_path: Path
) -> None:
    with tuned(calm, method) as ours:
        theirs = learning_twin(calm, method, ours)
        theirs.tokenizer = ours.tokenizer
        begun = copy.deepcopy([parameter.detach() for parameter in learning(ours)])
        losses = train(ours, tmp_path / "ours")
        assert losses == pytest.approx(train(theirs, tmp_path / "theirs"), rel=NEAR)
        assert len(losses) == 6

        if method == "p-tuning":
            return  # PEFT saves the outputs of its encoder, not the encoder
        with torch.no_grad():
            for parameter, source in zip(learning(ours), begun, strict=True):
                parameter.copy_(source)
        shutil.rmtree(tmp_path / "ours" / "checkpoint-4")
        assert train(ours, tmp_path / "ours", resume=True) == pytest.approx(losses, rel=NEAR)


def test_gradient_checkpointing_changes_nothing(calm: TinySwarm, tmp_path: Path) -> None:
    with tuned(calm, "prompt") as ours:
        begun = copy.deepcopy([parameter.detach() for parameter in learning(ours)])
        plain = train(ours, tmp_path / "plain")
        with torch.no_grad():
            for parameter, source in zip(learning(ours), begun, strict=True):
                parameter.copy_(source)
        losses = train(ours, tmp_path / "checkpointing", activation_checkpointing=True)
        assert losses == pytest.approx(plain, rel=NEAR)
        calm.model.activation_checkpointing_disable()
