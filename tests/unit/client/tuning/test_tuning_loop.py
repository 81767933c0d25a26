"""The loop of ``swarmnet tune`` on a plain local model: it learns, resumes with the same result,
and says when it cannot go on."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnet_client.tuning.adapter_dir import load_adapter, save_adapter
from swarmnet_client.tuning.batches import Dataset
from swarmnet_client.tuning.checkpoint import TuneCheckpoint
from swarmnet_client.tuning.methods import TuneMethod, TuneSettings, attach
from swarmnet_client.tuning.rows import read_rows
from swarmnet_client.tuning.trainer import Tuner
from swarmnet_protocols.errors import ConfigError, IntegrityError, OutOfResources, SwarmnetError
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.peft_adapters import CONFIG_FILE, WEIGHTS_FILE, require_peft
from swarmnet_protocols.models.text.rows import Encoder
from tests.support.swarm.tiny_swarm import load_tiny
from tests.support.training.tuning_rows import counting_rows, write_rows

STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a tokenizer, in HF layout."""
    directory = tmp_path_factory.mktemp("tiny")
    load_tiny(directory)
    return directory / "model"


def plain(place: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(place).eval()


def settings(method: TuneMethod = TuneMethod.LORA, **changes: Any) -> TuneSettings:
    fields = {"steps": STEPS, "batch_size": 4, "learning_rate": 0.01, "max_length": 32, "seed": 3}
    return TuneSettings(method, **(fields | {"virtual_tokens": 4} | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dataset(place: Path) -> Dataset:
    tokenizer = resolve(str(place), cache_dir=place.parent / "cache").tokenizer()
    path = write_rows(place.parent / "rows.jsonl", counting_rows(18))
    rows = read_rows(path, Encoder(tokenizer, 32)).rows
    return Dataset(rows[4:], rows[:4], (), 4, 3, pad_id=0)


def tuner(place: Path, dataset: Dataset, chosen: TuneSettings) -> Tuner:
    return Tuner(attach(plain(place), "tiny", chosen), dataset, chosen)


def without_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in event.items() if k not in {"tokens_per_s", "seconds"}} for event in events]


@pytest.mark.parametrize("method", [TuneMethod.LORA, TuneMethod.PROMPT, TuneMethod.DEEP_PROMPT])
def test_loss_falls_and_an_adapter_comes_out(
    place: Path, dataset: Dataset, tmp_path: Path, method: TuneMethod
) -> None:
    """The loss is that of the training rows: with random weights, the loss on other rows may rise
    or fall."""
    chosen = settings(method, steps=12, learning_rate=0.03 if method is TuneMethod.PROMPT else 0.05)
    model = attach(plain(place), "tiny", chosen)
    run = Tuner(model, replace(dataset, held_out=dataset.train), chosen)
    events = list(run.run(evaluate_every=4))
    assert [event["step"] for event in events if event["event"] == "eval"] == [0, 4, 8, 12]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 13))
    assert events[-1]["val_loss"] < events[0]["val_loss"]
    assert events[1]["tokens"] == 4 * 9

    save_adapter(model, tmp_path)
    loaded = load_adapter(plain(place), tmp_path)
    ids = torch.tensor([[20, 21, 22]])
    assert loaded(ids).logits.equal(model.eval()(ids).logits)
    assert not loaded(ids).logits.equal(plain(place)(ids).logits)


@pytest.mark.parametrize("stop", [0, 2, 5])
def test_an_interrupted_run_goes_on_with_the_same_result(
    place: Path, dataset: Dataset, tmp_path: Path, stop: int
) -> None:
    chosen = settings()
    whole = tuner(place, dataset, chosen)
    expected = list(whole.run(evaluate_every=4))

    first = tuner(place, dataset, chosen)
    events = []
    if stop:
        for event in first.run(evaluate_every=4):
            events.append(event)
            if event["step"] == stop and event["event"] == "step":
                break
    first.checkpoint({"a": 1}).save(tmp_path / "checkpoint.safetensors")

    other_seed = attach(plain(place), "tiny", settings(seed=9))
    second = Tuner(other_seed, dataset, chosen)
    kept = TuneCheckpoint.load(tmp_path / "checkpoint.safetensors")
    assert kept is not None
    assert (kept.step, kept.about) == (stop, {"a": 1})
    second.restore(kept)
    events += second.run(evaluate_every=4)
    assert without_times(events) == without_times(expected)
    assert repr(second.history) == repr(whole.history)
    ours, theirs = second.checkpoint({}).tensors, whole.checkpoint({}).tensors
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()) for name in ours)


def test_an_error_within_a_step_leaves_the_last_state(
    place: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tuner(place, dataset, settings())
    steps = run.run(evaluate_every=100)
    next(steps), next(steps)
    before = {name: value.clone() for name, value in run.checkpoint({}).tensors.items()}

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.Tensor, "backward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert run.is_whole
    assert run.step == 1
    after = run.checkpoint({}).tensors
    assert all(torch.equal(after[name].nan_to_num(), before[name].nan_to_num()) for name in before)

    monkeypatch.undo()
    monkeypatch.setattr(torch.optim.AdamW, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(run.run(evaluate_every=100))
    assert not run.is_whole


def test_a_loss_that_is_not_finite_ends_the_run_before_any_update(place: Path, dataset: Dataset) -> None:
    run = tuner(place, dataset, settings(learning_rate=1e37, warmup=0.0))
    with pytest.raises(SwarmnetError, match="the loss is not finite in step 2") as caught:
        list(run.run(evaluate_every=100))
    assert "--learning-rate" in caught.value.hint

    model = attach(plain(place), "tiny", settings())
    trained = [value for value in model.parameters() if value.requires_grad]
    trained[0].register_hook(lambda gradient: gradient / 0)
    with pytest.raises(SwarmnetError, match="a gradient is not finite in step 1"):
        list(Tuner(model, dataset, settings()).run(evaluate_every=100))
    assert all(value.isfinite().all() for value in trained)


def test_a_checkpoint_of_another_run_is_refused(place: Path, dataset: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    assert TuneCheckpoint.load(path) is None
    tuner(place, dataset, settings(rank=4)).checkpoint({}).save(path)
    kept = TuneCheckpoint.load(path)
    assert kept is not None
    with pytest.raises(ConfigError, match="other parameters"):
        tuner(place, dataset, settings(rank=8)).restore(kept)


@pytest.mark.parametrize("damage", ["cut", "pickle", "foreign", "nan"])
def test_a_damaged_checkpoint_is_refused(place: Path, dataset: Dataset, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "checkpoint.safetensors"
    run = tuner(place, dataset, settings())
    checkpoint = run.checkpoint({})
    if damage == "nan":
        name = next(name for name in checkpoint.tensors if name.startswith("parameter/"))
        checkpoint = TuneCheckpoint(0, {}, {**checkpoint.tensors, name: torch.tensor([float("nan")])})
    checkpoint.save(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "pickle":
        path.write_bytes(b"\x80\x04}q\x00.")
    elif damage == "foreign":
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(IntegrityError, match="not a checkpoint"):
        TuneCheckpoint.load(path)


def test_a_full_disk_leaves_the_old_checkpoint(
    place: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    run = tuner(place, dataset, settings())
    run.checkpoint({"run": 1}).save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swarmnet_client.tuning.checkpoint.save_file", full)
    with pytest.raises(OutOfResources, match="No space left"):
        run.checkpoint({"run": 2}).save(path)
    kept = TuneCheckpoint.load(path)
    assert kept is not None
    assert kept.about == {"run": 1}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


# ---- adapters on disk --------------------------------------------------------------------------


@pytest.fixture
def adapter(place: Path, tmp_path: Path) -> Path:
    save_adapter(attach(plain(place), "tiny", settings()), tmp_path)
    assert {CONFIG_FILE, WEIGHTS_FILE} <= {file.name for file in tmp_path.iterdir()}
    return tmp_path


def test_only_an_adapter_is_loaded(place: Path, adapter: Path) -> None:
    with pytest.raises(ConfigError, match="it has no adapter_config"):
        load_adapter(plain(place), place)
    weights = (adapter / WEIGHTS_FILE).read_bytes()
    (adapter / WEIGHTS_FILE).write_bytes(weights[:50])
    with pytest.raises(IntegrityError, match="damaged"):
        load_adapter(plain(place), adapter)
    (adapter / WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigError, match=f"no {WEIGHTS_FILE}"):
        load_adapter(plain(place), adapter)
    (adapter / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ConfigError, match="pickle"):
        load_adapter(plain(place), adapter)
    (adapter / WEIGHTS_FILE).write_bytes(weights)
    (adapter / CONFIG_FILE).write_text("[1]")
    with pytest.raises(IntegrityError, match="JSON object"):
        load_adapter(plain(place), adapter)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        (TuneMethod.LORA, {"num_hidden_layers": 4}),
        (TuneMethod.LORA, {"num_hidden_layers": 8}),
        (TuneMethod.LORA, {"hidden_size": 64}),
        (TuneMethod.PROMPT, {"hidden_size": 64}),
        (TuneMethod.DEEP_PROMPT, {"num_hidden_layers": 4}),
        (TuneMethod.DEEP_PROMPT, {"num_key_value_heads": 4}),
    ],
    ids=str,
)
def test_an_adapter_for_another_model_is_refused(
    place: Path, tmp_path: Path, method: TuneMethod, change: dict[str, int]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    save_adapter(attach(plain(place), "tiny", settings(method)), tmp_path)
    config = LlamaConfig.from_pretrained(place, **change)
    with pytest.raises(ConfigError, match="does not fit this model") as caught:
        load_adapter(LlamaForCausalLM(config), tmp_path)
    assert "it is for tiny" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rank_pattern": None}, "does not fit"),
        ({"init_lora_weights": 5}, "does not fit"),
        ({"megatron_config": {"a": 1}, "megatron_core": "this"}, "Megatron"),
        ({"peft_type": "XLORA"}, "hosts cannot apply"),
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused_and_imports_nothing(
    place: Path, adapter: Path, change: dict[str, Any], why: str
) -> None:
    config = json.loads((adapter / CONFIG_FILE).read_text())
    (adapter / CONFIG_FILE).write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=why):
        load_adapter(plain(place), adapter)
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("method", "change"),
    [
        (TuneMethod.LORA, {"r": 1 << 40}),
        (TuneMethod.LORA, {"rank_pattern": {"q_proj": 1 << 40}}),
        (TuneMethod.PROMPT, {"num_virtual_tokens": 1 << 40}),
        (TuneMethod.DEEP_PROMPT, {"num_virtual_tokens": 1 << 40}),
        (TuneMethod.PROMPT, {"peft_type": "P_TUNING", "num_virtual_tokens": 1 << 40}),
    ],
    ids=str,
)
def test_a_config_makes_the_loader_allocate_no_more_than_the_file_has(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: TuneMethod, change: dict[str, Any]
) -> None:
    """On systems that overcommit memory and kill a process that uses it."""
    largest = 0
    empty = torch.empty

    def measured(*sizes: Any, **options: Any) -> torch.Tensor:
        nonlocal largest
        shape = torch.Size(sizes[0] if isinstance(sizes[0], tuple | list | torch.Size) else sizes)
        device = options.get("device") or torch.get_default_device()
        if torch.device(device).type != "meta":
            largest = max(largest, shape.numel())
        return empty(*sizes, **options)

    save_adapter(attach(plain(place), "tiny", settings(method)), tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | change))
    model = plain(place)
    monkeypatch.setattr(torch, "empty", measured)
    with pytest.raises(ConfigError, match="does not fit"):
        load_adapter(model, tmp_path)
    assert largest < 1 << 30


def test_modules_that_are_not_there_are_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere") as caught:
        attach(plain(place), "tiny", settings(target_modules=("nowhere",)))
    assert "q_proj" in caught.value.hint


def test_without_peft_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_peft()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="peft") as caught:
        require_peft()
    assert "pip install peft" in caught.value.hint
