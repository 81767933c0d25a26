"""What a directory promises about records: their lifetime, their order and their spread."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from swarmnet_protocols.directory.records import Publisher, open_record
from swarmnet_protocols.net.identity import Identity
from tests.defences import defence, replacing
from tests.support.network import virtual_time
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import MemoryNetwork

EPOCH = 1_800_000_000.0
SWARM = bytes(32)
ALICE, BOB = Identity.from_seed(b"alice"), Identity.from_seed(b"bob")

Scenario = Callable[[MemoryNetwork, MemoryDirectory, MemoryDirectory], Awaitable[None]]


def run(scenario: Scenario, *, delay_s: float = 0.0) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = MemoryNetwork(random.Random(0))
        board = MemoryBoard(network, lambda: EPOCH + loop.time(), delay_s=delay_s)
        async with network.transport(ALICE.peer_id), network.transport(BOB.peer_id):
            await scenario(network, MemoryDirectory(board, ALICE, SWARM), MemoryDirectory(board, BOB, SWARM))

    virtual_time.run(main())


async def seen(directory: MemoryDirectory) -> list[bytes]:
    return sorted(record.body for record in await directory.lookup("topic"))


def test_records_live_for_their_lifetime() -> None:
    async def scenario(network: MemoryNetwork, alice: MemoryDirectory, bob: MemoryDirectory) -> None:
        await alice.publish("topic", b"alice", lifetime_s=10.0)
        await bob.publish("topic", b"bob", lifetime_s=20.0)
        await bob.publish("another topic", b"-", lifetime_s=20.0)
        assert await seen(alice) == await seen(bob) == [b"alice", b"bob"]
        await asyncio.sleep(15.0)
        assert await seen(alice) == [b"bob"]

    run(scenario)


def test_the_newest_record_counts_even_if_it_expires_earlier() -> None:
    async def scenario(network: MemoryNetwork, alice: MemoryDirectory, bob: MemoryDirectory) -> None:
        await alice.publish("topic", b"online", lifetime_s=60.0)
        await alice.publish("topic", b"leaving", lifetime_s=5.0)
        for _ in range(3):
            assert await seen(bob) == [b"leaving"]
            await asyncio.sleep(20.0)
        await asyncio.sleep(1.0)
        assert await seen(bob) == []

    run(scenario)


def test_records_take_time_to_propagate() -> None:
    async def scenario(network: MemoryNetwork, alice: MemoryDirectory, bob: MemoryDirectory) -> None:
        await alice.publish("topic", b"old", lifetime_s=60.0)
        await asyncio.sleep(3.0)
        await alice.publish("topic", b"new", lifetime_s=60.0)
        assert await seen(bob) == [b"old"]
        await asyncio.sleep(2.0)
        assert await seen(bob) == [b"new"]

    run(scenario, delay_s=2.0)


def test_an_offline_peer_neither_writes_nor_reads() -> None:
    async def scenario(network: MemoryNetwork, alice: MemoryDirectory, bob: MemoryDirectory) -> None:
        await bob.publish("topic", b"bob", lifetime_s=60.0)
        for down, up in ((network.isolate, network.rejoin), (network.hang, network.resume)):
            down(ALICE.peer_id)
            assert await seen(alice) == []
            await alice.publish("topic", b"unheard", lifetime_s=60.0)
            up(ALICE.peer_id)
            assert await seen(alice) == [b"bob"]
        network.crash(ALICE.peer_id)
        assert await seen(alice) == []

    run(scenario)


def test_sequences_grow_within_a_millisecond_and_across_restarts() -> None:
    now = EPOCH
    first = Publisher(ALICE, SWARM, lambda: now)
    sequences = [first.seal("topic", b"", lifetime_s=1.0)[0].sequence for _ in range(3)]
    now += 0.1
    sequences.append(Publisher(ALICE, SWARM, lambda: now).seal("topic", b"", lifetime_s=1.0)[0].sequence)
    assert sequences == sorted(set(sequences))


def test_expiries_grow_as_holders_only_replace_what_expires_earlier() -> None:
    publisher = Publisher(ALICE, SWARM, lambda: EPOCH)
    expiries = [
        publisher.seal("topic", b"", lifetime_s=lifetime_s)[0].expires_at for lifetime_s in (60.0, 5.0, 5.0)
    ]
    assert expiries == sorted(set(expiries))


@defence(
    "a publisher whose clock was ahead is heard again",
    off=replacing(Publisher, "max_lifetime_s", float("inf")),
    ahead_s=2 * 86400.0,
)
@pytest.mark.parametrize("ahead_s", [3600.0, 2 * 86400.0])
def test_a_publisher_is_heard_again_after_its_clock_was_ahead(ahead_s: float) -> None:
    now = EPOCH
    publisher = Publisher(ALICE, SWARM, lambda: now)
    publisher.seal("topic", b"", lifetime_s=45.0)
    now = EPOCH + ahead_s
    ahead, _ = publisher.seal("topic", b"", lifetime_s=45.0)
    now = EPOCH + 1.0
    record, sealed = publisher.seal("topic", b"", lifetime_s=45.0)
    assert open_record(sealed, swarm=SWARM, now=now) == record
    assert record.sequence > ahead.sequence
