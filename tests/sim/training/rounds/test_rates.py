"""Slices follow the links: receivers measure what arrives, rosters contain the rates, and rounds
become faster."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from functools import partial

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.bandwidth import ArrivalRates
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.codecs import ALIGNMENT
from swarmnet_protocols.training.matchmaking.matchmaking import Matchmaking
from swarmnet_protocols.training.matchmaking.rosters import Roster
from swarmnet_protocols.training.rounds.round_runner import Outcome
from swarmnet_protocols.training.rounds.terms import RoundMember
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import run
from tests.support.training.lab import JOB, TrainingLab, Work, check_agreement

COUNT = 200 * ALIGNMENT
ROUNDS = 2


class HomeNetwork(MemoryNetwork):
    """Peers at home: all that a peer sends goes through its one uplink."""

    def __init__(self, bytes_per_s: dict[PeerId, float]) -> None:
        super().__init__(random.Random(0), LinkProfile(delay_s=0.02))
        self._bytes_per_s = bytes_per_s
        self._free_at = dict.fromkeys(bytes_per_s, 0.0)
        self._leaving: dict[PeerId, deque[Callable[[], None]]] = {peer: deque() for peer in bytes_per_s}

    def carry(self, source: PeerId, target: PeerId, size_bytes: int, arrive: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        leaves_at = max(loop.time(), self._free_at[source]) + size_bytes / self._bytes_per_s[source]
        self._free_at[source] = leaves_at
        self._leaving[source].append(partial(super().carry, source, target, 0, arrive))
        loop.call_at(leaves_at, self._leave, source)

    def _leave(self, source: PeerId) -> None:
        """The next in the order of sending leaves: timers of equal deadlines may fire in any."""
        self._leaving[source].popleft()()


class RatesLab(TrainingLab):
    """Four workers that gather and average; the uplink of the first is ten times slower than those
    of the others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.slow, *others = self.peers
        self.network = HomeNetwork({self.slow: 4e6} | dict.fromkeys(others, 4e7))

    async def rounds(self) -> list[dict[PeerId, Outcome]]:
        """The outcomes of each round."""
        work = Work.random(self, COUNT)
        rates = {peer: ArrivalRates() for peer in self.peers}
        groups = {
            peer: Matchmaking(self.transports[peer], JOB, max_members=8, timeout_s=10.0, timing=Timing())
            for peer in self.peers
        }
        for matchmaking in groups.values():
            await matchmaking.serve()
        outcomes = []
        for round in range(ROUNDS):
            rosters = await asyncio.gather(
                *(self._form_group(groups[peer], peer, round, rates[peer]) for peer in self.peers)
            )
            (roster,) = set(rosters)
            outcomes.append(await self.average(work, round=round, members=roster.members))
            check_agreement(work, outcomes[-1])
            for peer, outcome in outcomes[-1].items():
                rates[peer].add(outcome.arrivals)
        return outcomes

    async def _form_group(
        self, matchmaking: Matchmaking, me: PeerId, number: int, rates: ArrivalRates
    ) -> Roster:
        await matchmaking.set_position(WorkerPosition(number, b"s" * 32))
        members = {peer: RoundMember(peer, weight=1.0) for peer in self.peers}
        return await matchmaking.form_group(members.pop(me), [*members.values()], rates.bytes_per_s())


def test_slices_follow_the_links_and_rounds_become_faster() -> None:
    lab = RatesLab(4)

    async def main() -> list[dict[PeerId, Outcome]]:
        async with lab:
            return await lab.rounds()

    first, last = run(main())
    assert [end - start for start, end in first[lab.slow].slices] == [COUNT // 4] * 4
    owned = [end - start for start, end in last[lab.slow].slices]
    assert len(owned) == 3, "the slow one owns nothing"
    assert max(owned) - min(owned) <= 4 * ALIGNMENT
    assert all(len(names) == 4 for names in last[lab.slow].contributors), "it still contributes"
    before_s, after_s = (max(outcome.wait_s for outcome in each.values()) for each in (first, last))
    assert after_s < 0.8 * before_s, (before_s, after_s)
