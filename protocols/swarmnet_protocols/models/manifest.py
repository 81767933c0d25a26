"""Manifests: the identity of a model, from the hashes of its files and the tensors of each
block."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Literal

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.fetching.pieces import ModelFile
from swarmnet_protocols.wire.canonical_json import canonical_json

BlockKey = int | Literal["local_layers"]
"""The number of a block, or "local_layers" for what a client computes itself: embeddings, final
norm, lm_head."""

MAX_JSON_BYTES = 64 << 20
MAX_FILES = 10_000
MAX_BLOCKS = 10_000
MAX_HIDDEN_SIZE = 1 << 20
MAX_TENSORS = 2_000_000
MAX_NAME_CHARS = 1_000
MAX_FILE_BYTES = 1 << 50


@dataclass(frozen=True)
class Manifest:
    """The files of a model, and the tensors of each block. Peers whose manifests have the same hash
    compute with the same weights."""

    architecture: str
    blocks: int
    hidden_size: int
    files: tuple[ModelFile, ...]
    tensors: Mapping[BlockKey, tuple[str, ...]]

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the content. The names and paths of files are not part of it."""
        canonical = {
            "architecture": self.architecture,
            "blocks": self.blocks,
            "hidden_size": self.hidden_size,
            "files": sorted([file.sha256.hex(), file.size] for file in self.files),
            "tensors": {str(key): sorted(names) for key, names in self.tensors.items()},
        }
        return hashlib.sha256(b"swarmnet-manifest-1\n" + canonical_json(canonical)).digest()

    def to_json(self) -> str:
        """Return a JSON object, which :meth:`from_json` reads."""
        return json.dumps(
            {
                "architecture": self.architecture,
                "blocks": self.blocks,
                "hidden_size": self.hidden_size,
                "files": [
                    {"path": file.name, "size": file.size, "sha256": file.sha256.hex()} for file in self.files
                ],
                "tensors": {str(key): list(names) for key, names in self.tensors.items()},
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Read a manifest from an untrusted source. Raises ``IntegrityError`` unless it is
        well-formed and within all limits."""
        if len(text) > MAX_JSON_BYTES:
            raise IntegrityError(f"the manifest is longer than {MAX_JSON_BYTES} bytes")
        try:
            root = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"the manifest is not JSON: {error}") from None
        root = _typed(root, dict, "the manifest")
        blocks = _count(root, "blocks", MAX_BLOCKS)
        files = _typed(root.get("files"), list, "files")
        if not 1 <= len(files) <= MAX_FILES:
            raise IntegrityError(f"the manifest lists {len(files)} files")
        return cls(
            architecture=_name(root.get("architecture"), "architecture"),
            blocks=blocks,
            hidden_size=_count(root, "hidden_size", MAX_HIDDEN_SIZE),
            files=tuple(_file(_typed(file, dict, "a file")) for file in files),
            tensors=_tensors(_typed(root.get("tensors"), dict, "tensors"), blocks),
        )


def _typed(value: object, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise IntegrityError(f"{what} in the manifest is not a {kind.__name__}")
    return value


def _count(root: dict[str, object], key: str, limit: int) -> int:
    value: int = _typed(root.get(key), int, key)
    if not 1 <= value <= limit:
        raise IntegrityError(f"{key} in the manifest is {value}, outside 1 to {limit}")
    return value


def _name(value: object, what: str) -> str:
    name: str = _typed(value, str, what)
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise IntegrityError(f"{what} in the manifest has {len(name)} characters")
    return name


def _file(raw: dict[str, object]) -> ModelFile:
    path = _name(raw.get("path"), "a file's path")
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\0" in path or "\\" in path:
        raise IntegrityError(f"the manifest names a file outside the model: {path!r}")
    size: int = _typed(raw.get("size"), int, "a file's size")
    if not 0 <= size <= MAX_FILE_BYTES:
        raise IntegrityError(f"{path} has an impossible size in the manifest: {size}")
    try:
        sha256 = bytes.fromhex(_typed(raw.get("sha256"), str, "a file's sha256"))
    except ValueError:
        sha256 = b""
    if len(sha256) != hashlib.sha256().digest_size:
        raise IntegrityError(f"{path} has no SHA-256 in the manifest")
    return ModelFile(path, size, sha256)


def _tensors(raw: dict[str, object], blocks: int) -> dict[BlockKey, tuple[str, ...]]:
    expected: dict[str, BlockKey] = {
        "local_layers": "local_layers",
        **{str(block): block for block in range(blocks)},
    }
    if raw.keys() != expected.keys():
        raise IntegrityError("the manifest does not map every block to its tensors")
    tensors: dict[BlockKey, tuple[str, ...]] = {}
    total = 0
    for key, names in raw.items():
        listed = _typed(names, list, "a block's tensors")
        total += len(listed)
        if total > MAX_TENSORS:
            raise IntegrityError(f"the manifest names more than {MAX_TENSORS} tensors")
        tensors[expected[key]] = tuple(_name(name, "a tensor's name") for name in listed)
    return tensors
