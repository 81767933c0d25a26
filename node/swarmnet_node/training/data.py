"""The training data of a job: documents as tokens in a memory-mapped cache, divided among the
workers.

1. ``open_corpus`` tokenises the documents (``documents.py``) once. The cache files are keyed by the
   content of the data and the tokenizer.
2. The hash of a document decides whether it belongs to the training or the validation part, so all
   machines agree. If a small corpus leaves one part without a sequence, the tokens themselves are
   divided.
3. Each part is cut into ``Sequences`` of equal length.
4. ``BatchSampler`` computes the sequences of each slot from the job's seed, so workers divide the
   data without communication.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swarmnet_node.training.documents import documents, files_of
from swarmnet_protocols.errors import ConfigError, IntegrityError, OutOfResources
from swarmnet_protocols.machine.files import creating
from swarmnet_protocols.models import Progress, resolve
from swarmnet_protocols.models.checkpoints.checkpoint import sha256_of
from swarmnet_protocols.training.job_settings import BYTES, PYTHON_STDLIB, DataSection, JobError, is_published

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ABOUT = "corpus.json"
_MAX_ABOUT_BYTES = 4096
_PARTS = ("train", "validation")
_VERSION = 3
_DIFFERS = "get the same files that the job was created with, or create another job"
_DIFFERS_STDLIB = "use the Python that the job was created with, or give the job's data as files"
_FEISTEL_ROUNDS = 6
"""Rounds of the Feistel network that permutes the sequences."""


class Tokenizer(Protocol):
    name: str
    vocab_size: int

    def encode(self, document: bytes) -> NDArray[np.uint32]:
        """Return the tokens of ``document`` (UTF-8), ``[n]``. The last is the end token, if there
        is one."""


END_OF_DOCUMENT = 0
"""The byte that ends a document with ``ByteTokenizer``."""


class ByteTokenizer:
    """A tokenizer with the 256 byte values as tokens."""

    name = BYTES
    vocab_size = 256

    def encode(self, document: bytes) -> NDArray[np.uint32]:
        return np.frombuffer(document + bytes([END_OF_DOCUMENT]), dtype=np.uint8).astype(np.uint32)


class ModelTokenizer:
    """The tokenizer of a model. Its end-of-sequence token ends each document."""

    def __init__(self, name: str, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.name = name
        self.vocab_size = len(tokenizer)
        self._tokenizer = tokenizer
        self._end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

    def encode(self, document: bytes) -> NDArray[np.uint32]:
        ids = self._tokenizer.encode(document.decode(), add_special_tokens=False, verbose=False)
        return np.array(ids + self._end, dtype=np.uint32)


@dataclass(frozen=True)
class Sequences:
    """A part of a corpus, cut into sequences of ``length`` tokens.

    Each sequence has one more token, the target of its last position.
    """

    tokens: NDArray[np.unsignedinteger]
    length: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def take(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Return the sequences with these numbers, ``[k, length + 1]`` int64.

        The inputs are ``[:, :-1]``, the targets ``[:, 1:]``.
        """
        rows = [self.tokens[n * self.length : (n + 1) * self.length + 1] for n in numbers.tolist()]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@dataclass(frozen=True)
class Corpus:
    """The tokenised data of a job.

    ``digest``: SHA-256 of the tokens. ``size_bytes``: size of all documents before tokenisation.
    """

    train: Sequences
    validation: Sequences
    vocab_size: int
    digest: str
    size_bytes: int


def open_corpus(data: DataSection, cache_dir: Path, progress: Progress = lambda *_: None) -> Corpus:
    """Return the job's data, tokenised or read from the cache.

    Raises ``JobError`` if the data is missing, unreadable, larger than the job states, different
    from its digest, or too short for one sequence of each part. Raises ``OutOfResources`` if the
    cache cannot be written.
    """
    files = files_of(data)
    tokenizer = _tokenizer(data.tokenizer, cache_dir, progress)
    folder = cache_dir / "tokens" / _cache_key(data, files, tokenizer, progress)
    cached = _read_cache(folder)
    if cached is None:
        source = _with_progress(documents(data, files), data, _size_bytes(data, files), progress)
        try:
            cached = _write_cache(folder, source, tokenizer, data)
        except OSError as error:
            raise OutOfResources(
                f"cannot keep the tokens in {folder.parent}: {error.strerror}", hint="make room on the disk"
            ) from error
    digest, size_bytes = cached
    if data.digest not in (None, digest):
        raise JobError(
            "data",
            "digest",
            f"is {data.digest}: the data on this machine has another digest, {digest}",
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
                hint=f"add data ({_least_tokens(data)} tokens suffice), or shorter sequences",
            )
    return Corpus(train, validation, tokenizer.vocab_size, digest, size_bytes)


@dataclass(frozen=True)
class BatchSampler:
    """Divides the ``sequences`` of a corpus among rounds, steps and slots.

    The batches, in order of (round, step, slot), are consecutive parts of an infinite stream: one
    permutation of all sequences after another. So no sequence occurs twice in an epoch. Sequences
    of a slot without a worker are left out in that epoch.
    """

    seed: int
    sequences: int
    batch_size: int
    steps_per_round: int
    slots: int

    def batch(self, round: int, step: int, slot: int) -> NDArray[np.int64]:
        """Return the sequence numbers of a slot's batch, ``[batch_size]`` in [0, sequences).

        Raises ``ValueError`` outside the job.
        """
        if not (round >= 0 and 0 <= step < self.steps_per_round and 0 <= slot < self.slots):
            raise ValueError(f"there is no batch for round {round}, step {step}, slot {slot}")
        first = ((round * self.steps_per_round + step) * self.slots + slot) * self.batch_size
        numbers = np.empty(self.batch_size, dtype=np.int64)
        done = 0
        while done < self.batch_size:  # repeats only where a batch spans two epochs
            epoch, start = divmod(first + done, self.sequences)
            count = min(self.batch_size - done, self.sequences - start)
            places = np.arange(start, start + count, dtype=np.uint64)
            numbers[done : done + count] = permute(places, self.sequences, self._key(epoch))
            done += count
        return numbers

    def _key(self, epoch: int) -> bytes:
        return hashlib.sha256(f"swarmnet-epoch-1 {self.seed} {epoch}".encode()).digest()


def permute(places: NDArray[np.uint64], size: int, key: bytes) -> NDArray[np.int64]:
    """Map ``places`` by a bijection of [0, size) that ``key`` (32 bytes) chooses.

    A Feistel network permutes the next larger power of four. Images outside [0, size) are permuted
    again until they are inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002, section 4).
    """
    half_bits = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    keys = np.frombuffer(hashlib.shake_256(key).digest(8 * _FEISTEL_ROUNDS), dtype="<u8")
    images = _feistel(places, half_bits, keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half_bits, keys)
    return images.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half_bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of splitmix64 (Steele, Lea and Flood, 2014).

    Every input bit flips each output bit with probability 1/2.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _size_bytes(data: DataSection, files: tuple[Path, ...]) -> int | None:
    """Return the bytes of all documents; None if these are known only once the documents are
    read."""
    if data.hub is not None or data.format == "parquet" or data.max_documents is not None:
        return None
    return sum(path.stat().st_size for path in files)


def _with_progress(
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
                f"is {data.size_bytes}: the data on this machine is larger, so it is not the data of the job",
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
    what.append(data.sequence_length)  # decides how much of a small corpus is held out
    return hashlib.sha256(json.dumps([*what, tokenizer.name, content]).encode()).hexdigest()


def _dtype(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
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


def _write_cache(
    folder: Path, source: Iterator[bytes], tokenizer: Tokenizer, data: DataSection
) -> tuple[str, int]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with creating(folder) as fresh:
            written = _tokenise(fresh, source, tokenizer, data)
            (fresh / _ABOUT).write_text(json.dumps(_about(*written)))
        return written
    except OSError:
        by_another = _read_cache(folder)  # another process may have written it meanwhile
        if by_another is None:
            raise
        return by_another


def _tokenise(
    folder: Path, source: Iterator[bytes], tokenizer: Tokenizer, data: DataSection
) -> tuple[str, int]:
    """Write both parts. Return their digest and the bytes of all documents."""
    size_bytes = 0
    dtype = _dtype(tokenizer)
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as held_out:
        for document in source:
            part = held_out if _is_validation(document, data.validation) else train
            part.write(tokenizer.encode(document).astype(dtype).tobytes())
            size_bytes += len(document)
    _hold_out(folder, dtype, data)
    return _digest([sha256_of(folder / f"{part}.bin", None) for part in _PARTS]), size_bytes


def _hold_out(folder: Path, dtype: np.dtype[np.unsignedinteger], data: DataSection) -> None:
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


def _mapped(path: Path, dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    if path.stat().st_size < dtype.itemsize:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
