"""A worker's checkpoints: written atomically, verified by hash, and exported for transformers.

A checkpoint is a folder in Hugging Face layout (``config.json``, ``model.safetensors``), which
transformers loads, or an adapter, which PEFT loads. It also has ``state/optimizer.safetensors``,
``state/outer.safetensors``, and ``progress.json``, which has the hashes of all other files and of
its own contents.

1. **Saved.** The store writes a checkpoint under a temporary name, syncs it and renames it.
2. **Loaded.** A worker resumes from the newest checkpoint whose hashes match. A checkpoint does not
   depend on the number of workers, so a job can resume with more or fewer.
3. **Removed.** The store keeps only the newest few.
"""

import hashlib
import json
import mmap
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from swarmnet_node.training.collecting import write_collected
from swarmnet_node.training.data.corpus import END_OF_DOCUMENT
from swarmnet_node.training.job_store import job_folder, load_local_files, load_stored_job
from swarmnet_node.training.model.building import read_model, update_json
from swarmnet_node.training.shared_state import pack, unpack
from swarmnet_protocols.errors import ConfigError, IntegrityError, OutOfResources
from swarmnet_protocols.machine.files import UNFINISHED, creating, write_whole
from swarmnet_protocols.models import Progress, resolve
from swarmnet_protocols.models.checkpoints.checkpoint import sha256_of
from swarmnet_protocols.models.peft_adapters import CONFIG_FILE
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.training.job_settings import BYTES, Job, is_published

_PROGRESS = "progress.json"
_MAX_PROGRESS_BYTES = 64 << 10
_HASHED_AT_ONCE = 1 << 22
"""Parameters that are hashed at a time. More would take the memory of a copy in float32."""
_STATE = "state"
_PARAMETERS = "parameters"
_ROUNDS = "trained-rounds.json"
_NAME = re.compile(r"checkpoint-(\d{8})")


@dataclass(frozen=True)
class WorkerCheckpoint:
    """The state of a worker after ``round`` rounds; ``revision`` of these were committed.

    - ``parameters``: the agreed parameters, flat ``[n]``.
    - ``optimizer``: the inner optimizer's state.
    - ``outer``: the method's outer state, and the residual of error feedback.
    - ``excluded``: workers that sent false results.
    """

    job_id: str
    round: int
    revision: int
    parameters: Tensor
    optimizer: Mapping[str, Tensor]
    outer: Mapping[str, Tensor]
    excluded: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Kept:
    """The number of checkpoints of a job that stay on the disk. Older ones are removed."""

    newest: int = 2
    set_aside: int = 3
    """Copies that ``CheckpointStore.set_aside`` keeps."""

    @property
    def most(self) -> int:
        """Most checkpoints on the disk at once: one is being written, and short-lived copies of
        states (``CheckpointStore.spill``) take as much as another."""
        return self.newest + 2 + self.set_aside

    @classmethod
    def within(cls, disk_bytes: int, checkpoint_bytes: int) -> "Kept":
        """Return how many checkpoints the disk holds, up to the usual number.

        Raises ``OutOfResources`` if it cannot hold one while the next is written.
        """
        room = disk_bytes // checkpoint_bytes
        if room < 3:
            raise OutOfResources(
                f"two checkpoints of this job and copies of its state take {3 * checkpoint_bytes / 2**30:.1f} GiB of disk",
                hint="raise --max-disk, or train a smaller job",
            )
        newest = min(cls.newest, room - 2)
        return cls(newest, min(cls.set_aside, room - newest - 2))


class CheckpointStore:
    """The checkpoints of one job, in ``root``. Only one worker at a time may write."""

    def __init__(self, root: Path, kept: Kept = Kept()) -> None:
        self._root = root
        self._kept = kept

    def save(
        self,
        checkpoint: WorkerCheckpoint,
        write_model: Callable[[Path, Tensor], None],
    ) -> Path:
        """Write a checkpoint and remove the oldest. Return its folder.

        ``write_model`` is ``Trainer.write``. Raises ``OutOfResources`` if the disk is full or
        fails; earlier checkpoints are then unchanged.
        """
        with _disk_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            for unfinished in self._root.glob(f"{UNFINISHED}*"):
                shutil.rmtree(unfinished)
            folders = self._folders()
            number = int(folders[0].name.rpartition("-")[2]) + 1 if folders else 1
            target = self._root / f"checkpoint-{number:08d}"
            with creating(target, mode=0o755) as folder:
                (folder / _STATE).mkdir()
                for name in ("optimizer", "outer"):
                    with (folder / _STATE / f"{name}.safetensors").open("wb") as stream:
                        stream.writelines(pack(getattr(checkpoint, name)))
                write_model(folder, checkpoint.parameters)
                _write_progress(folder, checkpoint)
            for old in self._folders()[self._kept.newest :]:
                shutil.rmtree(old)
        return target

    def spill(self, pieces: Iterable[Buffer]) -> memoryview:
        """Return a copy of ``pieces`` on the disk. It takes no memory, and ends with its last
        reference. Raises ``OutOfResources`` if the disk is full or fails."""
        with _disk_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._root) as file:
                file.writelines(pieces)
                file.flush()
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def begin_round(self, round: int | None) -> tuple[int, int]:
        """Note that a round is about to be trained; None for no round.

        Return the number of rounds, and how often one of them was trained again. Raises
        ``OutOfResources`` if the disk is full or fails.
        """
        path = self._root / _ROUNDS
        with _disk_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            rounds, again = json.loads(path.read_text()) if path.exists() else (0, 0)
            if round is not None:
                rounds, again = max(rounds, round + 1), again + (round < rounds)
                write_whole(path, json.dumps([rounds, again]).encode(), durable=True)
        return rounds, again

    def set_apart(self, checkpoint: WorkerCheckpoint, *, whole: bool) -> WorkerCheckpoint:
        """Return the checkpoint with the optimizer's state copied to the disk, so steps may change
        it.

        ``whole``: copy the parameters, too. Raises ``OutOfResources``.
        """
        parts = dict(checkpoint.optimizer)
        if whole:
            parts[_PARAMETERS] = checkpoint.parameters.to("cpu")
        if not parts:
            return checkpoint
        kept = unpack(self.spill(pack(parts)))
        return replace(checkpoint, parameters=kept.pop(_PARAMETERS, checkpoint.parameters), optimizer=kept)

    def set_aside(self) -> None:
        """Copy the newest valid checkpoint to ``before-catch-up-ROUND``.

        Call this before the state of other workers replaces it. Raises ``OutOfResources`` if the
        disk is full or fails.
        """
        found = self.newest_valid()
        if found is None or not self._kept.set_aside:
            return
        kept = self._root / f"before-catch-up-{found[1]['round']:08d}"
        with _disk_errors(self._root):
            if not kept.exists():
                shutil.copytree(found[0], kept)
            for old in sorted(self._root.glob("before-catch-up-*"))[: -self._kept.set_aside]:
                shutil.rmtree(old)

    def load_newest(self, job_id: str) -> WorkerCheckpoint | None:
        """Return the newest valid checkpoint, or None.

        Raises ``ConfigError`` if the checkpoint belongs to another job.
        """
        found = self.newest_valid()
        if found is None:
            return None
        folder, progress = found
        if progress["job"] != job_id:
            raise ConfigError(
                f"{folder} is a checkpoint of another job, {progress['job'][:16]}",
                hint="use another --data-dir for this job",
            )
        return WorkerCheckpoint(
            job_id=job_id,
            round=progress["round"],
            revision=progress["revision"],
            parameters=read_model(folder),
            optimizer=load_file(folder / _STATE / "optimizer.safetensors"),
            outer=load_file(folder / _STATE / "outer.safetensors"),
            excluded=tuple(map(PeerId, progress["excluded"])),
        )

    def copy_model(self, target: Path) -> None:
        """Copy the model of the newest valid checkpoint into the folder ``target``.

        transformers loads this folder. Raises ``ConfigError`` if there is no checkpoint.
        """
        found = self.newest_valid()
        if found is None:
            raise ConfigError(f"{self._root} has no checkpoint", hint="train for a round first")
        for file in found[0].iterdir():
            if file.is_file() and file.name != _PROGRESS:
                shutil.copyfile(file, target / file.name)

    def _folders(self) -> list[Path]:
        """Return the folders of all checkpoints, newest first."""
        if not self._root.is_dir():
            return []
        return sorted((path for path in self._root.iterdir() if _NAME.fullmatch(path.name)), reverse=True)

    def newest_valid(self) -> tuple[Path, dict[str, Any]] | None:
        for folder in self._folders():
            try:
                return folder, _checked_progress(folder)
            except (IntegrityError, OSError):
                continue
        return None


def export_model(  # noqa: PLR0913 - all by name but the first
    data_dir: Path,
    job_id: str,
    target: Path,
    *,
    cache_dir: Path,
    overwrite: bool,
    progress: Progress,
    collect: Callable[[Path], object] | None = None,
) -> Job:
    """Write the newest model of a job and its tokenizer into ``target``, or its adapter for PEFT.

    ``collect`` writes the stages of the job into a folder, as ``collecting.fetch_stages`` does.
    Returns the job with the local paths of its files. Raises ``ConfigError`` without a checkpoint.
    Raises it if ``target`` exists, too, except for the folder of a model with ``overwrite``. Raises
    ``OutOfResources`` if the disk is full.
    """
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} already exists", hint="choose another --out, or replace it with --force")
    if target.exists() and not any((target / name).is_file() for name in ("config.json", CONFIG_FILE)):
        raise ConfigError(
            f"{target} is not the folder of a model: it is not replaced", hint="choose another --out"
        )
    sealed, _ = load_stored_job(data_dir, job_id)
    if sealed.job.stages is not None and collect is None:
        raise ConfigError(
            "each worker has one stage of this job's model",
            hint="name the swarm, and the stages are collected from the workers: --swarm SWARM",
        )
    reads_no_data = None if collect is None else 1
    job = load_local_files(data_dir, job_id).applied_to(sealed.job, reads_no_data)
    with _disk_errors(target, "choose another --out"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with creating(target, mode=0o755, overwrite=overwrite) as folder:
            if collect is None:
                CheckpointStore(job_folder(data_dir, job_id)).copy_model(folder)
            else:
                with TemporaryDirectory(dir=target.parent, prefix=UNFINISHED) as pieces:
                    collect(Path(pieces))
                    write_collected(job, Path(pieces), folder, cache_dir)
            if not job.model.is_lora:  # else the frozen model has the tokenizer
                _write_tokenizer(job.data.tokenizer, folder, cache_dir, progress)
    return job


def _write_tokenizer(name: str, folder: Path, cache_dir: Path, progress: Progress) -> None:
    if name == BYTES:
        _write_byte_tokenizer(folder)
        return
    model = resolve(name, cache_dir=cache_dir, progress=progress, published=is_published(name))
    model.tokenizer().save_pretrained(folder)


def _write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token N is byte N, and make byte 0 the model's end token."""
    for name in ("config.json", "generation_config.json"):
        update_json(folder / name, {"bos_token_id": None, "eos_token_id": END_OF_DOCUMENT})
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    parts = {"added_tokens": [], "pre_tokenizer": kind, "decoder": kind, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", **parts}))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _characters() -> list[str]:
    """Return the character of each byte in byte-level BPE (GPT-2).

    A byte that is printable in Latin-1 is itself. Other bytes get the next unused character from
    U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def params_hash(parameters: Tensor) -> str:
    """Return the SHA-256 of the values (float32, little-endian) as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in torch.split(parameters.detach(), _HASHED_AT_ONCE):
        digest.update(part.to("cpu", torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def _write_progress(folder: Path, checkpoint: WorkerCheckpoint) -> None:
    files = {str(path.relative_to(folder)): sha256_of(path, None).hex() for path in _files(folder)}
    progress = {
        "job": checkpoint.job_id,
        "round": checkpoint.round,
        "revision": checkpoint.revision,
        "params_hash": params_hash(checkpoint.parameters),
        "excluded": list(checkpoint.excluded),
        "files": files,
    }
    (folder / _PROGRESS).write_text(json.dumps(progress | {"sha256": _hash_of(progress)}, indent=1))


def _hash_of(progress: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(progress, sort_keys=True).encode()).hexdigest()


def _checked_progress(folder: Path) -> dict[str, Any]:
    """Return the contents of ``progress.json``.

    Raises ``IntegrityError`` if any file of the folder has changed since it was written.
    """
    invalid = IntegrityError(f"{folder} is not a valid checkpoint")
    with (folder / _PROGRESS).open("rb") as stream:
        raw = stream.read(_MAX_PROGRESS_BYTES)
    try:
        progress: dict[str, Any] = json.loads(raw)
        is_unchanged = progress.pop("sha256") == _hash_of(progress)
        listed = {str(name): str(value) for name, value in progress["files"].items()}
        is_valid = isinstance(progress["job"], str) and all(
            type(progress[key]) is int and progress[key] >= 0 for key in ("round", "revision")
        )
        progress["excluded"] = [str(peer) for peer in progress.get("excluded", ())]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise invalid from error
    present = {str(path.relative_to(folder)) for path in _files(folder)} - {_PROGRESS}
    if not is_unchanged or not is_valid or present != set(listed):
        raise invalid
    if any(sha256_of(folder / name, None).hex() != value for name, value in listed.items()):
        raise invalid
    return progress


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def _disk_errors(where: Path, instead: str = "use another disk") -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OutOfResources(
            f"cannot write into {where}: {reason}", hint=f"make room there, or {instead}"
        ) from error
