"""Handing over what is owed, between workers that do nothing else: who may bequeath, what, and how often."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import torch

from swarmnet_protocols.errors import IntegrityError, StreamEnded, SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import Message, PeerId, Transport
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.memory import LinkProfile, MemoryNetwork
from swarmnet_protocols.net.protocol_ids import HANDOVER
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.handover import Handover
from swarmnet_protocols.training.rosters import Candidate
from swarmnet_protocols.training.state_transfer import PackedState, StateServer
from swarmnet_protocols.wire import workers_pb2 as pb
from tests.support.virtual_time import run

JOB = b"j" * 32
TIMING = Timing()
DEADLINE_S = 10.0
MAX_BYTES = 2 << 20
ERROR = bytes(range(256)) * 16


@dataclass
class Notes:
    """An heir that writes down what happens to it. ``wrong`` is what it says of everything it examines."""

    max_bytes: int = MAX_BYTES
    wrong: str = ""
    examined: list[tuple[bytes, float]] = field(default_factory=list)
    inherited: list[PeerId] = field(default_factory=list)
    refused: dict[PeerId, str] = field(default_factory=dict)

    async def examine(self, data: bytearray, factor: float) -> torch.Tensor:
        if self.wrong:
            raise IntegrityError(self.wrong)
        self.examined.append((bytes(data), factor))
        return torch.zeros(1)

    async def inherit(self, peer: PeerId, error: torch.Tensor) -> None:
        self.inherited.append(peer)

    def refuse(self, peer: PeerId, reason: str) -> None:
        self.refused[peer] = reason


class Worker:
    def __init__(self, transport: Transport) -> None:
        self.peer = transport.peer_id
        self.transport = transport
        self.heir = Notes()
        self.states = StateServer(transport, JOB, TIMING)
        self.handover = Handover(transport, JOB, self.heir, timing=TIMING, deadline_s=DEADLINE_S)
        self.forgot = 0

    async def serve(self) -> None:
        await self.states.serve()
        await self.handover.serve()

    async def give(self, error: bytes = ERROR) -> PeerId:
        await self.handover.leave()
        return await self.handover.give(self.states.offer(PackedState.of([error])), self._forget)

    async def offer(self, heir: "Worker", error: bytes = ERROR, *, job: bytes = JOB) -> pb.HandOverReply:
        """What an heir says of an offer that was not its turn to get, and nothing more."""
        state = self.states.offer(PackedState.of([error]))
        stream = await self.transport.open(heir.peer, HANDOVER, deadline_s=TIMING.open_s)
        try:
            request = pb.HandOverRequest(offer=pb.Offer(job=job, state=state))
            await stream.send(Message(request.SerializeToString()))
            return pb.HandOverReply.FromString((await stream.receive()).header)
        finally:
            stream.close()

    async def _forget(self) -> None:
        self.forgot += 1


Scenario = Callable[[MemoryNetwork, list[Worker]], Awaitable[None]]


def simulate(count: int, scenario: Scenario) -> None:
    """Run ``scenario`` with workers in the order of their peer ids."""

    async def main() -> None:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.02, bytes_per_s=1e7))
        workers: list[Worker] = []
        up = asyncio.Condition()

        async def live(number: int) -> None:
            async with network.transport(Identity.from_seed(bytes([number])).peer_id) as transport:
                worker = Worker(transport)
                await worker.serve()
                async with up:
                    workers.append(worker)
                    up.notify_all()
                await asyncio.Event().wait()

        living = [asyncio.create_task(live(number)) for number in range(count)]
        try:
            async with asyncio.timeout(300):
                async with up:
                    await up.wait_for(lambda: len(workers) == count)
                await scenario(network, sorted(workers, key=lambda worker: worker.peer))
        finally:
            await cancel(*living)

    run(main())


def meet(*workers: Worker, weights: dict[PeerId, float] | None = None) -> None:
    """A roster of these, in which each weighs 100 unless ``weights`` says otherwise."""
    weights = weights or {}
    members = [Candidate(each.peer, (), weight=weights.get(each.peer, 100.0)) for each in workers]
    for worker in workers:
        worker.handover.stand(members)


async def refusal(leaver: Worker, heir: Worker) -> str:
    return (await leaver.offer(heir)).refused.reason


def test_the_next_in_order_inherits_by_weight() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        first, second, third = workers
        meet(*workers, weights={second.peer: 300.0, third.peer: 200.0})
        assert await second.give() == third.peer
        assert third.heir.examined == [(ERROR, 1.5)]
        assert third.heir.inherited == [second.peer]
        assert second.forgot == 1
        assert not first.heir.examined

    simulate(3, scenario)


def test_who_only_listened_is_no_heir() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        first, second, third = workers
        meet(*workers, weights={second.peer: 0.0})
        assert [heir.peer for heir in first.handover.heirs()] == [third.peer]
        assert await first.give() == third.peer

    simulate(3, scenario)


def test_a_member_of_the_roster_before_may_bequeath_and_nobody_else() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        heir, leaver, stranger, listener = workers
        assert "has contributed" in await refusal(leaver, heir), "before any roster"
        meet(heir, leaver, listener, weights={listener.peer: 0.0})
        for each in (stranger, listener):
            assert "has contributed" in await refusal(each, heir)
        meet(heir, stranger)
        assert (await leaver.offer(heir)).HasField("ready")
        meet(heir, stranger)
        assert "has contributed" in await refusal(leaver, heir), "two rosters ago"
        assert not heir.heir.refused, "only members are named"

    simulate(4, scenario)


def test_a_worker_is_offered_something_once_a_round() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        heir, one, other = workers
        meet(*workers)
        assert (await one.offer(heir)).HasField("ready")
        assert len(heir.heir.examined) == 1
        assert "already" in await refusal(other, heir)
        assert len(heir.heir.examined) == 1
        meet(*workers)
        assert (await other.offer(heir)).HasField("ready")

    simulate(3, scenario)


def test_one_is_under_way_at_a_time_although_rounds_go_on() -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        heir, silent, other = workers
        meet(*workers)
        stream = await silent.transport.open(heir.peer, HANDOVER, deadline_s=TIMING.open_s)
        state = silent.states.offer(PackedState.of([ERROR]))
        request = pb.HandOverRequest(offer=pb.Offer(job=JOB, state=state))
        await stream.send(Message(request.SerializeToString()))
        await stream.receive()
        meet(*workers)
        assert "already" in await refusal(other, heir)
        with pytest.raises(StreamEnded):
            await (
                stream.receive()
            )  # who never says that it is the heir's now is waited for until the deadline
        assert asyncio.get_running_loop().time() < DEADLINE_S + 1
        assert (await other.offer(heir)).HasField("ready")
        assert not heir.heir.inherited

    simulate(3, scenario)


def test_what_is_larger_than_it_can_be_is_refused_and_named() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        heir, leaver = workers
        meet(*workers)
        reply = await leaver.offer(heir, bytes(MAX_BYTES + 1))
        assert "expected at most" in reply.refused.reason
        assert "expected at most" in heir.heir.refused[leaver.peer]
        assert not heir.heir.examined

    simulate(2, scenario)


def test_what_one_heir_refuses_another_may_take() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        leaver, picky, other = workers
        picky.heir.wrong = "far too long"
        meet(*workers)
        assert await leaver.give() == other.peer
        assert picky.heir.refused == {leaver.peer: "far too long"}
        assert not picky.heir.inherited
        assert leaver.forgot == 1

    simulate(3, scenario)


def test_what_nobody_takes_is_not_forgotten() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        leaver, *others = workers
        for each in others:
            each.heir.wrong = "far too long"
        with pytest.raises(Unreachable, match="nobody else contributes"):
            await leaver.give()
        meet(*workers)
        with pytest.raises(Unreachable, match=r"far too long.*far too long"):
            await leaver.give()
        assert not leaver.forgot

    simulate(3, scenario)


def test_who_leaves_inherits_nothing() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        meet(*workers)
        results = await asyncio.gather(*(worker.give() for worker in workers), return_exceptions=True)
        assert all(isinstance(each, Unreachable) and "leaves too" in str(each) for each in results)
        assert asyncio.get_running_loop().time() < 1.0

    simulate(3, scenario)


def test_who_leaves_while_it_inherits_hands_on_that_too() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        first, second, third = workers
        meet(*workers)
        forgetting, going_on = asyncio.Event(), asyncio.Event()

        async def forget() -> None:
            forgetting.set()
            await going_on.wait()

        giving = asyncio.create_task(first.handover.give(first.states.offer(PackedState.of([ERROR])), forget))
        await forgetting.wait()
        leaving = asyncio.create_task(second.handover.leave())
        going_on.set()
        await leaving
        assert second.heir.inherited == [first.peer]
        assert await giving == second.peer
        assert await second.give() == third.peer

    simulate(3, scenario)


def test_an_heir_that_is_ready_is_told_nothing_but_that_it_is_one() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        heir, leaver = workers
        meet(*workers)
        state = leaver.states.offer(PackedState.of([ERROR]))
        offer = Message(pb.HandOverRequest(offer=pb.Offer(job=JOB, state=state)).SerializeToString())
        stream = await leaver.transport.open(heir.peer, HANDOVER, deadline_s=TIMING.open_s)
        await stream.send(offer)
        await stream.receive()
        await stream.send(offer)
        with pytest.raises(StreamEnded):
            await stream.receive()
        assert not heir.heir.inherited

    simulate(2, scenario)


@pytest.mark.parametrize(
    "request_",
    [
        pb.HandOverRequest(),
        pb.HandOverRequest(yours=pb.Yours()),
        pb.HandOverRequest(offer=pb.Offer(job=b"k" * 32, state=bytes(32))),
    ],
    ids=["empty", "yours", "another job"],
)
def test_what_is_no_offer_ends_its_stream(request_: pb.HandOverRequest) -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        heir, leaver = workers
        meet(*workers)
        stream = await leaver.transport.open(heir.peer, HANDOVER, deadline_s=TIMING.open_s)
        await stream.send(Message(request_.SerializeToString()))
        with pytest.raises(SwarmnetError):
            await stream.receive()
        assert (await leaver.offer(heir)).HasField("ready"), "it was offered nothing so far"

    simulate(2, scenario)
