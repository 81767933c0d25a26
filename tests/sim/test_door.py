"""Who is refused at the door, under every protocol id there is, and who has to go later."""

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from swarmnet_protocols.errors import NotAuthorised, PeerUnreachable, StreamEnded
from swarmnet_protocols.identity import Identity
from swarmnet_protocols.membership import door as door_module
from swarmnet_protocols.membership.revocations import Named, sign_list
from swarmnet_protocols.membership.roles import ANY_ROLE, Role
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.protocol_ids import ALL, DOOR, ENTRANCE, LINK, PING, REVOCATIONS, SESSION
from swarmnet_protocols.transport import Message, ProtocolSpec, Stream, Transport
from swarmnet_protocols.transport.memory import Delivery, LinkProfile, MemoryNetwork, MemoryTransport
from swarmnet_protocols.wire import door_pb2 as pb
from tests.support import virtual_time
from tests.support.private_swarm import EPOCH, LIFETIME_S, PrivateSwarm, Someone, identity_of

DEADLINE_S = 5.0
DELAY_S = 0.02
HEARD = Message(b"heard")
GUARDED = [protocol for protocol in ALL if protocol not in ENTRANCE]


async def answer(stream: Stream) -> None:
    """What every protocol does here: it answers whatever it hears."""
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

    async def peer(self, name: str, certificate: bytes = b"") -> Someone:
        return await self.stack.enter_async_context(self.swarm.peer(self.network, name, certificate))

    async def stranger(self, name: str) -> MemoryTransport:
        """Somebody who runs other software than ours."""
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
    """What the other side answers. Raises whatever keeps it from doing so."""
    stream = await transport.open(other.peer_id, protocol, deadline_s=DEADLINE_S)
    try:
        with contextlib.suppress(StreamEnded):
            await stream.send(Message(b"hello"))
        async with asyncio.timeout(DEADLINE_S):
            return await stream.receive()
    finally:
        stream.close()


def hello(swarm: bytes, certificate: bytes) -> Message:
    said = pb.DoorMessage(hello=pb.Hello(swarm=swarm, certificate=certificate))
    return Message(said.SerializeToString())


async def knock(stranger: MemoryTransport, victim: Someone, message: Message) -> pb.DoorMessage:
    """Say something at the door, whatever it is; the answer."""
    stream = await stranger.open(victim.peer_id, DOOR, deadline_s=DEADLINE_S)
    await stream.send(message)
    return pb.DoorMessage.FromString((await stream.receive()).header)


# ---- who is refused -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Intruder:
    """What mallory shows at the door, and what the door says of it."""

    certificate: Callable[[World, ProtocolSpec], bytes]
    reason: str
    swarm: bytes = bytes(32)


def _of_another_swarm(world: World, _: ProtocolSpec) -> bytes:
    return world.swarm.certificate("mallory", *ANY_ROLE, swarm=b"\1" * 32)


def flip(sealed: bytes) -> bytes:
    return sealed[:-1] + bytes([sealed[-1] ^ 1])


INTRUDERS = {
    "outsider": Intruder(lambda *_: b"", "members only"),
    "expired": Intruder(
        lambda world, _: world.swarm.certificate("mallory", *ANY_ROLE, now=EPOCH - LIFETIME_S), "ended"
    ),
    "revoked": Intruder(lambda world, _: world.swarm.certificate("mallory", *ANY_ROLE), "revoked"),
    "not yet": Intruder(
        lambda world, _: world.swarm.certificate("mallory", *ANY_ROLE, now=EPOCH + 3600), "begins in"
    ),
    "member of another swarm": Intruder(_of_another_swarm, "another swarm", swarm=b"\1" * 32),
    "certificate of another swarm": Intruder(_of_another_swarm, "another swarm"),
    "certificate of another peer": Intruder(
        lambda world, _: world.swarm.certificate("alice", *ANY_ROLE), "another peer"
    ),
    "changed certificate": Intruder(
        lambda world, _: flip(world.swarm.certificate("mallory", *ANY_ROLE)), "damaged"
    ),
}


@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
@pytest.mark.parametrize("name", INTRUDERS)
def test_an_intruder_is_refused_under_every_protocol(name: str, protocol: ProtocolSpec) -> None:
    async def scenario(world: World) -> None:
        victim = await world.member("bob")
        victim.membership.take_revocations(
            [world.swarm.revocation(identity_of("mallory").peer_id)] if name == "revoked" else []
        )
        await victim.transport.serve(protocol, answer)
        mallory, intruder = await world.stranger("mallory"), INTRUDERS[name]
        reply = await knock(mallory, victim, hello(intruder.swarm, intruder.certificate(world, protocol)))
        assert intruder.reason in reply.refused.reason
        with pytest.raises(StreamEnded):
            await hear(mallory, victim.raw, protocol)

    run(scenario)


@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_who_did_not_come_through_the_door_is_refused_under_every_protocol(protocol: ProtocolSpec) -> None:
    async def scenario(world: World) -> None:
        victim = await world.member("bob")
        await victim.transport.serve(protocol, answer)
        member = await world.member("alice")
        with pytest.raises(StreamEnded):
            await hear(member.raw, victim.raw, protocol)

    run(scenario)


@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_the_wrong_role_is_refused_under_every_protocol(protocol: ProtocolSpec) -> None:
    wrong = ANY_ROLE - protocol.roles
    if not wrong:
        assert protocol.id in {
            PING.id,
            REVOCATIONS.id,
            "SwarmDirectoryV1.rpc_ping",
            "SwarmDirectoryV1.rpc_find",
        }
        return

    async def scenario(world: World) -> None:
        victim = await world.member("bob")
        await victim.transport.serve(protocol, answer)
        certificate = world.swarm.certificate("mallory", *wrong)
        # Our own software says so before it dials; others are refused by the other side.
        honest = await world.peer("mallory", certificate)
        with pytest.raises(NotAuthorised, match="is for"):
            await hear(honest.transport, victim.raw, protocol)
        reply = await knock(honest.raw, victim, hello(bytes(32), certificate))
        assert reply.HasField("hello")
        with pytest.raises(StreamEnded):
            await hear(honest.raw, victim.raw, protocol)

    run(scenario)


@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_a_member_who_may_not_serve_it_is_not_asked(protocol: ProtocolSpec) -> None:
    wrong = ANY_ROLE - protocol.served_by
    if not wrong:
        assert protocol is REVOCATIONS
        return

    async def scenario(world: World) -> None:
        asking, pretender = await world.member("alice"), await world.member("mallory", *wrong)
        heard: list[Delivery] = []
        world.network.observers.append(heard.append)
        with pytest.raises(NotAuthorised, match="is for"):
            await pretender.transport.serve(protocol, answer)
        await pretender.raw.serve(protocol, answer)
        with pytest.raises(NotAuthorised, match="is for"):
            await hear(asking.transport, pretender.raw, protocol)
        assert {delivery.protocol for delivery in heard} == {DOOR}

    run(scenario)


@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_a_replayed_handshake_is_refused_under_every_protocol(protocol: ProtocolSpec) -> None:
    async def scenario(world: World) -> None:
        victim, alice = await world.member("bob"), await world.member("alice")
        await victim.transport.serve(protocol, answer)
        overheard: list[Message] = []

        def overhear(delivery: Delivery) -> None:
            if delivery.protocol == DOOR and delivery.source == alice.peer_id:
                overheard.append(delivery.message)

        world.network.observers.append(overhear)
        assert await hear(alice.transport, victim.raw, protocol) == HEARD
        mallory = await world.stranger("mallory")
        for message in overheard:
            reply = await knock(mallory, victim, message)
            assert "another peer" in reply.refused.reason
            with pytest.raises(StreamEnded):
                await hear(mallory, victim.raw, protocol)

    run(scenario)


@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_without_the_door_the_same_stranger_is_heard(protocol: ProtocolSpec) -> None:
    """What keeps the tests above from being vacuous."""

    async def scenario(world: World) -> None:
        victim, mallory = await world.stranger("bob"), await world.stranger("mallory")
        await victim.serve(protocol, answer)
        assert await hear(mallory, victim, protocol) == HEARD

    run(scenario)


@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_a_member_is_heard_under_every_protocol(protocol: ProtocolSpec) -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob", *protocol.served_by)
        await server.transport.serve(protocol, answer)
        for number, role in enumerate(protocol.roles):
            opener = await world.member(f"alice {number}", role)
            assert await hear(opener.transport, server.raw, protocol) == HEARD

    run(scenario)


def test_a_refused_member_learns_why_and_what_to_do() -> None:
    async def scenario(world: World) -> None:
        victim, stranger = await world.member("bob"), await world.peer("mallory")
        with pytest.raises(NotAuthorised, match="no certificate") as info:
            await stranger.door.enter(victim.peer_id, SESSION, deadline_s=DEADLINE_S)
        assert "invite" in info.value.hint

    run(scenario)


# ---- what it costs --------------------------------------------------------------------------------------------


def test_two_members_meet_once() -> None:
    """Only the first stream waits for the door: a second costs what it costs without one."""

    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        await server.transport.serve(LINK, answer)
        loop = asyncio.get_running_loop()
        times = []
        for protocol in (SESSION, LINK, SESSION):
            started = loop.time()
            await hear(client.transport, server.raw, protocol)
            times.append(round((loop.time() - started) / (2 * DELAY_S), 3))
        assert times == [4.0, 2.0, 2.0], "round trips"
        # And the other way round.
        await client.transport.serve(SESSION, answer)
        started = loop.time()
        await hear(server.transport, client.raw, SESSION)
        assert loop.time() - started == pytest.approx(4 * DELAY_S)

    run(scenario)


def test_many_at_once_meet_once() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        knocks: list[Delivery] = []
        world.network.observers.append(
            lambda delivery: knocks.append(delivery) if delivery.protocol == DOOR else None
        )
        await asyncio.gather(*(hear(client.transport, server.raw, SESSION) for _ in range(20)))
        assert len(knocks) == 2

    run(scenario)


def test_who_gives_up_waiting_does_not_end_the_meeting() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        with pytest.raises(PeerUnreachable):
            await client.door.enter(server.peer_id, SESSION, deadline_s=DELAY_S)
        await asyncio.sleep(4 * DELAY_S)
        await client.door.enter(server.peer_id, SESSION, deadline_s=DELAY_S / 100)

    run(scenario)


# ---- who has to go --------------------------------------------------------------------------------------------


async def converse(client: Someone, server: Someone, protocol: ProtocolSpec = SESSION) -> Stream:
    """A stream that is in use."""
    stream = await client.transport.open(server.peer_id, protocol, deadline_s=DEADLINE_S)
    await stream.send(Message(b"hello"))
    assert await stream.receive() == HEARD
    return stream


async def seconds_until_the_end(stream: Stream) -> float:
    started = asyncio.get_running_loop().time()
    with pytest.raises(StreamEnded):
        await stream.receive()
    return asyncio.get_running_loop().time() - started


def test_the_streams_of_a_revoked_member_end_at_once() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("mallory")
        other = await world.member("alice")
        for someone in (server, client):
            await someone.transport.serve(SESSION, answer)
        theirs, ours = await converse(client, server), await converse(server, client)
        bystander = await converse(other, server)
        server.membership.take_revocations([world.swarm.revocation(client.peer_id)])
        assert await seconds_until_the_end(ours) == 0
        assert await seconds_until_the_end(theirs) <= 1.01 * DELAY_S
        await asyncio.sleep(1.0)
        with pytest.raises(NotAuthorised, match="this peer was revoked"):
            await converse(client, server)
        with pytest.raises(NotAuthorised, match="revoked"):
            await converse(server, client)
        await bystander.send(Message(b"still here?"))
        assert await bystander.receive() == HEARD

    run(scenario)


def test_a_revoked_member_is_shown_the_list_that_names_it() -> None:
    """One peer's word is not enough to make a node stop: the authority's is."""

    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        await converse(client, server)
        ended = asyncio.create_task(client.transport.died())
        (door,) = server.door._doors
        await door.send(Message(pb.DoorMessage(refused=pb.Refused(reason="revoked!")).SerializeToString()))
        await asyncio.sleep(1.0)
        assert not ended.done()
        await converse(client, server)
        server.membership.take_revocations([world.swarm.revocation(client.peer_id)])
        with pytest.raises(NotAuthorised, match="this peer was revoked"):
            await ended

    run(scenario)


def test_a_member_notices_that_its_certificate_ended() -> None:
    async def scenario(world: World) -> None:
        client = await world.peer("alice", world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600))
        with pytest.raises(NotAuthorised, match="ended"):
            await client.transport.died()
        assert asyncio.get_running_loop().time() == pytest.approx(3600, abs=2.0)

    run(scenario)


def test_a_revocation_spreads_to_all_who_are_connected() -> None:
    """Along a line of members each of whom has met its neighbours: the revoked one is at its end."""

    async def scenario(world: World) -> None:
        line = [await world.member(f"member {number}") for number in range(8)]
        for someone in line:
            await someone.transport.serve(SESSION, answer)
        streams = [await converse(one, next_one) for one, next_one in itertools.pairwise(line)]
        line[0].membership.take_revocations([world.swarm.revocation(line[-1].peer_id)])
        took_s = await seconds_until_the_end(streams[-1])
        assert took_s < 1.0 * len(line), "120 s are allowed"
        assert [someone.membership.revocations.serials for someone in line[:-1]] == [
            line[0].membership.revocations.serials
        ] * (len(line) - 1)
        await streams[0].send(Message(b"still here?"))
        assert await streams[0].receive() == HEARD

    run(scenario)


def test_a_stream_that_overtakes_the_word_at_the_door_waits_for_it() -> None:
    """Two streams of one peer may cross."""

    async def scenario(world: World) -> None:
        asked, asking = await world.member("bob"), await world.member("alice")
        await asking.transport.serve(SESSION, answer)
        told: list[Message] = []

        async def word_after_stream(stream: Stream) -> None:
            await stream.receive()
            calling = asyncio.create_task(hear(asked.raw, asking.raw, SESSION))
            await asyncio.sleep(1.0)
            await stream.send(hello(bytes(32), asked.membership.certificate))
            told.append(await calling)
            await stream.receive()

        await asked.raw.serve(DOOR, word_after_stream)
        await asking.door.enter(asked.peer_id, SESSION, deadline_s=DEADLINE_S)
        await asyncio.sleep(1.0)
        assert told == [HEARD]

    run(scenario)


def test_a_list_that_did_not_get_through_is_fetched_later() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        await converse(client, server)
        refused: list[Stream] = []

        async def refuse(stream: Stream) -> None:
            refused.append(stream)

        await client.raw.serve(REVOCATIONS, refuse)
        client.membership.take_revocations([world.swarm.revocation(identity_of("mallory").peer_id)])
        await asyncio.sleep(5.0)
        assert refused
        assert not server.membership.revocations.serials
        await client.raw.serve(REVOCATIONS, client.door._tell_revocations)
        await asyncio.sleep(world.swarm.rules.revocation_refresh_s + 5.0)
        assert server.membership.revocations.serials

    run(scenario)


@dataclass
class Signers:
    """Two whom the swarm file named: one who was removed since, whose list would be told first, and one who stays."""

    removed: Identity
    staying: Identity

    @classmethod
    def make(cls) -> "Signers":
        return cls(*sorted((identity_of("one"), identity_of("other")), key=lambda each: each.public_key))

    def revoke(self, swarm: PrivateSwarm, name: str) -> tuple[bytes, bytes]:
        """That list of each that puts ``name`` out."""
        named = Named(peers=frozenset({identity_of(name).peer_id}))
        first, second = (
            sign_list(named, serial=1, swarm=swarm.rules.swarm, key=key)
            for key in (self.removed, self.staying)
        )
        return first, second

    def rules(self, swarm: PrivateSwarm, *signers: Identity) -> Rules:
        keys = {**swarm.rules.keys, **{each.public_key: math.inf for each in signers}}
        return replace(swarm.rules, keys=keys)


def test_nobody_is_out_by_the_word_of_a_signer_who_was_removed() -> None:
    async def scenario(world: World) -> None:
        signers, rules = Signers.make(), world.swarm.rules
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        server.membership.rules = signers.rules(world.swarm, signers.removed)
        server.membership.take_revocations([signers.revoke(world.swarm, "alice")[0]])
        with pytest.raises(NotAuthorised, match="revoked"):
            await converse(client, server)
        server.membership.adopt = lambda _: rules
        server.membership.take_swarm_file(b"a newer file")
        await converse(client, server)

    run(scenario)


def test_the_list_of_a_signer_who_was_removed_hides_no_other() -> None:
    async def scenario(world: World) -> None:
        signers = Signers.make()
        server, behind = await world.member("bob"), await world.member("behind")
        await server.transport.serve(SESSION, answer)
        server.membership.rules = signers.rules(world.swarm, signers.staying)
        behind.membership.rules = signers.rules(world.swarm, signers.removed, signers.staying)
        behind.membership.take_revocations(signers.revoke(world.swarm, "mallory"))
        await converse(behind, server)
        await asyncio.sleep(1.0)
        assert list(server.membership.revocations.serials) == [signers.staying.public_key]

    run(scenario)


def test_who_was_away_learns_of_revocations_from_the_first_it_meets() -> None:
    async def scenario(world: World) -> None:
        server, late = await world.member("bob"), await world.member("late")
        mallory = await world.member("mallory")
        for someone in (server, late):
            await someone.transport.serve(SESSION, answer)
        await converse(mallory, late)
        server.membership.take_revocations([world.swarm.revocation(mallory.peer_id)])
        await converse(late, server)
        await asyncio.sleep(1.0)
        with pytest.raises(NotAuthorised, match="revoked"):
            await converse(mallory, late)

    run(scenario)


def test_streams_end_with_the_certificate() -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        client = await world.peer("alice", world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600))
        stream = await converse(client, server)
        assert await seconds_until_the_end(stream) == pytest.approx(3600, abs=2.0)

    run(scenario)


def test_streams_live_on_with_a_renewed_certificate() -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        client = await world.peer("alice", world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600))
        stream = await converse(client, server)
        await asyncio.sleep(2400)
        client.membership.take_certificate(world.swarm.certificate("alice", Role.CLIENT, now=EPOCH + 2400))
        await asyncio.sleep(2400)
        await stream.send(Message(b"still here?"))
        assert await stream.receive() == HEARD

    run(scenario)


@pytest.mark.parametrize("skew_s", [-300.0, 300.0])
def test_clocks_five_minutes_apart_do_no_harm(skew_s: float) -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        certificate = world.swarm.certificate("alice", Role.CLIENT, now=EPOCH + skew_s, lifetime_s=3600)
        await converse(await world.peer("alice", certificate), server)

    run(scenario)


def test_a_clock_that_is_far_off_is_named() -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob")
        client = await world.member("alice")
        server.membership.clock = lambda: EPOCH + 26 * 3600
        with pytest.raises(NotAuthorised, match="ended") as info:
            await client.door.enter(server.peer_id, SESSION, deadline_s=DEADLINE_S)
        assert "clock" in info.value.hint
        assert "1560 minutes" in info.value.hint

    run(scenario)


def test_a_peer_that_restarted_is_met_again() -> None:
    async def scenario(world: World) -> None:
        client = await world.member("alice")
        for _ in range(2):
            async with world.swarm.member(world.network, "bob", ANY_ROLE) as server:
                await server.transport.serve(SESSION, answer)
                await converse(client, server)
            await asyncio.sleep(1.0)

    run(scenario)


def test_nothing_is_kept_of_somebody_who_left() -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        async with world.swarm.member(world.network, "alice", ANY_ROLE) as client:
            await converse(client, server)
            assert server.door._guests
        await asyncio.sleep(1.0)
        assert not server.door._guests
        assert not server.door._doors
        assert not server.door._tasks

    run(scenario)


# ---- limits ---------------------------------------------------------------------------------------------------


def test_who_says_nothing_at_the_door_is_gone_in_time() -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob")
        strangers = [await world.stranger(f"stranger {number}") for number in range(100)]
        silent = [
            await stranger.open(server.peer_id, DOOR, deadline_s=DEADLINE_S)
            for stranger in strangers
            for _ in range(20)
        ]
        async with asyncio.timeout(10.0):
            await asyncio.gather(*(seconds_until_the_end(stream) for stream in silent))
        assert not server.door._strangers

    run(scenario)


def test_silent_strangers_keep_no_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_STRANGERS", 8)

    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        for number in range(20):
            stranger = await world.stranger(f"stranger {number}")
            await stranger.open(server.peer_id, DOOR, deadline_s=DEADLINE_S)
        assert len(server.door._strangers) == 8
        await converse(client, server)

    run(scenario)


def test_the_door_of_a_guest_who_hears_nothing_is_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        await converse(client, server)
        (door,) = server.door._doors

        async def never(_: Message) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(door, "send", never)
        await asyncio.sleep(world.swarm.rules.revocation_refresh_s + world.swarm.timing.door_s + 1.0)
        assert door not in server.door._doors

    run(scenario)


def test_doors_are_kept_open_to_so_many_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_DOORS", 3)

    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        clients = [await world.member(f"client {number}") for number in range(6)]
        streams = [await converse(client, server) for client in clients]
        assert len(server.door._doors) == 3
        for stream in streams:  # who is busy stays known
            await stream.send(Message(b"still here?"))
            assert await stream.receive() == HEARD
        await asyncio.sleep(1.0)
        await converse(clients[0], server)  # and who is not meets us anew
        assert len(server.door._doors) == 3

    run(scenario)


def test_who_sends_wrong_revocations_has_to_go() -> None:
    async def scenario(world: World) -> None:
        server, liar = await world.member("bob"), await world.member("mallory")

        async def lie(stream: Stream) -> None:
            await stream.receive()
            await stream.send(Message(b"", b"no list"))

        await liar.raw.serve(REVOCATIONS, lie)
        serials = [pb.Serial(signer=next(iter(world.swarm.rules.keys)), serial=1 << 60)]
        said = pb.Hello(swarm=bytes(32), certificate=liar.membership.certificate, serials=serials)
        stream = await liar.raw.open(server.peer_id, DOOR, deadline_s=DEADLINE_S)
        await stream.send(Message(pb.DoorMessage(hello=said).SerializeToString()))
        assert pb.DoorMessage.FromString((await stream.receive()).header).HasField("hello")
        refused = pb.DoorMessage.FromString((await stream.receive()).header).refused
        assert "no revocations" in refused.reason
        assert not server.door._guests
        assert not server.membership.revocations.serials

    run(scenario)
