"""Gathering the members of a round, and fetching the state of a job, while peers die and lie."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import pytest

from swarmnet_protocols.aio import cancel
from swarmnet_protocols.errors import IntegrityError, ProtocolViolation, SwarmnetError, Unreachable
from swarmnet_protocols.identity import Identity
from swarmnet_protocols.protocol_ids import GATHER, STATE
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training import gathering
from swarmnet_protocols.training.gathering import Elsewhere, Gathering
from swarmnet_protocols.training.rosters import Candidate, Roster, roster_from_wire
from swarmnet_protocols.training.state_transfer import (
    ASKED_AHEAD,
    CHUNK_BYTES,
    PackedState,
    Source,
    StateDownload,
    StateServer,
)
from swarmnet_protocols.transport import Message, PeerId, Transport
from swarmnet_protocols.transport.memory import Delivery, LinkProfile, MemoryNetwork
from swarmnet_protocols.wire import workers_pb2 as pb
from tests.support.virtual_time import run

T = TypeVar("T")
JOB = b"j" * 32
START = b"s" * 32
TIMING = Timing()
PATIENCE_S = 10.0


@dataclass
class Worker:
    transport: Transport
    member: Candidate
    gathering: Gathering
    states: StateServer
    measured: dict[PeerId, float] = field(default_factory=dict)

    async def gather(self, others: "list[Worker]", *, round: int = 3, state: bytes = START) -> Roster:
        known = [other.member for other in others if other is not self]
        await self.gathering.stand(round, state)
        return await self.gathering.gather(self.member, known, measured=self.measured, patience_s=PATIENCE_S)


async def start(network: MemoryNetwork, living: list[asyncio.Task[None]], seed: int) -> Worker:
    identity = Identity.from_seed(bytes([seed]))
    up: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

    async def live() -> None:
        async with network.transport(identity.peer_id) as transport:
            member = Candidate(identity.peer_id, (), weight=100.0)
            gathering = Gathering(transport, JOB, max_members=8, timing=TIMING)
            states = StateServer(transport, JOB, TIMING)
            await gathering.serve()
            await states.serve()
            up.set_result(Worker(transport, member, gathering, states))
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


def names(roster: Roster) -> list[PeerId]:
    return [member.peer for member in roster.members]


# ---- gathering ----------------------------------------------------------------------------------------------


def test_all_who_are_there_get_the_same_roster() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in workers))
        assert set(rosters) == {rosters[0]}
        assert names(rosters[0]) == [worker.member.peer for worker in workers]
        assert [rosters[0].slot(worker.member.peer) for worker in workers] == [0, 1, 2, 3]
        assert asyncio.get_running_loop().time() < 1.0, "nobody waits when all are there"

    simulate(4, scenario)


@pytest.mark.parametrize("fault", ["crash", "hang", "isolate"])
def test_a_round_does_not_wait_for_the_dead(fault: str) -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        getattr(network, fault)(workers[2].member.peer)
        present = [worker for worker in workers if worker is not workers[2]]
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in present))
        assert [names(roster) for roster in rosters] == [[worker.member.peer for worker in present]] * 3
        assert asyncio.get_running_loop().time() < 2 * TIMING.silence_s

    simulate(4, scenario)


def test_whoever_does_not_come_in_time_is_left_out() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        present = workers[:3]
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in present))
        assert [names(roster) for roster in rosters] == [[worker.member.peer for worker in present]] * 3
        assert PATIENCE_S <= asyncio.get_running_loop().time() < PATIENCE_S + 1

    simulate(4, scenario)


@pytest.mark.parametrize("fault", ["crash", "hang"])
@pytest.mark.parametrize("moment", ["before", "asked"])
def test_a_gatherer_that_fails_is_followed_by_the_next(fault: str, moment: str) -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        first = workers[0].member.peer
        fail = getattr(network, fault)

        def watch(delivery: Delivery) -> None:
            if delivery.protocol == GATHER and delivery.target == first:
                fail(first)

        if moment == "before":
            fail(first)
        else:
            network.observers.append(watch)
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in workers[1:]))
        assert set(rosters) == {rosters[0]}
        assert names(rosters[0]) == [worker.member.peer for worker in workers[1:]]

    simulate(4, scenario)


def test_a_worker_alone_goes_on_alone() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        roster = await workers[0].gather([])
        assert names(roster) == [workers[0].member.peer]

    simulate(1, scenario)


def test_a_laggard_learns_where_the_others_are() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        await asyncio.gather(*(worker.gather(workers[:3], round=1) for worker in workers[:3]))
        late = asyncio.ensure_future(workers[3].gather(workers, round=2))  # they might be about to follow
        await asyncio.sleep(1)
        rosters = await asyncio.gather(*(worker.gather(workers[:3], round=5) for worker in workers[:3]))
        with pytest.raises(Elsewhere) as caught:
            await late
        assert (caught.value.round, caught.value.state) == (5, START)
        assert len(rosters[0].members) == 3

    simulate(4, scenario)


def test_a_newcomer_that_would_gather_learns_where_the_others_are() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        newcomer, others = workers[0], workers[1:]
        await asyncio.gather(*(worker.gather(others, round=7) for worker in others))
        with pytest.raises(Elsewhere) as caught:
            await newcomer.gather(workers, round=0, state=b"0" * 32)
        assert (caught.value.round, caught.value.state) == (7, START)

        # Meanwhile nobody waits for it, though it comes first in their order.
        started = asyncio.get_running_loop().time()
        rosters = await asyncio.gather(*(worker.gather(workers, round=8) for worker in others))
        assert names(rosters[0]) == [worker.member.peer for worker in others]
        assert asyncio.get_running_loop().time() - started < PATIENCE_S

    simulate(4, scenario)


def test_one_with_another_state_than_most_learns_that_it_is_the_stray() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        stray, others = workers[0], workers[1:]
        gathered = asyncio.gather(*(worker.gather(others) for worker in others))
        await asyncio.sleep(0.1)
        with pytest.raises(Elsewhere) as caught:
            await stray.gather(workers, state=b"x" * 32)
        assert caught.value.state == START
        await gathered

    simulate(4, scenario)


def test_a_worker_with_another_state_is_not_let_in() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        strange = asyncio.ensure_future(workers[2].gather(workers, state=b"x" * 32))
        rosters = await asyncio.gather(*(worker.gather(workers[:2]) for worker in workers[:2]))
        with pytest.raises(Elsewhere) as caught:
            await strange
        assert caught.value.state == START
        assert names(rosters[0]) == [worker.member.peer for worker in workers[:2]]

    simulate(3, scenario)


def test_a_full_round_takes_contributors_before_newcomers() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        for worker in workers:
            worker.gathering._max_members = 3
        workers[1].member = replace(workers[1].member, weight=0.0)
        await workers[0].gather([], round=2)
        others = [asyncio.ensure_future(worker.gather(workers)) for worker in workers[1:]]
        await asyncio.sleep(1)
        roster = await workers[0].gather(workers)
        assert names(roster) == [workers[index].member.peer for index in (0, 2, 3)]
        for task in others:
            task.cancel()

    simulate(4, scenario)


def test_a_roster_says_of_every_member_what_the_others_measured_of_it() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        peers = [worker.member.peer for worker in workers]
        truth = dict(zip(peers, [1e5, 1e6, 2e6, 3e6], strict=True))
        for worker in workers:
            worker.measured = {peer: rate for peer, rate in truth.items() if peer != worker.member.peer}
        for liar in (0, 3):  # the one who gathers is asked as little about itself as a guest is
            workers[liar].measured |= {peers[liar]: 1e12}
        workers[3].measured |= {peers[1]: 1e-3, peers[2]: 1e12}
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in workers))
        assert set(rosters) == {rosters[0]}
        assert {member.peer: member.bytes_per_s for member in rosters[0].members} == truth

    simulate(4, scenario)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), 1e13])
def test_a_guest_that_measured_what_cannot_be_is_not_in_the_round(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        strange = pb.Measured(id=workers[0].member.peer, bytes_per_s=rate)
        monkeypatch.setattr(gathering, "measured_to_wire", lambda measured: [strange] if measured else [])
        workers[1].measured = {workers[0].member.peer: 1e6}
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in workers))
        alone = [worker.member.peer for worker in (workers[0], workers[2])]
        assert names(rosters[0]) == names(rosters[2]) == alone

    simulate(3, scenario)


@pytest.mark.parametrize("rates", [[], [1e6], [1e6, 0.0], [1e6, float("nan")], [1e6] * 3])
def test_a_roster_without_a_good_rate_for_every_member_is_refused(rates: list[float]) -> None:
    members = [pb.Member(id="a"), pb.Member(id="b")]
    wire = pb.Roster(round=3, members=members, exchange=1, bytes_per_s=[1e6, 2e6])
    assert roster_from_wire(wire, round=3, me=PeerId("a")).members[1].bytes_per_s == 2e6
    with pytest.raises(ProtocolViolation):
        roster_from_wire(
            pb.Roster(round=3, members=members, exchange=1, bytes_per_s=rates), round=3, me=PeerId("a")
        )


# ---- the state ----------------------------------------------------------------------------------------------

DATA = random.Random(1).randbytes(5 * CHUNK_BYTES + 1234)
PACKED = PackedState.of([DATA[:9], DATA[9 : 3 * CHUNK_BYTES], DATA[3 * CHUNK_BYTES :]])
STATE_ID = PACKED.id


def sources(workers: list[Worker]) -> list[Source]:
    return [Source(worker.member.peer) for worker in workers]


def download(max_bytes: int = len(DATA)) -> StateDownload:
    return StateDownload(JOB, STATE_ID, max_bytes=max_bytes)


def test_a_state_comes_from_several_peers_at_once() -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        served: set[PeerId] = set()
        network.observers.append(
            lambda delivery: served.add(delivery.source) if len(delivery.message.payload) > 1000 else None
        )
        for worker in workers[1:]:
            assert worker.states.offer(PACKED) == STATE_ID
        heard: list[tuple[int, int]] = []
        data = await download().run(
            workers[0].transport, sources(workers[1:]), TIMING, lambda *progress: heard.append(progress)
        )
        assert data == DATA
        assert served == {worker.member.peer for worker in workers[1:]}
        assert heard == [(number, 6) for number in range(1, 7)]

    simulate(4, scenario)


def test_a_long_line_to_one_source_stays_full() -> None:
    rate = 12_500_000.0

    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        for worker in workers[1:]:
            worker.states.offer(PACKED)
            profile = LinkProfile(delay_s=0.025, bytes_per_s=rate)
            network.set_link(workers[0].member.peer, worker.member.peer, profile)
        began = asyncio.get_running_loop().time()
        assert await download().run(workers[0].transport, sources(workers[1:]), TIMING) == DATA
        # Two round trips to begin with, then a one-way delay for each of the six chunks and the first request: the window of
        # a simulated stream is one chunk. A round trip for each would be 0.15 s more.
        waits_s = 2 * 0.05 + 7 * 0.025
        assert asyncio.get_running_loop().time() - began < len(DATA) / rate + waits_s + 0.01

    simulate(2, scenario)


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_what_a_lost_source_owes_comes_from_the_others(fault: str) -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        lost = workers[1].member.peer
        for worker in workers[1:]:
            worker.states.offer(PACKED)

        def watch(delivery: Delivery) -> None:
            if delivery.source == lost and len(delivery.message.payload) > 1000:
                getattr(network, fault)(lost)

        network.observers.append(watch)
        assert await download().run(workers[0].transport, sources(workers[1:]), TIMING) == DATA

    simulate(3, scenario)


def test_a_source_that_serves_a_flipped_bit_is_dropped_and_named() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        liar = workers[1]
        liar.states.offer(PACKED)
        flipped = bytearray(DATA)
        flipped[3 * CHUNK_BYTES + 17] ^= 4
        flipped[17] ^= 4
        liar.states._states[STATE_ID] = replace(PACKED, pieces=(memoryview(flipped),))
        workers[2].states.offer(PACKED)
        wanted = download()
        assert await wanted.run(workers[0].transport, sources(workers[1:]), TIMING) == DATA
        assert set(wanted.dropped) == {liar.member.peer}
        assert "hash" in wanted.dropped[liar.member.peer]

        alone = download()
        with pytest.raises(IntegrityError, match=liar.member.peer):
            await alone.run(workers[0].transport, sources([liar]), TIMING)

    simulate(3, scenario)


def test_a_download_goes_on_where_it_was_when_other_sources_are_found() -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        first, second = workers[1], workers[2]
        first.states.offer(PACKED)
        second.states.offer(PACKED)
        chunks: list[PeerId] = []

        def watch(delivery: Delivery) -> None:
            if delivery.protocol == STATE and len(delivery.message.payload) > 1000:
                chunks.append(delivery.source)
                if len(chunks) == 3:
                    network.crash(first.member.peer)

        network.observers.append(watch)
        wanted = download()
        with pytest.raises(Unreachable, match=first.member.peer):
            await wanted.run(workers[0].transport, sources([first]), TIMING)
        assert await wanted.run(workers[0].transport, sources([second]), TIMING) == DATA
        assert len(chunks) <= 6 + ASKED_AHEAD, "at most those that were on their way are sent again"

    simulate(3, scenario)


def test_a_state_larger_than_can_be_is_not_allocated() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        workers[1].states.offer(PACKED)
        wanted = download(max_bytes=len(DATA) - 1)
        with pytest.raises(IntegrityError, match="expected at most"):
            await wanted.run(workers[0].transport, sources(workers[1:]), TIMING)
        assert not wanted._data

    simulate(2, scenario)


def test_an_older_state_is_kept_for_as_long_as_somebody_fetches_it() -> None:
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
        assert await download().run(workers[0].transport, sources(workers[1:]), TIMING) == DATA
        await asyncio.sleep(1)
        assert list(states._states) == [PackedState.of([bytes([2])]).id]

    simulate(2, scenario)


def test_of_states_that_are_fetched_the_newest_two_are_kept() -> None:
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


def test_a_state_that_nobody_fetched_in_time_is_refused() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        workers[1].states.offer(PACKED)
        workers[1].states.offer(PackedState.of([b"one more"]))
        with pytest.raises(SwarmnetError, match="not kept"):
            await download().run(workers[0].transport, sources(workers[1:]), TIMING)

    simulate(2, scenario)


@pytest.mark.parametrize(
    "cuts", [[], [5], [CHUNK_BYTES], [0, 7, 7, CHUNK_BYTES - 1, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]]
)
def test_a_state_is_the_same_however_it_lies_in_memory(cuts: list[int]) -> None:
    bounds = [0, *cuts, len(DATA)]
    packed = PackedState.of([DATA[start:end] for start, end in pairwise(bounds)])
    assert packed.id == STATE_ID
    assert b"".join(packed.chunk(index) for index in range(6)) == DATA
