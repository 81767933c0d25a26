"""Switches of a node to another model of the swarm, when that needs hosts more.

A node looks at the models that the swarm file lists from time to time, and switches as ``routing/switching.py`` decides:

1. **Announced.** It announces, beside the blocks that it serves, those of the other model that it intends to take.
2. **Confirmed.** After a while it looks once more: others may have left its model, or gone to the other one, at the same time.
   The hosts that stay compute what this node computes. Announcements alone do not count.
3. **Left.** Its sessions are handed over to other hosts of its model, which it leaves only if they suffice.
4. **Joined.** Its supervisor reads the other model, and runs a node that chooses its blocks and loads them as any joining node does.

If the other model cannot be read, or does not fit into the owner's limits, the node serves its former blocks again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from swarmnet_node.claims import ClaimReader
from swarmnet_node.host_checks import HostChecker, Trial
from swarmnet_node.moving import DRAIN_S, Placed
from swarmnet_node.running_node import Dependencies
from swarmnet_protocols.directory.announcer import Announcer
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel, persist
from swarmnet_protocols.routing.rebalancing import MOVE_PAUSE_S
from swarmnet_protocols.routing.switching import (
    LOOK_S,
    OTHER_HOSTS,
    ServedModel,
    Switch,
    SwitchLooks,
    is_confirmed,
    may_leave_model,
    should_switch,
    staying,
)
from swarmnet_protocols.routing.throughput import Claim

_log = logging.getLogger(__name__)

READ_AGAIN_S = 600.0
"""Seconds after which a node tries again to read the outline of another model, which the hub or a host of it may then have."""


class OtherModels(Protocol):
    """The models of the swarm to which a node may switch."""

    @property
    def manifests(self) -> Sequence[bytes]:
        """The manifest hashes of those that the swarm file lists, without the node's own."""

    def own(self) -> ServedModel:
        """The model of the node, without claims."""

    async def read(self, manifest: bytes, blocks: int) -> ServedModel:
        """One of them, without claims. ``blocks``: those that the node hosts now, from which follows how many of the model fit in their place.

        Raises ``SwarmnetError`` if its outline is not on this machine and cannot be fetched.
        """


@dataclass(frozen=True)
class Departure:
    """A switch that a node makes: it ends for it, and its supervisor runs one of the other model."""

    switch: Switch
    intent: Announcer
    """Announces the blocks of the other model."""
    weight_bytes: int
    """Bytes of the weights of the blocks that it leaves."""


class Switchable(Protocol):
    """A node, as its switches need it."""

    placed: Placed
    next: Placed | None
    switch_looks: SwitchLooks
    departure: Departure | None
    """The switch for which it ends; None while it makes none."""

    @property
    def claim(self) -> Claim:
        """Its claim to the blocks that it serves."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of these blocks."""

    async def make_trial(self, span: tuple[int, int]) -> Trial:
        """Random inputs of some of these blocks, and their outputs."""

    def intent(self, switch: Switch) -> Announcer: ...

    def finish(self, grace_s: float) -> None:
        """End once all sessions are handed over, or after ``grace_s``."""

    async def finished(self) -> None: ...


class Switcher:
    """Has ``node`` switch to one of ``models`` when that needs it more."""

    def __init__(
        self,
        node: Switchable,
        claims: ClaimReader,
        models: OtherModels,
        dependencies: Dependencies,
        checker: HostChecker,
    ) -> None:
        """``claims``: those of the node's own model."""
        self._node = node
        self._checker = checker
        self._claims = claims
        self._models = models
        self._dependencies = dependencies
        self._readers: dict[bytes, ClaimReader] = {}
        self._read_at: dict[bytes, float] = {}
        """When a model that could not be read is read again."""

    async def run(self) -> None:
        """Look at the swarm again and again, and switch; returns when the node has ended for it."""
        node = self._node
        while node.departure is None:
            await self._wait()
            if node.next is None:
                with contextlib.suppress(SwarmnetError):  # the directory may answer at the next look
                    switch = await self._look()
                    if switch is not None:
                        await self._switch(switch)

    async def _wait(self) -> None:
        await asyncio.sleep(LOOK_S * self._dependencies.rng.uniform(0.8, 1.2))

    async def _look(self) -> Switch | None:
        node, loop = self._node, asyncio.get_running_loop()
        now = loop.time()
        own, mine = await self._own()
        others: list[ServedModel] = []
        if now >= node.placed.looks.moved_at + MOVE_PAUSE_S and may_leave_model(own, mine):
            others = await self._others(mine)  # else nothing more need be read
        looks, rng = node.switch_looks, self._dependencies.rng
        decide = partial(should_switch, own, mine, others, looks, now=now, rng=rng)
        # With hundreds of hosts it takes tens of milliseconds, in which the loop would send no step.
        switch, node.switch_looks = await loop.run_in_executor(None, decide)
        return switch

    async def _own(self, blocks: tuple[int, int] | None = None) -> tuple[ServedModel, Claim]:
        others, _ = await self._claims.read(blocks=blocks)
        mine = self._node.claim
        return replace(self._models.own(), claims=[mine, *others]), mine

    async def _others(self, mine: Claim) -> list[ServedModel]:
        """The other models whose outlines can be read, with the claims to their blocks."""
        dependencies, now = self._dependencies, asyncio.get_running_loop().time()
        found = []
        for manifest in self._models.manifests:
            if now < self._read_at.get(manifest, now) or not self._node.switch_looks.may_try(manifest, now):
                continue
            try:
                model = await self._models.read(manifest, mine.end - mine.start)
            except SwarmnetError as error:
                _log.info("another model of the swarm cannot be read: %s", error)
                self._read_at[manifest] = now + READ_AGAIN_S
                continue
            if manifest not in self._readers:
                me = dependencies.transport.peer_id
                self._readers[manifest] = ClaimReader(
                    dependencies.directory,
                    manifest,
                    dependencies.rng,
                    self._checker,
                    me=me,
                    blocks=model.blocks,
                )
            claims, _ = await self._readers[manifest].read()
            found.append(replace(model, claims=claims))
        return found

    async def _switch(self, switch: Switch) -> None:
        """Announce the switch, look once more after a while, and have the node end for it."""
        node = self._node
        _log.info("may switch to %s: %s", switch.name, switch.reason)
        intent = node.intent(switch)
        keeping = asyncio.create_task(persist("the announcement", intent.run), name="announce intent")
        try:
            await self._wait()
            if not await self._is_confirmed(switch):
                _log.info("stayed: other nodes have switched to %s", switch.name)
                await cancel(keeping)
                await intent.withdraw()
                return
            _log.info("switching to %s", switch.name)
            node.departure = Departure(switch, intent, node.weight_bytes)
            node.finish(DRAIN_S)
            await node.finished()
        finally:
            await cancel(keeping)

    async def _is_confirmed(self, switch: Switch) -> bool:
        if self._node.next is not None:  # it moves to other blocks
            return False
        own, mine = await self._own(self._node.placed.span)
        others = await self._others(mine)
        found = await self._claims.computing(
            staying(own, mine, others),
            self._node.make_trial,
            blocks=range(mine.start, mine.end),
            least=OTHER_HOSTS,
        )
        own = replace(own, claims=[mine, *found])
        decide = partial(is_confirmed, own, mine, others, switch)
        return await asyncio.get_running_loop().run_in_executor(None, decide)
