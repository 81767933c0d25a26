"""A peer outside the swarm, and hostile input that it sends to a real process."""

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import uvloop

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Stream
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.transport import P2pdTransport
from swarmnet_protocols.net.pipe import Pipe

DEADLINE_S = 60.0
GROWTH_BYTES = 48 << 20
"""Limit on the growth of a process's memory under an attack: less than one of the announced
messages."""

Scenario = Callable[[P2pdTransport], Awaitable[None]]


def run_stranger(bootstrap: list[str], scenario: Scenario, directory: Path) -> None:
    """Run a scenario over the transport of a peer that knows only these addresses."""

    async def main() -> None:
        config = P2pdConfig(
            directory / "identity.key",
            listen=("/ip4/127.0.0.1/tcp/0",),
            bootstrap=tuple(bootstrap),
            require_bootstrap=True,
        )
        async with P2pdTransport.create(config) as transport:
            await scenario(transport)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@contextlib.asynccontextmanager
async def opened(transport: P2pdTransport, peer: PeerId, protocol: ProtocolSpec) -> AsyncIterator[Stream]:
    stream = await transport.open(peer, protocol, deadline_s=DEADLINE_S)
    try:
        yield stream
    finally:
        stream.close()


@contextlib.asynccontextmanager
async def raw_streams(
    transport: P2pdTransport, peer: PeerId, protocol: ProtocolSpec, count: int
) -> AsyncIterator[list[Pipe]]:
    """Streams whose bytes are not framed."""
    with contextlib.ExitStack() as stack:
        pipes = []
        for _ in range(count):
            pipe = await transport._daemon.open_stream(peer, protocol.id, deadline_s=DEADLINE_S)
            stack.callback(pipe.writer.close)
            pipes.append(pipe)
        yield pipes


async def read_to_end(pipe: Pipe) -> bytes:
    """The bytes that come until the other side ends the stream: none if the end discards what this
    side has sent."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            return await pipe.reader.read()
        except OSError:
            return b""


async def await_end(stream: Stream) -> None:
    """Wait until the other side ends the stream; earlier messages are ignored."""
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(StreamEnded):
            while True:
                await stream.receive()


async def send_garbage(transport: P2pdTransport, peer: PeerId, protocol: ProtocolSpec) -> None:
    """Send forty streams of garbage, each of which must end."""
    rng = random.Random(protocol.id)
    for _ in range(40):
        header = b"\xff" + rng.randbytes(rng.randrange(min(200, protocol.max_header_bytes)))
        payload = rng.randbytes(rng.randrange(4096)) if protocol.max_payload_bytes else b""
        async with opened(transport, peer, protocol) as stream:
            with contextlib.suppress(StreamEnded):
                await stream.send(Message(header, payload))
            await await_end(stream)


async def send_oversized(transport: P2pdTransport, peer: PeerId, protocol: ProtocolSpec) -> None:
    """Send frames at once that announce a header or a payload of 2 GiB. Their streams must end
    before all of it was sent.

    Each stream lasts some seconds: the other side waits for the sender to read the refusal.
    """

    async def send(header: int, payload: int) -> None:
        async with raw_streams(transport, peer, protocol, 1) as (pipe,):
            with contextlib.suppress(OSError):
                pipe.writer.write(struct.pack(">II", header, payload))
                for _ in range(64):
                    pipe.writer.write(bytes(1 << 20))
                    await pipe.writer.drain()
            assert await read_to_end(pipe) == b""

    await asyncio.gather(*(send(*sizes) for sizes in 4 * [(1 << 31, 0), (0, 1 << 31)]))
