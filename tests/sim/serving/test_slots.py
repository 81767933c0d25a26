"""Slots held without work are evicted for clients with work."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
import torch

from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_node.hosting import slots
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_node.hosting.host import Host
from swarmnet_node.hosting.session import HostedSession
from swarmnet_node.hosting.slots import NEW_S
from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.net import Message, Stream
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import Patch, defence, nothing, replacing
from tests.support.attacks.raw_client import Stranger, a_step, assert_ends, link_reply, session_reply
from tests.support.attacks.refusals import final_refusal, refusal
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

PROMPT = [5, 6, 7]
TOKENS = 4
SERVED_S = 5.0


class Attacker:
    """Identities of one attacker that holds as many slots as it gets."""

    def __init__(self, lab: Lab, stack: AsyncExitStack) -> None:
        self.lab = lab
        self._stack = stack
        self._numbers = 0

    async def stranger(self) -> Stranger:
        self._numbers += 1
        peer = self.lab.peer_id(f"mallory{self._numbers}")
        return Stranger(self.lab, await self._stack.enter_async_context(self.lab.network.transport(peer)))

    def drain(self, stream: Stream) -> asyncio.Task[Refused | None]:
        """Read and send heartbeats until the stream ends; returns the refusal."""

        async def read() -> Refused | None:
            try:
                await session_reply(stream)
            except Refused as refused:
                return refused
            except StreamEnded:
                pass
            return None

        return asyncio.create_task(read())

    async def fill_sessions(
        self, peers: int, each: int, *, positions: int = 0
    ) -> list[asyncio.Task[Refused | None]]:
        """Open sessions; with ``positions``, each has sent one step of this many positions."""
        ends = []
        for _ in range(peers):
            stranger = await self.stranger()
            for number in range(each):
                session = bytes([self._numbers, number]) * 8
                stream = await stranger.send_open(
                    session=session, span=pb.Span(start=0, end=6), max_length=4096
                )
                if positions:
                    link = await stranger.link(session=session)
                    await link_reply(link)
                    await stranger.step(link, a_step(1, 0, positions))
                    assert (await session_reply(stream)).HasField("output")
                ends.append(self.drain(stream))
        await asyncio.sleep(0.5)
        return ends


async def be_served(lab: Lab, name: str = "client") -> None:
    """Assert that an honest client is served, and soon."""
    clock = asyncio.get_running_loop().time
    async with lab.client(name) as swarm:
        await swarm.refresh()
        began = clock()
        async with lab.chain(swarm) as chain:
            assert await lab.generate(chain, PROMPT, TOKENS) == lab.reference.greedy(PROMPT, TOKENS)
        assert clock() - began < SERVED_S


@defence(
    "a session without steps is evicted from a full host", off=replacing(slots, "slot_to_evict", nothing)
)
def test_sessions_without_steps_are_evicted_for_a_client_with_work(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6), limits=ClientLimits(sessions=16, sessions_per_client=4)))
        async with AsyncExitStack() as stack:
            ends = await Attacker(lab, stack).fill_sessions(4, 4)
            assert lab.sessions() == {"a": 16}
            await asyncio.sleep(4.0)
            await be_served(lab)
            told = [end.result() for end in ends if end.done()]
            assert [refused.reason for refused in told if refused] == [refusal_pb2.REASON_IDLE] * len(told)
            assert len(told) == 1

    simulate(reference, scenario)


@defence("an idle session is evicted from a full host", off=replacing(slots, "slot_to_evict", nothing))
def test_idle_sessions_that_once_had_steps_are_evicted(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6), limits=ClientLimits(sessions=4, sessions_per_client=2)))
        async with AsyncExitStack() as stack:
            await Attacker(lab, stack).fill_sessions(2, 2, positions=1)
            await asyncio.sleep(10.0)
            await be_served(lab)

    simulate(reference, scenario)


@pytest.mark.parametrize(
    "changes",
    [{"wire": pb.DTYPE_UNSPECIFIED}, {"spare": True}, {"standby": True, "next": pb.Peer(id="any")}],
    ids=["wire", "spare", "standby"],
)
def test_an_invalid_open_message_evicts_no_session(reference: Reference, changes: dict[str, Any]) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6), limits=ClientLimits(sessions=1)))
        async with AsyncExitStack() as stack:
            attacker = Attacker(lab, stack)
            (idle,) = await attacker.fill_sessions(1, 1)
            await asyncio.sleep(NEW_S)
            mallory = await attacker.stranger()
            await assert_ends(await mallory.send_open(session=b"m" * 16, **changes))
            assert (lab.sessions(), idle.done()) == ({"a": 1}, False)
            await mallory.send_open(session=b"m" * 16)
            await asyncio.sleep(0.5)
            assert idle.done()

    simulate(reference, scenario)


async def evict_none(*_: object) -> None:
    """Evict no session."""


@defence("caches of idle sessions are evicted for steps", off=replacing(Host, "make_room", evict_none))
def test_caches_of_idle_sessions_are_evicted(reference: Reference) -> None:
    sequence_bytes = reference.stage(0, 6).geometry.bytes_for(64)

    async def scenario(lab: Lab) -> None:
        limits = ClientLimits(cache_share_per_client=0.5)
        await lab.start("a", lab.hosting((0, 6), limits=limits, max_cache_bytes=4 * sequence_bytes))
        async with AsyncExitStack() as stack:
            await Attacker(lab, stack).fill_sessions(2, 2, positions=3)
            assert lab.cache_bytes() == {"a": 4 * sequence_bytes}
            await asyncio.sleep(10.0)
            await be_served(lab)

    simulate(reference, scenario)


def test_caches_of_idle_sessions_are_evicted_for_a_new_sequence(
    reference: Reference,
) -> None:
    sequence_bytes = reference.stage(0, 6).geometry.bytes_for(64)

    async def scenario(lab: Lab) -> None:
        limits = ClientLimits(cache_share_per_client=0.5)
        await lab.start("a", lab.hosting((0, 6), limits=limits, max_cache_bytes=4 * sequence_bytes))
        async with AsyncExitStack() as stack:
            await Attacker(lab, stack).fill_sessions(2, 2, positions=3)
            await asyncio.sleep(10.0)
            async with lab.client() as swarm, lab.chain(swarm) as chain:
                for sequence in range(2):
                    await chain.forward((Row(sequence, 0, 3, 1, sequence),), np.array(PROMPT))

    simulate(reference, scenario)


@defence(
    "a client holds at most a quarter of the caches",
    off=replacing(ClientLimits, "client_cache_bytes", lambda _, max_cache_bytes: max_cache_bytes),
)
def test_one_client_has_a_quarter_of_the_caches(reference: Reference) -> None:
    sequence_bytes = reference.stage(0, 6).geometry.bytes_for(64)

    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6), max_cache_bytes=4 * sequence_bytes))
        async with AsyncExitStack() as stack:
            stranger = await Attacker(lab, stack).stranger()
            streams = []
            for number in range(2):
                session = bytes([number]) * 16
                stream = await stranger.send_open(session=session, span=pb.Span(start=0, end=6))
                link = await stranger.link(session=session)
                await link_reply(link)
                await stranger.step(link, a_step(1, 0))
                streams.append(stream)
            assert (await session_reply(streams[0])).HasField("output")
            assert (await refusal(session_reply(streams[1]))).reason == refusal_pb2.REASON_OUT_OF_RESOURCES

    simulate(reference, scenario)


def end_no_session(patch: Patch) -> None:
    """Let a session wait for its first step for ever."""
    patch.setattr(HostedSession, "_first_step", HostedSession._failure)


@defence("a session without a first step is ended", off=end_no_session)
def test_a_session_without_a_first_step_ends_where_there_is_room(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        async with AsyncExitStack() as stack:
            stranger = await Attacker(lab, stack).stranger()
            stream = await stranger.send_open()

            async def heartbeat() -> None:
                while True:
                    await stream.send(
                        Message(pb.SessionRequest(heartbeat=pb.Heartbeat()).SerializeToString())
                    )
                    await asyncio.sleep(10.0)

            heartbeating = asyncio.create_task(heartbeat())
            clock = asyncio.get_running_loop().time
            began = clock()
            assert (await refusal(session_reply(stream))).reason == refusal_pb2.REASON_IDLE
            assert clock() - began == pytest.approx(lab.timing.first_step_s, abs=1.0)
            heartbeating.cancel()

    simulate(reference, scenario, limit_s=400)


def test_a_client_with_an_evicted_session_goes_on_with_its_next_step(reference: Reference) -> None:
    """Until then it opens no other session, which would take the slot of another client."""

    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 3), limits=ClientLimits(sessions=1)))
        await lab.start("b", lab.hosting((3, 6)))
        expected = reference.greedy(PROMPT, 2 * TOKENS)
        async with lab.client("reader") as swarm, lab.chain(swarm) as chain:
            assert await lab.generate(chain, PROMPT, TOKENS) == expected[:TOKENS]
            await asyncio.sleep(30.0)
            async with lab.client("other") as other, lab.chain(other) as second:
                assert await lab.generate(second, PROMPT, 1) == expected[:1]
                await asyncio.sleep(60.0)
                assert lab.sessions()["a"] == 1
            values = torch.tensor([expected[TOKENS - 1]])
            fed = len(PROMPT) + TOKENS - 1
            hidden = await chain.forward((Row(0, fed, 1, 1, 0),), values)
            assert reference.next_token(hidden) == expected[TOKENS]

    simulate(reference, scenario, limit_s=400)


def open_again_at_once(patch: Patch) -> None:
    class Restless:
        def __get__(self, *_: object) -> bool:
            return False

        def __set__(self, *_: object) -> None:
            pass

    patch.setattr(ChainSupervisor, "_is_resting", Restless(), raising=False)


@defence("a client without work does not reopen an evicted session", off=open_again_at_once)
def test_a_client_may_wait_before_its_first_step(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            await asyncio.sleep(2 * lab.timing.first_step_s)
            assert lab.sessions() == {}
            assert await lab.generate(chain, PROMPT, TOKENS) == reference.greedy(PROMPT, TOKENS)

    simulate(reference, scenario, limit_s=1000)


async def pass_reply(stream: Stream) -> pb.PassReply:
    return pb.PassReply.FromString((await stream.receive()).header)


@defence("a pass without tensors is evicted from a full host", off=replacing(slots, "slot_to_evict", nothing))
def test_only_a_valid_pass_evicts_one_without_tensors(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6), limits=ClientLimits(passes=4, passes_per_client=2)))
        async with AsyncExitStack() as stack:
            attacker = Attacker(lab, stack)
            held = [
                await each.begin_pass()
                for each in [await attacker.stranger(), await attacker.stranger()]
                for _ in range(2)
            ]
            ended = asyncio.create_task(final_refusal(held[0]))
            await asyncio.sleep(6.0)
            invalid = await (await attacker.stranger()).begin_pass(counts=())
            assert (await final_refusal(invalid)).reason == refusal_pb2.REASON_PROTOCOL
            assert not ended.done()
            honest = await (await attacker.stranger()).begin_pass()
            assert (await pass_reply(honest)).HasField("heartbeat")
            assert (await ended).reason == refusal_pb2.REASON_IDLE
            for stream in held[1:]:
                assert (await pass_reply(stream)).HasField("heartbeat")

    simulate(reference, scenario)


@defence(
    "a link without a session is evicted from a full host", off=replacing(slots, "slot_to_evict", nothing)
)
def test_links_without_a_session_are_evicted(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        limits = ClientLimits(pending_links=2, pending_links_per_client=2)
        await lab.start("a", lab.hosting((0, 6), limits=limits))
        async with AsyncExitStack() as stack:
            attacker = Attacker(lab, stack)
            mallory, honest = await attacker.stranger(), await attacker.stranger()
            for number in range(2):
                await mallory.link(session=bytes([number]) * 16)
            await asyncio.sleep(NEW_S)
            link = await honest.link(session=b"h" * 16)
            await asyncio.sleep(0.5)
            await honest.send_open(session=b"h" * 16)
            assert (await link_reply(link)).HasField("linked")

    simulate(reference, scenario)
