"""What the two kinds of checkpoint, safetensors and gguf, have in common."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swarmnet_protocols.errors import IntegrityError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_CHUNK_BYTES = 1 << 20

CONFIG_FAULTS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError)
"""What transformers raises, at some place or other, for a config that makes no sense. NotImplementedError is among them."""


class Progress(Protocol):
    """Hears how far a long step has come; ``total`` is None while it is unknown."""

    def __call__(self, description: str, done: int, total: int | None) -> None: ...


@dataclass(frozen=True)
class BlockNaming:
    """How a kind of checkpoint numbers blocks in tensor names: ``pattern`` matches what is before, the number, the rest."""

    pattern: re.Pattern[str]

    def block_of(self, tensor_name: str) -> int | None:
        """The block a tensor belongs to; None for the edges."""
        match = self.pattern.match(tensor_name)
        return int(match[2]) if match else None

    def renumbered(self, tensor_name: str, first_block: int) -> str:
        """The name with ``first_block`` counted as block 0."""
        return self.pattern.sub(
            lambda match: f"{match[1]}{int(match[2]) - first_block}{match[3]}", tensor_name
        )


class ModelCheckpoint(Protocol):
    """Weights, config and tokenizer on disk. Opening one has checked its headers; tensors are read one by one."""

    @property
    def root(self) -> Path:
        """The directory that the paths of ``files`` are relative to."""

    @property
    def files(self) -> tuple[str, ...]:
        """Every file the model is made of."""

    @property
    def tensor_names(self) -> tuple[str, ...]: ...

    @property
    def naming(self) -> BlockNaming: ...

    def holders(self, names: Iterable[str]) -> set[str]:
        """Those of ``files`` that hold these tensors."""

    def config(self) -> "PretrainedConfig": ...

    def generation_config(self) -> "GenerationConfig | None":
        """What the checkpoint itself says about generation."""

    def tokenizer(self) -> "PreTrainedTokenizerBase": ...

    def state_dict(self, names: Sequence[str], first_block: int, model: "PreTrainedModel") -> dict[str, Any]:
        """These tensors under the names transformers loads them by, ``first_block`` becoming block 0.

        ``model`` is what they are loaded into; it may lie on the meta device.
        """


def sha256_of(path: Path, progress: Progress | None) -> bytes:
    """The SHA-256 of a file; raises ``IntegrityError`` when it cannot be read."""
    digest = hashlib.sha256()
    try:
        total = path.stat().st_size
        done = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(f"checking {path.name}", done, total)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    return digest.digest()
