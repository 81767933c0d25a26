"""The training data of a job: documents as tokens in a memory-mapped cache.

1. ``open_source`` tokenises the documents of a source (``documents.py``) once. The cache files are
   keyed by the content of the source and the tokenizer.
2. The hash of a document decides whether it belongs to the training or the validation part, so all
   machines agree. If a small corpus leaves one part without a sequence, the tokens themselves are
   divided.
3. Each part of all sources is cut into ``Sequences`` of equal length (``open_corpus``).

``sampler.py`` divides the sequences among the workers.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from swarmnet_node.training.data.documents import Document, documents, files_of
from swarmnet_protocols.errors import ConfigError, IntegrityError, OutOfResources
from swarmnet_protocols.machine.files import creating
from swarmnet_protocols.models import Progress, resolve
from swarmnet_protocols.models.checkpoints.checkpoint import sha256_of
from swarmnet_protocols.models.text.rows import BadRow, DataRow, Encoder
from swarmnet_protocols.training.job_settings import (
    BYTES,
    PYTHON_STDLIB,
    DataSection,
    DataSource,
    JobError,
    is_published,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ABOUT = "corpus.json"
_MAX_ABOUT_BYTES = 4096
_PARTS = ("train", "validation")
_VERSION = 4
_DIFFERS = "get the same files that the job was created with, or create another job"
_DIFFERS_STDLIB = "use the Python that the job was created with, or give the job's data as files"
END_OF_DOCUMENT = 0
"""The byte that ends a document with ``ByteTokenizer``."""


class ByteTokenizer:
    """A tokenizer with the 256 byte values as tokens.

    It has the parts of transformers' tokenizers that ``Encoder`` uses.
    """

    eos_token_id = END_OF_DOCUMENT
    chat_template = None

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=np.frombuffer(text.encode(), dtype=np.uint8))


class Tokenizer:
    """The tokenizer of a job. Its end token, if there is one, ends each document."""

    def __init__(
        self, name: str, vocab_size: int, tokenizer: "PreTrainedTokenizerBase | ByteTokenizer"
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self._encoder = Encoder(tokenizer)

    def encode(self, row: DataRow) -> NDArray[np.int32]:
        """Return the tokens of a document, ``[n]``. A token *t* that does not count in the loss is
        *-t - 1*.

        Raises ``BadRow`` for a conversation that the model's chat template cannot show.
        """
        ids, learned = self._encoder.tokens(row)
        return np.where(learned, ids, ~ids)


@dataclass(frozen=True)
class Sequences:
    """A part of the data, cut into sequences of ``length`` tokens. They are numbered from source to
    source.

    Each sequence has one more token, the target of its last position. ``sources``: the tokens of
    each source; a token *t* that does not count in the loss is *-t - 1*.
    """

    sources: tuple[NDArray[np.integer], ...]
    length: int

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of sequences of each source."""
        return tuple(max(0, (len(tokens) - 1) // self.length) for tokens in self.sources)

    def take(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Return the sequences with these numbers, ``[k, length + 1]`` int64.

        The inputs are ``[:, :-1]``, the targets ``[:, 1:]``.
        """
        ends = np.cumsum(self.counts)
        rows = []
        for number, source in zip(numbers, np.searchsorted(ends, numbers, side="right"), strict=True):
            start = int(number - (ends[source - 1] if source else 0)) * self.length
            rows.append(self.sources[source][start : start + self.length + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@dataclass(frozen=True)
class SourceTokens:
    """The tokens of one source, in two parts.

    ``digest``: SHA-256 of the tokens. ``size_bytes``: size of all documents before tokenisation.
    """

    train: NDArray[np.integer]
    validation: NDArray[np.integer]
    digest: str
    size_bytes: int


@dataclass(frozen=True)
class Corpus:
    """The tokenised data of a job."""

    train: Sequences
    validation: Sequences
    vocab_size: int


def open_corpus(data: DataSection, cache_dir: Path, progress: Progress = lambda *_: None) -> Corpus:
    """Return the job's data, tokenised or read from the cache. Raises the errors of
    ``open_source``."""
    tokenizer = tokenizer_of(data, cache_dir, progress)
    opened = [open_source(data, source, tokenizer, cache_dir, progress) for source in data.sources]
    train, validation = (
        Sequences(tuple(getattr(source, part) for source in opened), data.sequence_length) for part in _PARTS
    )
    return Corpus(train, validation, tokenizer.vocab_size)


def open_source(
    data: DataSection,
    source: DataSource,
    tokenizer: Tokenizer,
    cache_dir: Path,
    progress: Progress = lambda *_: None,
) -> SourceTokens:
    """Return the tokens of a source of the data, new or from the cache.

    Raises ``JobError`` if the source is missing, unreadable, larger than the job states, different
    from its digest, or too short for one sequence of each part. Raises ``OutOfResources`` if the
    cache cannot be written.
    """
    files = files_of(source)
    folder = cache_dir / "tokens" / _cache_key(data, source, files, tokenizer, progress)
    cached = _read_cache(folder)
    dtype = _dtype(tokenizer, source)
    if cached is None:
        read = _with_progress(documents(source, files), source, _size_bytes(source, files), progress)
        try:
            cached = _write_cache(folder, lambda fresh: _tokenise(fresh, read, tokenizer, data, dtype))
        except OSError as error:
            raise OutOfResources(
                f"cannot keep the tokens in {folder.parent}: {error.strerror}", hint="make room on the disk"
            ) from error
    digest, size_bytes = cached
    if source.digest not in (None, digest):
        raise JobError(
            "data",
            "digest",
            f"is {source.digest}: the data on this machine has another digest, {digest}",
            hint=_DIFFERS_STDLIB if source.path == PYTHON_STDLIB else _DIFFERS,
        )
    train, validation = (_mapped(folder / f"{part}.bin", dtype) for part in _PARTS)
    for part, tokens in zip(_PARTS, (train, validation), strict=True):
        if len(tokens) <= data.sequence_length:
            raise JobError(
                "data",
                "hub" if source.path is None else "path",
                f"is wrong: its {part} part has {len(tokens)} tokens, and a sequence needs {data.sequence_length + 1}",
                hint=f"add data ({_least_tokens(data)} tokens suffice), or shorter sequences",
            )
    return SourceTokens(train, validation, digest, size_bytes)


def _size_bytes(data: DataSource, files: tuple[Path, ...]) -> int | None:
    """Return the bytes of all documents; None if these are known only once the documents are
    read."""
    if data.hub is not None or data.format != "text" or data.max_documents is not None:
        return None
    return sum(path.stat().st_size for path in files)


def _with_progress(
    read: Iterator[Document], source: DataSource, total: int | None, progress: Progress
) -> Iterator[Document]:
    done = 0
    for document in read:
        progress("tokenising the data", done, total)
        yield document
        done += len(document.row.content)
        if source.size_bytes is not None and done > source.size_bytes:
            raise JobError(
                "data",
                "size_bytes",
                f"is {source.size_bytes}: the data on this machine is larger, so it is not the data of the job",
                hint=_DIFFERS_STDLIB if source.path == PYTHON_STDLIB else _DIFFERS,
            )
    progress("tokenising the data", done, done)


def tokenizer_of(data: DataSection, cache_dir: Path, progress: Progress = lambda *_: None) -> Tokenizer:
    """Return the tokenizer of the data. Raises ``JobError`` if it cannot be loaded."""
    name = data.tokenizer
    if name == BYTES:
        return Tokenizer(name, 256, ByteTokenizer())
    try:
        model = resolve(name, cache_dir=cache_dir, progress=progress, published=is_published(name))
        tokenizer = model.tokenizer()
        return Tokenizer(name, len(tokenizer), tokenizer)
    except ConfigError as error:
        raise JobError(
            "data", "tokenizer", f"is wrong: {error}", hint=f'"{BYTES}", or a model: {error.hint}'
        ) from error


def _cache_key(
    data: DataSection, source: DataSource, files: tuple[Path, ...], tokenizer: Tokenizer, progress: Progress
) -> str:
    content = []
    for number, path in enumerate(files, start=1):
        content.append(sha256_of(path, None).hex())
        progress("reading the data", number, len(files))
    what: list[object] = [
        _VERSION,
        source.format,
        source.field,
        source.max_documents,
        source.hub,
        source.split,
    ]
    what += [data.validation, data.sequence_length]  # decide what of a small corpus is held out
    return hashlib.sha256(json.dumps([*what, tokenizer.name, content]).encode()).hexdigest()


def _dtype(tokenizer: Tokenizer, source: DataSource) -> np.dtype[np.integer]:
    if source.format != "text" and source.field is None:
        return np.dtype("<i4")  # tokens without a loss are negative
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _is_validation(document: bytes, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(document).digest()[:8], "big") < share * 2**64


def _read_cache(folder: Path) -> tuple[str, int] | None:
    """Return the digest of the cached tokens, and the bytes of their documents.

    None without a cache. A damaged cache is removed.
    """
    if not folder.exists():
        return None
    try:
        with (folder / _ABOUT).open("rb") as stream:
            about = json.loads(stream.read(_MAX_ABOUT_BYTES))
        digest = _digest([sha256_of(folder / f"{part}.bin", None) for part in _PARTS])
        if about == _about(digest, about["size_bytes"]):
            return digest, int(about["size_bytes"])
    except (OSError, ValueError, KeyError, TypeError, IntegrityError):
        pass
    shutil.rmtree(folder)
    return None


def _about(digest: str, size_bytes: int) -> dict[str, str | int]:
    check = hashlib.sha256(f"{digest} {size_bytes}".encode()).hexdigest()
    return {"sha256": digest, "size_bytes": size_bytes, "check": check}


def _digest(hashes: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _write_cache(folder: Path, write: Callable[[Path], tuple[str, int]]) -> tuple[str, int]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with creating(folder) as fresh:
            written = write(fresh)
            (fresh / _ABOUT).write_text(json.dumps(_about(*written)))
        return written
    except OSError:
        by_another = _read_cache(folder)  # another process may have written it meanwhile
        if by_another is None:
            raise
        return by_another


def _tokenise(
    folder: Path,
    read: Iterator[Document],
    tokenizer: Tokenizer,
    data: DataSection,
    dtype: np.dtype[np.integer],
) -> tuple[str, int]:
    """Write both parts. Return their digest and the bytes of all documents."""
    size_bytes = 0
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as held_out:
        for document in read:
            content = document.row.content
            part = held_out if _is_validation(content, data.validation) else train
            try:
                part.write(tokenizer.encode(document.row).astype(dtype).tobytes())
            except BadRow as error:
                raise JobError(
                    "data", "path", f"is wrong: {document.place}: {error}", hint="correct or remove the row"
                ) from error
            size_bytes += len(content)
    _hold_out(folder, dtype, data)
    return _digest([sha256_of(folder / f"{part}.bin", None) for part in _PARTS]), size_bytes


def _hold_out(folder: Path, dtype: np.dtype[np.integer], data: DataSection) -> None:
    """Divide the tokens again if one part has no sequence.

    Hashes choose the documents of the validation part, so of a few documents they may choose none
    or all. The validation part then gets its share of the tokens, at least one sequence.
    """
    train, held_out = (folder / f"{part}.bin" for part in _PARTS)
    tokens, drawn = (path.stat().st_size // dtype.itemsize for path in (train, held_out))
    sequence = data.sequence_length + 1
    if min(tokens, drawn) >= sequence or tokens + drawn < _least_tokens(data):
        return
    share = max(sequence, round(data.validation * (tokens + drawn)))
    if share > drawn:
        _move_end(train, held_out, (share - drawn) * dtype.itemsize)
    else:
        _move_end(held_out, train, (drawn - share) * dtype.itemsize)


def _move_end(source: Path, target: Path, size_bytes: int) -> None:
    with source.open("r+b") as giving, target.open("ab") as taking:
        giving.seek(-size_bytes, os.SEEK_END)
        shutil.copyfileobj(giving, taking)
        giving.seek(-size_bytes, os.SEEK_END)
        giving.truncate()


def _least_tokens(data: DataSection) -> int:
    """Return the tokens of one sequence for each part."""
    return 2 * (data.sequence_length + 1)


def _mapped(path: Path, dtype: np.dtype[np.integer]) -> NDArray[np.unsignedinteger]:
    if path.stat().st_size < dtype.itemsize:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
