"""A model on the hub is identified without its weights, and only the files that a part needs are
downloaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from swarmnet_protocols.errors import IntegrityError, OutOfResources, Unreachable
from swarmnet_protocols.fetching import hub_files
from swarmnet_protocols.models import LocalModel, resolve
from tests.support.models.model_hub import COMMIT, NAME, ModelHub, model_hub
from tests.support.models.tiny_models import save_tiny

CPU = torch.device("cpu")
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
BLOCKS = 80


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 blocks in files of about three blocks each, as Llama-70B has."""
    folder = tmp_path_factory.mktemp("big") / "model"
    return save_tiny("llama-tied", folder, num_hidden_layers=BLOCKS, max_shard_size="110KB")


@pytest.fixture
def hub(big: Path, tmp_path: Path) -> Iterator[ModelHub]:
    with model_hub(big, tmp_path / "hf") as serving:
        yield serving


def load(tmp_path: Path, name: str = NAME) -> LocalModel:
    return resolve(name, cache_dir=tmp_path / "cache")


def test_the_identity_is_that_of_the_whole_model_and_costs_no_weights(
    big: Path, hub: ModelHub, tmp_path: Path
) -> None:
    model = load(tmp_path)
    assert model.manifest.hash == resolve(str(big), cache_dir=tmp_path / "other").manifest.hash
    assert model.manifest.blocks == BLOCKS
    assert not [name for name in hub.sent if name.endswith(".safetensors")]
    assert not [file for file in model.present_files if file.name.endswith(".safetensors")]


def test_parts_are_fetched_by_file(big: Path, hub: ModelHub, tmp_path: Path) -> None:
    model, whole = load(tmp_path), resolve(str(big), cache_dir=tmp_path / "other")
    mine, theirs = (each.load_span(30, 40, **FLOAT32).state_dict() for each in (model, whole))
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    weights = sum(size for name, size in hub.sent.items() if name.endswith(".safetensors"))
    # Ten of eighty blocks, and the rest of the two files at the edges.
    assert 10 / BLOCKS * 0.9 < weights / hub.weight_bytes < 16 / BLOCKS
    before = dict(hub.sent)
    load(tmp_path).load_span(32, 38, **FLOAT32)
    assert hub.sent == before
    local: Any = load(tmp_path).load_local_layers(lambda layers: layers, **FLOAT32)
    assert local.model.embed_tokens.weight.shape[1] == model.manifest.hidden_size
    fetched = sum(hub.sent[name] for name in hub.sent.keys() - before.keys())
    assert fetched < 8 / BLOCKS * hub.weight_bytes


def test_a_broken_connection_is_tried_again(big: Path, hub: ModelHub, tmp_path: Path) -> None:
    model = load(tmp_path)
    [file] = model._checkpoint.holders(model.manifest.tensors[40][:1])
    hub.stop_after[file] = 50_000
    model.load_span(40, 41, **FLOAT32)
    assert hub.sent[file] > (big / file).stat().st_size


def test_a_flipped_bit_is_noticed_and_the_file_named(hub: ModelHub, tmp_path: Path) -> None:
    model = load(tmp_path)
    [file] = model._checkpoint.holders(model.manifest.tensors[40][:1])
    hub.damaged.add(file)
    with pytest.raises(IntegrityError, match=file):
        model.load_span(40, 41, **FLOAT32)


def test_files_on_disk_are_used_while_the_hub_refuses(hub: ModelHub, tmp_path: Path) -> None:
    first = load(tmp_path)
    first.load_span(10, 12, **FLOAT32)
    hub.is_closed = True
    again = load(tmp_path, f"{NAME}@{COMMIT}")
    assert again.manifest.hash == first.manifest.hash
    again.load_span(10, 12, **FLOAT32)
    with pytest.raises(Unreachable, match=NAME):
        again.load_span(70, 71, **FLOAT32)


def test_a_model_too_large_for_the_disk_is_refused_before_the_fetch(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tmp_path)
    monkeypatch.setattr(hub_files, "free_bytes", lambda _: 10_000)
    with pytest.raises(OutOfResources, match="MiB") as caught:
        model.load_span(0, 1, **FLOAT32)
    assert "HF_HUB_CACHE" in caught.value.hint
    assert not [name for name in hub.sent if name.endswith(".safetensors")]


def test_a_whole_model_can_be_fetched(hub: ModelHub, tmp_path: Path) -> None:
    model = load(tmp_path)
    model.fetch()
    assert model.present_files == model.manifest.files
    model.verify()


@pytest.mark.parametrize(
    "entry", [[10, "00"], [-1, "00" * 32], [1 << 60, "00" * 32], ["10", "00" * 32], [10, "zz" * 32], 7]
)
def test_a_list_of_files_that_is_out_of_bounds_is_refused(
    entry: object, hub: ModelHub, tmp_path: Path
) -> None:
    load(tmp_path)
    [kept] = (tmp_path / "cache" / "hub").iterdir()
    kept.write_text(json.dumps({"model.safetensors": entry}))
    with pytest.raises(IntegrityError, match=NAME):
        load(tmp_path)


def test_a_file_that_lacks_tensors_of_the_index_is_refused(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_hub(big, tmp_path / "hf"):
        model = load(tmp_path)
        names = model.manifest.tensors
        [file] = model._checkpoint.holders(names[40][:1])
        index: dict[str, str] = dict(model._checkpoint._index)  # type: ignore[attr-defined]
        elsewhere = next(name for name, at in index.items() if at != file)
        monkeypatch.setitem(model._checkpoint._index, elsewhere, file)  # type: ignore[attr-defined]
        with pytest.raises(IntegrityError, match="lacks tensor"):
            model.load_span(40, 41, **FLOAT32)


def test_the_cache_of_the_hub_is_where_its_tools_look(hub: ModelHub, tmp_path: Path) -> None:
    model = load(tmp_path)
    assert Path(huggingface_hub.constants.HF_HUB_CACHE) in model.path.parents
