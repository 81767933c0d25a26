"""Exchange numbers increase, and no follower can use up those of a job."""

import asyncio
from dataclasses import replace

import pytest

from swarmnet_protocols.training.matchmaking import followers
from swarmnet_protocols.training.matchmaking.rosters import EXCHANGES_PER_ROUND, MAX_AHEAD_OF_LEADER
from tests.defences import defence, replacing
from tests.support.network.memory_network import MemoryNetwork
from tests.support.training.peers import Worker, simulate

FIRST = 3 * EXCHANGES_PER_ROUND
"""One below the first exchange number of round 3."""


@defence(
    "a follower does not use up exchange numbers",
    off=replacing(followers, "highest_exchange_number", lambda *_: 1 << 64),
    last_exchange=9 * EXCHANGES_PER_ROUND,
)
@pytest.mark.parametrize(
    "last_exchange", [(1 << 64) - 1, 9 * EXCHANGES_PER_ROUND, FIRST + MAX_AHEAD_OF_LEADER]
)
def test_a_follower_that_claims_a_high_exchange_number_is_left_out(last_exchange: int) -> None:
    """With a number near the largest it would end the job: no exchange could follow."""

    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        liar, present = workers[3], workers[:3]
        liar.member = replace(liar.member, last_exchange=last_exchange)
        lying = asyncio.create_task(liar.gather(workers))
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in present))
        assert {roster.exchange_number for roster in rosters} == {FIRST + 1}
        assert {tuple(member.peer for member in roster.members) for roster in rosters} == {
            tuple(worker.member.peer for worker in present)
        }
        lying.cancel()

    simulate(4, scenario)


def test_a_worker_that_missed_many_attempts_of_a_round_joins() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        for worker in workers[:2]:
            worker.member = replace(worker.member, last_exchange=FIRST + MAX_AHEAD_OF_LEADER - 1)
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in workers))
        assert {roster.exchange_number for roster in rosters} == {FIRST + MAX_AHEAD_OF_LEADER}

    simulate(3, scenario)
