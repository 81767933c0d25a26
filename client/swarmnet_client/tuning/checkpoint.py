"""The checkpoint of a tuning run: parameters, optimizer state and curves in one file, replaced
atomically."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarmnet_protocols.errors import IntegrityError, OutOfResources
from swarmnet_protocols.machine import files

HISTORY = "history"
"""Name of the tensor [points, 4] with the curves: step, loss, held-out loss and accuracy. NaN: not
measured."""
POINT_FIELDS = 4
CHECKPOINT_FILE = "checkpoint.safetensors"
UNFINISHED = ".unfinished-"
"""Name prefix of files that are being written. A crash may leave them behind."""
_ABOUT = "swarmnet-tune"
_HASH = "sha256"


@dataclass(frozen=True)
class TuneCheckpoint:
    """The state after ``step`` steps of a run that ``about`` describes."""

    step: int
    about: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    def save(self, path: Path) -> None:
        """Replace the file at ``path``. Raises ``OutOfResources`` when the disk is full; the old
        file then stays."""
        about = json.dumps({"step": self.step, "about": self.about})
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()}
        header = {_ABOUT: about, _HASH: _hash_of(about, tensors)}
        with replacing(path) as temporary:
            save_file(tensors, temporary, header)

    @classmethod
    def load(cls, path: Path) -> "TuneCheckpoint | None":
        """Return the checkpoint at ``path``; None if there is no file.

        Raises ``IntegrityError`` for a file that ``save`` did not write.
        """
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
                kept = json.loads(metadata[_ABOUT])
                step, about = kept["step"], kept["about"]
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            if metadata[_HASH] != _hash_of(metadata[_ABOUT], tensors):
                raise _damaged(path)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(path) from error
        finite = all(value.isfinite().all() for name, value in tensors.items() if name != HISTORY)
        history = tensors.get(HISTORY, torch.empty(0))
        is_whole = finite and history.dim() == 2 and history.shape[1] == POINT_FIELDS
        if type(step) is not int or step < 0 or not isinstance(about, dict) or not is_whole:
            raise _damaged(path)
        return cls(step, about, tensors)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to ``path``. It replaces ``path``, synced to the disk, when the
    block ends without an exception.

    Raises ``OutOfResources`` when the disk is full.
    """
    try:
        with files.replacing(path, prefix=UNFINISHED, mode=0o644) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise OutOfResources(
            f"cannot write {path}: {error}", hint="make room there, or use another disk"
        ) from error


def _hash_of(about: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over the description and every tensor's name, type, shape and values."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path) -> IntegrityError:
    return IntegrityError(f"{path} is not a checkpoint of a run", hint="start over with --force")
