"""Peers of a private swarm and their handshakes, in virtual time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.net import Message, ProtocolSpec, Stream, Transport
from swarmnet_protocols.net.protocol_ids import ALL, ENTRANCE, HANDSHAKE, SESSION
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.wire import handshake_pb2 as pb
from swarmnet_protocols.wire.roles import ANY_ROLE, Role
from tests.support.attacks.refusals import final_refusal
from tests.support.network import virtual_time
from tests.support.network.memory_network import LinkProfile, MemoryNetwork, MemoryTransport
from tests.support.network.private_swarm import PrivateSwarm, Someone, identity_of

DEADLINE_S = 5.0
DELAY_S = 0.02
HEARD = Message(b"heard")
GUARDED = [protocol for protocol in ALL if protocol not in ENTRANCE]


async def answer(stream: Stream) -> None:
    """The handler of every protocol: it answers each message."""
    while True:
        await stream.receive()
        await stream.send(HEARD)


@dataclass
class World:
    network: MemoryNetwork
    swarm: PrivateSwarm
    stack: AsyncExitStack

    async def member(self, name: str, *roles: Role) -> Someone:
        context = self.swarm.member(self.network, name, frozenset(roles) or ANY_ROLE)
        return await self.stack.enter_async_context(context)

    async def peer(self, name: str, certificate: bytes = b"", public_name: str = "") -> Someone:
        context = self.swarm.peer(self.network, name, certificate, public_name)
        return await self.stack.enter_async_context(context)

    async def stranger(self, name: str) -> MemoryTransport:
        """A peer that runs other software."""
        return await self.stack.enter_async_context(self.network.transport(identity_of(name).peer_id))


@asynccontextmanager
async def world(swarm: PrivateSwarm | None = None) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=DELAY_S))
        yield World(network, swarm or PrivateSwarm(), stack)


def run(scenario: Callable[[World], Awaitable[None]], swarm: PrivateSwarm | None = None) -> None:
    async def main() -> None:
        async with world(swarm) as made:
            await scenario(made)

    virtual_time.run(main())


async def hear(transport: Transport, other: Transport, protocol: ProtocolSpec) -> Message:
    """Exchange a message on a new stream; returns the answer of the other side. Raises the error
    that prevents it."""
    stream = await transport.open(other.peer_id, protocol, deadline_s=DEADLINE_S)
    try:
        with contextlib.suppress(StreamEnded):
            await stream.send(Message(b"hello"))
        async with asyncio.timeout(DEADLINE_S):
            return await stream.receive()
    finally:
        stream.close()


def hello(swarm: bytes, certificate: bytes) -> Message:
    said = pb.HandshakeMessage(hello=pb.Hello(swarm=swarm, certificate=certificate))
    return Message(said.SerializeToString())


async def send_handshake(stranger: MemoryTransport, victim: Someone, message: Message) -> pb.HandshakeMessage:
    """Send any message on a handshake stream; returns the answer."""
    stream = await stranger.open(victim.peer_id, HANDSHAKE, deadline_s=DEADLINE_S)
    await stream.send(message)
    return pb.HandshakeMessage.FromString((await stream.receive()).header)


async def refusal_of(stranger: MemoryTransport, victim: Someone, message: Message) -> Refused:
    """Send any message on a handshake stream, and return the refusal that follows."""
    stream = await stranger.open(victim.peer_id, HANDSHAKE, deadline_s=DEADLINE_S)
    await stream.send(message)
    return await final_refusal(stream)


async def converse(client: Someone, server: Someone, protocol: ProtocolSpec = SESSION) -> Stream:
    """Open a stream and exchange a message on it; the stream stays in use."""
    stream = await client.transport.open(server.peer_id, protocol, deadline_s=DEADLINE_S)
    await stream.send(Message(b"hello"))
    assert await stream.receive() == HEARD
    return stream


async def seconds_until_the_end(stream: Stream) -> float:
    started = asyncio.get_running_loop().time()
    with pytest.raises(StreamEnded):
        await stream.receive()
    return asyncio.get_running_loop().time() - started
