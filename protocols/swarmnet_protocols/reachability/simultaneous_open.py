"""TCP simultaneous open (RFC 9293, section 3.5): two peers behind routers connect to each other.

Both call ``connect`` at the same moment. Each router accepts the other's SYN because its own host
has sent one to that address. Both ends are then TCP clients, and p2pd cannot make one of them act
as the server. So this process makes the connection, from the port on which p2pd listens, and
forwards its bytes to the local p2pd:

- One end connects to p2pd's listening port.
- The other end asks p2pd to dial a local port.

p2pd sees such a peer on loopback. ``forwarded`` tells the endpoint the real address of the peer, so
that limits count the right one.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.machine.platform import share_port
from swarmnet_protocols.net.multiaddr import Multiaddr

_CHUNK_BYTES = 64 << 10


async def simultaneous_open(
    local_port: int, address: Multiaddr, *, within_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect from ``local_port`` to ``address``, while the peer there connects to this one.

    Raises ``OSError`` or ``TimeoutError``.
    """
    family = socket.AF_INET6 if address.ip.version == 6 else socket.AF_INET
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        share_port(end)
        end.bind(("", local_port))
        async with asyncio.timeout(within_s):
            await asyncio.get_running_loop().sock_connect(end, (str(address.ip), address.port))
        return await asyncio.open_connection(sock=end, limit=_CHUNK_BYTES)
    except BaseException:
        end.close()
        raise


async def serve_at(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    remote: Multiaddr,
    listening_port: int,
    forwarded: dict[str, str],
) -> None:
    """Forward between a connection with ``remote`` and the local p2pd until one side closes.

    Connects to p2pd's ``listening_port``.
    """
    loopback = "127.0.0.1" if remote.ip.version == 4 else "::1"
    try:
        local_reader, local_writer = await asyncio.open_connection(loopback, listening_port)
    except OSError:
        writer.close()
        return
    with _forwarding(local_writer.get_extra_info("sockname"), remote, forwarded):
        await _forward_both(reader, writer, local_reader, local_writer)


async def dial_through(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    remote: Multiaddr,
    dial: Callable[[str], Awaitable[None]],
    forwarded: dict[str, str],
) -> None:
    """Have ``dial`` connect p2pd to a local multiaddr, and forward it to ``remote``.

    Returns when one side closes. Raises what ``dial`` raises.
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
        with _forwarding(server.sockets[0].getsockname(), remote, forwarded) as local:
            await dial(local)
            server.close()
            await forwarding
    finally:
        server.close()
        forwarding.cancel()
        writer.close()


@contextlib.contextmanager
def _forwarding(local: tuple[str, int], remote: Multiaddr, forwarded: dict[str, str]) -> Iterator[str]:
    """Let the socket ``local`` stand for ``remote`` in this context. Yields its multiaddr."""
    host, port, *_ = local
    address = f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"
    forwarded[address] = str(remote)
    try:
        yield address
    finally:
        del forwarded[address]


async def _forward_both(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    local_reader: asyncio.StreamReader,
    local_writer: asyncio.StreamWriter,
) -> None:
    for each in writer, local_writer:
        each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        await race(_forward(reader, local_writer), _forward(local_reader, writer))
    finally:
        for each in writer, local_writer:
            each.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
