"""Newcomers choose their stages by the directory, in virtual time."""

import asyncio
import random
from collections import Counter

from swarmnet_node.training.pipeline.stage_choice import choose_stage, keep_choice
from swarmnet_protocols.machine.aio import in_background
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import worker_announcement
from swarmnet_protocols.training.pipeline.stages import groups
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import run
from tests.support.training.workers import EPOCH, SWARM

JOB = "ab" * 32
ADDRESSES = ("/ip4/1.2.3.4/tcp/1",)


def chosen(newcomers: int, present: tuple[int, ...], seed: int, within_s: float = 3.0) -> Counter[int]:
    """The workers of each stage after ``newcomers``, who load for ten minutes, have chosen within
    ``within_s``."""

    async def main() -> Counter[int]:
        network, delays = MemoryNetwork(random.Random(seed), LinkProfile()), random.Random(seed)
        board = MemoryBoard(network, lambda: EPOCH + asyncio.get_running_loop().time())

        async def old(number: int, stage: int) -> None:
            identity = Identity.from_seed(f"old {number}".encode())
            async with network.transport(identity.peer_id):
                record = worker_announcement(groups(JOB, 3)[stage], ADDRESSES, WorkerPosition(0, bytes(32)))
                await record.publish(MemoryDirectory(board, identity, SWARM))

        async def choose(number: int) -> int:
            identity = Identity.from_seed(f"new {number}".encode())
            await asyncio.sleep(delays.uniform(0.0, within_s))
            async with network.transport(identity.peer_id):
                directory = MemoryDirectory(board, identity, SWARM)
                stage = await choose_stage(directory, JOB, 3, identity.peer_id, lambda: ADDRESSES)
                async with in_background(keep_choice(directory, JOB, stage, lambda: ADDRESSES)):
                    await asyncio.sleep(600.0)
                return stage

        await asyncio.gather(*(old(*each) for each in enumerate(present)))
        return Counter([*present, *await asyncio.gather(*map(choose, range(newcomers)))])

    return run(main())


def test_workers_that_start_together_fill_all_stages() -> None:
    for seed in range(20):
        assert chosen(6, (), seed) == {0: 2, 1: 2, 2: 2}
        assert chosen(3, (0, 0, 2), seed) == {0: 2, 1: 2, 2: 2}


def test_a_newcomer_that_loads_for_minutes_keeps_its_stage() -> None:
    for seed in range(5):
        assert chosen(6, (), seed, within_s=500.0) == {0: 2, 1: 2, 2: 2}
