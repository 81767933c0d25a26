"""What a model on this machine has for peers: verified files and pieces, their tables, and the manifest."""

from collections.abc import Collection
from functools import cached_property
from pathlib import Path

from swarmnet_protocols.fetching.pieces import FileKey, PieceTable, pieces_between
from swarmnet_protocols.models.checkpoint import ModelCheckpoint
from swarmnet_protocols.models.manifest import Manifest
from swarmnet_protocols.models.parts import Parts
from swarmnet_protocols.wire import weights_pb2 as pb


class SharedWeights:
    """``Library`` of one model. Only what was hashed since the process began, or has not changed since it was hashed, is offered."""

    def __init__(
        self, manifest: Manifest, checkpoint: ModelCheckpoint, parts: Parts, checked: Collection[str]
    ) -> None:
        """``checked``: the files that are whole and have their hash, by name; it grows."""
        self._manifest = manifest
        self._checkpoint = checkpoint
        self._parts = parts
        self._checked = checked
        self._files = {file.sha256: FileKey(file.path, file.size, file.sha256) for file in manifest.files}

    @property
    def model(self) -> bytes:
        """The hash of the manifest."""
        return self._manifest.hash

    @cached_property
    def _manifest_json(self) -> bytes:
        return self._manifest.to_json().encode()

    def document(self, what: "pb.What", file: bytes) -> bytes:
        """See ``Library``."""
        if what == pb.WHAT_MANIFEST:
            return self._manifest_json
        if what == pb.WHAT_LISTING:
            return self._parts.tables.listing(self.model, list(self._files.values()))
        table = self._table(file)
        if what == pb.WHAT_TABLE and table is not None:
            return table.encode()
        if what == pb.WHAT_HELD and table is not None:
            return self._held(file, table)
        return b""

    def place(self, file: bytes, start: int, end: int) -> tuple[Path, int] | None:
        """See ``Library``."""
        key = self._files.get(file)
        if key is None or end > key.size:
            return None
        if key.name in self._checked:
            return self._checkpoint.path_of(key.name), key.size
        partial = self._parts.in_use.get(file)
        if partial is None or not all(
            partial.has(piece) for piece in pieces_between(partial.starts, start, end)
        ):
            return None
        return partial.path, key.size

    def _table(self, file: bytes) -> PieceTable | None:
        key = self._files.get(file)
        return self._parts.tables.known(key) if key is not None else None

    def _held(self, file: bytes, table: PieceTable) -> bytes:
        if self._files[file].name in self._checked:
            return b"\xff" * -(-table.count // 8)
        partial = self._parts.in_use.get(file)
        return partial.present if partial is not None else b""
