"""The faults of the simulated Internet, and that one seed gives one trace."""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from swarmnet_protocols.errors import PeerUnreachable, StreamEnded
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Stream
from tests.support.network import virtual_time
from tests.support.network.conversations import echo
from tests.support.network.memory_network import Delivery, LinkProfile, MemoryNetwork, MemoryTransport

ECHO = ProtocolSpec("/test/echo/1", max_payload_bytes=1 << 20)
DELAY_S = 0.05
PLAIN = LinkProfile(delay_s=DELAY_S)

Scenario = Callable[[MemoryNetwork, MemoryTransport, MemoryTransport], Awaitable[None]]


def run(scenario: Scenario, profile: LinkProfile = PLAIN) -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(1), profile)
        async with network.transport(PeerId("a")) as a, network.transport(PeerId("b")) as b:
            await b.serve(ECHO, echo)
            await scenario(network, a, b)

    virtual_time.run(main())


async def dial(a: MemoryTransport, b: MemoryTransport) -> Stream:
    return await a.open(b.peer_id, ECHO, deadline_s=1.0)


async def expect_silence(stream: Stream, for_s: float = 30.0) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(for_s):
            await stream.receive()


def test_a_crash_is_seen_one_delay_later() -> None:
    async def scenario(network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport) -> None:
        stream, loop = await dial(a, b), asyncio.get_running_loop()
        network.crash(b.peer_id)
        started = loop.time()
        with pytest.raises(StreamEnded):
            await stream.receive()
        assert loop.time() - started == pytest.approx(DELAY_S)
        with pytest.raises(StreamEnded):
            await stream.send(Message(b""))
        with pytest.raises(PeerUnreachable):
            await dial(a, b)
        with pytest.raises(PeerUnreachable):
            await dial(b, a)
        assert not network.is_online(b.peer_id)

    run(scenario)


def test_a_crashed_peer_comes_back_under_its_id() -> None:
    async def scenario(network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport) -> None:
        network.crash(b.peer_id)
        async with network.transport(b.peer_id) as again:
            await again.serve(ECHO, echo)
            stream = await dial(a, again)
            await stream.send(Message(b"back"))
            assert (await stream.receive()).header == b"back"

    run(scenario)


def test_a_hung_peer_is_silent_until_it_resumes() -> None:
    async def scenario(network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport) -> None:
        stream = await dial(a, b)
        await stream.send(Message(b"0"))
        await stream.receive()
        network.hang(b.peer_id)
        await stream.send(Message(b"1"))
        await stream.send(Message(b"2"))
        await expect_silence(stream)
        with pytest.raises(PeerUnreachable):
            await dial(a, b)
        network.resume(b.peer_id)
        assert [(await stream.receive()).header for _ in range(2)] == [b"1", b"2"]

    run(scenario)


def test_a_hung_peer_that_is_killed_ends_its_streams() -> None:
    async def scenario(network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport) -> None:
        stream = await dial(a, b)
        network.hang(b.peer_id)
        network.crash(b.peer_id)
        with pytest.raises(StreamEnded):
            await stream.receive()

    run(scenario)


def test_a_cut_hides_even_a_crash_until_it_heals() -> None:
    async def scenario(network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport) -> None:
        stream = await dial(a, b)
        network.cut(a.peer_id, b.peer_id)
        network.crash(b.peer_id)
        await expect_silence(stream)
        network.heal(a.peer_id, b.peer_id)
        with pytest.raises(StreamEnded):
            await stream.receive()

    run(scenario)


def test_a_cut_concerns_one_pair_and_isolation_all() -> None:
    async def scenario(network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport) -> None:
        async with network.transport(PeerId("c")) as c:
            network.cut(a.peer_id, b.peer_id)
            stream = await dial(c, b)
            with pytest.raises(PeerUnreachable):
                await dial(a, b)
            await stream.send(Message(b"said in time"))
            await stream.receive()
            network.isolate(b.peer_id)
            await stream.send(Message(b"x"))
            await expect_silence(stream)
            network.rejoin(b.peer_id)
            assert (await stream.receive()).header == b"x"

    run(scenario)


def test_bandwidth_delays_in_proportion_and_messages_queue() -> None:
    async def scenario(network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport) -> None:
        arrivals: list[float] = []
        network.observers.append(lambda delivery: arrivals.append(delivery.time_s))
        stream, loop = await dial(a, b), asyncio.get_running_loop()
        started = loop.time()
        for _ in range(3):
            await stream.send(Message(b"", bytes(100_000 - 8)))
        for _ in range(3):
            await stream.receive()
        assert arrivals[0] - started == pytest.approx(DELAY_S + 0.1)
        assert loop.time() - started == pytest.approx(2 * DELAY_S + 0.4)

    run(scenario, LinkProfile(delay_s=DELAY_S, bytes_per_s=1e6))


def test_a_profile_can_be_set_per_pair() -> None:
    async def scenario(network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport) -> None:
        network.set_link(a.peer_id, b.peer_id, LinkProfile(delay_s=1.0))
        started = asyncio.get_running_loop().time()
        await a.open(b.peer_id, ECHO, deadline_s=5.0)
        assert asyncio.get_running_loop().time() - started == pytest.approx(2.0)

    run(scenario)


def test_a_fault_can_be_injected_on_a_delivery() -> None:
    async def scenario(network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport) -> None:
        def crash_on_third(delivery: Delivery) -> None:
            if delivery.target == b.peer_id and delivery.message.header == b"3":
                network.crash(b.peer_id)

        network.observers.append(crash_on_third)
        stream = await dial(a, b)
        for header in (b"1", b"2"):
            await stream.send(Message(header))
            assert (await stream.receive()).header == header
        await stream.send(Message(b"3"))
        with pytest.raises(StreamEnded):
            await stream.receive()

    run(scenario)


def test_a_dial_that_times_out_leaves_no_stream_behind() -> None:
    async def scenario(network: MemoryNetwork, a: MemoryTransport, b: MemoryTransport) -> None:
        ended = asyncio.Event()

        async def handler(stream: Stream) -> None:
            try:
                await stream.receive()
            finally:
                ended.set()

        await b.serve(ECHO, handler)
        with pytest.raises(PeerUnreachable):
            await a.open(b.peer_id, ECHO, deadline_s=1.5 * DELAY_S)
        await ended.wait()

    run(scenario)


CHURN = """
import asyncio, random
from swarmnet_protocols.errors import StreamEnded, PeerUnreachable
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network import virtual_time
from tests.support.network.conversations import echo

ECHO = ProtocolSpec("/test/echo/1", max_payload_bytes=1 << 20)

async def main(seed):
    rng = random.Random(seed)
    network = MemoryNetwork(rng, LinkProfile(delay_s=0.03, jitter_s=0.05, bytes_per_s=1e6))
    names = [PeerId(f"peer-{number}") for number in range(8)]

    async def talk(transport):
        own = random.Random(f"{seed}/{transport.peer_id}")
        for _ in range(20):
            try:
                stream = await transport.open(own.choice(names), ECHO, deadline_s=1.0)
                async with asyncio.TaskGroup() as group:
                    for _ in range(3):
                        group.create_task(stream.send(Message(b"", own.randbytes(own.randrange(1000)))))
                for _ in range(3):
                    async with asyncio.timeout(1.0):
                        await stream.receive()
                stream.close()
            except* (StreamEnded, PeerUnreachable, TimeoutError):
                await asyncio.sleep(0.1)

    async def live(name, crash_at):
        async with network.transport(name) as transport:
            await transport.serve(ECHO, echo)
            asyncio.get_running_loop().call_at(crash_at, network.crash, name)
            await talk(transport)
            await asyncio.sleep(5)

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(live(name, rng.uniform(0, 20)))
    return network.trace_hash()

print(virtual_time.run(main(SEED)))
"""


def trace(seed: int, hash_seed: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", CHURN.replace("SEED", str(seed))],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_one_seed_gives_one_trace_in_every_process() -> None:
    first = trace(7, "1")
    assert trace(7, "2") == first
    assert trace(8, "1") != first
