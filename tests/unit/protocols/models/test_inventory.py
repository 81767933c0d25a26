"""Model files on this machine: their list, the limit on their size, and their removal."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.fetching import disk
from swarmnet_protocols.fetching.disk import make_room, stored_files
from swarmnet_protocols.fetching.piece_file import PieceFile
from swarmnet_protocols.fetching.pieces import ModelFile
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.inventory import remove_model, stored_models
from tests.defences import defence, nothing, replacing
from tests.support.models.big_model import FLOAT32, load, make_tables, save_big
from tests.support.models.model_hub import NAME, ModelHub, model_hub


def three_files(parts: Path) -> Path:
    """Three partial files of 64 KiB; the first was used least recently."""
    for number in range(3):
        file = PieceFile(parts / f"{number}", ModelFile("weights", 1 << 20, bytes(32)))
        file.write_head(bytes([1]) * 65536)
        os.utime(file.folder, (1000 + number, 1000 + number))
    return parts


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    return three_files(tmp_path)


def names(parts: Path) -> list[str]:
    return [each.folder.name for each in stored_files(parts)]


@defence(
    "weights on disk have a limit", off=replacing(disk.PieceFile, "remove_folder", staticmethod(nothing))
)
def test_the_least_recently_used_file_makes_way(parts: Path) -> None:
    assert names(parts) == ["0", "1", "2"]
    make_room(parts, 65536, 3 * 65536)
    assert names(parts) == ["1", "2"]
    make_room(parts, 65536, 3 * 65536)
    assert names(parts) == ["1", "2"]


def test_a_file_in_use_does_not_make_way(parts: Path) -> None:
    used = PieceFile(parts / "0", ModelFile("weights", 1 << 20, bytes(32)))
    used.hold()
    os.utime(used.folder, (1, 1))
    make_room(parts, 65536, 3 * 65536)
    assert names(parts) == ["0", "2"]
    with pytest.raises(OutOfResources, match="--max-disk"):
        make_room(parts, 3 * 65536, 3 * 65536)
    assert names(parts) == ["0", "2"]
    used.release()
    make_room(parts, 3 * 65536, 3 * 65536)
    assert names(parts) == []


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_big(tmp_path_factory.mktemp("big") / "model")


@pytest.fixture(scope="module")
def tables(big: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tables(big, tmp_path_factory.mktemp("maker"))[0]


@pytest.fixture
def hub(big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    with model_hub(big, tmp_path / "hf") as serving:
        monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        yield serving


def test_a_limit_on_the_disk_is_kept(hub: ModelHub, tables: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load(cache, tables).load_span(0, 3, **FLOAT32)
    taken = sum(each.size for each in stored_files(cache / "parts"))
    small = resolve(NAME, cache_dir=cache, max_disk_bytes=taken + 100_000)
    small.load_span(40, 43, **FLOAT32)
    assert sum(each.size for each in stored_files(cache / "parts")) <= 2 * taken
    with pytest.raises(OutOfResources, match="--max-disk"):
        small.load_span(0, 80, **FLOAT32)


def test_the_files_of_a_model_are_listed_and_removed(hub: ModelHub, tables: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    model = load(cache, tables)
    model.load_span(0, 3, **FLOAT32)
    [stored] = stored_models(cache)
    assert stored.name == NAME
    assert stored.total_bytes == sum(file.size for file in model.manifest.files)
    assert 0 < stored.present_bytes < stored.total_bytes / 5
    with pytest.raises(ConfigError, match="in use"):
        remove_model(NAME, cache)
    for partial in model.parts.in_use.values():
        partial.release()
    assert remove_model(NAME, cache) >= 0.9 * stored.present_bytes
    assert stored_models(cache) == []
    with pytest.raises(ConfigError, match="no file of"):
        remove_model(NAME, cache)
