"""Detection of a duplicate identity: a running process is found; the announcement of a process that
has ended is no evidence."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest

from swarmnet_protocols.directory import duplicate_identity
from swarmnet_protocols.directory.duplicate_identity import REMEMBERED_S, DuplicateWatch, topic_of
from swarmnet_protocols.net import Transport, TransportWrapper
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import records_pb2 as pb
from tests.defences import defence, replacing
from tests.support.network import virtual_time
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import MemoryNetwork

EPOCH = 1_800_000_000.0
SWARM = bytes(32)
ALICE, MALLORY = Identity.from_seed(b"alice"), Identity.from_seed(b"mallory")
TIMING = Timing()
PERIOD_S = TIMING.identity_announce_s


class At(TransportWrapper):
    """``transport``, at an address of its own."""

    def __init__(self, transport: Transport, address: str) -> None:
        super().__init__(transport)
        self._address = address

    def addresses(self) -> Sequence[str]:
        return (self._address,)


class SlowDirectory(MemoryDirectory):
    """Takes its time to store."""

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        await asyncio.sleep(5.0)
        await super().publish(topic, body, lifetime_s=lifetime_s)


class Machines:
    """Machines with copies of one key. Each call of ``watch`` is another process, on the machine of
    this number."""

    def __init__(self, transport: Transport, board: MemoryBoard) -> None:
        self.board = board
        self._transport = transport
        self._processes = 0
        self.told: list[str] = []
        """The warnings of all processes, in order."""

    def watch(self, machine: int, kind: type[MemoryDirectory] = MemoryDirectory) -> DuplicateWatch:
        self._processes += 1
        transport = At(self._transport, f"/ip4/203.0.113.{machine}/tcp/31337")
        directory = kind(self.board, ALICE, SWARM)
        return DuplicateWatch(transport, directory, random.Random(self._processes), TIMING, self.told.append)


def run(scenario: Callable[[Machines], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = MemoryNetwork(random.Random(0))
        board = MemoryBoard(network, lambda: EPOCH + loop.time(), delay_s=1.0)
        async with network.transport(ALICE.peer_id) as transport, network.transport(MALLORY.peer_id):
            await scenario(Machines(transport, board))

    virtual_time.run(main())


async def live(watch: DuplicateWatch, seconds: float) -> None:
    keeping = asyncio.create_task(watch.announcer.run())
    done, _ = await asyncio.wait({keeping}, timeout=seconds)
    assert not done
    keeping.cancel()
    await asyncio.wait({keeping})


def test_two_machines_with_one_key_find_each_other_and_say_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(machines: Machines) -> None:
        one, other = machines.watch(1), machines.watch(2)
        await asyncio.gather(live(one, 4 * PERIOD_S), live(other, 4 * PERIOD_S))
        for watch, where in ((one, "203.0.113.2"), (other, "203.0.113.1")):
            warning = watch.warning()
            assert str(ALICE.peer_id) in warning
            assert f"at /ip4/{where}/tcp/31337: two machines" in warning
            assert "another --data-dir" in warning
        assert len(caplog.records) == 2
        await live(one, REMEMBERED_S + 2 * PERIOD_S)  # alone again
        assert not one.warning()
        assert [bool(told) for told in machines.told] == [True, True, False]

    run(scenario)


@pytest.mark.parametrize("alone_s", [0.0, 0.3, 0.5, 0.7, 1.0, 3.0, 12.0, 20.0, 70.0, 1000.0, 1033.0])
def test_both_owners_are_told_soon_after_the_second_has_started(alone_s: float) -> None:
    async def scenario(machines: Machines) -> None:
        one = machines.watch(1)
        first = asyncio.create_task(live(one, alone_s + 3 * PERIOD_S))
        await asyncio.sleep(alone_s)
        other = machines.watch(2)
        await live(other, 3 * PERIOD_S - 1.0)
        assert one.warning()
        assert other.warning()
        await first

    run(scenario)


def test_warnings_of_the_status_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(machines: Machines) -> None:
        one, other = machines.watch(1, SlowDirectory), machines.watch(2)
        living = asyncio.gather(live(one, 6 * PERIOD_S), live(other, 6 * PERIOD_S))
        warned = 0
        while not living.done():
            await asyncio.sleep(0.1)
            warned += bool(one.warning())
            assert bool(one.warning()) == any("203.0.113.2" in each.message for each in caplog.records)
        assert warned

    run(scenario)


def test_a_restarted_peer_is_no_duplicate() -> None:
    async def scenario(machines: Machines) -> None:
        for _ in range(4):
            watch = machines.watch(1)
            await live(watch, 3 * PERIOD_S)
            assert not watch.warning()

    run(scenario)


@defence(
    "a duplicate identity proves that it has the key",
    off=replacing(duplicate_identity, "peer_id_of", lambda _: ALICE.peer_id),
)
def test_a_peer_with_another_key_proves_no_duplicate() -> None:
    async def scenario(machines: Machines) -> None:
        mallory = MemoryDirectory(machines.board, MALLORY, SWARM)
        watch = machines.watch(1)
        living = asyncio.create_task(live(watch, 6 * PERIOD_S))
        while not living.done():
            said = pb.ProcessRecord(number=1 << 60).SerializeToString()
            await mallory.publish(topic_of(ALICE.peer_id), said, lifetime_s=60.0)
            await asyncio.sleep(1.0)
        assert not watch.warning()

    run(scenario)


def hear_all(watch: DuplicateWatch, _: pb.ProcessRecord) -> None:
    watch._heard_at = asyncio.get_running_loop().time()


@defence(
    "a duplicate identity is detected only by proof that it is alive",
    off=replacing(DuplicateWatch, "_found", hear_all),
)
def test_one_announcement_of_a_maybe_ended_process_proves_nothing() -> None:
    async def scenario(machines: Machines) -> None:
        ended = MemoryDirectory(machines.board, ALICE, SWARM)
        left = pb.ProcessRecord(number=int((EPOCH + 3600) * 1000)).SerializeToString()  # its clock was ahead
        watch = machines.watch(1)
        await ended.publish(topic_of(ALICE.peer_id), left, lifetime_s=60.0)
        await asyncio.sleep(2.0)
        living = asyncio.create_task(live(watch, 6 * PERIOD_S))
        while not living.done():
            await asyncio.sleep(1.0)
            await ended.publish(topic_of(ALICE.peer_id), left, lifetime_s=60.0)
            assert not watch.warning()

    run(scenario)
