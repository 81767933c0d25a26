"""Many workers that only form groups and average, over simulated links: the real protocols, without
models."""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.matchmaking.matchmaking import Matchmaking, NoPlace
from swarmnet_protocols.training.matchmaking.positions import OutOfSync
from swarmnet_protocols.training.matchmaking.rosters import Roster
from swarmnet_protocols.training.rounds.averaging import Averager
from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.round_runner import Outcome, RoundContext
from swarmnet_protocols.training.rounds.terms import RoundMember
from tests.support.network.memory_network import LinkProfile, MemoryNetwork, _Link
from tests.support.network.virtual_time import run

JOB = bytes(range(32))
TIMEOUT_S = 60.0
SITES = 4
NEAR_S, FAR_S = 0.005, 0.08
"""One-way delays within a site and between two sites."""


class Sites(MemoryNetwork):
    """Peers at a few sites. Counts the bytes that each peer sends."""

    def __init__(self, rng: random.Random, bytes_per_s: float) -> None:
        super().__init__(rng)
        self.bytes_per_s = bytes_per_s
        self.site: dict[PeerId, int] = {}
        self.sent: Counter[PeerId] = Counter()
        self.far_bytes = 0

    def carry(self, source: PeerId, target: PeerId, size_bytes: int, arrive: Callable[[], None]) -> None:
        self.sent[source] += size_bytes
        self.far_bytes += size_bytes * (self.site[source] != self.site[target])
        super().carry(source, target, size_bytes, arrive)

    def _link(self, source: PeerId, target: PeerId) -> _Link:
        is_new, link = (source, target) not in self._links, super()._link(source, target)
        if is_new:
            delay_s = NEAR_S if self.site[source] == self.site[target] else FAR_S
            link.profile = LinkProfile(delay_s=delay_s, bytes_per_s=self.bytes_per_s)
        return link


@dataclass
class Member:
    """One worker of the crowd, with the hash of all averages that it committed."""

    me: RoundMember
    matchmaking: Matchmaking
    averager: Averager
    scale: float
    state: bytes = bytes(32)
    roster: Roster | None = None
    outcome: Outcome | None = None
    spare: bool = False
    healed: bool = False
    """Whether it missed the last round, and took over the state of another worker."""
    task: "asyncio.Task[None] | None" = None


@dataclass
class Crowd:
    """``count`` workers that average vectors of ``size`` values."""

    count: int
    size: int
    max_workers: int = 1024
    deadline_s: float = TIMEOUT_S
    bytes_per_s: float = 1e7
    seed: int = 0
    members: dict[PeerId, Member] = field(default_factory=dict)

    async def __aenter__(self) -> "Crowd":
        self.network = Sites(random.Random(self.seed), self.bytes_per_s)
        self.stack = AsyncExitStack()
        self.base = torch.randn(self.size, generator=torch.Generator().manual_seed(self.seed))
        for number in range(self.count):
            await self.add(number)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await cancel(*(member.task for member in self.members.values()))
        await self.stack.aclose()

    async def add(self, number: int) -> Member:
        identity = Identity.from_seed(f"crowd {number}".encode())
        self.network.site[identity.peer_id] = number % SITES
        transport = await self.stack.enter_async_context(self.network.transport(identity.peer_id))
        matchmaking = Matchmaking(
            transport, JOB, max_members=self.max_workers, timeout_s=self.deadline_s, timing=Timing()
        )
        timing = RoundTiming(self.deadline_s / 3, 2 * self.deadline_s / 3, self.deadline_s)
        averager = Averager(RoundContext(transport, JOB, identity.sign, timing))
        await matchmaking.serve()
        await self.stack.enter_async_context(averager)
        me = RoundMember(identity.peer_id, weight=100.0)
        member = self.members[identity.peer_id] = Member(me, matchmaking, averager, 1.0 + number % 7)
        await matchmaking.set_position(WorkerPosition(0, member.state))
        return member

    def leave(self, peer: PeerId) -> None:
        """Crash a worker."""
        self.network.crash(peer)
        member = self.members.pop(peer)
        if member.task is not None:
            member.task.cancel()

    async def round(self, number: int) -> None:
        """Run one round of all workers."""
        known = [member.me for member in self.members.values()]
        for member in [*self.members.values()]:
            member.task = asyncio.create_task(self._take_part(member, number, known))
        await asyncio.wait([member.task for member in self.members.values() if member.task])
        for member in self.members.values():
            if member.task is not None and member.task.done():
                member.task.result()

    async def _take_part(self, member: Member, number: int, known: list[RoundMember]) -> None:
        me, matchmaking = member.me, member.matchmaking
        member.outcome, member.roster, member.healed = None, None, False
        try:
            roster = await matchmaking.form_group(me, [each for each in known if each.peer != me.peer], {})
        except NoPlace:
            member.spare = True
            return
        except OutOfSync as elsewhere:  # a worker downloads the state; here it takes it
            member.state, member.healed = elsewhere.position.state, True
            await matchmaking.set_position(elsewhere.position)
            return
        member.roster, member.spare = roster, False
        outcome = await member.averager.average(
            roster.exchange_number,
            roster.group_of(me.peer),
            self.base * member.scale,
            weight=me.weight,
            codec=get_codec("float32"),
            state=member.state,
            groups=roster.groups,
        )
        member.outcome = outcome
        if outcome.average is not None:
            digest = hashlib.sha256(member.state)
            digest.update(outcome.average.numpy().tobytes())
            member.state = digest.digest()
        await matchmaking.set_position(WorkerPosition(number + 1, member.state))

    def about(self) -> dict[str, Any]:
        """Return the outcome of the last round."""
        outcomes = [member.outcome for member in self.members.values() if member.outcome is not None]
        rosters = {len(member.roster.members) for member in self.members.values() if member.roster}
        groups = {len(member.roster.groups) for member in self.members.values() if member.roster}
        least = min((len(names) for each in outcomes for names in each.contributors), default=0)
        return {
            "workers": len(self.members),
            "rosters": sorted(rosters),
            "groups": sorted(groups),
            "spares": sum(member.spare for member in self.members.values()),
            "healed": sum(member.healed for member in self.members.values()),
            "committed": sum(outcome.committed for outcome in outcomes),
            "behind": sum(outcome.behind for outcome in outcomes),
            "states": len({member.state for member in self.members.values() if not member.spare}),
            "contributors": max((len(each.all_contributors()) for each in outcomes), default=0),
            "least_contributors": least,
            "reasons": Counter(each.reason for each in outcomes).most_common(3),
        }


def simulate(crowd: Crowd, scenario: Callable[[Crowd], Any]) -> Any:
    """Run ``scenario`` with the crowd."""

    async def main() -> Any:
        async with crowd:
            return await scenario(crowd)

    return run(main())
