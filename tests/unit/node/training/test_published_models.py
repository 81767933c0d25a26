"""A model from another peer opens no files of this machine, and does not choose the code that
runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from swarmnet_node.training.model.config import model_config
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import partial_model, resolve
from swarmnet_protocols.models.checkpoints import saved_tokenizer
from swarmnet_protocols.training.job_settings import JobError, ModelSection
from tests.defences import defence, nothing, replacing, yes
from tests.support.models.tiny_models import save_tiny
from tests.support.training.tiny_job import CONFIG
from tests.unit.node.training.test_training_start import hear_of_files

SECRET = "PRIVATEKEYLINE"


def publish(folder: Path, **changes: dict[str, Any]) -> Path:
    """A tiny model with a tokenizer. ``changes`` has new settings by the name of their JSON
    file."""
    model = save_tiny("llama-tied", folder / "model")
    words = WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="<unk>", padding_side="left"
    ).save_pretrained(model)
    for name, settings in changes.items():
        path = model / f"{name}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | settings))
    return model


BERT = {"tokenizer_class": "BertTokenizer"}
NAMING: dict[str, dict[str, dict[str, Any]]] = {
    "a vocabulary": {"tokenizer_config": BERT | {"vocab": "SECRET"}},
    "arguments in order": {"tokenizer_config": BERT | {"init_inputs": ["SECRET"]}},
    "special tokens": {"tokenizer_config": BERT, "special_tokens_map": {"vocab_file": "SECRET"}},
}


@defence(
    "a published tokenizer opens no file by {case}",
    off=replacing(saved_tokenizer, "_is_no_path", yes),
    cases=[{"case": each} for each in NAMING],
)
@pytest.mark.parametrize("case", NAMING)
def test_a_tokenizer_names_no_file_of_this_machine(case: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(f"{SECRET}\n")
    changes = json.loads(json.dumps(NAMING[case]).replace("SECRET", str(secret)))
    model = publish(tmp_path, **changes)
    (model / "tokenizer.json").unlink()
    heard: list[str] = []
    stop = hear_of_files(heard)
    try:
        tokenizer = resolve(str(model), cache_dir=tmp_path / "cache").tokenizer()
    finally:
        stop()
    assert SECRET not in tokenizer.get_vocab()
    assert str(secret) not in heard


def test_a_tokenizer_keeps_settings_that_are_not_paths(tmp_path: Path) -> None:
    said = {"chat_template": "{{ messages }}", "model_max_length": 77, "tokenizer_file": "/of/its/author"}
    model = publish(tmp_path, tokenizer_config=said)
    tokenizer = resolve(str(model), cache_dir=tmp_path / "cache").tokenizer()
    assert (tokenizer.chat_template, tokenizer.model_max_length) == ("{{ messages }}", 77)
    assert (tokenizer.padding_side, tokenizer.unk_token) == ("left", "<unk>")
    assert tokenizer("hello").input_ids == [1]
    assert tokenizer.name_or_path == str(model)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert again("hello").input_ids == [1]


def test_a_config_refers_to_no_other_file(tmp_path: Path) -> None:
    model = publish(tmp_path, config={"configuration_files": ["../config.4.0.0.json"]})
    with pytest.raises(ConfigError, match="other files"):
        resolve(str(model), cache_dir=tmp_path / "cache")


FOREIGN = [
    ("attn_implementation", "org/kernel"),
    ("attn_implementation", "kernels-community/flash-attn2"),
    ("attn_implementation", "flash_attention_2"),
    ("attn_implementation", ["org/kernel"]),
    ("experts_implementation", "sonicmoe"),
]


@defence(
    "a job does not choose which code computes its model",
    off=replacing(partial_model, "_check_implementations", nothing),
    key="attn_implementation",
    code="org/kernel",
)
@pytest.mark.parametrize(("key", "code"), FOREIGN, ids=str)
def test_neither_a_job_nor_a_checkpoint_chooses_code(key: str, code: object, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=key):
        model_config(ModelSection(config=CONFIG | {key: code}), tmp_path)
    model = publish(tmp_path, config={key: code})
    with pytest.raises(ConfigError, match=key):
        resolve(str(model), cache_dir=tmp_path / "cache")


def test_a_job_sets_nothing_that_is_transformers_own(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="_name_or_path"):
        model_config(ModelSection(config=CONFIG | {"_name_or_path": "/etc"}), tmp_path)
