"""Downloading the state of a job from several peers, some of which fail or send wrong bytes."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from swarmnet_protocols.errors import IntegrityError, SwarmnetError
from swarmnet_protocols.fetching import download as download_module
from swarmnet_protocols.fetching.download import REPEAT_S
from swarmnet_protocols.net import Message, PeerId
from swarmnet_protocols.net.protocol_ids import STATE
from swarmnet_protocols.training import state_transfer
from swarmnet_protocols.training.state_transfer import CHUNK_BYTES, STREAMS, PackedState, fetch_state
from swarmnet_protocols.wire import workers_pb2 as pb
from tests.defences import defence, replacing
from tests.support.network.memory_network import Delivery, LinkProfile, MemoryNetwork
from tests.support.training.peers import JOB, TIMING, Worker, simulate

DATA = random.Random(1).randbytes(5 * CHUNK_BYTES + 1234)
PACKED = PackedState.of([DATA[:9], DATA[9 : 3 * CHUNK_BYTES], DATA[3 * CHUNK_BYTES :]])
STATE_ID = PACKED.id


Progress = Callable[[int, int], None]


async def fetch(
    me: Worker, *sources: Worker, max_bytes: int = len(DATA), on_bytes: Progress = lambda done, total: None
) -> tuple[bytearray, dict[PeerId, str]]:
    """The state, and the sources that sent wrong data."""
    members = [source.member for source in sources]
    return await fetch_state(
        me.transport, JOB, STATE_ID, members, TIMING, max_bytes=max_bytes, on_bytes=on_bytes
    )


def test_a_state_comes_from_several_peers_at_once() -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        served: set[PeerId] = set()
        network.observers.append(
            lambda delivery: served.add(delivery.source) if len(delivery.message.payload) > 1000 else None
        )
        for worker in workers[1:]:
            assert worker.states.offer(PACKED) == STATE_ID
        heard: list[tuple[int, int]] = []
        data, _ = await fetch(*workers, on_bytes=lambda *progress: heard.append(progress))
        assert data == DATA
        assert served == {worker.member.peer for worker in workers[1:]}
        assert [total for _, total in heard] == [len(DATA)] * 6
        assert heard == sorted(heard)
        assert heard[-1][0] == len(DATA)

    simulate(4, scenario)


def test_the_logs_of_both_sides_of_a_download_name_it_alike(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        workers[1].states.offer(PACKED)
        await fetch(*workers)

    with caplog.at_level("DEBUG", logger="swarmnet_protocols"):
        simulate(2, scenario)
    name = f"download {STATE_ID.hex()[:8]}"
    logged = {record.module for record in caplog.records if name in record.getMessage()}
    assert logged == {"download", "state_transfer"}


def test_a_long_link_to_one_source_stays_busy() -> None:
    rate = 12_500_000.0

    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        for worker in workers[1:]:
            worker.states.offer(PACKED)
            profile = LinkProfile(delay_s=0.025, bytes_per_s=rate)
            network.set_link(workers[0].member.peer, worker.member.peer, profile)
        began = asyncio.get_running_loop().time()
        assert (await fetch(*workers))[0] == DATA
        # Two round trips to begin with, then a one-way delay for each of the six chunks and the
        # first request: the window of a simulated stream is one chunk. A round trip for each would
        # be 0.15 s more.
        waits_s = 2 * 0.05 + 7 * 0.025
        assert asyncio.get_running_loop().time() - began < len(DATA) / rate + waits_s + 0.01

    simulate(2, scenario)


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_chunks_of_a_lost_source_come_from_the_others(fault: str) -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        lost = workers[1].member.peer
        for worker in workers[1:]:
            worker.states.offer(PACKED)

        chunks: list[PeerId] = []

        def watch(delivery: Delivery) -> None:
            if len(delivery.message.payload) > 1000:
                chunks.append(delivery.source)
                if delivery.source == lost:
                    getattr(network, fault)(lost)

        network.observers.append(watch)
        assert (await fetch(*workers))[0] == DATA
        assert len(chunks) <= 6 + STREAMS, "only chunks in flight are sent again"

    simulate(3, scenario)


@defence(
    "chunks of a state that a source sends slowly are asked of another",
    off=replacing(download_module, "REPEAT_S", 1e6),
)
def test_chunks_that_a_source_sends_slowly_come_from_another() -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        for worker in workers[1:]:
            worker.states.offer(PACKED)
        slow = LinkProfile(delay_s=0.01, bytes_per_s=40_000.0)
        network.set_link(workers[0].member.peer, workers[1].member.peer, slow)
        network.set_link(workers[0].member.peer, workers[2].member.peer, slow)
        began = asyncio.get_running_loop().time()
        assert (await fetch(*workers))[0] == DATA
        assert asyncio.get_running_loop().time() - began < 3 * REPEAT_S

    simulate(4, scenario)


def test_a_source_that_serves_a_flipped_bit_is_dropped_and_named() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        liar = workers[1]
        liar.states.offer(PACKED)
        flipped = bytearray(DATA)
        flipped[3 * CHUNK_BYTES + 17] ^= 4
        flipped[17] ^= 4
        liar.states._states[STATE_ID] = replace(PACKED, pieces=(memoryview(flipped),))
        workers[2].states.offer(PACKED)
        data, dropped = await fetch(*workers)
        assert data == DATA
        assert set(dropped) == {liar.member.peer}
        assert "hash" in dropped[liar.member.peer]
        with pytest.raises(IntegrityError, match=liar.member.peer):
            await fetch(workers[0], liar)

    simulate(3, scenario)


def test_a_state_above_the_size_limit_is_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "PieceMemory", lambda *_: pytest.fail("it was allocated"))

    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        workers[1].states.offer(PACKED)
        with pytest.raises(IntegrityError, match="were expected"):
            await fetch(*workers, max_bytes=len(DATA) - 1)

    simulate(2, scenario)


def test_an_older_state_is_kept_while_a_peer_downloads_it() -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        states = workers[1].states
        states.offer(PACKED)
        chunks: list[Delivery] = []

        def watch(delivery: Delivery) -> None:
            if delivery.protocol == STATE and len(delivery.message.payload) > 1000:
                chunks.append(delivery)
                if len(chunks) == 2:
                    for number in range(3):
                        states.offer(PackedState.of([bytes([number])]))

        network.observers.append(watch)
        assert (await fetch(*workers))[0] == DATA
        await asyncio.sleep(1)
        assert list(states._states) == [PackedState.of([bytes([2])]).id]

    simulate(2, scenario)


def test_a_download_goes_on_from_a_copy_when_the_state_changes() -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        memory, states = bytearray(DATA), workers[1].states
        states.offer(PackedState.of([memory]))
        changes: list[asyncio.Task[None]] = []

        async def copy(pieces: Sequence[memoryview]) -> memoryview:
            return memoryview(b"".join(pieces))

        async def change() -> None:
            await states.withdraw(copy)
            memory[:] = bytes(len(memory))

        def watch(delivery: Delivery) -> None:
            if delivery.protocol == STATE and len(delivery.message.payload) > 1000 and not changes:
                changes.append(asyncio.create_task(change()))

        network.observers.append(watch)
        assert (await fetch(*workers))[0] == DATA
        await asyncio.sleep(1)
        await states.withdraw(copy)
        assert not states._states, "nobody downloads it any more"

    simulate(2, scenario)


def test_the_newest_two_states_that_are_downloaded_are_kept() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        states = workers[1].states
        offered = [PackedState.of([bytes([number])]) for number in range(4)]
        streams = []
        for state in offered[:-1]:
            states.offer(state)
            stream = await workers[0].transport.open(workers[1].member.peer, STATE, deadline_s=TIMING.open_s)
            request = pb.StateRequest(job=JOB, state=state.id, describe=pb.Describe())
            await stream.send(Message(request.SerializeToString()))
            await stream.receive()
            streams.append(stream)
        states.offer(offered[-1])
        assert list(states._states) == [state.id for state in offered[-2:]]
        for stream in streams:
            stream.close()

    simulate(2, scenario)


def test_a_state_that_was_replaced_is_refused() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        workers[1].states.offer(PACKED)
        workers[1].states.offer(PackedState.of([b"one more"]))
        with pytest.raises(SwarmnetError, match="not kept"):
            await fetch(*workers)

    simulate(2, scenario)


@pytest.mark.parametrize(
    "cuts", [[], [5], [CHUNK_BYTES], [0, 7, 7, CHUNK_BYTES - 1, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]]
)
def test_the_id_of_a_state_does_not_depend_on_its_pieces(cuts: list[int]) -> None:
    bounds = [0, *cuts, len(DATA)]
    packed = PackedState.of([DATA[start:end] for start, end in pairwise(bounds)])
    assert packed.id == STATE_ID
    assert b"".join(packed.chunk(index) for index in range(6)) == DATA
