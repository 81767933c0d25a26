"""The DHT of a private swarm answers and asks only its members."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from swarmnet_protocols.errors import NotAuthorised, StreamEnded
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.membership.revocations import RevokedIds, sign_list
from swarmnet_protocols.net import Message, ProtocolSpec
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.transport import P2pdTransport
from swarmnet_protocols.net.protocol_ids import DHT_PING, DHT_STORE, DIRECTORY
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import receive_within
from swarmnet_protocols.wire.roles import Role

from .conftest import LOOPBACK
from .dht_peers import AUTHORITY, OPEN, PRIVATE, SWARM, Peer, RawStore, bodies, join, mallorys, raw_store

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
GARBAGE = b"\xff" * 40
"""Bytes that are no protobuf: a peer that parses them fails, and reports it."""


@contextlib.asynccontextmanager
async def stranger(directory: Path, victim: Peer) -> AsyncIterator[P2pdTransport]:
    """A peer with other software, connected to ``victim``."""
    async with P2pdTransport.create(P2pdConfig(directory / "stranger", listen=LOOPBACK)) as transport:
        await transport.connect(
            victim.transport.peer_id, list(victim.transport.addresses()), deadline_s=DEADLINE_S
        )
        yield transport


async def call(caller: P2pdTransport, victim: Peer, protocol: ProtocolSpec) -> StreamEnded:
    """The failure of a call with random bytes."""
    stream = await caller.open(victim.transport.peer_id, protocol, deadline_s=DEADLINE_S)
    with contextlib.closing(stream), pytest.raises(StreamEnded) as info:  # noqa: PT012
        await stream.send(Message(GARBAGE))
        await receive_within(stream, DEADLINE_S)
    return info.value


def is_refused(error: StreamEnded) -> bool:
    """Whether the call failed before it was parsed."""
    return isinstance(error, Refused)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def table(peer: Peer) -> set[Any]:
    return {str(each) for each in peer.node.protocol.routing_table.peer_id_to_uid}


def test_calls_of_strangers_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            join(tmp_path / "open", rules=OPEN) as public,
            join(tmp_path / "private", rules=PRIVATE) as private,
            stranger(tmp_path, public) as caller,
        ):
            await caller.connect(
                private.transport.peer_id, list(private.transport.addresses()), deadline_s=DEADLINE_S
            )
            for protocol in DIRECTORY:
                assert not is_refused(await call(caller, public, protocol))
                assert is_refused(await call(caller, private, protocol))
            assert not table(private)

    run(scenario)


def test_a_member_asks_no_strangers_and_reports_that_it_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with join(tmp_path / "member", rules=PRIVATE) as member:
            bootstrap = tuple(member.transport.addresses())
            with pytest.raises(NotAuthorised, match="no certificate"):
                async with join(tmp_path / "late", bootstrap, rules=PRIVATE, roles=frozenset()):
                    pass
            assert not table(member)
        async with join(tmp_path / "open", rules=OPEN) as public:
            heard: list[str] = []
            public.node.protocol.rpc_ping = lambda *_: heard.append("ping")
            with pytest.raises(NotAuthorised):
                async with join(tmp_path / "member2", tuple(public.transport.addresses()), rules=PRIVATE):
                    pass
            assert not heard

    run(scenario)


def test_a_client_reads_records_but_stores_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with join(tmp_path / "keeper", rules=PRIVATE) as keeper:
            await keeper.directory.publish("topic", b"x", lifetime_s=60.0)
            async with join(
                tmp_path / "client",
                tuple(keeper.transport.addresses()),
                client_mode=True,
                rules=PRIVATE,
                roles=frozenset({Role.CLIENT}),
            ) as client:
                assert await bodies(client, "topic") == {b"x"}
                before = keeper.node.protocol.storage.total_bytes
                assert await raw_store(client, keeper, RawStore.of(mallorys())) is None
                assert is_refused(await call(client.transport, keeper, DHT_STORE))
                assert not is_refused(await call(client.transport, keeper, DHT_PING))
                assert keeper.node.protocol.storage.total_bytes == before

    run(scenario)


def test_a_revoked_peer_leaves_every_routing_table(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(join(tmp_path / "0", rules=PRIVATE))
            bootstrap = tuple(first.transport.addresses())
            second = await stack.enter_async_context(join(tmp_path / "1", bootstrap, rules=PRIVATE))
            mallory = await stack.enter_async_context(join(tmp_path / "m", bootstrap, rules=PRIVATE))
            await mallory.directory.publish("topic", b"x", lifetime_s=60.0)
            assert mallory.identity.peer_id in table(first)
            named = RevokedIds(peers=frozenset({mallory.identity.peer_id}))
            sealed = sign_list(named, serial=int(wall_clock()), swarm=SWARM, key=AUTHORITY)
            learned = asyncio.Event()
            second.directory._handshakes.membership.listeners.append(learned.set)
            first.directory._handshakes.membership.add_revocations([sealed])
            async with asyncio.timeout(DEADLINE_S):
                await learned.wait()
            for peer in (first, second):
                await peer.directory.publish("after", b"y", lifetime_s=60.0)
                assert await bodies(peer, "after") == {b"y"}
                assert mallory.identity.peer_id not in table(peer)
            with pytest.raises(NotAuthorised, match="revoked"):
                async with asyncio.timeout(DEADLINE_S):
                    await mallory.directory._handshakes.membership.ended()
            with pytest.raises(NotAuthorised, match="revoked"):
                await mallory.directory.lookup("after")

    run(scenario)
