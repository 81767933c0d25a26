"""Rosters carry the measured rates of their members, and send addresses once."""

import asyncio
from dataclasses import replace

import pytest

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.net import Message
from swarmnet_protocols.net.protocol_ids import MATCHMAKING
from swarmnet_protocols.training.matchmaking import rosters
from swarmnet_protocols.training.matchmaking.rosters import (
    NO_ADDRESSES,
)
from swarmnet_protocols.wire import workers_pb2 as pb
from tests.support.network.memory_network import Delivery, MemoryNetwork
from tests.support.training.peers import AT_START, JOB, START, Worker, names, simulate


def test_rates_in_a_roster_are_those_that_other_members_measured() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        peers = [worker.member.peer for worker in workers]
        truth = dict(zip(peers, [1e5, 1e6, 2e6, 3e6], strict=True))
        for worker in workers:
            worker.measured = {peer: rate for peer, rate in truth.items() if peer != worker.member.peer}
        for liar in (0, 3):  # the leader and a follower: neither counts for its own rate
            workers[liar].measured |= {peers[liar]: 1e12}
        workers[3].measured |= {peers[1]: 1e-3, peers[2]: 1e12}
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in workers))
        assert set(rosters) == {rosters[0]}
        assert {member.peer: member.bytes_per_s for member in rosters[0].members} == truth

    simulate(4, scenario)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), 1e13])
def test_a_follower_with_an_impossible_measurement_is_left_out(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        strange = pb.Measured(id=workers[0].member.peer, bytes_per_s=rate)
        monkeypatch.setattr(rosters, "measured_to_wire", lambda measured: [strange] if measured else [])
        workers[1].measured = {workers[0].member.peer: 1e6}
        found = await asyncio.gather(*(worker.gather(workers) for worker in workers))
        alone = [worker.member.peer for worker in (workers[0], workers[2])]
        assert names(found[0]) == names(found[2]) == alone

    simulate(3, scenario)


def sizes(network: MemoryNetwork) -> list[int]:
    """The size of every matchmaking message that arrives from now on."""
    found: list[int] = []

    def watch(delivery: Delivery) -> None:
        if delivery.protocol == MATCHMAKING:
            found.append(len(delivery.message.header))

    network.observers.append(watch)
    return found


def test_addresses_are_sent_once() -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        for worker in workers:
            worker.member = replace(worker.member, addresses=tuple(f"/ip4/10.0.0.{n}" for n in range(9)))
        told = []
        for round in (3, 4):
            messages = sizes(network)
            rosters = await asyncio.gather(*(worker.gather(workers, round=round) for worker in workers))
            network.observers.clear()
            assert {names(roster)[0] for roster in rosters} == {workers[0].member.peer}
            assert {
                tuple((each.peer, each.addresses, each.weight) for each in roster.members)
                for roster in rosters
            } == {tuple((each.member.peer, each.member.addresses, 100.0) for each in workers)}
            told.append(sum(messages))
        assert told[1] < told[0] / 5

    simulate(4, scenario)


@pytest.mark.parametrize("change", ["moved", "weight", "missed", "new leader", "fewer"])
def test_a_follower_without_the_address_book_gets_the_whole_roster(change: str) -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        await asyncio.gather(*(worker.gather(workers) for worker in workers))
        present = workers
        match change:
            case "moved":
                workers[2].member = replace(workers[2].member, addresses=("/ip4/10.0.0.1",))
            case "weight":
                workers[2].member = replace(workers[2].member, weight=0.0)
            case "missed":
                three = [worker for worker in workers if worker is not workers[2]]
                await asyncio.gather(*(worker.gather(three, round=4) for worker in three))
            case "new leader":
                present = workers[1:]
                workers[1].matchmaking._state.book = NO_ADDRESSES
            case "fewer":
                present = workers[:3]
        rosters = await asyncio.gather(*(worker.gather(present, round=5) for worker in present))
        expected = [(each.member.peer, each.member.addresses, each.member.weight) for each in present]
        for roster in rosters:
            assert [(each.peer, each.addresses, each.weight) for each in roster.members] == expected

    simulate(4, scenario)


def test_a_follower_that_never_sends_its_addresses_is_refused() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        host, follower = workers
        await host.matchmaking.set_position(AT_START)
        request = pb.MatchmakingRequest(
            job=JOB, round=3, state=START, member=pb.Member(weight=1.0), known=b"0" * 16
        )
        stream = await follower.transport.open(host.member.peer, MATCHMAKING, deadline_s=2.0)
        for _again in range(2):
            await stream.send(Message(request.SerializeToString()))
        reply = pb.MatchmakingReply.FromString((await stream.receive()).header)
        assert reply.HasField("unknown")
        with pytest.raises(StreamEnded):
            await stream.receive()

    simulate(2, scenario)
