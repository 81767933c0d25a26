"""Verifies the files of a model by their hashes, and hashes them again only when they change."""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.fetching.piece_file import PieceFile
from swarmnet_protocols.fetching.pieces import ModelFile, PieceTable, Progress, Tables, cut
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.models.checkpoints.checkpoint import ModelCheckpoint, hash_pieces
from swarmnet_protocols.models.checkpoints.model_folder import stamp_of

SETTLED_NS = 2_000_000_000
"""Nanoseconds after which a further change of a file surely alters its times.

File systems round times, so two changes within a shorter time could look like one.
"""


class VerifiedFiles:
    """The verified files of one model. Marks in ``cache_dir`` tell later processes about them."""

    def __init__(
        self, checkpoint: ModelCheckpoint, tables: Tables, cache_dir: Path, progress: Progress | None
    ) -> None:
        """``tables`` gets a table of pieces for each whole file that is hashed."""
        self._checkpoint = checkpoint
        self._tables = tables
        self._marks = cache_dir / "verified"
        self._progress = progress
        self._whole: dict[str, dict[str, int]] = {}
        """For each whole file, by name, its stamp when its hash was verified."""
        self._pieces: dict[Path, tuple[bool, dict[str, int]]] = {}
        """The stamp of each partial file when all its pieces were last verified.

        The flag: whether hashes that this machine noted itself were used.
        """

    def check(self, file: ModelFile) -> None:
        """Hash a file at its first use in this process, unless an earlier process did."""
        if file.name not in self._whole:
            self.check_again(file, self._progress, even_if_marked=False)

    def check_again(self, file: ModelFile, progress: Progress | None, *, even_if_marked: bool = True) -> None:
        """Hash a file. Raises ``IntegrityError`` if it does not have its hash."""
        path = self._checkpoint.path_of(file.name)
        mark, stamp = self._mark_of(path, file.sha256), _stamp_if_present(path)
        if even_if_marked or not _is_marked(mark, path) or self._tables.known(file) is None:
            head_bytes, edges = file.size, [0]
            if file.name in self._checkpoint.holders(self._checkpoint.tensor_names):
                layout = self._checkpoint.layout(file.name)
                head_bytes, edges = layout.head_bytes, layout.edges
            hasher = hash_pieces(path, cut(file.size, edges), progress)
            if hasher.sha256 != file.sha256:
                raise IntegrityError(
                    f"{path} does not have the hash in its manifest",
                    hint="delete it and fetch the model again",
                )
            self._tables.add(file, hasher.table(head_bytes))
            self._remove_pieces(file, path)
            _mark(mark, path)
        if stamp is not None:
            self._whole[file.name] = stamp

    def _remove_pieces(self, file: ModelFile, whole: Path) -> None:
        """Remove the pieces that were fetched before the file was ``whole``."""
        hub = self._checkpoint.hub
        if hub is not None and file.name in self._checkpoint.known:
            partial = hub.partial(file.name)
            if partial.path != whole:
                partial.remove()

    def has(self, file: ModelFile) -> bool:
        """Return whether a file is whole and was hashed, in this process or before, and has not
        changed since."""
        path = self._checkpoint.path_of(file.name)
        stamp = _stamp_if_present(path)
        if stamp is None:
            return False
        if self._whole.get(file.name) != stamp:
            if not _is_marked(self._mark_of(path, file.sha256), path):
                return False
            self._whole[file.name] = stamp
        return True

    def check_pieces(self, partial: PieceFile, table: PieceTable) -> None:
        """Hash the pieces that are here, unless they are unchanged since the last time.

        Forget pieces that have changed.
        """
        if self._pieces.get(partial.path) == (partial.notes, stamp_of(partial.path)):
            return
        mark = self._mark_of(partial.path, table.hash(partial.file))
        if not _is_marked(mark, partial.path):
            partial.verify(self._progress)
            _mark(mark, partial.path)

    def check_pieces_again(self, partial: PieceFile, progress: Progress | None) -> None:
        """Hash the pieces that are here, and forget changed ones. Raises ``IntegrityError`` if
        there are any."""
        told = self._tables.known(partial.file) or self._tables.claimed(partial.file)
        table = told or partial.read_notes()
        if table is None:
            return  # only a header, which is verified before a tensor is read
        partial.use(table, self._checkpoint.layout(partial.file.name).edges, notes=told is None)
        if not partial.verify(progress):
            raise IntegrityError(
                f"{partial.path} has pieces that do not have their hash",
                hint="they are downloaded again when needed",
            )

    def add_pieces(self, partial: PieceFile) -> None:
        """Note that pieces were downloaded, which verified them on arrival."""
        self._pieces[partial.path] = partial.notes, stamp_of(partial.path)

    def _mark_of(self, path: Path, content: bytes) -> Path:
        """Return the path of the mark which says that a file was hashed and has this content."""
        return self._marks / hashlib.sha256(os.fsencode(path) + content).hexdigest()[:32]


def _is_marked(mark: Path, path: Path) -> bool:
    """Return whether the file was verified and has not changed since."""
    try:
        return bool(json.loads(mark.read_bytes()) == stamp_of(path))
    except (OSError, ValueError):
        return False


def _mark(mark: Path, path: Path) -> None:
    """Mark the file as verified, unless it changed very recently.

    A further change might then leave its times as they are.
    """
    stamp = stamp_of(path)
    if time.time_ns() - max(stamp["modified_ns"], stamp["changed_ns"]) > SETTLED_NS:
        # a full disk or a read-only one: the file is hashed again next time
        with contextlib.suppress(OSError):
            write_whole(mark, json.dumps(stamp).encode(), durable=False)


def _stamp_if_present(path: Path) -> dict[str, int] | None:
    try:
        return stamp_of(path)
    except OSError:
        return None
