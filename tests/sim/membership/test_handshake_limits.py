"""Limits on the handshake resources that outsiders and members can use."""

import asyncio

import pytest

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.membership import admitted_peers
from swarmnet_protocols.membership.admitted_peers import MAX_STREAMS_PER_PEER
from swarmnet_protocols.net import Message, Stream
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import RETRY_S, Scope
from swarmnet_protocols.net.limits.subnets import SubnetLimits
from swarmnet_protocols.net.protocol_ids import HANDSHAKE, REVOCATIONS, SESSION
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.wire import handshake_pb2 as pb
from tests.defences import defence, nothing, replacing
from tests.support.attacks.refusals import final_refusal
from tests.support.attacks.switched_off import wait_for_ever
from tests.support.network.handshake_lab import (
    DEADLINE_S,
    HEARD,
    World,
    answer,
    converse,
    hear,
    run,
    seconds_until_the_end,
)
from tests.support.network.private_swarm import Someone

# ---- limits -------------------------------------------------------------------------------------


@defence("silent streams time out", off=wait_for_ever)
def test_a_silent_handshake_stream_times_out() -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob")
        strangers = [await world.stranger(f"stranger {number}") for number in range(100)]
        silent = [
            await stranger.open(server.peer_id, HANDSHAKE, deadline_s=DEADLINE_S)
            for stranger in strangers
            for _ in range(20)
        ]
        async with asyncio.timeout(10.0):
            await asyncio.gather(*(seconds_until_the_end(stream) for stream in silent))
        assert not server.raw.resources.system.used[Resource.PENDING_HANDSHAKES]

    run(scenario)


@defence(
    "silent streams are evicted from the pending handshakes",
    off=replacing(Scope, "available", lambda *_: 1 << 30),
)
def test_silent_strangers_keep_no_member_out() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        server.raw.resources.limit(Resource.PENDING_HANDSHAKES, system=8)
        await server.transport.serve(SESSION, answer)
        for number in range(20):
            stranger = await world.stranger(f"stranger {number}")
            await stranger.open(server.peer_id, HANDSHAKE, deadline_s=DEADLINE_S)
        assert server.raw.resources.system.used[Resource.PENDING_HANDSHAKES] == 8
        await converse(client, server)

    run(scenario)


@defence("one subnet does not take all streams", off=replacing(SubnetLimits, "_evict_from", nothing))
def test_sixteen_strangers_with_all_streams_keep_no_member_out() -> None:
    """Outsiders stay silent or keep refused streams open: each stream lasts seconds, and another
    one follows."""

    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        server.raw.resources.limit(Resource.INBOUND_STREAMS, system=64)
        await server.transport.serve(SESSION, answer)
        world.network.move(client.peer_id, "/ip4/192.0.2.1/tcp/1")
        for number in range(16):
            stranger = await world.stranger(f"stranger {number}")
            world.network.move(stranger.peer_id, f"/ip4/203.0.113.{number}/tcp/1")
            opening = (stranger.open(server.peer_id, HANDSHAKE, deadline_s=DEADLINE_S) for _ in range(4))
            await asyncio.gather(*opening)
        assert server.raw.resources.system.used[Resource.INBOUND_STREAMS] == 48
        await converse(client, server)

    run(scenario)


def test_an_overloaded_server_refuses_a_handshake_with_a_retry_time() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        server.raw.resources.limit(Resource.PENDING_HANDSHAKES, per_peer=0)
        with pytest.raises(Refused, match="is out of resources") as info:
            await client.handshakes.ensure(server.peer_id, SESSION, deadline_s=DEADLINE_S)
        assert info.value.retry_after_s == RETRY_S
        server.raw.resources.limit(Resource.INBOUND_STREAMS, per_peer=0)
        with pytest.raises(Refused, match="is out of resources"):
            await client.handshakes.ensure(server.peer_id, SESSION, deadline_s=DEADLINE_S)
        server.raw.resources.limit(Resource.INBOUND_STREAMS, per_peer=9)
        server.raw.resources.limit(Resource.PENDING_HANDSHAKES, per_peer=1)
        await client.handshakes.ensure(server.peer_id, SESSION, deadline_s=DEADLINE_S)

    run(scenario)


def test_a_handshake_stream_that_is_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        await converse(client, server)
        (stream,) = server.handshakes.admitted.streams

        async def never(_: Message) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(stream, "send", never)
        await asyncio.sleep(world.swarm.rules.revocation_refresh_s + world.swarm.timing.handshake_s + 1.0)
        assert stream not in server.handshakes.admitted.streams

    run(scenario)


@defence(
    "a member evicts only its own handshake streams",
    off=replacing(admitted_peers, "MAX_STREAMS_PER_PEER", 1 << 30),
)
def test_a_member_evicts_only_its_own_handshake_streams() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        await converse(client, server)
        (hers,) = server.handshakes.admitted.streams
        greedy = await world.member("mallory")
        said = pb.Hello(swarm=bytes(32), certificate=greedy.membership.certificate)
        for _ in range(3 * MAX_STREAMS_PER_PEER):
            stream = await greedy.raw.open(server.peer_id, HANDSHAKE, deadline_s=DEADLINE_S)
            await stream.send(Message(pb.HandshakeMessage(hello=said).SerializeToString()))
            await asyncio.sleep(0.5)
        assert len(server.handshakes.admitted.streams) == 1 + MAX_STREAMS_PER_PEER
        assert hers in server.handshakes.admitted.streams

    run(scenario)


def test_handshake_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admitted_peers, "MAX_STREAMS", 3)

    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        clients = [await world.member(f"client {number}") for number in range(6)]
        streams = [await converse(client, server) for client in clients]
        assert len(server.handshakes.admitted.streams) == 3
        for stream in streams:  # a peer with streams stays admitted
            await stream.send(Message(b"still here?"))
            assert await stream.receive() == HEARD
        await asyncio.sleep(1.0)
        await converse(clients[0], server)  # a peer without streams makes a new handshake
        assert len(server.handshakes.admitted.streams) == 3

    run(scenario)


async def overloaded(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[Someone, list[Someone]]:
    """A server that keeps three handshake streams open, and five admitted clients. No other stream
    is open."""
    monkeypatch.setattr(admitted_peers, "MAX_STREAMS", 3)
    server = await world.member("bob")
    await server.transport.serve(SESSION, answer)
    clients = [await world.member(f"client {number}") for number in range(5)]
    for client in clients:
        (await converse(client, server)).close()
        await asyncio.sleep(1.0)
    return server, clients


@defence(
    "a peer stays admitted when its handshake stream is evicted",
    off=replacing(admitted_peers, "MAX_WITHOUT_STREAM", 0),
)
def test_a_peer_with_an_evicted_handshake_stays_until_it_is_revoked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that was opened before the end of the handshake stream arrived."""

    async def scenario(world: World) -> None:
        server, clients = await overloaded(world, monkeypatch)
        first = clients[0]
        assert await hear(first.raw, server.raw, SESSION) == HEARD
        server.membership.add_revocations([world.swarm.revocation(first.peer_id)])
        with pytest.raises(StreamEnded):
            await hear(first.raw, server.raw, SESSION)

    run(scenario)


def test_admitted_peers_without_a_stream_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admitted_peers, "MAX_WITHOUT_STREAM", 1)

    async def scenario(world: World) -> None:
        server, clients = await overloaded(world, monkeypatch)
        assert len(server.handshakes.admitted.by_peer) == 3 + 1
        with pytest.raises(StreamEnded):
            await hear(clients[0].raw, server.raw, SESSION)
        assert await hear(clients[1].raw, server.raw, SESSION) == HEARD
        await converse(clients[0], server)

    run(scenario)


def test_handshake_streams_of_busy_peers_are_evicted_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admitted_peers, "MAX_STREAMS", 3)

    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        busy = await world.member("busy")
        await converse(busy, server)
        for number in range(5):
            (await converse(await world.member(f"client {number}"), server)).close()
            await asyncio.sleep(1.0)
        assert any(stream.peer == busy.peer_id for stream in server.handshakes.admitted.streams)

    run(scenario)


def test_a_peer_that_sends_invalid_revocations_is_disconnected() -> None:
    async def scenario(world: World) -> None:
        server, liar = await world.member("bob"), await world.member("mallory")

        async def lie(stream: Stream) -> None:
            await stream.receive()
            await stream.send(Message(b"", b"no list"))

        await liar.raw.serve(REVOCATIONS, lie)
        serials = [pb.Serial(signer=next(iter(world.swarm.rules.keys)), serial=1 << 60)]
        said = pb.Hello(swarm=bytes(32), certificate=liar.membership.certificate, serials=serials)
        stream = await liar.raw.open(server.peer_id, HANDSHAKE, deadline_s=DEADLINE_S)
        await stream.send(Message(pb.HandshakeMessage(hello=said).SerializeToString()))
        assert pb.HandshakeMessage.FromString((await stream.receive()).header).HasField("hello")
        assert "invalid revocation list" in (await final_refusal(stream)).detail
        assert not server.handshakes.admitted.by_peer
        assert not server.membership.revocations.serials

    run(scenario)
