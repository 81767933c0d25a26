"""Stream handlers and readers for tests."""

import asyncio
import contextlib
from collections.abc import Callable

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.net import Message, ProtocolSpec, Stream, Transport
from tests.defences import patience_s

DEADLINE_S = 60.0


async def dial(a: Transport, b: Transport, protocol: ProtocolSpec) -> Stream:
    return await a.open(b.peer_id, protocol, addresses=b.addresses(), deadline_s=DEADLINE_S)


async def until(holds: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait for what has no event, such as a change in another process."""
    async with asyncio.timeout(patience_s(within_s)):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())


async def drain(stream: Stream) -> list[Message]:
    """The messages that arrive until the stream ends."""
    messages = []
    with contextlib.suppress(StreamEnded):
        while True:
            messages.append(await stream.receive())
    return messages


async def collect(b: Transport, protocol: ProtocolSpec) -> "asyncio.Future[list[Message]]":
    """Serve one stream; returns its messages once it has ended."""
    result: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()

    async def handler(stream: Stream) -> None:
        result.set_result(await drain(stream))

    await b.serve(protocol, handler)
    return result
