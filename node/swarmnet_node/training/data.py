"""The tokens a job trains on: documents, tokenised once into files that are memory-mapped from then on."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swarmnet_node.training.documents import documents, files_of
from swarmnet_protocols.errors import ConfigError, IntegrityError, OutOfResources
from swarmnet_protocols.models import Progress, resolve
from swarmnet_protocols.models.checkpoint import sha256_of
from swarmnet_protocols.training.jobs import BYTES, PYTHON_STDLIB, DataSection, JobError, is_published

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ABOUT = "corpus.json"
_MAX_ABOUT_BYTES = 4096
_PARTS = ("train", "validation")
_VERSION = 2
_DIFFERS = "get the very files that the job was created with, or create a job of your own"
_DIFFERS_STDLIB = "use the Python that the job was created with, or give the job's data as files"


class Tokenizer(Protocol):
    name: str
    vocab_size: int

    def encode(self, document: bytes) -> NDArray[np.uint32]:
        """The document's tokens, ``[n]``, and one that ends it."""


END_OF_DOCUMENT = 0
"""The byte that ends a document where tokens are bytes."""


class ByteTokenizer:
    """One token a byte."""

    name = BYTES
    vocab_size = 256

    def encode(self, document: bytes) -> NDArray[np.uint32]:
        return np.frombuffer(document + bytes([END_OF_DOCUMENT]), dtype=np.uint8).astype(np.uint32)


class ModelTokenizer:
    """The tokenizer of a checkpoint; a document ends with its end-of-sequence token."""

    def __init__(self, name: str, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.name = name
        self.vocab_size = len(tokenizer)
        self._tokenizer = tokenizer
        self._end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

    def encode(self, document: bytes) -> NDArray[np.uint32]:
        ids = self._tokenizer.encode(
            document.decode("utf-8", "replace"), add_special_tokens=False, verbose=False
        )
        return np.array(ids + self._end, dtype=np.uint32)


@dataclass(frozen=True)
class Sequences:
    """A part of a corpus, cut into sequences that do not overlap (but for the token that one predicts and the next begins with)."""

    tokens: NDArray[np.unsignedinteger]
    length: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def take(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """The sequences with these numbers, ``[k, length + 1]`` int64: inputs are ``[:, :-1]``, what to predict ``[:, 1:]``."""
        rows = [self.tokens[n * self.length : (n + 1) * self.length + 1] for n in numbers.tolist()]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@dataclass(frozen=True)
class Corpus:
    """The data of a job on this machine. ``digest`` (SHA-256) is equal where the tokens are."""

    train: Sequences
    validation: Sequences
    vocab_size: int
    digest: str
    size_bytes: int
    """Of all documents together."""


def open_corpus(data: DataSection, cache_dir: Path, progress: Progress = lambda *_: None) -> Corpus:
    """Tokenise the job's data, or take the tokens from the cache, which is keyed by the content of the files.

    A document belongs to the validation part if the hash of its bytes says so: everywhere the same, whatever else is there.
    Raises ``JobError`` for data that is missing, unreadable, larger than the job says, not what its digest says, or too short for one
    sequence of each part, and ``OutOfResources`` if the cache cannot be written.
    """
    files = files_of(data)
    tokenizer = _tokenizer(data.tokenizer, cache_dir, progress)
    folder = cache_dir / "tokens" / _cache_key(data, files, tokenizer, progress)
    kept = _kept(folder)
    if kept is None:
        source = _counted(documents(data, files), data, _size_bytes(data, files), progress)
        try:
            kept = _write_cache(folder, source, tokenizer, data.validation)
        except OSError as error:
            raise OutOfResources(
                f"cannot keep the tokens in {folder.parent}: {error.strerror}", hint="make room on the disk"
            ) from error
    digest, size_bytes = kept
    if data.digest not in (None, digest):
        raise JobError(
            "data",
            "digest",
            f"is {data.digest}: the job is about other data than this machine has, whose digest is {digest}",
            hint=_DIFFERS_STDLIB if data.path == PYTHON_STDLIB else _DIFFERS,
        )
    train, validation = (
        Sequences(_mapped(folder / f"{part}.bin", _dtype(tokenizer)), data.sequence_length) for part in _PARTS
    )
    for part, sequences in zip(_PARTS, (train, validation), strict=True):
        if not len(sequences):
            raise JobError(
                "data",
                "hub" if data.path is None else "path",
                f"is wrong: its {part} part has {len(sequences.tokens)} tokens, and a sequence needs {data.sequence_length + 1}",
                hint="give more data, shorter sequences or another 'validation'",
            )
    return Corpus(train, validation, tokenizer.vocab_size, digest, size_bytes)


def _size_bytes(data: DataSection, files: tuple[Path, ...]) -> int | None:
    """What there is to tokenise; None where that shows only at the end."""
    if data.hub is not None or data.format == "parquet" or data.max_documents is not None:
        return None
    return sum(path.stat().st_size for path in files)


def _counted(
    source: Iterator[bytes], data: DataSection, total: int | None, progress: Progress
) -> Iterator[bytes]:
    done = 0
    for document in source:
        progress("tokenising the data", done, total)
        yield document
        done += len(document)
        if data.size_bytes is not None and done > data.size_bytes:
            raise JobError(
                "data",
                "size_bytes",
                f"is {data.size_bytes}: what is here is more, so it is not the data of the job",
                hint=_DIFFERS_STDLIB if data.path == PYTHON_STDLIB else _DIFFERS,
            )
    progress("tokenising the data", done, done)


def _tokenizer(name: str, cache_dir: Path, progress: Progress) -> Tokenizer:
    if name == BYTES:
        return ByteTokenizer()
    try:
        model = resolve(name, cache_dir=cache_dir, progress=progress, published=is_published(name))
        return ModelTokenizer(name, model.tokenizer())
    except ConfigError as error:
        raise JobError(
            "data", "tokenizer", f"is wrong: {error}", hint=f'"{BYTES}", or a model: {error.hint}'
        ) from error


def _cache_key(data: DataSection, files: tuple[Path, ...], tokenizer: Tokenizer, progress: Progress) -> str:
    content = []
    for number, path in enumerate(files, start=1):
        content.append(sha256_of(path, None).hex())
        progress("reading the data", number, len(files))
    what = [_VERSION, data.format, data.field, data.max_documents, data.validation, data.hub, data.split]
    return hashlib.sha256(json.dumps([*what, tokenizer.name, content]).encode()).hexdigest()


def _dtype(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _is_validation(document: bytes, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(document).digest()[:8], "big") < share * 2**64


def _kept(folder: Path) -> tuple[str, int] | None:
    """Digest of the tokens kept in ``folder`` and size of their documents; None, and they are gone, if they are not as they were written."""
    if not folder.exists():
        return None
    try:
        with (folder / _ABOUT).open("rb") as stream:
            kept = json.loads(stream.read(_MAX_ABOUT_BYTES))
        digest = _digest([sha256_of(folder / f"{part}.bin", None) for part in _PARTS])
        if kept == _about(digest, kept["size_bytes"]):
            return digest, int(kept["size_bytes"])
    except (OSError, ValueError, KeyError, TypeError, IntegrityError):
        pass
    shutil.rmtree(folder)
    return None


def _about(digest: str, size_bytes: int) -> dict[str, str | int]:
    check = hashlib.sha256(f"{digest} {size_bytes}".encode()).hexdigest()
    return {"sha256": digest, "size_bytes": size_bytes, "check": check}


def _digest(hashes: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _write_cache(
    folder: Path, source: Iterator[bytes], tokenizer: Tokenizer, validation: float
) -> tuple[str, int]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        digest, size_bytes = _tokenise(temporary, source, tokenizer, validation)
        (temporary / _ABOUT).write_text(json.dumps(_about(digest, size_bytes)))
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.exists():  # else another process was quicker
                raise
        return digest, size_bytes
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tokenise(
    folder: Path, source: Iterator[bytes], tokenizer: Tokenizer, validation: float
) -> tuple[str, int]:
    """Write both parts; returns the hash of both, and the size of the documents."""
    size_bytes = 0
    hashes = [hashlib.sha256(), hashlib.sha256()]
    dtype = _dtype(tokenizer)
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as held_out:
        for document in source:
            part = _is_validation(document, validation)
            tokens = tokenizer.encode(document).astype(dtype).tobytes()
            hashes[part].update(tokens)
            size_bytes += len(document)
            (held_out if part else train).write(tokens)
        for stream in (train, held_out):
            stream.flush()
            os.fsync(stream.fileno())
    return _digest([each.digest() for each in hashes]), size_bytes


def _mapped(path: Path, dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    if path.stat().st_size < dtype.itemsize:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
