"""Download pieces from several sources at once, each at its own speed, and verify each on arrival.

Weights go to a ``PieceFile``, the state of a training job to a ``PieceMemory``. The life of a
download:

1. Missing pieces become units in one queue, and all sources take work from it.
2. Peers bring pieces first. The hub brings pieces that no peer has, once peers have said so. After
   ``HUB_WAIT_S`` it brings any piece.
3. A few sources work at a time. Another starts when one ends, or while nothing arrives.
4. When the queue is empty, an idle source repeats the reads of a slow one.

A source that sends wrong bytes is dropped. The error names it if no other source has the pieces.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarmnet_protocols.errors import IntegrityError, SwarmnetError, Unreachable
from swarmnet_protocols.fetching.pieces import PIECE_BYTES, ModelFile
from swarmnet_protocols.machine.aio import all_of, cancel, loop_time, within

_log = logging.getLogger(__name__)

HUB_WAIT_S = 3.0
"""Head start in seconds of peers over the hub, because the hub's operator pays for its traffic."""
REPEAT_S = 5.0
"""Seconds until an idle source repeats a read that another source has not finished, and between
repeats.

Also the seconds without a new piece until a further source starts."""
MAX_SOURCES = 17
"""Most sources that work at the same time while pieces arrive: the hub, and two streams with each
of eight peers."""
ATTEMPTS = 4
"""Consecutive failures to answer that drop the hub. Other sources are dropped after one failure."""
PAUSE_S = 0.5
"""Seconds of pause after a source's first failure. Each further failure doubles it."""


class PieceSource(Protocol):
    """A source of pieces: the hub, or a peer."""

    name: str
    """Names the source in error messages."""
    is_last: bool
    """True if other sources get the head start ``HUB_WAIT_S``. True for the hub."""
    connections: int
    """Most reads at the same time."""
    max_bytes: int
    """Most bytes of one read."""

    async def prepare(self) -> None:
        """Connect, and find out which pieces the source has. Raises ``SwarmnetError``."""

    def has(self, file: ModelFile, piece: int) -> bool:
        """Tell whether the source may have a piece. False until it is prepared."""

    async def read(self, file: ModelFile, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of a file, or a prefix that is not empty. Raises
        ``SwarmnetError``.
        """


class PieceTarget(Protocol):
    """The place for the pieces of one file. It verifies pieces and keeps them when a download
    fails.
    """

    file: ModelFile

    @property
    def starts(self) -> Sequence[int]:
        """The offsets at which pieces begin, and the end of the last one."""

    def has(self, piece: int) -> bool:
        """Return whether a piece is here."""

    def write(self, first: int, data: bytes) -> int:
        """Keep the whole pieces at the beginning of ``data``, from piece ``first`` on. Returns
        their number.

        Raises ``IntegrityError`` for a piece with another hash.
        """

    def sync(self) -> None:
        """Make what was written durable."""


@dataclass
class _Unit:
    """Consecutive pieces [first, last) of one file that are fetched together."""

    file: PieceTarget
    first: int
    last: int
    asked: dict[str, float] = field(default_factory=dict)
    """Sources that were asked and have not answered → time of the request."""

    @property
    def start(self) -> int:
        return self.file.starts[self.first]

    @property
    def end(self) -> int:
        return self.file.starts[self.last]

    @property
    def name(self) -> str:
        """Name of the file in logs. It is the hash, which servers log, too."""
        return f"download {self.file.file.sha256.hex()[:8]}"

    def missing(self) -> bool:
        return not all(self.file.has(piece) for piece in range(self.first, self.last))


def _units(file: PieceTarget, pieces: Sequence[int]) -> list[_Unit]:
    """Return the missing pieces among ``pieces`` as units.

    Neighbours share a unit of at most ``PIECE_BYTES``.
    """
    units: list[_Unit] = []
    for piece in sorted(set(pieces)):
        if file.has(piece):
            continue
        last = units[-1] if units else None
        if last and last.last == piece and file.starts[piece + 1] - last.start <= PIECE_BYTES:
            last.last = piece + 1
        else:
            units.append(_Unit(file, piece, piece + 1))
    return units


async def download(
    wanted: Sequence[tuple[PieceTarget, Sequence[int]]],
    sources: Sequence[PieceSource],
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    on_wrong: Callable[[str, IntegrityError], None] = lambda source, error: None,
) -> dict[str, int]:
    """Fetch the wanted pieces that are missing. Returns the bytes from each source, by its name.

    - ``on_bytes`` gets the bytes fetched so far and the bytes of all missing pieces.
    - ``on_wrong`` gets the name of each source that sent wrong bytes.

    Raises ``IntegrityError`` if all sources sent wrong bytes, and ``Unreachable`` if pieces could
    not be fetched for another reason. Both name the sources. Raises ``OutOfResources`` for a full
    disk. Verified pieces are always kept.
    """
    units = [unit for file, pieces in wanted for unit in _units(file, pieces)]
    running = _Download(units, on_bytes, on_wrong)
    try:
        await running.run(sources)
    finally:
        for file, _ in wanted:
            await asyncio.to_thread(file.sync)
    return running.bytes_from


class _Download:
    def __init__(
        self,
        units: Sequence[_Unit],
        on_bytes: Callable[[int, int], None],
        on_wrong: Callable[[str, IntegrityError], None],
    ) -> None:
        self.bytes_from: dict[str, int] = {}
        self._queue = deque(units)
        self._asked: list[_Unit] = []
        self._on_bytes = on_bytes
        self._on_wrong = on_wrong
        self._total = sum(unit.end - unit.start for unit in units)
        self._done = 0
        self._unready: dict[str, SwarmnetError] = {}
        self._failed: dict[str, SwarmnetError] = {}
        self._dropped: dict[str, IntegrityError] = {}
        self._changed = asyncio.Event()
        self._sources: list[PieceSource] = []
        """Sources that have started."""
        self._preparing = 0
        self._progress_at = loop_time()
        """Time of the last arrived piece, or of the last start of a source."""
        self._writing = asyncio.Lock()

    async def run(self, sources: Sequence[PieceSource]) -> None:
        for name, count in Counter(unit.name for unit in self._queue).items():
            _log.debug("%s: %d parts wanted of %d sources", name, count, len(sources))
        waiting = deque(sources)
        working: set[asyncio.Task[None]] = set()
        try:
            while (working or waiting) and (self._queue or self._asked):
                is_stuck = loop_time() >= self._progress_at + REPEAT_S
                while waiting and (len(working) < MAX_SOURCES or is_stuck):
                    working.add(asyncio.create_task(self._use(waiting.popleft())))
                    is_stuck, self._progress_at = False, loop_time()
                ended, working = await asyncio.wait(
                    working, timeout=REPEAT_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    task.result()
        finally:
            await cancel(*working)
        if self._queue:
            causes = "; ".join(
                f"{name}: {error}"
                for name, error in {**self._unready, **self._failed, **self._dropped}.items()
            )
            kind = IntegrityError if self._dropped and not self._failed else Unreachable
            raise kind(
                f"parts of {self._queue[0].file.file.name} could not be fetched ({causes or 'no source has them'})",
                hint="check the connection, and start again: what has arrived is kept",
            )

    def _is_out(self, source: PieceSource) -> bool:
        return source.name in self._dropped or source.name in self._failed

    async def _use(self, source: PieceSource) -> None:
        """Prepare a source, and fetch over its connections until it can bring no unit that is
        left."""
        self._preparing += not source.is_last
        try:
            await source.prepare()
        except SwarmnetError as error:
            self._unready[source.name] = error
            _log.debug("%s: not ready: %s", source.name, error)
            return
        finally:
            self._preparing -= not source.is_last
            self._changed.set()
        self._sources.append(source)
        await all_of(*(self._work(source) for _ in range(source.connections)))

    async def _work(self, source: PieceSource) -> None:
        """Fetch over one connection of a source until it can bring no unit that is left."""
        began, failures = loop_time(), 0
        while not self._is_out(source):
            units = self._next_units(source, began)
            if units is None:
                return
            if not units:
                self._changed.clear()
                await within(HUB_WAIT_S / 10, self._changed.wait())
                continue
            try:
                error = await self._fetch(source, units)
            finally:
                self._release(source, units)
            failures = 0 if error is None else failures + 1
            if isinstance(error, IntegrityError):
                self._dropped[source.name] = error
                self._on_wrong(source.name, error)
                _log.debug("%s of %s: dropped: %s", units[0].name, source.name, error)
            elif error is not None and (failures == ATTEMPTS or not source.is_last):
                self._failed[source.name] = error
                _log.debug("%s of %s: given up: %s", units[0].name, source.name, error)
            if failures and not self._is_out(source):
                await asyncio.sleep(PAUSE_S * 2 ** (failures - 1))

    def _next_units(self, source: PieceSource, began: float) -> list[_Unit] | None:
        """Return adjacent units for one read.

        Empty if the source has to wait; None if no unit is left for it.
        """
        if not self._queue and not self._asked:
            return None
        others = [other for other in self._sources if not other.is_last and not self._is_out(other)]
        waits = source.is_last and loop_time() < began + HUB_WAIT_S
        for unit in () if waits and self._preparing else self._queue:
            if _has(source, unit) and not (waits and any(_has(other, unit) for other in others)):
                return self._with_adjacent(source, unit)
        for unit in self._asked:
            waited_s = loop_time() - min(unit.asked.values(), default=loop_time())
            is_slow = waited_s > REPEAT_S * len(unit.asked)
            if is_slow and source.name not in unit.asked and _has(source, unit):
                unit.asked[source.name] = loop_time()
                return [unit]
        if not source.is_last and not any(_has(source, unit) for unit in (*self._queue, *self._asked)):
            return None
        return []

    def _with_adjacent(self, source: PieceSource, unit: _Unit) -> list[_Unit]:
        """Return ``unit`` and the queued units that follow it, up to a fair share of the bytes
        left.
        """
        workers = sum(each.connections for each in self._sources if not self._is_out(each))
        left = sum(each.end - each.start for each in self._queue)
        limit = min(source.max_bytes, max(left // (2 * workers), unit.end - unit.start))
        units = [unit]
        following = {(each.file.file.sha256, each.first): each for each in self._queue}
        while (
            (after := following.get((unit.file.file.sha256, units[-1].last))) is not None
            and after.end - unit.start <= limit
            and _has(source, after)
        ):
            units.append(after)
        for each in units:
            self._queue.remove(each)
            self._asked.append(each)
            each.asked[source.name] = loop_time()
        return units

    def _release(self, source: PieceSource, units: list[_Unit]) -> None:
        """Queue the units again that a source did not bring, unless another source fetches them."""
        for unit in units:
            unit.asked.pop(source.name, None)
            if unit in self._asked and not (unit.asked and unit.missing()):
                self._asked.remove(unit)
                if unit.missing():
                    self._queue.appendleft(unit)
        self._changed.set()

    async def _fetch(self, source: PieceSource, units: list[_Unit]) -> SwarmnetError | None:
        """Read and write adjacent units. Returns the error of the source, or None.

        Raises ``OutOfResources`` for a full disk.
        """
        file, last = units[0].file, units[-1].last
        # If an answer broke off, its first pieces are here already.
        first = next((piece for piece in range(units[0].first, last) if not file.has(piece)), units[0].first)
        try:
            data = await source.read(file.file, file.starts[first], file.starts[last])
        except SwarmnetError as error:
            return error
        async with self._writing:
            before = [unit for unit in units if unit.missing()]
            try:
                written = await asyncio.to_thread(file.write, first, data)
            except IntegrityError as error:
                return IntegrityError(f"it sent wrong bytes: {error}")
            brought = sum(unit.end - unit.start for unit in before if not unit.missing())
            self._done += brought
            if brought:
                self._progress_at = loop_time()
        _log.debug(
            "%s from byte %d of %s: %d bytes", units[0].name, file.starts[first], source.name, len(data)
        )
        self.bytes_from[source.name] = self.bytes_from.get(source.name, 0) + len(data)
        self._on_bytes(self._done, self._total)
        return None if written else Unreachable("it sent less than one piece")


def _has(source: PieceSource, unit: _Unit) -> bool:
    return all(source.has(unit.file.file, piece) for piece in range(unit.first, unit.last))
