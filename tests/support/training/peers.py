"""Workers that only do matchmaking and state transfer, over simulated links."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.matchmaking.matchmaking import Matchmaking
from swarmnet_protocols.training.matchmaking.rosters import Roster, place_as_leader
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.training.state_transfer import StateServer
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import run

T = TypeVar("T")
JOB = b"j" * 32
TIMING = Timing()
TIMEOUT_S = 10.0
_PEERS = sorted(Identity.from_seed(bytes([seed])).peer_id for seed in range(4))
AT_START = next(
    position
    for position in (WorkerPosition(3, bytes([number]) * 32) for number in range(256))
    if sorted(_PEERS, key=lambda peer: place_as_leader(peer, position.round, position.state)) == _PEERS
)
"""A position at which four workers lead in the order of their peer ids."""
START = AT_START.state


def names(roster: Roster) -> list[PeerId]:
    return [member.peer for member in roster.members]


@dataclass
class Worker:
    transport: Transport
    member: RoundMember
    matchmaking: Matchmaking
    states: StateServer
    excluded: set[PeerId]
    """Peers that this worker neither follows nor leads."""
    measured: dict[PeerId, float] = field(default_factory=dict)

    async def gather(self, others: "list[Worker]", *, round: int = 3, state: bytes = START) -> Roster:
        known = [other.member for other in others if other is not self]
        await self.matchmaking.set_position(WorkerPosition(round, state))
        return await self.matchmaking.form_group(self.member, known, self.measured)


async def start(network: MemoryNetwork, living: list[asyncio.Task[None]], seed: int) -> Worker:
    identity = Identity.from_seed(bytes([seed]))
    up: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

    async def live() -> None:
        async with network.transport(identity.peer_id) as transport:
            member = RoundMember(identity.peer_id, weight=100.0)
            excluded: set[PeerId] = set()
            matchmaking = Matchmaking(
                transport,
                JOB,
                max_members=8,
                timeout_s=TIMEOUT_S,
                timing=TIMING,
                is_excluded=excluded.__contains__,
            )
            states = StateServer(transport, JOB, TIMING)
            await matchmaking.serve()
            await states.serve()
            up.set_result(Worker(transport, member, matchmaking, states, excluded))
            await asyncio.Event().wait()

    living.append(asyncio.create_task(live()))
    return await up


def simulate(count: int, scenario: Callable[[MemoryNetwork, list[Worker]], Awaitable[T]]) -> T:
    """Run ``scenario`` with workers in the order of their peer ids."""

    async def main() -> T:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.02, bytes_per_s=1e7))
        living: list[asyncio.Task[None]] = []
        workers = [await start(network, living, seed) for seed in range(count)]
        workers.sort(key=lambda worker: worker.member.peer)
        try:
            async with asyncio.timeout(300):
                return await scenario(network, workers)
        finally:
            await cancel(*living)

    return run(main())
