"""The sequences of a session. Each has a KV cache, which begins empty or as another's copy."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmnet_node.engine.caches.kv_cache import SequenceCache
from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.session.steps import Row

if TYPE_CHECKING:
    from swarmnet_node.engine.torch_layers.adapters import StageAdapter


@dataclass(eq=False)
class SessionSequences:
    """The KV caches of one session, by sequence.

    Their bytes count in ``scope``. ``freed`` is set when the session has ended.
    """

    engine: Engine
    stage: Stage
    adapter: "StageAdapter | None"
    scope: Scope
    freed: asyncio.Event
    caches: dict[int, SequenceCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefix_positions = self.adapter.prefix_positions if self.adapter else 0

    def new_bytes(self, rows: Sequence[Row]) -> int:
        """Return the bytes that a step needs beyond the KV caches that it replaces or extends."""
        geometry = self.stage.geometry
        longest = [geometry.bytes_for(self.prefix_positions + row.end) for row in rows]
        held = [self.caches[row.sequence].nbytes for row in rows if row.sequence in self.caches]
        return max(0, sum(longest) - sum(held))

    async def place(self, rows: tuple[Row, ...]) -> None:
        """Give every row the KV cache that it starts from.

        A cache that no row starts from is freed first. A cache is moved instead of copied if two
        things hold. Only one row starts from it. And the step replaces the cache of the sequence
        that had it.
        """
        uses = Counter(row.source for row in rows)
        # Free first: the copies below may need this room.
        self._release(
            self.caches.pop(row.sequence)
            for row in rows
            if row.sequence in self.caches and not uses[row.sequence]
        )
        before = dict(self.caches)
        overwritten = {row.sequence for row in rows}
        # A beam search permutes its sequences at almost every step. A cache with one heir just
        # changes its number. It is copied only if it has several heirs, or continues under its own
        # number.
        copied = [
            row.sequence
            for row in rows
            if row.sequence != row.source
            and row.source in before
            and (uses[row.source] > 1 or row.source not in overwritten)
        ]
        after: dict[int, SequenceCache] = {}
        if copied:
            sources = [
                (before[row.source], self.prefix_positions + row.start)
                for row in rows
                if row.sequence in copied
            ]
            after = dict(zip(copied, await self.engine.fork(sources, self.scope), strict=True))
        if self.freed.is_set():  # the session ended during the fork
            self._release(after.values())
            raise StreamEnded("the session has ended")
        for row in rows:
            if row.source not in before:
                after[row.sequence] = self.engine.register(self.stage.new_sequence(self.adapter), self.scope)
            elif row.sequence not in after:
                after[row.sequence] = before[row.source]
        self.caches.update(after)
        kept = {id(cache) for cache in self.caches.values()}
        self._release(cache for cache in before.values() if id(cache) not in kept)
        # A client that goes back after a rejected draft sends positions that are here already.
        for row in rows:
            start = self.prefix_positions + row.start
            if self.caches[row.sequence].length > start:
                self.caches[row.sequence].truncate(start)

    def release(self) -> None:
        """Free all caches."""
        self._release(self.caches.values())
        self.caches = {}

    def _release(self, caches: Iterable[SequenceCache]) -> None:
        for cache in caches:
            self.engine.release(cache)
