"""Lists and removes the models on this machine that came from the hub or from peers."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.fetching.disk import stored_files
from swarmnet_protocols.fetching.hub_files import parts_folder
from swarmnet_protocols.fetching.piece_file import PieceFile, is_held
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.models.local_model import LocalModel


@dataclass(frozen=True)
class StoredModel:
    """A model that is wholly or partly on this machine.

    ``total_bytes`` is None if the size of the whole model is unknown.
    """

    name: str
    present_bytes: int
    total_bytes: int | None


def remember_model(model: LocalModel, cache_dir: Path) -> None:
    """Note which files belong to a model, so that its files here can be listed and removed by its
    name."""
    files = {file.sha256.hex(): file.size for file in model.manifest.files}
    note = {"name": model.name, "manifest": model.manifest.hash.hex(), "files": files}
    with suppress(OSError):  # a full disk: the model is used all the same
        write_whole(_note_path(model.name, cache_dir), json.dumps(note).encode(), durable=False)


def stored_models(cache_dir: Path) -> list[StoredModel]:
    """Return the models that came from the hub or from peers, by name."""
    whole = dict(_whole_repositories())
    parts = {each.folder.name: each.size for each in stored_files(parts_folder(cache_dir))}
    found = {name: StoredModel(name, size, None) for name, size in whole.items()}
    for name, files in _notes(cache_dir):
        repository = name.partition("@")[0].partition(":")[0]
        here = sum(parts.get(sha256, 0) for sha256 in files)
        if repository in found or here:
            found.pop(repository, None)
            found[name] = StoredModel(name, here + whole.get(repository, 0), sum(files.values()))
    return [found[name] for name in sorted(found)]


def remove_model(name: str, cache_dir: Path) -> int:
    """Remove the files of a model from this machine. Returns the bytes that this has freed.

    Raises ``ConfigError`` if no part of it is on this machine, or if a process uses it.
    """
    repository = name.partition("@")[0].partition(":")[0]
    folders = [
        parts_folder(cache_dir) / sha256
        for noted, files in _notes(cache_dir)
        if noted == name
        for sha256 in files
        if (parts_folder(cache_dir) / sha256).is_dir()
    ]
    is_whole = repository in dict(_whole_repositories())
    if not folders and not is_whole:
        raise ConfigError(
            f"no file of {name} is on this machine", hint="`swarmnet model ls` lists what is here"
        )
    if any(is_held(folder) for folder in folders):
        raise ConfigError(
            f"{name} is in use on this machine", hint="stop the node or gateway that uses it first"
        )
    freed = sum(PieceFile.remove_folder(folder) for folder in folders)
    if is_whole:
        freed += _remove_repository(repository)
    _note_path(name, cache_dir).unlink(missing_ok=True)
    return freed


def _note_path(name: str, cache_dir: Path) -> Path:
    return cache_dir / "models" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def _notes(cache_dir: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield name and files of each model that was noted."""
    for path in sorted((cache_dir / "models").glob("*.json")):
        with suppress(OSError, ValueError, LookupError, TypeError):
            note = json.loads(path.read_bytes())
            yield str(note["name"]), {str(sha256): int(size) for sha256, size in note["files"].items()}


def _whole_repositories() -> Iterator[tuple[str, int]]:
    """Yield name and bytes of each model in the hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with suppress(CacheNotFound):
        for repository in scan_cache_dir().repos:
            if repository.repo_type == "model":
                yield repository.repo_id, repository.size_on_disk


def _remove_repository(name: str) -> int:
    from huggingface_hub import scan_cache_dir

    freed = 0
    for repository in scan_cache_dir().repos:
        if repository.repo_type == "model" and repository.repo_id == name:
            freed += repository.size_on_disk
            shutil.rmtree(repository.repo_path)
    return freed
