"""A model's folder comes from a stranger: only what is part of the model is read and given to
peers."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models import LocalModel, partial_model, resolve, verified_files
from swarmnet_protocols.models.checkpoints import model_folder, safetensors_header
from swarmnet_protocols.models.checkpoints.model_folder import MAX_METADATA_BYTES, MAX_SIZE, file_of
from swarmnet_protocols.models.checkpoints.safetensors_file import INDEX_NAME, METADATA_PATTERNS
from swarmnet_protocols.models.checkpoints.safetensors_header import read_header
from swarmnet_protocols.models.public_names import name_for_peers
from tests.defences import defence, nothing, replacing, yes
from tests.support.models.tiny import save_tiny_llama

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny_llama(tmp_path / "model")
    return tmp_path / "model"


def secret_of(folder: Path) -> Path:
    (folder / "home").mkdir(exist_ok=True)
    path = folder / "home" / "id_ed25519"
    path.write_text(SECRET)
    return path


def opened(path: Path) -> LocalModel:
    return resolve(str(path), cache_dir=path.parent / "cache")


@defence(
    "a model's files are in its folder", off=replacing(model_folder, "is_part_of", yes), name="merges.txt"
)
@pytest.mark.parametrize("name", [*METADATA_PATTERNS, INDEX_NAME, "model.safetensors"])
def test_a_link_to_a_file_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    (tmp_path / "model" / name).unlink(missing_ok=True)
    (tmp_path / "model" / name).symlink_to(secret_of(tmp_path))
    with pytest.raises(ConfigError, match="outside the model's folder"):
        opened(tmp_path / "model")


def test_a_link_that_leaves_the_folder_on_its_way_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "inner").symlink_to(tmp_path / "home")
    (model / "merges.txt").symlink_to(Path("inner", secret_of(tmp_path).name))
    with pytest.raises(ConfigError, match="outside the model's folder"):
        opened(model)


@defence(
    "a model's files without weights have one name on the disk",
    off=replacing(model_folder, "_check_metadata", nothing),
)
def test_a_file_with_another_name_on_the_disk_is_refused(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    os.link(secret_of(tmp_path), tmp_path / "model" / "chat_template.jinja")
    with pytest.raises(ConfigError, match="hard link"):
        opened(tmp_path / "model")


def test_weights_may_have_several_names_on_the_disk(model: Path, tmp_path: Path) -> None:
    os.link(model / "model.safetensors", tmp_path / "same.safetensors")
    assert opened(model).manifest.blocks


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-1.safetensors"])
def test_a_pipe_is_not_waited_for(name: str, model: Path) -> None:
    if name == "model-1.safetensors":
        tensors = read_header(model / "model.safetensors").spans
        (model / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(ConfigError, match="not an ordinary file"):
        opened(model)


@pytest.mark.parametrize("target", ["/dev/zero", "/proc/self/environ"])
def test_a_device_is_not_read(target: str, model: Path) -> None:
    (model / "merges.txt").symlink_to(target)
    with pytest.raises(ConfigError, match="file"):
        opened(model)


@defence(
    "a model's files without weights are bounded", off=replacing(model_folder, "MAX_METADATA_BYTES", 1 << 40)
)
def test_a_file_without_weights_has_a_bounded_size(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    with (tmp_path / "model" / "merges.txt").open("wb") as file:
        file.truncate(MAX_METADATA_BYTES + 1)
    with pytest.raises(IntegrityError, match="larger than"):
        opened(tmp_path / "model")


@pytest.mark.parametrize(
    "name", ["..", ".", "../secret.safetensors", "/etc/passwd", "config.json", "", "a/b"]
)
def test_an_index_names_files_of_the_folder_only(name: str, model: Path) -> None:
    tensors = read_header(model / "model.safetensors").spans
    (model / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    with pytest.raises((IntegrityError, ConfigError)):
        opened(model)


def test_a_snapshot_of_the_hubs_cache_links_to_its_own_blobs_only(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123456789abcdef"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, repository / "blobs" / f"blob{number}")
        (snapshot / path.name).symlink_to(Path("../../blobs", f"blob{number}"))
    found = opened(snapshot)
    assert found.manifest.hash == opened(model).manifest.hash
    assert name_for_peers(str(snapshot)) == "org/name"
    (snapshot / "merges.txt").symlink_to("../../blobs/other")
    (repository / "blobs" / "other").symlink_to(secret_of(tmp_path))
    with pytest.raises(ConfigError, match="outside the model's folder"):
        opened(snapshot)


def test_blobs_that_are_a_link_are_no_part_of_a_snapshot(tmp_path: Path) -> None:
    secret = secret_of(tmp_path)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name" / "blobs").symlink_to(secret.parent)
    (snapshot / "merges.txt").symlink_to(Path("../../blobs", secret.name))
    with pytest.raises(ConfigError, match="outside the model's folder"):
        file_of(snapshot, "merges.txt")


@defence(
    "a file that was replaced is not served",
    off=replacing(verified_files, "stamp_of", lambda _: dict.fromkeys(("modified_ns", "changed_ns"), 0)),
)
def test_a_file_that_was_replaced_after_it_was_verified_is_not_served(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    local = opened(tmp_path / "model")
    local.fetch()
    [weights] = [file for file in local.manifest.files if file.name == "model.safetensors"]
    shared = local.shared()
    assert shared.place(weights.sha256, 0, 8) is not None
    path = tmp_path / "model" / "model.safetensors"
    path.rename(tmp_path / "old")
    path.write_bytes((tmp_path / "old").read_bytes())
    assert shared.place(weights.sha256, 0, 8) is None


@defence(
    "every tensor of a safetensors file is used",
    off=replacing(partial_model, "UNUSED", re.compile("")),
    name="model.layers.0.self_attn.q_proj.bias",
    is_refused=True,
)
@pytest.mark.parametrize(("name", "is_refused"), [
    ("model.layers.0.self_attn.q_norm.weight", True),
    ("model.layers.0.self_attn.q_proj.bias", True),
    ("model.layers.0.self_attn.rotary_emb.inv_freq", False),
    ("score.weight", False),
])  # fmt: skip
def test_a_tensor_that_the_model_does_not_use_is_refused_by_name(
    name: str, is_refused: bool, tmp_path: Path
) -> None:
    save_tiny_llama(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    save_file({**load_file(path), name: torch.ones(4)}, path, {"format": "pt"})

    def load() -> None:
        opened(tmp_path / "model").load_span(0, 1, dtype=torch.float32, device=torch.device("cpu"))

    if is_refused:
        with pytest.raises(ConfigError, match=name):
            load()
    else:
        load()


@defence("a dimension of a tensor is bounded", off=replacing(safetensors_header, "MAX_SIZE", 1 << 48))
def test_a_dimension_of_a_tensor_is_bounded(tmp_path: Path) -> None:
    for size, is_refused in ((MAX_SIZE, False), (MAX_SIZE + 1, True)):
        entry = {"dtype": "F32", "shape": [0, size], "data_offsets": [0, 0]}
        header = json.dumps({"x": entry}).encode()
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
        if is_refused:
            with pytest.raises(IntegrityError, match="not valid"):
                read_header(tmp_path / "x")
        else:
            assert read_header(tmp_path / "x").spans == {"x": (8 + len(header), 8 + len(header))}


def test_the_public_name_of_a_model_has_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--Tiny-GGUF" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (tmp_path / "b179c9").write_bytes(b"")
    (snapshot / "Tiny-Q4_1.gguf").symlink_to(tmp_path / "b179c9")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    for name, expected in {
        str(tmp_path / "my-model"): "my-model",
        "my-model": "my-model",
        "./my-model": "my-model",
        ".": tmp_path.name,
        str(tmp_path / "removed" / "model.gguf"): "model.gguf",
        str(snapshot / "Tiny-Q4_1.gguf"): "Tiny-Q4_1.gguf",
        str(snapshot): "org/Tiny-GGUF",
        "org/name@main": "org/name@main",
        "smollm2-135m-instruct": "smollm2-135m-instruct",
    }.items():
        assert name_for_peers(name) == expected
