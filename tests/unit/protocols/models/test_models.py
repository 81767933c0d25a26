"""A model on disk: the tensors of each span, the layers around the blocks, manifest and cache."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.fetching.pieces import Hasher
from swarmnet_protocols.models import (
    LocalModel,
    Manifest,
    Progress,
    local_model,
    resolve,
    resolver,
    verified_files,
)
from swarmnet_protocols.models.checkpoints.safetensors_file import SafetensorsCheckpoint
from swarmnet_protocols.models.checkpoints.safetensors_header import StoredTensor, read_header
from swarmnet_protocols.models.partial_model import ModelBuilder
from tests.defences import nothing
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import FAMILIES, flip_last_byte, save_tiny

CPU = torch.device("cpu")
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": CPU}


@pytest.fixture
def model(tmp_path: Path) -> LocalModel:
    return load(save_tiny("llama-untied", tmp_path / "model", max_shard_size="80KB"), tmp_path)


def load(path: Path, tmp_path: Path) -> LocalModel:
    return resolve(str(path), cache_dir=tmp_path / "cache")


def reference_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def assert_same_tensors(
    part: torch.nn.Module, reference: torch.nn.Module, name_of: Callable[[str], str]
) -> None:
    expected = reference.state_dict()
    for name, tensor in part.state_dict().items():
        assert torch.equal(tensor, expected[name_of(name)]), name


# ---- loading parts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_span_has_the_tensors_of_its_blocks(family: str, tmp_path: Path) -> None:
    path = save_tiny(family, tmp_path / "model", max_shard_size="40KB")
    span = load(path, tmp_path).load_span(1, 4, **FLOAT32)

    reference = reference_of(path)
    assert span.state_dict().keys() == {
        name.replace(f"layers.{block}.", f"layers.{block - 1}.")
        for name in reference.model.state_dict()
        for block in (1, 2, 3)
        if name.startswith(f"layers.{block}.")
    }
    assert_same_tensors(
        span, reference, lambda name: f"model.layers.{int(name.split('.')[1]) + 1}.{name.split('.', 2)[2]}"
    )
    assert not span.training
    assert not any(parameter.requires_grad for parameter in span.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_local_layers_around_the_blocks_are_the_reference_model(family: str, tmp_path: Path) -> None:
    path = save_tiny(family, tmp_path / "model")
    reference = reference_of(path)

    class Blocks(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
            return hidden_states * 0.5 + 1

    local_layers: Any = load(path, tmp_path).load_local_layers(
        lambda _: torch.nn.ModuleList([Blocks()]), **FLOAT32
    )
    local_layers.config.num_hidden_layers = 1
    ids = torch.arange(3, 13)[None]
    reference.model.layers = torch.nn.ModuleList([Blocks()])
    reference.config.num_hidden_layers = 1
    with torch.inference_mode():
        assert_near(local_layers(ids, use_cache=False).logits, reference(ids, use_cache=False).logits)
    assert type(local_layers) is type(reference)
    tied = local_layers.lm_head.weight is local_layers.model.embed_tokens.weight
    assert tied == (reference.lm_head.weight is reference.model.embed_tokens.weight)
    assert local_layers.generation_config.to_dict() == reference.generation_config.to_dict()


def test_generation_follows_the_checkpoints_own_config(tmp_path: Path) -> None:
    path = save_tiny("llama-tied", tmp_path / "model")
    GenerationConfig(eos_token_id=[5, 7], do_sample=True, temperature=0.3).save_pretrained(path)

    local_layers = load(path, tmp_path).load_local_layers(lambda layers: layers, **FLOAT32)
    assert local_layers.generation_config.eos_token_id == [5, 7]
    assert local_layers.generation_config.temperature == 0.3


def test_the_whole_model_is_what_transformers_loads(model: LocalModel) -> None:
    whole = model.load_whole(**FLOAT32)
    reference = reference_of(model.path)
    assert_same_tensors(whole, reference, str)
    assert whole.state_dict().keys() == reference.state_dict().keys()


def test_weights_come_in_the_wanted_precision(model: LocalModel) -> None:
    for part in (
        model.load_span(0, 2, dtype=torch.bfloat16, device=CPU),
        model.load_whole(dtype=torch.bfloat16, device=CPU),
    ):
        assert {parameter.dtype for parameter in part.parameters()} == {torch.bfloat16}


def test_a_span_reads_only_its_own_tensors(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        (path.name, span): name
        for path in model.path.glob("*.safetensors")
        for name, span in read_header(path).spans.items()
    }
    read: list[str] = []
    real = StoredTensor.__getitem__

    def counting(tensor: StoredTensor, index: Any) -> torch.Tensor:
        read.append(names[tensor.path.name, tensor.span])
        return real(tensor, index)

    monkeypatch.setattr(StoredTensor, "__getitem__", counting)
    model.load_span(2, 4, **FLOAT32)
    assert sorted(read) == sorted([*model.manifest.tensors[2], *model.manifest.tensors[3]])
    read.clear()
    model.load_local_layers(lambda layers: layers, **FLOAT32)
    assert sorted(read) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


@pytest.mark.parametrize(("start", "end"), [(0, 0), (-1, 2), (3, 6), (4, 2)])
def test_blocks_that_a_model_does_not_have_are_refused(start: int, end: int, model: LocalModel) -> None:
    with pytest.raises(ConfigError, match="has no blocks"):
        model.load_span(start, end, **FLOAT32)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny("llama-tied", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(4, 32)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match="up_proj"):
        load(path, tmp_path)

    monkeypatch.setattr(ModelBuilder, "check", nothing)
    model = load(path, tmp_path)
    model.load_span(0, 2, **FLOAT32)
    for block in (2, 3):
        with pytest.raises(IntegrityError, match="up_proj"):
            model.load_span(block, block + 1, **FLOAT32)


# ---- what a model is


def test_the_manifest_describes_the_model(model: LocalModel) -> None:
    manifest = model.manifest
    assert (manifest.architecture, manifest.blocks, manifest.hidden_size) == ("LlamaForCausalLM", 5, 32)
    assert model.max_positions == 256
    assert set(manifest.tensors) == {"local_layers", 0, 1, 2, 3, 4}
    assert {file.name for file in manifest.files} >= {"config.json", "model-00001-of-00003.safetensors"}
    assert all((model.path / file.name).stat().st_size == file.size for file in manifest.files)
    model.verify()


def test_a_manifest_survives_json(model: LocalModel) -> None:
    again = Manifest.from_json(model.manifest.to_json())
    assert again == model.manifest
    assert again.hash == model.manifest.hash


def test_a_copy_has_the_same_manifest_and_a_changed_copy_another(model: LocalModel, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(model.path, copy)
    assert load(copy, tmp_path).manifest.hash == model.manifest.hash

    flip_last_byte(copy / "model-00002-of-00003.safetensors")
    assert load(copy, tmp_path).manifest.hash != model.manifest.hash


def test_verify_names_the_file_that_changed(model: LocalModel) -> None:
    flip_last_byte(model.path / "model-00002-of-00003.safetensors")
    with pytest.raises(IntegrityError, match="model-00002-of-00003"):
        model.verify()
    (model.path / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(IntegrityError, match="model-00001-of-00003"):
        model.verify()


def test_files_are_hashed_once_until_they_change(model: LocalModel, tmp_path: Path) -> None:
    heard: list[str] = []

    def progress(description: str, done: int, total: int | None) -> None:
        heard.append(description)

    resolve(str(model.path), cache_dir=tmp_path / "cache", progress=progress)
    assert heard == []
    (model.path / "config.json").touch()
    resolve(str(model.path), cache_dir=tmp_path / "cache", progress=progress)
    assert "checking config.json" in heard


def test_a_file_that_was_verified_is_hashed_again_when_it_changes(
    model: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    real = verified_files.hash_pieces

    def counting(path: Path, starts: Sequence[int], progress: Progress | None) -> Hasher:
        hashed.append(path.name)
        return real(path, starts, progress)

    monkeypatch.setattr(verified_files, "hash_pieces", counting)
    file = "model-00002-of-00003.safetensors"

    def load_all() -> int:
        hashed.clear()
        load(model.path, tmp_path).load_span(0, 5, **FLOAT32)
        return hashed.count(file)

    assert load_all() == 1
    assert load_all() == 1  # it has just been written: a change might not show in its times
    monkeypatch.setattr(verified_files, "SETTLED_NS", -1)
    assert load_all() == 1
    assert load_all() == 0
    times = (model.path / file).stat()
    flip_last_byte(model.path / file)
    os.utime(model.path / file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(IntegrityError, match=file):
        model.load_span(0, 5, **FLOAT32)
    with pytest.raises(IntegrityError, match=file):
        model.verify()


def test_a_damaged_cache_entry_is_made_again(model: LocalModel, tmp_path: Path) -> None:
    (kept,) = (tmp_path / "cache" / "manifests").iterdir()
    kept.write_text(kept.read_text()[:-40])
    assert load(model.path, tmp_path).manifest == model.manifest


def test_newer_checks_are_made_once_without_hashing(
    model: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def check(checkpoint: SafetensorsCheckpoint) -> None:
        checked.append(checkpoint)

    monkeypatch.setattr(SafetensorsCheckpoint, "check_kind", check)
    monkeypatch.setattr(local_model, "sha256_of", lambda *_: pytest.fail("a file is hashed"))
    load(model.path, tmp_path)
    assert not checked
    monkeypatch.setattr(resolver, "CHECKS", resolver.CHECKS + 1)
    for _ in range(2):
        assert load(model.path, tmp_path).manifest == model.manifest
    assert len(checked) == 1


# ---- models that are refused


def test_an_architecture_that_cannot_be_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        load(save_tiny("gpt2", tmp_path / "model"), tmp_path)


def test_sequences_end_where_rotary_embeddings_change(tmp_path: Path) -> None:
    assert load(save_tiny("phi3-longrope", tmp_path / "model"), tmp_path).max_positions == 64


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "no_such_type"},
        {"model_type": "bert"},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 100_000},
        {"num_hidden_layers": "many"},
        {"hidden_size": -1},
        {"num_attention_heads": 0},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"},
    ],
)
def test_a_config_that_describes_no_model_is_refused(
    change: dict[str, Any], model: LocalModel, tmp_path: Path
) -> None:
    config = model.path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ConfigError):
        load(model.path, tmp_path)


def test_blocks_without_tensors_are_noticed(model: LocalModel, tmp_path: Path) -> None:
    config = model.path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 6}))
    with pytest.raises(IntegrityError, match="no tensors of block 5"):
        load(model.path, tmp_path)


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors"]
)
def test_a_truncated_file_is_named(file: str, model: LocalModel, tmp_path: Path) -> None:
    path = model.path / file
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(IntegrityError, match=file):
        load(model.path, tmp_path)


def test_a_missing_shard_is_named(model: LocalModel, tmp_path: Path) -> None:
    (model.path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(IntegrityError, match="model-00003-of-00003"):
        load(model.path, tmp_path)


def test_an_index_cannot_point_outside_its_directory(model: LocalModel, tmp_path: Path) -> None:
    index = model.path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../outside.safetensors"}}))
    with pytest.raises(IntegrityError, match=index.name):
        load(model.path, tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(tmp_path / "empty", tmp_path)


def test_pickled_weights_are_never_read(model: LocalModel, tmp_path: Path) -> None:
    for file in model.path.glob("model*"):
        file.unlink()
    (model.path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="safetensors"):
        load(model.path, tmp_path)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        ({"a": GOOD | {"dtype": "Q4"}}, 8),
        ({"a": GOOD | {"shape": [3]}}, 8),
        ({"a": GOOD | {"shape": [-1, -2]}}, 8),
        ({"a": GOOD | {"shape": [1] * 8 + [2]}}, 8),
        ({"a": GOOD | {"data_offsets": [0, 8, 16]}}, 8),
        ({"a": GOOD | {"data_offsets": [8, 0]}}, 8),
        ({"a": GOOD | {"data_offsets": [8, 16]}}, 8),
        ({"a": GOOD, "b": GOOD}, 8),
        ({"a": GOOD, "b": GOOD | {"data_offsets": [16, 24]}}, 24),
        ({"a": GOOD, "b": GOOD | {"data_offsets": [8, 16]}}, 8),
        ({"a": "not an entry"}, 8),
        ([], 8),
    ],
)
def test_a_safetensors_header_that_does_not_match_its_file_is_refused(
    header: object, data_bytes: int, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "good", {"a": GOOD}, 8)
    assert read_header(tmp_path / "good").spans.keys() == {"a"}
    write_safetensors(tmp_path / "bad", header, data_bytes)
    with pytest.raises(IntegrityError, match="bad"):
        read_header(tmp_path / "bad")


def write_safetensors(path: Path, header: object, data_bytes: int) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data_bytes))


def test_a_safetensors_header_larger_than_its_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(IntegrityError, match="bad"):
        read_header(tmp_path / "bad")
