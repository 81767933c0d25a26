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
from dataclasses import replace
from functools import partial

from swarmnet_node.claims import ClaimReader
from swarmnet_node.host_checks import Trial, make_trial, trial_inputs
from swarmnet_node.node import Node
from swarmnet_protocols.arrays import Array, as_array, as_float32
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import loop_time, race, within
from swarmnet_protocols.routing.model_needs import ServedModel
from swarmnet_protocols.routing.relocation import (
    LOOK_S,
    Kind,
    Look,
    Relocation,
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


class Relocator:
    """Moves a node to the blocks, or to the other model, that the swarm needs most."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._others = node.hosting.others
        self._readers: dict[bytes, ClaimReader] = {}
        self._read_at: dict[bytes, float] = {}
        """Loop time to try again, for models that could not be read."""

    async def run(self) -> None:
        """Look at the swarm again and again, and relocate the node. Return when it leaves, or if it
        may not relocate."""
        if self._node.hosting.may_relocate:
            await race(self._keep_looking(), self._node.leaving.wait())

    async def _keep_looking(self) -> None:
        node = self._node
        while node.relocation is None:
            await within(self._look_s(), node.limits_changed.wait())
            node.limits_changed.clear()
            with contextlib.suppress(SwarmnetError):  # the directory may answer at the next look
                relocation = await self._decide()
                if relocation is not None:
                    await self._relocate(relocation)

    def _look_s(self) -> float:
        return LOOK_S * self._node.dependencies.rng.uniform(0.8, 1.2)

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
            look = self._look_with(mine, [])
        now = loop.time()
        if may_switch(look, node.memory, now=now):
            look = replace(look, others=await self._read_others(mine))
        decide = partial(should_relocate, look, node.memory, now=now, rng=node.dependencies.rng)
        # On a thread: with hundreds of hosts this takes tens of milliseconds and would delay steps.
        relocation, node.memory = await loop.run_in_executor(None, decide)
        return relocation

    async def _proven(self, look: Look) -> Look:
        """Ask hosts to compute a block, if that is due. Return the look without claims to blocks
        that nobody computes."""
        node, model, mine = self._node, look.own, look.mine
        sightings, loop = node.checker.sightings, asyncio.get_running_loop()

        def due() -> int | None:
            outlook = model.outlook.including(mine)
            return sightings.block_to_try(outlook, mine, model.manifest, node.dependencies.rng)

        if (block := await loop.run_in_executor(None, due)) is not None:
            if node.engine is None:
                raise Unreachable("this node does not serve")
            inputs = trial_inputs(node.engine.stage.hidden_size, node.dependencies.rng)
            unproven = [claim for claim in model.claims if claim != mine]
            await node.claims.prove(unproven, block, inputs, self._compute)
            look = await self._look(whole=False)  # the block may have taken minutes to load
        now = loop.time()
        return look.of(
            [
                claim
                for claim in look.own.claims
                if claim.peer != mine.peer and sightings.stands(claim, model.manifest, now=now)
            ]
        )

    async def _compute(self, block: int, inputs: Array) -> Array | None:
        """Return the outputs of a block that the node lacks, loaded for this alone.

        None if the memory has no room for it, or if it cannot be fetched.
        """
        hosting = self._node.hosting
        if not self._has_room_for(1, on_cpu=True):
            return None

        def outputs() -> Array:
            loaded = (hosting.load_on_cpu or hosting.load)(block, block + 1)
            return as_float32(as_array(loaded.run_sequences(inputs, (len(inputs),))))

        try:
            return await asyncio.get_running_loop().run_in_executor(None, outputs)
        except SwarmnetError as error:
            _log.info("block %d could not be loaded for a check: %s", block, error)
            return None

    async def _look(self, *, whole: bool) -> Look:
        """Read the claims to blocks of the node's model.

        ``whole``: read every host of the node's blocks, even in a large swarm.
        """
        mine = self._node.claim
        others, _ = await self._node.claims.read(blocks=(mine.start, mine.end) if whole else None)
        return self._look_with(self._node.claim, others)

    def _look_with(self, mine: Claim, others: Sequence[Claim]) -> Look:
        hosting = self._node.hosting
        if self._others is not None:
            model = self._others.own()
        else:
            model = ServedModel(hosting.manifest, hosting.model, hosting.total_blocks, 1.0, ())
        return Look(replace(model, claims=[mine, *others]), mine, self._node.capacity)

    async def _read_others(self, mine: Claim) -> list[ServedModel]:
        """Read the other models whose outlines can be read, with the claims to their blocks."""
        now, found = loop_time(), []
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
            self._readers[model.manifest] = ClaimReader(
                self._node.dependencies, self._node.checker, model.manifest, model.blocks
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
        elif self._has_room_for(relocation.end - relocation.start):
            # Not on the torch thread, which computes sessions.
            loop, load = asyncio.get_running_loop(), node.hosting.load
            stage = await loop.run_in_executor(None, load, *relocation.span)
            looks = 1 if relocation.fills_gap else MAY_LEAVE_LOOKS
            if await self._is_confirmed(relocation, kept=kept, looks=looks):
                await node.move(stage, drain_s)
            return False
        if not await self._is_confirmed(relocation):
            return False
        node.finish(drain_s)
        return True

    def _has_room_for(self, blocks: int, *, on_cpu: bool = False) -> bool:
        """Return whether the memory has room for ``blocks`` more blocks next to the current ones.

        False on an accelerator, unless ``on_cpu``: the caches take all its memory.
        """
        engine = self._node.engine
        if engine is None or (engine.stage.is_on_accelerator and not on_cpu):
            return False
        return self._node.hosting.has_room(blocks * engine.stage.weight_bytes // engine.stage.blocks)

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
        found = await self._node.claims.computing(
            there, self._make_trial, blocks=left, least=relocation.others_needed
        )
        return await self._holds(look.of(found), relocation, left)

    async def _make_trial(self, span: Span) -> Trial:
        if self._node.host is None:
            raise Unreachable("this node does not serve")
        return await make_trial(self._node.host.blocks, self._node.dependencies.rng, span)

    async def _holds(self, look: Look, relocation: Relocation, left: Sequence[int]) -> bool:
        check = partial(is_confirmed, look, relocation, left)
        return await asyncio.get_running_loop().run_in_executor(None, check)
