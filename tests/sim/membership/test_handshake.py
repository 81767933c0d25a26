"""Which peers the handshake refuses, under every protocol id, and what a handshake costs."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from swarmnet_protocols.errors import NotAuthorised, PeerUnreachable, StreamEnded
from swarmnet_protocols.membership import certificates, handshake, membership, signed
from swarmnet_protocols.membership.certificates import Admittance, issue
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.membership.membership import Member
from swarmnet_protocols.membership.revocations import Revocations
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net import Message, ProtocolSpec
from swarmnet_protocols.net.protocol_ids import (
    HANDSHAKE,
    LINK,
    PING,
    PROBE,
    PUNCH,
    RELAY,
    REVOCATIONS,
    SESSION,
)
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.wire import handshake_pb2 as pb
from swarmnet_protocols.wire.roles import ANY_ROLE, Role
from tests.defences import Patch, defence, no, nothing, replacing, yes
from tests.support.network.handshake_lab import (
    DEADLINE_S,
    DELAY_S,
    GUARDED,
    HEARD,
    World,
    answer,
    hear,
    hello,
    refusal_of,
    run,
    send_handshake,
)
from tests.support.network.memory_network import Delivery
from tests.support.network.private_swarm import EPOCH, LIFETIME_S, Someone, identity_of

# ---- peers that are refused ---------------------------------------------------------------------


@dataclass(frozen=True)
class Intruder:
    """The credentials that mallory shows in a handshake, and the reason of the refusal."""

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


def admit_any_peer(patch: Patch) -> None:
    patch.setattr(membership, "admit", lambda _, certificate, peer, *__: Member(peer, ANY_ROLE))


def ignore_validity(patch: Patch) -> None:
    for module in (certificates, membership):
        patch.setattr(module, "check_current", nothing)


def skip_admission_checks(patch: Patch) -> None:
    patch.setattr(
        membership,
        "admit",
        lambda _, certificate, peer, *__: Member(peer, certificate.roles, certificate.not_after),
    )


@defence("an outsider is refused", off=admit_any_peer, name="outsider", protocol=SESSION)
@defence("a certificate ends", off=ignore_validity, name="expired", protocol=SESSION)
@defence(
    "a certificate does not count before it begins", off=ignore_validity, name="not yet", protocol=SESSION
)
@defence(
    "a revoked peer is refused",
    off=replacing(Revocations, "find_revocation", nothing),
    name="revoked",
    protocol=SESSION,
)
@defence(
    "a certificate counts in one swarm",
    off=ignore_validity,
    name="certificate of another swarm",
    protocol=SESSION,
)
@defence(
    "a certificate counts for one peer",
    off=skip_admission_checks,
    name="certificate of another peer",
    protocol=SESSION,
)
@defence(
    "a certificate is signed",
    off=replacing(signed, "verify", yes),
    name="changed certificate",
    protocol=SESSION,
)
@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
@pytest.mark.parametrize("name", INTRUDERS)
def test_an_intruder_is_refused_under_every_protocol(name: str, protocol: ProtocolSpec) -> None:
    async def scenario(world: World) -> None:
        victim = await world.member("bob")
        victim.membership.add_revocations(
            [world.swarm.revocation(identity_of("mallory").peer_id)] if name == "revoked" else []
        )
        await victim.transport.serve(protocol, answer)
        mallory, intruder = await world.stranger("mallory"), INTRUDERS[name]
        message = hello(intruder.swarm, intruder.certificate(world, protocol))
        assert intruder.reason in (await refusal_of(mallory, victim, message)).detail
        with pytest.raises(StreamEnded):
            await hear(mallory, victim.raw, protocol)

    run(scenario)


@defence("names of peers are short", off=replacing(handshake, "MAX_NAME_CHARS", 1 << 20))
@defence("names of peers are printable", off=replacing(handshake, "printable", str))
def test_each_side_learns_the_name_of_the_other() -> None:
    async def scenario(world: World) -> None:
        host = await world.peer("bob", world.swarm.certificate("bob", *ANY_ROLE), "bob's attic")
        await host.transport.serve(SESSION, answer)
        name = "\x1b[2J" + 100 * "k"
        client = await world.peer("alice", world.swarm.certificate("alice", *ANY_ROLE), name)
        await hear(client.transport, host.raw, SESSION)
        assert client.handshakes.admitted.get(host.peer_id).name == "bob's attic"
        assert host.handshakes.admitted.get(client.peer_id).name == "[2J" + 60 * "k"

    run(scenario)


def check_no_stream(patch: Patch) -> None:
    @contextlib.asynccontextmanager
    async def admitting(*_: Any) -> AsyncIterator[None]:
        yield

    patch.setattr(Handshakes, "admitting", admitting)


@defence("every stream needs a handshake", off=check_no_stream, protocol=SESSION)
@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_a_peer_without_a_handshake_is_refused_under_every_protocol(protocol: ProtocolSpec) -> None:
    async def scenario(world: World) -> None:
        victim = await world.member("bob")
        await victim.transport.serve(protocol, answer)
        member = await world.member("alice")
        with pytest.raises(Refused, match="has not shown that it is a member"):
            await hear(member.raw, victim.raw, protocol)

    run(scenario)


@defence(
    "the opener of a stream has the role", off=replacing(handshake, "check_role", nothing), protocol=LINK
)
@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_the_wrong_role_is_refused_under_every_protocol(protocol: ProtocolSpec) -> None:
    wrong = ANY_ROLE - protocol.roles
    if not wrong:
        assert protocol.id in {
            PING.id,
            PROBE.id,
            PUNCH.id,
            RELAY.id,
            REVOCATIONS.id,
            "SwarmDirectoryV1.rpc_ping",
            "SwarmDirectoryV1.rpc_find",
            "SwarmDirectoryV1.rpc_sample",
        }
        return

    async def scenario(world: World) -> None:
        victim = await world.member("bob")
        await victim.transport.serve(protocol, answer)
        certificate = world.swarm.certificate("mallory", *wrong)
        # Our own software raises before it dials; another program is refused by the other side.
        honest = await world.peer("mallory", certificate)
        with pytest.raises(NotAuthorised, match="is for"):
            await hear(honest.transport, victim.raw, protocol)
        reply = await send_handshake(honest.raw, victim, hello(bytes(32), certificate))
        assert reply.HasField("hello")
        with pytest.raises(Refused, match="is for"):
            await hear(honest.raw, victim.raw, protocol)

    run(scenario)


@defence(
    "the server of a stream has the role", off=replacing(handshake, "check_role", nothing), protocol=LINK
)
@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_a_member_without_the_role_of_a_server_is_not_asked(protocol: ProtocolSpec) -> None:
    wrong = ANY_ROLE - protocol.served_by
    if not wrong:
        assert protocol in (REVOCATIONS, PUNCH)
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
        assert {delivery.protocol for delivery in heard} == {HANDSHAKE}

    run(scenario)


@defence("a handshake cannot be replayed", off=skip_admission_checks, protocol=SESSION)
@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_a_replayed_handshake_is_refused_under_every_protocol(protocol: ProtocolSpec) -> None:
    async def scenario(world: World) -> None:
        victim, alice = await world.member("bob"), await world.member("alice")
        await victim.transport.serve(protocol, answer)
        overheard: list[Message] = []

        def overhear(delivery: Delivery) -> None:
            if delivery.protocol == HANDSHAKE and delivery.source == alice.peer_id:
                overheard.append(delivery.message)

        world.network.observers.append(overhear)
        assert await hear(alice.transport, victim.raw, protocol) == HEARD
        mallory = await world.stranger("mallory")
        for message in overheard:
            assert "another peer" in (await refusal_of(mallory, victim, message)).detail
            with pytest.raises(StreamEnded):
                await hear(mallory, victim.raw, protocol)

    run(scenario)


@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_without_handshakes_the_same_stranger_is_served(protocol: ProtocolSpec) -> None:
    """The tests above fail without handshakes."""

    async def scenario(world: World) -> None:
        victim, mallory = await world.stranger("bob"), await world.stranger("mallory")
        await victim.serve(protocol, answer)
        assert await hear(mallory, victim, protocol) == HEARD

    run(scenario)


@pytest.mark.parametrize("protocol", GUARDED, ids=lambda protocol: protocol.id)
def test_a_member_is_served_under_every_protocol(protocol: ProtocolSpec) -> None:
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
            await stranger.handshakes.ensure(victim.peer_id, SESSION, deadline_s=DEADLINE_S)
        assert "invite" in info.value.hint

    run(scenario)


def test_a_peer_that_newer_rules_refuse_learns_the_reason() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        for one, role in ((server, Role.OBSERVER), (client, Role.CLIENT)):
            one.membership.rules = replace(
                one.membership.rules,
                admission=Admission.ALLOW_LIST,
                allow={server.peer_id: ANY_ROLE, client.peer_id: frozenset({role})},
            )
            one.membership.certificate, one.membership._own = b"", None
        await server.transport.serve(SESSION, answer)
        with pytest.raises(
            Refused,
            match=f"bob refused the stream: {SESSION.id} is for client; .* as observer".replace(
                "bob", server.peer_id
            ),
        ) as info:
            await hear(client.transport, server.raw, SESSION)
        assert not info.value.retry_after_s
        assert "swarmnet doctor" in info.value.hint

    run(scenario)


# ---- what it costs -----------------------------------------------------------------------------


def test_two_members_need_one_handshake() -> None:
    """Only the first stream waits for the handshake; a second one takes as long as without a
    handshake."""

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


def test_many_streams_at_once_need_one_handshake() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        knocks: list[Delivery] = []
        world.network.observers.append(
            lambda delivery: knocks.append(delivery) if delivery.protocol == HANDSHAKE else None
        )
        await asyncio.gather(*(hear(client.transport, server.raw, SESSION) for _ in range(20)))
        assert len(knocks) == 2

    run(scenario)


def test_a_caller_that_gives_up_does_not_end_the_handshake() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        with pytest.raises(PeerUnreachable):
            await client.handshakes.ensure(server.peer_id, SESSION, deadline_s=DELAY_S)
        await asyncio.sleep(4 * DELAY_S)
        await client.handshakes.ensure(server.peer_id, SESSION, deadline_s=DELAY_S / 100)

    run(scenario)


# ---- a newer swarm file ------------------------------------------------------------------------


NEW_AUTHORITY = identity_of("new authority")


def rotate(someone: Someone, *, handed_out: list[str] | None = None) -> None:
    """Give ``someone`` the file with another key, and a certificate by it."""
    membership = someone.membership
    membership.rules = rotated(membership.rules)

    def read() -> bytes:
        if handed_out is not None:
            handed_out.append(someone.peer_id)
        return b"the newer file"

    membership.swarm_file = read
    membership.replace_certificate(
        issue(
            Admittance(someone.peer_id, ANY_ROLE),
            swarm=membership.rules.swarm,
            key=NEW_AUTHORITY,
            now=EPOCH,
            lifetime_s=LIFETIME_S,
        )
    )


def rotated(rules: Rules) -> Rules:
    return replace(rules, serial=2, keys={**rules.keys, NEW_AUTHORITY.public_key: math.inf})


def adopts(someone: Someone) -> None:
    rules = rotated(someone.membership.rules)
    someone.membership.adopt = lambda data: {b"the newer file": rules}[data]
    someone.membership.swarm_file = lambda: b"the newer file"


@defence(
    "a member with a newer swarm file brings it to those that know only the former key",
    off=replacing(Handshakes, "_is_file_wanted", no),
    newer="opener",
)
@pytest.mark.parametrize("newer", ["opener", "other side"])
def test_a_member_brings_a_newer_file_to_those_with_the_former_key(newer: str) -> None:
    async def scenario(world: World) -> None:
        alice, bob, carol = [await world.member(name) for name in ("alice", "bob", "carol")]
        adopts(bob)
        adopts(carol)
        await bob.transport.serve(SESSION, answer)
        await carol.transport.serve(SESSION, answer)
        await alice.transport.serve(SESSION, answer)
        assert await hear(bob.transport, carol.raw, SESSION) == HEARD  # connected before
        rotate(alice)
        opener, other = (alice, bob) if newer == "opener" else (bob, alice)
        assert await hear(opener.transport, other.raw, SESSION) == HEARD
        assert NEW_AUTHORITY.public_key in bob.membership.rules.keys
        await asyncio.sleep(5.0)
        assert carol.membership.rules == bob.membership.rules  # a member that has never met alice

    run(scenario)


@defence("the swarm file is handed to members only", off=admit_any_peer)
def test_an_outsider_is_given_no_swarm_file() -> None:
    async def scenario(world: World) -> None:
        alice, handed_out = await world.member("alice"), list[str]()
        rotate(alice, handed_out=handed_out)
        mallory = await world.stranger("mallory")
        wanting = pb.HandshakeMessage(hello=pb.Hello(swarm=bytes(32), wants_file=True))
        assert (
            "members only" in (await refusal_of(mallory, alice, Message(wanting.SerializeToString()))).detail
        )
        assert not handed_out

    run(scenario)


def always_want_the_file(patch: Patch) -> None:
    patch.setattr(
        Handshakes,
        "_is_file_wanted",
        lambda self, _, hello: hello.file_serial > self.membership.rules.serial,
    )


@defence("a peer that claims a newer swarm file is asked once", off=always_want_the_file)
def test_a_peer_that_claims_a_newer_file_and_has_none_is_asked_once() -> None:
    async def scenario(world: World) -> None:
        bob, mallory = await world.member("bob"), await world.stranger("mallory")
        adopts(bob)
        claim = pb.Hello(swarm=bytes(32), file_serial=1 << 60)
        claiming = Message(pb.HandshakeMessage(hello=claim).SerializeToString())
        assert (await send_handshake(mallory, bob, claiming)).hello.wants_file
        assert "members only" in (await refusal_of(mallory, bob, claiming)).detail

    run(scenario)
