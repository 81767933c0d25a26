"""Moves of a node to other blocks, when the swarm needs those more.

A node looks at the claims of all hosts from time to time, and moves as ``routing/rebalancing.py`` decides:

1. **Announced.** Its announcement names the next blocks, so that others neither join nor move to the same place.
2. **Loaded.** They are loaded beside the present ones, whose sessions go on.
3. **Confirmed.** Other hosts of the present blocks compute what this node computes. Announcements alone do not count.
4. **Served.** New sessions use the next blocks, and those of the former are handed over.
5. **Dropped.** The former blocks are freed.

Where the memory has no room for both, the node ends once its sessions are handed over, and its supervisor runs it with the next blocks.

A node whose owner allows less memory than its blocks need keeps some of them, and drops the others in the same steps. It waits for other hosts of those, but
not for long: the owner's limit counts more. Sessions on blocks that it keeps go on.
"""

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from swarmnet_node.claims import ClaimReader
from swarmnet_node.engine.stage import Stage
from swarmnet_node.host_checks import Trial
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.routing.rebalancing import (
    LOOK_S,
    Looks,
    Move,
    Outlook,
    may_leave,
    should_move,
    staying,
)
from swarmnet_protocols.routing.throughput import Claim, holders

_log = logging.getLogger(__name__)

DRAIN_S = 120.0
"""Seconds that sessions have to move off blocks that the node leaves, while other hosts have the same blocks."""
DRAIN_GAP_S = 2.5
"""Seconds that sessions have when the node fills a gap: until it does, the model cannot be served."""
MAY_LEAVE_LOOKS = 4
"""Looks at the swarm after which a node gives up a move, because it may not leave its blocks; or drops them in any case, if its memory may not hold them."""
DROP_S = 30.0
"""Seconds that sessions have to move off blocks that other hosts have and the node's memory may not hold."""


@dataclass(frozen=True)
class Placed:
    """The blocks [start, end) ``span`` that a node serves, and how it came to them. It keeps them across a pause."""

    span: tuple[int, int]
    reason: str
    """The reason why it serves these, for its owner."""
    moved_from: tuple[int, int] | None = None
    """The blocks that it served before; None if it has not moved."""
    looks: Looks = field(default_factory=Looks)
    """Its earlier looks at the swarm."""

    def after(self, move: Move) -> "Placed":
        return replace(self, span=(move.start, move.end), reason=move.reason, moved_from=self.span)


@dataclass(frozen=True)
class LoadedBlocks:
    """Blocks that are ready to be served, and the measured seconds of one token through them."""

    stage: Stage
    step_s: float


class Movable(Protocol):
    """A node, as its moves need it."""

    placed: Placed
    next: Placed | None
    """The blocks to which it is moving; None while it is not. If it ends during the move, its supervisor runs it again with these."""

    limits_changed: asyncio.Event
    """Set when its owner has changed the limits."""

    @property
    def claim(self) -> Claim:
        """Its claim to the blocks that it serves."""

    @property
    def capacity(self) -> int:
        """The number of blocks that its owner's limits allow now, at least 1."""

    def has_room_for(self, blocks: int) -> bool:
        """Whether the memory has room for ``blocks`` more blocks beside the present ones."""

    async def make_trial(self, span: tuple[int, int]) -> Trial:
        """Random inputs of some of the present blocks, and their outputs."""

    async def load(self, span: tuple[int, int]) -> LoadedBlocks:
        """Load blocks while sessions go on. Raises ``SwarmnetError`` if they cannot be fetched."""

    async def swap(self, loaded: LoadedBlocks, drain_s: float) -> None:
        """Serve the blocks of ``next``; hand the sessions of the former ones over within ``drain_s``, and drop those."""

    async def keep(self, drain_s: float) -> None:
        """Serve only the blocks of ``next``, which are some of the present ones; hand the sessions of the others over within ``drain_s``, and drop those."""

    async def try_to_announce(self) -> None: ...

    def finish(self, grace_s: float) -> None:
        """End once all sessions are handed over, or after ``grace_s``."""


class Mover:
    """Moves ``node`` to blocks that the swarm needs more, as many as its owner allows. The model has ``blocks``."""

    def __init__(self, node: Movable, claims: ClaimReader, rng: random.Random, *, blocks: int) -> None:
        self._node = node
        self._claims = claims
        self._rng = rng
        self._blocks = blocks

    async def run(self) -> None:
        """Look at the swarm again and again, and move; returns only when the node has to end for it."""
        node = self._node
        while node.next is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S * self._rng.uniform(0.8, 1.2)):
                    await node.limits_changed.wait()
            node.limits_changed.clear()
            with contextlib.suppress(SwarmnetError):  # the directory may answer at the next look
                move = await self._look()
                if move is not None and (move.start, move.end) != node.placed.span:
                    await self._move(move)

    async def _look(self) -> Move | None:
        length, mine = self._node.capacity, self._node.claim
        must_drop = length < mine.end - mine.start
        others: list[Claim] = []
        try:
            mine, others = await self._settled_claims((mine.start, mine.end) if must_drop else None)
        except SwarmnetError:
            if not must_drop:
                raise
        loop = asyncio.get_running_loop()
        outlook = Outlook([mine, *others], blocks=self._blocks)
        looks = self._node.placed.looks
        decide = partial(should_move, outlook, mine, looks, length=length, now=loop.time(), rng=self._rng)
        # With hundreds of hosts it takes tens of milliseconds, in which the loop would send no step.
        move, looks = await loop.run_in_executor(None, decide)
        self._node.placed = replace(self._node.placed, looks=looks)
        return move

    async def _settled_claims(self, blocks: tuple[int, int] | None = None) -> tuple[Claim, list[Claim]]:
        """The claim of the node to the blocks that it serves, and those of others, as ``ClaimReader.read``."""
        others, _ = await self._claims.read(blocks=blocks)
        return self._node.claim, others

    async def _may_leave(self, kept: tuple[int, int] = (0, 0), *, fills_gap: bool = False) -> bool:
        """Whether other hosts have shown that they have the blocks of this node but those ``kept``.

        ``fills_gap``: blocks that no other host claims need none. The plan of all hosts has others shift there.
        """
        mine, others = await self._settled_claims(self._node.placed.span)
        left = [block for block in range(mine.start, mine.end) if not kept[0] <= block < kept[1]]
        there = staying(others, mine)
        if fills_gap:
            claimed = holders(there, self._blocks)
            left = [block for block in left if claimed[block]]
        elif not may_leave(others, mine, blocks=self._blocks, kept=kept):
            return False  # no host need compute anything
        found = await self._claims.computing(there, self._node.make_trial, blocks=left, least=1)
        counts = holders(found, self._blocks)
        return all(counts[block] for block in left)

    async def _move(self, move: Move) -> None:
        """Serve other blocks in place of the present ones, and go on serving these until the others are loaded.

        Where the memory has no room for both, the node ends, with the others as its next ones.
        """
        node = self._node
        start, end = node.placed.span
        node.next = node.placed.after(move)
        drain_s = DRAIN_GAP_S if move.fills_gap else DRAIN_S
        ends = False
        _log.info("moving to blocks %d:%d: %s", move.start, move.end, move.reason)
        await node.try_to_announce()
        try:
            if start <= move.start and move.end <= end:
                is_spared = await self._will_be_spared(node.next.span)
                if node.capacity < end - start:  # its owner may have allowed more again
                    await node.keep(DROP_S if is_spared else DRAIN_GAP_S)
            elif node.has_room_for(move.end - move.start):
                loaded = await node.load(node.next.span)
                kept = node.next.span
                if await (
                    self._may_leave(kept, fills_gap=True) if move.fills_gap else self._will_be_spared(kept)
                ):
                    await node.swap(loaded, drain_s)
            elif await self._may_leave(fills_gap=move.fills_gap):
                ends = True
                node.finish(drain_s)
        except SwarmnetError as error:  # as when the weights cannot be fetched: the node serves what it has
            _log.warning("the move to blocks %d:%d failed: %s", move.start, move.end, error)
        finally:
            if not ends:
                node.next = None

    async def _will_be_spared(self, kept: tuple[int, int]) -> bool:
        """Whether the node may leave its blocks but those ``kept``, at one of a few looks: others may have left since it decided to."""
        for look in range(MAY_LEAVE_LOOKS):
            if look:
                await asyncio.sleep(LOOK_S * self._rng.uniform(0.8, 1.2))
            with contextlib.suppress(SwarmnetError):  # the directory may answer at the next look
                if await self._may_leave(kept):
                    return True
        _log.info("no other host has taken over the blocks to leave")
        return False
