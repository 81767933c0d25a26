"""Fetches the pieces of a model's weight files that some tensors need, from the hub and from peers.

A piece is verified by its hash. docs/decisions/0087 decides which tables of hashes are trusted, and
for what:

- A *known* table was made by this machine from a whole file, or is covered by the swarm file's
  pieces hash. Pieces may come from any peer.
- A *claimed* table comes from peers. It confirms what the hub sends: two independent sources agree.
  Pieces come from the hub only.
- If the hub does not answer, a file with a claimed table is fetched whole from peers. If the file
  has the hash in the manifest, the table becomes known.
- Without a table, pieces come from the hub only, and their hashes are *noted* when they arrive.

A file without a table is fetched whole in three cases: most of it is needed, it is no longer than a
piece, or the swarm file names the model. The table is then made from the file. In the last case
only the model's hashes are trusted.
"""

import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from swarmnet_protocols.errors import IntegrityError, Unreachable
from swarmnet_protocols.fetching.disk import make_room
from swarmnet_protocols.fetching.download import PieceSource, download
from swarmnet_protocols.fetching.hub_files import HubFiles, check_free_space
from swarmnet_protocols.fetching.piece_file import PieceFile
from swarmnet_protocols.fetching.pieces import (
    PIECE_BYTES,
    Layout,
    ModelFile,
    PieceTable,
    Progress,
    Tables,
    cut,
    pieces_between,
)
from swarmnet_protocols.machine.aio import run_apart
from swarmnet_protocols.models.checkpoints.checkpoint import ModelCheckpoint, hash_pieces
from swarmnet_protocols.models.verified_files import VerifiedFiles

T = TypeVar("T")
WHOLE_SHARE = 0.5
"""Share of a file without a table. If more of it is needed, the whole file is fetched.

A whole file can be verified, and gives peers its table.
"""
ASK_AGAIN_S = 60.0
"""Seconds after which peers are asked again for the table of a file."""
Slices = Mapping[str, tuple[int, Collection[int]]]
"""By tensor name: the number of equal slices along the first dimension, and the wanted indices."""
Files = Sequence[tuple[PieceFile, PieceTable]]


class Peers(Protocol):
    """Peers of the swarm that have parts of a model."""

    def lists(self, model: bytes) -> bool:
        """Return whether the swarm file names the hash of this model's manifest."""

    def wait(self) -> bool:
        """Wait for the connection to the swarm. Returns whether peers can be asked from this
        thread."""

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop of the network, from another thread."""

    async def tables(self, model: bytes, files: Sequence[ModelFile], tables: Tables) -> None:
        """Ask for the tables of files, and add them to ``tables``. A table is known if a pieces
        hash covers it, otherwise claimed."""

    def sources(
        self, model: bytes, files: Sequence[ModelFile]
    ) -> AbstractAsyncContextManager[Sequence[PieceSource]]:
        """Yield the peers that have pieces of these files."""


class Parts:
    """The weight files of one model that are not complete on this machine."""

    def __init__(
        self, model: bytes, checkpoint: ModelCheckpoint, cache_dir: Path, progress: Progress | None
    ) -> None:
        """``model``: the hash of its manifest."""
        self.tables = Tables(cache_dir / "pieces")
        self.verified = VerifiedFiles(checkpoint, self.tables, cache_dir, progress)
        self.peers: Peers | None = None
        self.bytes_from: dict[str, int] = {}
        """Bytes fetched in this process, by the name of the source."""
        self.in_use: dict[bytes, PieceFile] = {}
        """The files with verified pieces on this machine, by SHA-256."""
        self.max_disk_bytes: int | None = None
        """Most bytes that all partial files on this machine may take together. None: no limit."""
        self._model = model
        self._checkpoint = checkpoint
        self._progress = progress
        self._asked: dict[bytes, float] = {}
        """SHA-256 of a file → monotonic time when peers were asked for its table."""

    def partial(self) -> list[str]:
        """Return the files that are not whole on this machine."""
        hub = self._checkpoint.hub
        if hub is None:
            return []
        return [
            name
            for name in sorted(self._checkpoint.known)
            if self._checkpoint.path_of(name) == hub.partial(name).path
        ]

    def fetch(
        self,
        names: Iterable[str],
        slices: Slices | None = None,
    ) -> list[PieceFile]:
        """Fetch the missing pieces of these tensors. Return the partial files that hold them.

        ``slices``: fetch only these slices of a tensor, unless its whole file must be fetched.
        Raises ``Unreachable``, ``OutOfResources`` or ``IntegrityError``.
        """
        hub = self._checkpoint.hub
        wanted: Slices = dict.fromkeys(names, (1, (0,))) | dict(slices or {})
        files = [name for name in self.partial() if name in self._checkpoint.holders(wanted)]
        if hub is None or not files:
            return []
        self._ask_for_tables([hub.file(name) for name in files])
        known, claimed, noted = [], [], []
        for partial in map(hub.partial, files):
            if (table := self.tables.known(partial.file)) is not None:
                known.append((partial, table))
            elif (table := self.tables.claimed(partial.file)) is not None:
                claimed.append((partial, table))
            elif (table := self._noted(hub, partial, wanted)) is not None:
                noted.append((partial, table))
        self._complete(known, wanted, from_anyone=True)
        fetched = [partial for partial, _ in known]
        fetched += self._fetch_claimed(claimed, wanted)
        self._complete(noted, wanted, notes=True)
        fetched += [partial for partial, _ in noted]
        self._checkpoint.fetch(set(files) - {each.file.name for each in fetched})
        for partial in fetched:
            self.verified.add_pieces(partial)
        return fetched

    def _ask_for_tables(self, files: Iterable[ModelFile]) -> None:
        """Ask peers for the tables of those files whose table is not known."""
        now = time.monotonic()
        due = [
            file
            for file in files
            if self.tables.known(file) is None
            and self._asked.get(file.sha256, -ASK_AGAIN_S) <= now - ASK_AGAIN_S
        ]
        if due and (peers := self._reachable_peers()) is not None:
            peers.run(lambda: peers.tables(self._model, due, self.tables))
            self._asked |= dict.fromkeys((file.sha256 for file in due), now)

    def _fetch_claimed(self, files: Files, wanted: Slices) -> list[PieceFile]:
        """Fetch the wanted pieces of files whose tables are claimed. Returns these files; none if a
        table is wrong."""
        try:
            self._complete(files, wanted)
        except IntegrityError:
            # the claim or the hub is wrong: the hash of the whole file will decide
            for partial, _ in files:
                self.tables.forget_claim(partial.file)
            return []
        except Unreachable:
            if self._reachable_peers() is None:
                raise
            return [self._prove(*each) for each in files]
        return [partial for partial, _ in files]

    def _noted(self, hub: HubFiles, partial: PieceFile, wanted: Slices) -> PieceTable | None:
        """Return the table of the hashes noted for a file; None to fetch the whole file instead.

        Fetches the header.
        """
        name, size = partial.file.name, partial.file.size
        is_listed = self.peers is not None and self.peers.lists(self._model)
        if not hub.repository or is_listed or size <= PIECE_BYTES:
            return None
        try:
            hub.read_head(name, lambda _: self._checkpoint.layout(name).head_bytes)
        except Unreachable:  # a hub that sends no parts of files may send whole ones
            return None
        layout = self._checkpoint.layout(name)
        starts = cut(size, layout.edges)
        needed = sum(starts[piece + 1] - starts[piece] for piece in _pieces(layout, starts, wanted))
        if needed > WHOLE_SHARE * size:
            return None
        noted = partial.read_notes()
        if noted is not None and (noted.head_bytes, noted.count) == (layout.head_bytes, len(starts) - 1):
            return noted
        with partial.path.open("rb") as file:
            return PieceTable.of_head(file.read(layout.head_bytes), len(starts) - 1)

    def _complete(
        self,
        files: Files,
        wanted: Slices,
        *,
        from_anyone: bool = False,
        notes: bool = False,
    ) -> None:
        """Fetch the headers of files, and the pieces of their wanted tensors. ``notes``: as for
        ``PieceFile.use``."""
        heads = []
        for partial, table in files:
            partial.create()
            partial.hold()
            partial.use(table, None, notes=notes)
            head = range(len(table.head_starts) - 1)
            partial.adopt(head)
            heads.append((partial, head))
        self._download(heads, from_anyone=from_anyone)
        bodies = []
        for partial, table in files:
            layout = self._checkpoint.layout(partial.file.name)
            if layout.head_bytes != table.head_bytes:
                raise IntegrityError(
                    f"the header of {partial.file.name} has another size than its table of pieces says"
                )
            partial.use(table, layout.edges, notes=notes)
            self.verified.check_pieces(partial, table)
            if not notes:  # peers get only what others have confirmed
                self.in_use[partial.file.sha256] = partial
            bodies.append((partial, _pieces(layout, partial.starts, wanted)))
        self._download([*heads, *bodies], from_anyone=from_anyone)

    def _prove(self, partial: PieceFile, table: PieceTable) -> PieceFile:
        """Fetch a whole file from peers by the table that they claim. Raises ``IntegrityError`` if
        the result does not have the file's hash."""
        self._complete([(partial, table)], {}, from_anyone=True)
        self._download([(partial, range(table.count))], from_anyone=True)
        if hash_pieces(partial.path, (), self._progress).sha256 != partial.file.sha256:
            self.tables.forget_claim(partial.file)
            partial.remove()
            raise IntegrityError(
                f"the peers that offer {partial.file.name} have another file of this name",
                hint="try again when the hub can be reached, or in a swarm whose swarm file names the model's pieces hash",
            )
        self.tables.add(partial.file, table)
        return partial

    def _download(self, wanted: Sequence[tuple[PieceFile, Collection[int]]], *, from_anyone: bool) -> None:
        missing = [
            (file, sorted(piece for piece in set(pieces) if not file.has(piece))) for file, pieces in wanted
        ]
        missing = [(file, pieces) for file, pieces in missing if pieces]
        if not missing:
            return
        size = sum(
            file.starts[piece + 1] - file.starts[piece] for file, pieces in missing for piece in pieces
        )
        if self.max_disk_bytes is not None:
            make_room(missing[0][0].folder.parent, size, self.max_disk_bytes)
        check_free_space("what is missing of the model", size, missing[0][0].folder)
        peers = self._reachable_peers() if from_anyone else None
        run = run_apart if peers is None else peers.run
        for name, count in run(lambda: self._download_from(missing, peers)).items():
            self.bytes_from[name] = self.bytes_from.get(name, 0) + count

    async def _download_from(
        self, wanted: Sequence[tuple[PieceFile, list[int]]], peers: Peers | None
    ) -> dict[str, int]:
        hub, progress = self._checkpoint.hub, self._progress
        async with AsyncExitStack() as stack:
            sources: list[PieceSource] = [hub.ranges] if hub is not None and hub.repository else []
            if peers is not None:
                files = [file.file for file, _ in wanted]
                sources += await stack.enter_async_context(peers.sources(self._model, files))

            def report(done: int, total: int) -> None:
                if progress is not None:
                    progress("fetching weights", done, total)

            return await download(wanted, sources, report)

    def _reachable_peers(self) -> Peers | None:
        return self.peers if self.peers is not None and self.peers.wait() else None


def _pieces(layout: Layout, starts: Sequence[int], wanted: Slices) -> set[int]:
    """Return the numbers of the pieces of a file that hold the wanted tensors."""
    return {
        piece
        for name in layout.spans.keys() & wanted.keys()
        for start, end in _ranges(layout.spans[name], *wanted[name])
        for piece in pieces_between(starts, start, end)
    }


def _ranges(span: tuple[int, int], count: int, chosen: Collection[int]) -> Iterable[tuple[int, int]]:
    """Yield the bytes [start, end) of the ``chosen`` ones among ``count`` equal slices of a
    tensor."""
    start, end = span
    for number in chosen:
        yield start + (end - start) * number // count, start + -(-(end - start) * (number + 1) // count)
