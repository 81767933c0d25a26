"""The weights of a model that this machine offers to peers.

These are verified files and pieces, their tables, and the manifest.
"""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet_protocols.fetching.pieces import PieceTable, pieces_between
from swarmnet_protocols.models.checkpoints.checkpoint import ModelCheckpoint
from swarmnet_protocols.models.manifest import Manifest
from swarmnet_protocols.models.parts import Parts

if TYPE_CHECKING:
    from swarmnet_protocols.wire import weights_pb2 as pb


class SharedWeights:
    """A ``Library`` (``fetching/server.py``) of one model. It offers only files and pieces that
    have not changed since they were hashed."""

    def __init__(self, manifest: Manifest, checkpoint: ModelCheckpoint, parts: Parts) -> None:
        self._manifest = manifest
        self._checkpoint = checkpoint
        self._parts = parts
        self._listed = {file.sha256: file for file in manifest.files}

    @property
    def model(self) -> bytes:
        """The hash of the manifest."""
        return self._manifest.hash

    @cached_property
    def _manifest_json(self) -> bytes:
        return self._manifest.to_json().encode()

    def document(self, what: "pb.What", file: bytes) -> bytes:
        """See ``Library``."""
        from swarmnet_protocols.wire import weights_pb2 as pb

        if what == pb.WHAT_MANIFEST:
            return self._manifest_json
        if what == pb.WHAT_LISTING:
            return self._parts.tables.listing(self.model, self._manifest.files)
        table = self._table(file)
        if what == pb.WHAT_TABLE and table is not None:
            return table.encode()
        if what == pb.WHAT_HELD and table is not None:
            return self._held(file, table)
        return b""

    def place(self, file: bytes, start: int, end: int) -> tuple[Path, int] | None:
        """See ``Library``."""
        listed = self._listed.get(file)
        if listed is None or end > listed.size:
            return None
        if self._parts.verified.has(listed):
            return self._checkpoint.path_of(listed.name), listed.size
        partial = self._parts.in_use.get(file)
        if partial is None or not all(
            partial.has(piece) for piece in pieces_between(partial.starts, start, end)
        ):
            return None
        return partial.path, listed.size

    def _table(self, file: bytes) -> PieceTable | None:
        listed = self._listed.get(file)
        return self._parts.tables.known(listed) if listed is not None else None

    def _held(self, file: bytes, table: PieceTable) -> bytes:
        if self._parts.verified.has(self._listed[file]):
            return b"\xff" * -(-table.count // 8)
        partial = self._parts.in_use.get(file)
        return partial.present if partial is not None else b""
