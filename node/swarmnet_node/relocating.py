"""Moves a node to other blocks, or to another model of the swarm, when the swarm needs it there.

A node looks at the claims of all hosts from time to time. If only unproven hosts claim a block that
it could take, it asks them to compute the block. ``routing/relocation.py`` decides whether it
stays, shrinks, grows, moves or switches:

1. **Announced.** The node announces where it will be, so that no other node goes to the same place.
2. **Loaded.** The node loads other blocks of its model next to its current ones. Sessions continue.
3. **Confirmed.** The node looks again. Other hosts must compute the same outputs for the blocks
   that it leaves: announcements alone do not count.
4. **Served.** New sessions use the next blocks. Sessions of the former blocks are handed over.
5. **Dropped.** The former blocks are freed.

If the memory has no room for both, the node skips the second step, and ends once its sessions are
handed over. Its supervisor then runs it with the next blocks. A switch also ends the node: the
supervisor reads the other model and runs a node that joins it.

A node that shrinks keeps some of its blocks, so it loads nothing. It waits a short time for other
hosts of the rest. Then it drops them anyway, because the owner's limit counts more.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from swarmnet_node.claims import ClaimReader
from swarmnet_node.engine.stage import Stage
from swarmnet_node.host_checks import HostChecker, Trial
from swarmnet_node.running_node import Dependencies
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.routing.model_needs import ServedModel
from swarmnet_protocols.routing.relocation import (
    LOOK_S,
    Kind,
    Look,
    Relocation,
    Remembered,
    blocks_to_leave,
    is_confirmed,
    may_switch,
    should_relocate,
    staying,
)
from swarmnet_protocols.routing.spans import Span
from swarmnet_protocols.routing.throughput import Claim

_log = logging.getLogger(__name__)

DRAIN_S = 120.0
"""Seconds that sessions have to move off blocks that the node leaves, while other hosts have the
same blocks."""
DRAIN_GAP_S = 2.5
"""Seconds that sessions have when the node fills a gap. Until it does, nobody can use the model."""
MAY_LEAVE_LOOKS = 4
"""Looks at the swarm before a node gives up a move because other hosts do not cover its blocks. A
node that shrinks drops its blocks then anyway."""
DROP_S = 30.0
"""Seconds that sessions have to move off blocks that other hosts have but the node's memory may not
hold."""
READ_AGAIN_S = 600.0
"""Seconds until a node tries again to read the outline of another model. By then the hub or a host
of the model may have it."""


@dataclass(frozen=True)
class Placed:
    """The blocks [start, end) ``span`` that a node serves, and why. The node keeps them across a
    pause."""

    span: Span
    reason: str
    """The reason why the node serves these blocks, for its owner."""
    moved_from: Span | None = None
    """The blocks that the node served before. None if it has not moved."""

    def after(self, relocation: Relocation) -> "Placed":
        """Return what the node serves after ``relocation`` within its model."""
        return Placed(relocation.span, relocation.reason, self.span)


@dataclass(frozen=True)
class LoadedBlocks:
    """Blocks that are ready to serve, and the measured seconds of one token through them."""

    stage: Stage
    step_s: float


class OtherModels(Protocol):
    """The other models of the swarm that a node may switch to."""

    @property
    def manifests(self) -> Sequence[bytes]:
        """The manifest hashes of the models in the swarm file, without the node's own model."""

    def own(self) -> ServedModel:
        """Return the model of the node, without claims."""

    async def read(self, manifest: bytes, blocks: int) -> ServedModel:
        """Return another model, without claims.

        ``blocks``: how many the node hosts now. They decide how many blocks of the other model fit
        in their place. Raises ``SwarmnetError`` if its outline is not on this machine and cannot be
        fetched.
        """


class Relocatable(Protocol):
    """What a relocator needs from its node."""

    memory: Remembered
    relocation: Relocation | None
    """What the node announces that it will do. None if it stays. If the node ends meanwhile, its
    supervisor carries on."""
    limits_changed: asyncio.Event
    """Set when the owner has changed the limits."""

    @property
    def claim(self) -> Claim:
        """The node's claim to the blocks that it serves."""

    @property
    def model(self) -> ServedModel:
        """The node's model, without claims."""

    @property
    def capacity(self) -> int:
        """The number of blocks that the owner's limits allow now, at least 1."""

    def has_room_for(self, blocks: int) -> bool:
        """Return whether the memory has room for ``blocks`` more blocks next to the current
        ones."""

    async def make_trial(self, span: Span) -> Trial:
        """Return random inputs for some current blocks, and their outputs."""

    def trial_inputs(self) -> torch.Tensor:
        """Return random inputs for any block."""

    async def compute(self, block: int, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return the outputs of a block that the node lacks, loaded for this alone.

        None if the memory has no room for it, or if it cannot be fetched.
        """

    async def load(self, span: Span) -> LoadedBlocks:
        """Load blocks while sessions go on. Raises ``SwarmnetError`` if they cannot be fetched."""

    async def move(self, loaded: LoadedBlocks, drain_s: float) -> None:
        """Serve the blocks of ``relocation``.

        Hand sessions of the former blocks over within ``drain_s``, then drop these blocks.
        """

    async def shrink(self, drain_s: float) -> None:
        """Serve only the blocks of ``relocation``, a part of the current ones.

        Hand sessions of the other blocks over within ``drain_s``, then drop these blocks.
        """

    async def try_to_announce(self) -> None: ...

    async def withdraw(self, relocation: Relocation) -> None:
        """Announce that the node stays after all."""

    def finish(self, grace_s: float) -> None:
        """End once all sessions are handed over, or after ``grace_s``."""


class Relocator:
    """Moves ``node`` to the blocks, or the model of ``others``, that the swarm needs most."""

    def __init__(
        self,
        node: Relocatable,
        claims: ClaimReader,
        others: OtherModels | None,
        dependencies: Dependencies,
        checker: HostChecker,
    ) -> None:
        """``claims`` cover the node's own model. ``others`` is None if the node keeps that
        model."""
        self._node = node
        self._claims = claims
        self._others = others
        self._dependencies = dependencies
        self._checker = checker
        self._readers: dict[bytes, ClaimReader] = {}
        self._read_at: dict[bytes, float] = {}
        """Loop time to try again, for models that could not be read."""

    async def run(self) -> None:
        """Look at the swarm again and again, and relocate. Return when the node has to end for
        that."""
        node = self._node
        while node.relocation is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s()):
                    await node.limits_changed.wait()
            node.limits_changed.clear()
            with contextlib.suppress(SwarmnetError):  # the directory may answer at the next look
                relocation = await self._decide()
                if relocation is not None:
                    await self._relocate(relocation)

    def _look_s(self) -> float:
        return LOOK_S * self._dependencies.rng.uniform(0.8, 1.2)

    # ---- looking --------------------------------------------------------------------------------

    async def _decide(self) -> Relocation | None:
        node, loop = self._node, asyncio.get_running_loop()
        mine = node.claim
        must_drop = mine.may_move and node.capacity < mine.end - mine.start
        try:
            look = await self._look(whole=must_drop)
            if mine.may_move and not must_drop:
                look = await self._proven(look)
        except SwarmnetError:
            if not must_drop:
                raise
            # The owner's limit counts without the directory, too.
            look = Look(replace(node.model, claims=[mine]), mine, node.capacity)
        now = loop.time()
        if may_switch(look, node.memory, now=now):
            look = replace(look, others=await self._read_others(mine))
        decide = partial(should_relocate, look, node.memory, now=now, rng=self._dependencies.rng)
        # On a thread: with hundreds of hosts this takes tens of milliseconds and would delay steps.
        relocation, node.memory = await loop.run_in_executor(None, decide)
        return relocation

    async def _proven(self, look: Look) -> Look:
        """Ask hosts to compute a block, if that is due. Return the look without claims to blocks
        that nobody computes."""
        model, mine = look.own, look.mine
        sightings, loop = self._checker.sightings, asyncio.get_running_loop()

        def due() -> int | None:
            outlook = model.outlook.including(mine)
            return sightings.block_to_try(outlook, mine, model.manifest, self._dependencies.rng)

        if (block := await loop.run_in_executor(None, due)) is not None:
            unproven = [claim for claim in model.claims if claim != mine]
            await self._claims.prove(unproven, block, self._node.trial_inputs(), self._node.compute)
            look = await self._look(whole=False)  # the block may have taken minutes to load
        now = loop.time()
        return look.of(
            [
                claim
                for claim in look.own.claims
                if claim.peer != mine.peer and sightings.stands(claim, model.manifest, now=now)
            ]
        )

    async def _look(self, *, whole: bool) -> Look:
        """Read the claims to blocks of the node's model.

        ``whole``: read every host of the node's blocks, even in a large swarm.
        """
        mine = self._node.claim
        others, _ = await self._claims.read(blocks=(mine.start, mine.end) if whole else None)
        mine = self._node.claim
        return Look(replace(self._node.model, claims=[mine, *others]), mine, self._node.capacity)

    async def _read_others(self, mine: Claim) -> list[ServedModel]:
        """Read the other models whose outlines can be read, with the claims to their blocks."""
        now, found = asyncio.get_running_loop().time(), []
        for manifest in self._others.manifests if self._others is not None else ():
            may_try = self._node.memory.may_try(manifest, now)
            if may_try and (model := await self._read_other(manifest, mine, now)) is not None:
                claims, _ = await self._reader(model).read()
                found.append(replace(model, claims=claims))
        return found

    async def _read_other(self, manifest: bytes, mine: Claim, now: float) -> ServedModel | None:
        if self._others is None or now < self._read_at.get(manifest, now):
            return None
        try:
            return await self._others.read(manifest, mine.end - mine.start)
        except SwarmnetError as error:
            _log.info("another model of the swarm cannot be read: %s", error)
            self._read_at[manifest] = now + READ_AGAIN_S
            return None

    def _reader(self, model: ServedModel) -> ClaimReader:
        if model.manifest not in self._readers:
            dependencies = self._dependencies
            self._readers[model.manifest] = ClaimReader(
                dependencies.directory,
                model.manifest,
                dependencies.rng,
                self._checker,
                me=dependencies.transport.peer_id,
                blocks=model.blocks,
            )
        return self._readers[model.manifest]

    # ---- leaving --------------------------------------------------------------------------------

    async def _relocate(self, relocation: Relocation) -> None:
        """Announce ``relocation`` and carry it out. If that fails, continue as before."""
        node, where = self._node, relocation.model or f"blocks {relocation.start}:{relocation.end}"
        _log.info("%s to %s: %s", relocation.kind.name.lower(), where, relocation.reason)
        node.relocation = relocation
        ends = False
        try:
            await node.try_to_announce()
            ends = await self._carry_out(relocation)
        except SwarmnetError as error:
            # For example, the weights cannot be fetched: the node serves what it has.
            _log.warning("could not go to %s: %s", where, error)
        finally:
            if not ends:
                node.relocation = None
        if not ends:
            await node.withdraw(relocation)

    async def _carry_out(self, relocation: Relocation) -> bool:
        """Carry out an announced relocation. Return True if the node ends for it."""
        node, kept = self._node, relocation.span
        drain_s = DRAIN_GAP_S if relocation.fills_gap else DRAIN_S
        if relocation.kind is Kind.SHRINK:
            is_spared = await self._is_confirmed(relocation, kept=kept, looks=MAY_LEAVE_LOOKS)
            if node.capacity < node.claim.end - node.claim.start:  # the owner may allow more again
                await node.shrink(DROP_S if is_spared else DRAIN_GAP_S)
            return False
        if relocation.is_switch:
            # others read this node's intent, and this node theirs
            await asyncio.sleep(self._look_s())
        elif node.has_room_for(relocation.end - relocation.start):
            loaded = await node.load(relocation.span)
            looks = 1 if relocation.fills_gap else MAY_LEAVE_LOOKS
            if await self._is_confirmed(relocation, kept=kept, looks=looks):
                await node.move(loaded, drain_s)
            return False
        if not await self._is_confirmed(relocation):
            return False
        node.finish(drain_s)
        return True

    async def _is_confirmed(self, relocation: Relocation, *, kept: Span = (0, 0), looks: int = 1) -> bool:
        """Check at up to ``looks`` looks whether the node may leave all blocks except ``kept``."""
        for number in range(looks):
            if number:
                await asyncio.sleep(self._look_s())
            with contextlib.suppress(SwarmnetError):  # the directory may answer at the next look
                if await self._may_leave(relocation, kept):
                    return True
        _log.info("stayed: no other hosts are shown to have the blocks to leave")
        return False

    async def _may_leave(self, relocation: Relocation, kept: Span) -> bool:
        """Check whether other hosts have shown that they compute the blocks to leave."""
        look = await self._look(whole=True)
        if relocation.is_switch:
            look = replace(look, others=await self._read_others(look.mine))
        there = staying(look, relocation)
        left = blocks_to_leave(look, relocation, kept=kept)
        if not await self._holds(look.of(there), relocation, left):
            return False  # hosts need not compute anything then
        found = await self._claims.computing(
            there, self._node.make_trial, blocks=left, least=relocation.others_needed
        )
        return await self._holds(look.of(found), relocation, left)

    async def _holds(self, look: Look, relocation: Relocation, left: Sequence[int]) -> bool:
        check = partial(is_confirmed, look, relocation, left)
        return await asyncio.get_running_loop().run_in_executor(None, check)
