"""Handshakes, negotiations, streams and bytes that outsiders may hold of a peer over py-libp2p are
limited."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from swarmnet_protocols.net import ProtocolSpec, Stream
from swarmnet_protocols.net.p2pd import connection_limits
from swarmnet_protocols.net.p2pd.config import ConnectionLimits, P2pdConfig
from swarmnet_protocols.net.pylibp2p.transport import PyLibp2pTransport, prepare_libp2p
from swarmnet_protocols.wire.roles import ANY_ROLE
from tests.defences import defence, nothing, patience_s, replacing
from tests.support.attacks.outsider import MULTISTREAM, NOISE, Outsider, line, outsiders, varint
from tests.support.network.conversations import echo, until

from .conftest import LOOPBACK
from .test_p2pd_limits import run

# before modules of py-libp2p are imported: it gives their protobufs a pool of their own
prepare_libp2p()

from swarmnet_protocols.net.pylibp2p import connection, host  # noqa: E402

pytestmark = pytest.mark.slow

ECHO = ProtocolSpec("/test/echo", max_header_bytes=1 << 10, roles=ANY_ROLE, served_by=ANY_ROLE)
IDLE = ProtocolSpec("/test/idle", max_header_bytes=1 << 10, roles=ANY_ROLE, served_by=ANY_ROLE)
NEAR, FAR = "127.0.1.{}", "127.0.9.1"
"""Addresses of one subnet, and one of another."""
LONG_LINE_BYTES = 1025
DEADLINE_S = 5.0


@contextlib.asynccontextmanager
async def peer(folder: Path, **changes: Any) -> AsyncIterator[str]:
    """The address of a peer that serves ECHO, and IDLE, on whose streams it reads nothing."""

    async def idle(_: Stream) -> None:
        await asyncio.Event().wait()

    config = P2pdConfig(folder / "identity.key", listen=LOOPBACK, **changes)
    async with PyLibp2pTransport.create(config) as transport:
        await transport.serve(ECHO, echo)
        await transport.serve(IDLE, idle)
        yield transport.addresses()[0]


@contextlib.asynccontextmanager
async def plain(
    address: str, source: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A TCP connection that sends nothing by itself."""
    _, _, ip, _, port, *_ = address.split("/")
    reader, writer = await asyncio.open_connection(ip, int(port), local_addr=(source, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def all_read(reader: asyncio.StreamReader) -> bytes:
    """The bytes that come before the other side closes the connection."""
    received = b""
    async with asyncio.timeout(patience_s(DEADLINE_S)):
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(1 << 16):
                received += data
    return received


async def is_served(address: str, source: str) -> bool:
    """Whether a newcomer from ``source`` completes its handshakes."""
    try:
        async with asyncio.timeout(patience_s(DEADLINE_S)):
            (await Outsider.connect(address, source=source)).close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    return True


@defence(
    "a subnet has its share of the pending handshakes",
    off=replacing(host, "subnet_of", lambda address: address),
)
def test_a_subnet_that_hoards_handshakes_keeps_no_other_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MAX_PENDING", 4 * host.MAX_PENDING_PER_SUBNET)

    async def main() -> None:
        async with peer(tmp_path) as address, contextlib.AsyncExitStack() as held:
            for number in range(5 * host.MAX_PENDING_PER_SUBNET):
                await held.enter_async_context(plain(address, NEAR.format(number + 1)))
            assert not await is_served(address, NEAR.format(1))
            assert await is_served(address, FAR)

    run(main)


def test_a_bounded_number_of_handshakes_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_PENDING", 8)

    async def main() -> None:
        async with peer(tmp_path) as address:
            async with contextlib.AsyncExitStack() as held:
                for number in range(8):
                    await held.enter_async_context(plain(address, NEAR.format(number + 1)))
                assert not await is_served(address, FAR)
            async with asyncio.timeout(patience_s(DEADLINE_S)):
                while True:
                    if await is_served(address, FAR):
                        return
                    await asyncio.sleep(0.01)

    run(main)


@defence("handshakes have a timeout", off=replacing(host, "HANDSHAKE_S", 1e6))
def test_a_silent_handshake_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "HANDSHAKE_S", host.HANDSHAKE_S / 50)

    async def main() -> None:
        async with peer(tmp_path) as address, plain(address) as (reader, _):
            assert await all_read(reader) == line(MULTISTREAM)

    run(main)


@defence("lines of a negotiation are bounded", off=replacing(connection, "MAX_LINE_BYTES", 1 << 14))
def test_a_long_line_ends_a_negotiation_before_it_is_received(tmp_path: Path) -> None:
    """Both negotiations are tested: that of a connection before its encryption, and that of a
    stream."""
    long = line(MULTISTREAM) + varint(LONG_LINE_BYTES)

    async def main() -> None:
        async with (
            peer(tmp_path) as address,
            outsiders(address, 1) as [outsider],
            plain(address) as (reader, writer),
        ):
            writer.write(long)
            assert await all_read(reader) == line(MULTISTREAM)
            stream = await outsider.open("", varint(LONG_LINE_BYTES))
            await until(lambda: stream in outsider.reset)
            assert outsider.is_connected

    run(main)


@defence("protocols offered in a negotiation are bounded", off=replacing(connection, "MAX_OFFERS", 1 << 20))
def test_a_bounded_number_of_protocols_is_offered(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            peer(tmp_path) as address,
            outsiders(address, 1) as [outsider],
            plain(address) as (reader, writer),
        ):
            stream = await outsider.open("", line("/nothing") * 16 + line(ECHO.id))
            await until(lambda: stream in outsider.reset)
            assert line(ECHO.id) not in outsider.heard[stream]
            writer.write(line(MULTISTREAM) + line("/nothing") * 16 + line(NOISE))
            assert line(NOISE) not in await all_read(reader)

    run(main)


def no_limit_of_streams(patch: pytest.MonkeyPatch) -> None:
    """A limit so high that a 32nd of it is still more than the test opens."""
    patch.setattr(host, "MAX_STREAMS", 1 << 20)


@defence("streams of a connection are bounded", off=no_limit_of_streams)
def test_a_connection_has_a_bounded_number_of_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MAX_STREAMS", host.MAX_STREAMS // 32)

    async def main() -> None:
        async with peer(tmp_path) as address, outsiders(address, 2) as [outsider, other]:
            streams = [await outsider.open(IDLE.id) for _ in range(16)]
            await until(lambda: outsider.reset == set(streams[8:]))
            await other.until_heard(await other.open(IDLE.id), line(IDLE.id))

    run(main)


@defence(
    "bytes that wait on a connection are bounded", off=replacing(connection, "MAX_BUFFERED_BYTES", 1 << 40)
)
def test_a_peer_that_sends_more_than_it_was_granted_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_BUFFERED_BYTES", connection.MAX_BUFFERED_BYTES >> 4)

    async def main() -> None:
        async with peer(tmp_path) as address, outsiders(address, 2) as [outsider, other]:
            stream = await outsider.open(IDLE.id)
            with contextlib.suppress(ConnectionError):
                for _ in range(64):
                    await outsider.say(stream, bytes(1 << 17))
            await until(lambda: not outsider.is_connected)
            await other.until_heard(await other.open(IDLE.id), line(IDLE.id))

    run(main)


@defence(
    "bytes that wait are bounded over all connections", off=replacing(host.PyLibp2p, "_make_room", nothing)
)
def test_bytes_that_wait_are_bounded_over_all_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each outsider sends less than one connection may hold alone."""
    monkeypatch.setattr(connection, "MAX_BUFFERED_BYTES", 1 << 20)

    async def main() -> None:
        async with peer(tmp_path) as address, outsiders(address, 13) as [*greedy, other]:
            for outsider in greedy:
                stream = await outsider.open(IDLE.id)
                with contextlib.suppress(ConnectionError):
                    for _ in range(8):
                        await outsider.say(stream, bytes(100 << 10))
            await until(lambda: sum(not outsider.is_connected for outsider in greedy) >= 4)
            assert any(outsider.is_connected for outsider in greedy)
            await other.until_heard(await other.open(IDLE.id), line(IDLE.id))

    run(main)


@defence(
    "memory that outsiders filled is returned after they have left", off=replacing(host, "RETURN_S", 1e6)
)
def test_memory_that_outsiders_filled_is_returned_after_they_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[float] = []
    monkeypatch.setattr(host, "return_freed_memory", lambda: returned.append(time.monotonic()))

    async def main() -> None:
        async with peer(tmp_path) as address:
            async with outsiders(address, 5):
                assert not returned
            await until(lambda: bool(returned))
            await asyncio.sleep(0.1)
            assert len(returned) == 1

    run(main)


def test_a_peer_dials_from_the_port_on_which_it_listens(tmp_path: Path) -> None:
    """Its router then has one mapping for both. A port that still belongs to a former connection
    keeps no new one from being made."""

    async def main() -> None:
        listening = P2pdConfig(tmp_path / "a", listen=LOOPBACK)
        dialling = P2pdConfig(tmp_path / "b", listen=("/ip4/0.0.0.0/tcp/0",))
        async with PyLibp2pTransport.create(listening) as a, PyLibp2pTransport.create(dialling) as b:
            await b.connect(a.peer_id, a.addresses(), deadline_s=DEADLINE_S)
            await until(lambda: bool(a._daemon._all_connections()))
            [seen] = await a.addresses_of(b.peer_id)
            assert seen.split("/")[4] in {each.split("/")[4] for each in b.addresses()}
            await b._daemon.disconnect(a.peer_id)
            await b.connect(a.peer_id, a.addresses(), deadline_s=DEADLINE_S)
            assert await b.is_connected(a.peer_id)

    run(main)


@defence(
    "connections of one address are limited over py-libp2p, too",
    off=replacing(connection_limits, "excess", lambda *_: []),
)
def test_connections_of_one_address_are_limited(tmp_path: Path) -> None:
    limits = ConnectionLimits(per_host=4, per_subnet=8, total=20)

    async def main() -> None:
        async with peer(tmp_path, connections=limits) as address, outsiders(address, 12) as strangers:
            await until(lambda: sum(each.is_connected for each in strangers) <= limits.per_host)
            assert await is_served(address, FAR)

    run(main)
