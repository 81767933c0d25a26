"""TCP simultaneous open (RFC 9293, section 3.5): two peers behind routers connect to each other at the same moment.

Each router accepts the other's SYN because its own host has sent one to that address. Both ends have then called ``connect``, and p2pd
has no option to make one of them act as the server. So this process makes the connection, from the port on which p2pd listens, and forwards
its bytes to the local p2pd: at one end to p2pd's listening port, at the other end from a port that p2pd is asked to dial.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from swarmnet_protocols.machine.platform import share_port

_CHUNK_BYTES = 64 << 10


async def simultaneous_open(
    local_port: int, host: str, port: int, *, within_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A TCP connection from ``local_port`` to ``host``, whose end does the same. Raises ``OSError`` or ``TimeoutError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        share_port(end)
        end.bind(("", local_port))
        async with asyncio.timeout(within_s):
            await asyncio.get_running_loop().sock_connect(end, (host, port))
        return await asyncio.open_connection(sock=end, limit=_CHUNK_BYTES)
    except BaseException:
        end.close()
        raise


async def serve_at(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listening_port: int) -> None:
    """Forward between a connection and the p2pd that listens on ``listening_port`` of this machine, until one side closes."""
    try:
        local_reader, local_writer = await asyncio.open_connection("127.0.0.1", listening_port)
    except OSError:
        writer.close()
        return
    await _forward_both(reader, writer, local_reader, local_writer)


async def dial_through(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    dial: Callable[[str], Awaitable[None]],
) -> None:
    """Have ``dial`` connect p2pd to a local multiaddr, and forward between that and the connection until one side closes.

    Raises what ``dial`` raises.
    """
    accepted: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
        asyncio.get_running_loop().create_future()
    )

    def accept(local_reader: asyncio.StreamReader, local_writer: asyncio.StreamWriter) -> None:
        if accepted.done():
            local_writer.close()
        else:
            accepted.set_result((local_reader, local_writer))

    async def forward() -> None:
        await _forward_both(reader, writer, *await accepted)

    forwarding = asyncio.create_task(forward())
    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=_CHUNK_BYTES)
    try:
        await dial(f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}")
        server.close()
        await forwarding
    finally:
        server.close()
        forwarding.cancel()
        writer.close()


async def _forward_both(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    local_reader: asyncio.StreamReader,
    local_writer: asyncio.StreamWriter,
) -> None:
    for each in writer, local_writer:
        each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    forwarding = [
        asyncio.create_task(_forward(reader, local_writer)),
        asyncio.create_task(_forward(local_reader, writer)),
    ]
    try:
        await asyncio.wait(forwarding, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in forwarding:
            task.cancel()
        for each in writer, local_writer:
            each.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
