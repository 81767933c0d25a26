"""Limits on outsiders at a real p2pd: connections, records of libp2p's own Kademlia, memory; and
its restart."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
import uvloop

from swarmnet_protocols.net import Message, ProtocolSpec, Stream
from swarmnet_protocols.net.endpoint import Endpoint
from swarmnet_protocols.net.multiaddr import Multiaddr
from swarmnet_protocols.net.p2pd import connection_limits
from swarmnet_protocols.net.p2pd import daemon as p2pd_daemon
from swarmnet_protocols.net.p2pd import process as p2pd_process
from swarmnet_protocols.net.p2pd import transport as p2pd_transport
from swarmnet_protocols.net.p2pd.config import ConnectionLimits, P2pdConfig
from swarmnet_protocols.net.p2pd.connection_limits import ConnectionGuard, ListedConnection, Use
from swarmnet_protocols.net.p2pd.transport import P2pdTransport
from swarmnet_protocols.reachability.dial_back import ports_of
from swarmnet_protocols.reachability.simultaneous_open import dial_through, serve_at
from swarmnet_protocols.wire.roles import ANY_ROLE
from tests.defences import defence, patience_s, replacing
from tests.support.attacks.outsider import MULTISTREAM, Outsider, field, line, outsiders, varint
from tests.support.network.conversations import dial, echo, until

from .conftest import LOOPBACK

pytestmark = pytest.mark.slow

ECHO = ProtocolSpec("/test/echo", max_header_bytes=1 << 10, roles=ANY_ROLE, served_by=ANY_ROLE)
KADEMLIA = "/ipfs/kad/1.0.0"
RELAYS = ("/libp2p/circuit/relay/0.2.0/hop", "/libp2p/circuit/relay/0.2.0/stop")
PING = "/ipfs/ping/1.0.0"
LIMITS = ConnectionLimits()
DEADLINE_S = 20.0


@contextlib.asynccontextmanager
async def peer(identity_path: Path, **changes: Any) -> AsyncIterator[P2pdTransport]:
    """A peer that echoes."""
    async with P2pdTransport.create(P2pdConfig(identity_path, listen=LOOPBACK, **changes)) as transport:
        await transport.serve(ECHO, echo)
        yield transport


async def echoes(stream: Stream) -> None:
    await stream.send(Message(b"still"))
    async with asyncio.timeout(patience_s(DEADLINE_S)):
        assert (await stream.receive()).header == b"still"


def connected(there: list[Outsider]) -> int:
    return sum(each.is_connected for each in there)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as nodes do
        runner.run(main())


def close_none(*_: object) -> list[ListedConnection]:
    return []


@defence("connections of one address are limited", off=replacing(connection_limits, "excess", close_none))
def test_connections_of_one_address_are_limited_and_those_in_use_stay(tmp_path: Path) -> None:
    async def main() -> None:
        async with peer(tmp_path / "a") as a, peer(tmp_path / "b") as b, peer(tmp_path / "c") as c:
            accepted, dialled = await dial(b, a, ECHO), await dial(a, c, ECHO)
            for stream in accepted, dialled:
                await echoes(stream)
            async with outsiders(a.addresses()[0], LIMITS.per_host + 36) as strangers:
                assert len(strangers) == LIMITS.per_host + 36
                await until(lambda: connected(strangers) <= LIMITS.per_host)
                assert len(await a.addresses_of(b.peer_id)) == 1
                for stream in accepted, dialled:
                    await echoes(stream)

    run(main)


def test_many_addresses_keep_no_newcomer_out(tmp_path: Path) -> None:
    """Strangers of a few subnets lose connections; a newcomer of another subnet stays."""
    limits = ConnectionLimits(per_host=4, per_subnet=8, total=20)
    near_sources = tuple(f"127.0.{net}.{host}" for net in (1, 2, 3) for host in (1, 2, 3, 4))

    async def main() -> None:
        async with (
            peer(tmp_path / "a", connections=limits) as a,
            outsiders(a.addresses()[0], 6, sources=near_sources) as strangers,
        ):
            await until(lambda: connected(strangers) <= limits.total)
            async with (
                outsiders(a.addresses()[0], 1, sources=("127.0.9.1",)) as [newcomer],
                outsiders(a.addresses()[0], 2, sources=near_sources) as more,
            ):
                await until(lambda: connected(strangers) + connected(more) < limits.total)
                assert newcomer.is_connected

    run(main)


def have_a_kademlia(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(p2pd_process.FLAGS, "dhtServer", 1)


@defence("libp2p's own Kademlia keeps nothing for outsiders", off=have_a_kademlia)
def test_an_outsider_leaves_nothing_in_libp2ps_own_kademlia(tmp_path: Path) -> None:
    async def main() -> None:
        async with peer(tmp_path / "a") as a, outsiders(a.addresses()[0], 1) as [outsider]:
            record = b"\x08\x02" + field(2, b"\x12\x20" + bytes(32)) + field(9, field(1, outsider.id))
            kademlia = await outsider.open(KADEMLIA, varint(len(record)) + record)
            ping = await outsider.open(PING, bytes(32))
            await outsider.until_heard(ping, bytes(32))
            async with asyncio.timeout(patience_s(DEADLINE_S)):
                await outsider.until_heard(kademlia, line(MULTISTREAM) + b"\x03na\n")

    run(main)


@defence("libp2p's own relay serves no outsider", off=replacing(p2pd_daemon, "REFUSED", ()))
def test_libp2ps_own_relay_serves_no_outsider(tmp_path: Path) -> None:
    async def main() -> None:
        async with peer(tmp_path / "a") as a, outsiders(a.addresses()[0], 1) as [outsider]:
            reserve, stop = b"\x02\x08\x00", b"\x02\x08\x00"
            streams = [
                await outsider.open(each, said) for each, said in zip(RELAYS, (reserve, stop), strict=True)
            ]
            replies = [line(MULTISTREAM) + line(each) for each in RELAYS]
            await until(
                lambda: all(
                    stream in outsider.reset or len(outsider.heard[stream]) > len(reply)
                    for stream, reply in zip(streams, replies, strict=True)
                )
            )
            assert outsider.reset.issuperset(streams)

    run(main)


@defence(
    "a connection that this process forwards counts where its peer is",
    off=replacing(Endpoint, "real_address", lambda _, address: address),
)
def test_a_forwarded_connection_counts_where_its_peer_is(tmp_path: Path) -> None:
    """p2pd sees it come from loopback, where a peer would be dialled at any port, and where limits
    would count all peers as one."""
    remote, other = (Multiaddr(IPv4Address(f"203.0.113.{each}"), "tcp", 4001) for each in (9, 8))

    async def main() -> None:
        async with peer(tmp_path / "a") as a, peer(tmp_path / "b") as b:
            port, is_connected = ports_of(a.addresses())[0], asyncio.Event()

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                a.endpoint.start(serve_at(reader, writer, remote, port, a.endpoint.forwarded))

            async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
                far = server.sockets[0].getsockname()[1]

                async def connect(local: str) -> None:
                    await b.connect(a.peer_id, [local], deadline_s=DEADLINE_S)
                    is_connected.set()

                ends = await asyncio.open_connection("127.0.0.1", far)
                b.endpoint.start(dial_through(*ends, other, connect, b.endpoint.forwarded))
                async with asyncio.timeout(patience_s(DEADLINE_S)):
                    await is_connected.wait()
                assert await b.addresses_of(a.peer_id) == [str(other)]
                stream = await b.open(a.peer_id, ECHO, deadline_s=DEADLINE_S)
                await echoes(stream)
                assert await a.addresses_of(b.peer_id) == [str(remote)]
                assert {each.address for each in a.endpoint.streams_with(b.peer_id)} == {str(remote)}
                [listed] = a._connection_guard._connections.update(await a._daemon.packed_connections(), 0.0)
                assert listed.host == "203.0.113.9/32"

    run(main)


def test_a_peer_sees_from_its_connections_that_others_dial_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with peer(tmp_path / "a") as a, peer(tmp_path / "b") as b:
            await dial(b, a, ECHO)
            assert not await a.was_dialled()  # from this machine
            monkeypatch.setattr(p2pd_transport, "own_interfaces", list)
            assert await a.was_dialled()
            assert not await b.was_dialled()

    run(main)


@defence(
    "a p2pd over its memory limit is restarted",
    off=replacing(ConnectionGuard, "_must_restart", lambda _: False),
)
def test_a_p2pd_over_its_memory_limit_is_restarted(tmp_path: Path) -> None:
    """After the restart, p2pd has the same address, identity and handlers; sessions have moved to
    other hosts before."""
    said: list[str] = []

    @contextlib.asynccontextmanager
    async def aside() -> AsyncIterator[None]:
        said.append("away")
        yield
        said.append("back")

    async def main() -> None:
        async with peer(tmp_path / "b") as b, peer(tmp_path / "a", step_aside=aside) as a:
            died = asyncio.create_task(a.died())
            addresses, before = a.addresses(), a._daemon.process
            stream = await dial(b, a, ECHO)
            await echoes(stream)
            a._connection_guard._max_memory_bytes = -(1 << 40)
            await until(lambda: said == ["away"])
            a._connection_guard._max_memory_bytes = 1 << 40
            await until(lambda: said == ["away", "back"])
            assert a._daemon.process is not before
            assert a.addresses() == addresses
            again = await b.open(a.peer_id, ECHO, addresses=addresses, deadline_s=DEADLINE_S)
            await echoes(again)
            await echoes(await dial(a, b, ECHO))
            assert not died.done()
            a._daemon.process.kill()
            await died

    run(main)


@defence(
    "strangers are disconnected first when p2pd is over its memory limit",
    off=replacing(ConnectionGuard, "_use", lambda *_: Use.KNOWN),
)
def test_strangers_are_disconnected_first_when_p2pd_lacks_memory(tmp_path: Path) -> None:
    async def main() -> None:
        async with peer(tmp_path / "a") as a, outsiders(a.addresses()[0], 8) as strangers:
            assert connected(strangers) == 8
            a._connection_guard._max_memory_bytes = -(1 << 40)
            await until(lambda: connected(strangers) == 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_limits, "RELIEF_S", math.inf)  # it is not restarted
        run(main)
