"""When a membership ends: revocations and how they spread, certificates that end, clocks that
differ, peers that restart."""

import asyncio
import itertools
import math
from dataclasses import dataclass, replace

import pytest

from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.membership.admitted_peers import AdmittedPeer
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.membership.revocations import Revocations, RevokedIds, sign_list
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net import Message, Stream
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.protocol_ids import HANDSHAKE, MATCHMAKING, REVOCATIONS, SESSION
from swarmnet_protocols.net.refusal import Refusal, Refused
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire.roles import ANY_ROLE, Role
from tests.defences import Patch, defence, nothing, replacing
from tests.support.network.handshake_lab import (
    DEADLINE_S,
    DELAY_S,
    HEARD,
    World,
    answer,
    converse,
    hear,
    hello,
    run,
    seconds_until_the_end,
)
from tests.support.network.private_swarm import EPOCH, PrivateSwarm, identity_of

# ---- the end of a membership --------------------------------------------------------------------


def keep_admitted(patch: Patch) -> None:
    patch.setattr(Handshakes, "_on_membership_change", nothing)


def end_without_a_reason(patch: Patch) -> None:
    end = AdmittedPeer.end
    patch.setattr(AdmittedPeer, "end", lambda peer, *_: end(peer))


@defence("streams of a revoked peer end", off=keep_admitted)
@defence("a revoked peer gets the reason", off=end_without_a_reason)
def test_the_streams_of_a_revoked_member_end_at_once() -> None:
    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("mallory")
        other = await world.member("alice")
        for someone in (server, client):
            await someone.transport.serve(SESSION, answer)
        theirs, ours = await converse(client, server), await converse(server, client)
        bystander = await converse(other, server)
        server.membership.add_revocations([world.swarm.revocation(client.peer_id)])
        assert await seconds_until_the_end(ours) == 0
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(Refused, match=f"{server.peer_id} refused the stream: this peer was revoked"):
            await theirs.receive()
        assert loop.time() - started <= 1.01 * DELAY_S
        await asyncio.sleep(1.0)
        with pytest.raises(NotAuthorised, match="this peer was revoked"):
            await converse(client, server)
        with pytest.raises(NotAuthorised, match="revoked"):
            await converse(server, client)
        await bystander.send(Message(b"still here?"))
        assert await bystander.receive() == HEARD

    run(scenario)


def test_a_revoked_member_is_shown_the_list_that_names_it() -> None:
    """A node stops for a revocation by the authority, not for the claim of one peer."""

    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        await converse(client, server)
        ended = asyncio.create_task(client.transport.died())
        (stream,) = server.handshakes.admitted.streams
        stream.refuse(Refusal(refusal_pb2.REASON_NOT_AUTHORISED, "revoked!"))
        await asyncio.sleep(1.0)
        assert not ended.done()
        await converse(client, server)
        server.membership.add_revocations([world.swarm.revocation(client.peer_id)])
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
    """The members stand in a line and each has met its neighbours; the revoked one is at the
    end."""

    async def scenario(world: World) -> None:
        line = [await world.member(f"member {number}") for number in range(8)]
        for someone in line:
            await someone.transport.serve(SESSION, answer)
        streams = [await converse(one, next_one) for one, next_one in itertools.pairwise(line)]
        line[0].membership.add_revocations([world.swarm.revocation(line[-1].peer_id)])
        took_s = await seconds_until_the_end(streams[-1])
        assert took_s < 1.0 * len(line), "120 s are allowed"
        assert [someone.membership.revocations.serials for someone in line[:-1]] == [
            line[0].membership.revocations.serials
        ] * (len(line) - 1)
        await streams[0].send(Message(b"still here?"))
        assert await streams[0].receive() == HEARD

    run(scenario)


def test_a_stream_that_overtakes_its_handshake_waits_for_it() -> None:
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

        await asked.raw.serve(HANDSHAKE, word_after_stream)
        await asking.handshakes.ensure(asked.peer_id, SESSION, deadline_s=DEADLINE_S)
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
        client.membership.add_revocations([world.swarm.revocation(identity_of("mallory").peer_id)])
        await asyncio.sleep(5.0)
        assert refused
        assert not server.membership.revocations.serials
        await REVOCATIONS.serve(client.raw, client.handshakes._serve_revocations)
        await asyncio.sleep(world.swarm.rules.revocation_refresh_s + 5.0)
        assert server.membership.revocations.serials

    run(scenario)


@dataclass
class Signers:
    """Two signers of the swarm file: a removed one, whose revocation list comes first in order, and
    one that stays."""

    removed: Identity
    staying: Identity

    @classmethod
    def make(cls) -> "Signers":
        return cls(*sorted((identity_of("one"), identity_of("other")), key=lambda each: each.public_key))

    def revoke(self, swarm: PrivateSwarm, name: str) -> tuple[bytes, bytes]:
        """The revocation lists of both signers; each revokes ``name``."""
        named = RevokedIds(peers=frozenset({identity_of(name).peer_id}))
        first, second = (
            sign_list(named, serial=1, swarm=swarm.rules.swarm, key=key)
            for key in (self.removed, self.staying)
        )
        return first, second

    def rules(self, swarm: PrivateSwarm, *signers: Identity) -> Rules:
        keys = {**swarm.rules.keys, **{each.public_key: math.inf for each in signers}}
        return replace(swarm.rules, keys=keys)


@defence(
    "a removed signer cannot revoke",
    off=replacing(Revocations, "trusted", lambda revocations, **_: revocations),
)
def test_revocations_of_a_removed_signer_do_not_count() -> None:
    async def scenario(world: World) -> None:
        signers, rules = Signers.make(), world.swarm.rules
        server, client = await world.member("bob"), await world.member("alice")
        await server.transport.serve(SESSION, answer)
        server.membership.rules = signers.rules(world.swarm, signers.removed)
        server.membership.add_revocations([signers.revoke(world.swarm, "alice")[0]])
        with pytest.raises(NotAuthorised, match="revoked"):
            await converse(client, server)
        server.membership.adopt = lambda _: rules
        server.membership.adopt_swarm_file(b"a newer file")
        await converse(client, server)

    run(scenario)


def test_the_list_of_a_removed_signer_hides_no_other() -> None:
    async def scenario(world: World) -> None:
        signers = Signers.make()
        server, behind = await world.member("bob"), await world.member("behind")
        await server.transport.serve(SESSION, answer)
        server.membership.rules = signers.rules(world.swarm, signers.staying)
        behind.membership.rules = signers.rules(world.swarm, signers.removed, signers.staying)
        behind.membership.add_revocations(signers.revoke(world.swarm, "mallory"))
        await converse(behind, server)
        await asyncio.sleep(1.0)
        assert list(server.membership.revocations.serials) == [signers.staying.public_key]

    run(scenario)


def test_a_returning_member_gets_revocations_from_its_first_peer() -> None:
    async def scenario(world: World) -> None:
        server, late = await world.member("bob"), await world.member("late")
        mallory = await world.member("mallory")
        for someone in (server, late):
            await someone.transport.serve(SESSION, answer)
        await converse(mallory, late)
        server.membership.add_revocations([world.swarm.revocation(mallory.peer_id)])
        await converse(late, server)
        await asyncio.sleep(1.0)
        with pytest.raises(NotAuthorised, match="revoked"):
            await converse(mallory, late)

    run(scenario)


def never_check_again(patch: Patch) -> None:
    async def keep_quiet(_: Handshakes) -> None:
        """Send no message that would make the other side check again."""

    patch.setattr(Handshakes, "_schedule_check", nothing)
    patch.setattr(Handshakes, "_send_hellos_periodically", keep_quiet)


@defence("streams end with their certificate", off=never_check_again)
def test_streams_end_with_the_certificate() -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        client = await world.peer("alice", world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600))
        stream = await converse(client, server)
        assert await seconds_until_the_end(stream) == pytest.approx(3600, abs=2.0)

    run(scenario)


def test_a_peer_with_an_ended_certificate_keeps_the_roles_without_one() -> None:
    """In an open swarm every peer is a client; trainers need a certificate."""

    async def scenario(world: World) -> None:
        server = await world.member("bob")
        for protocol in (SESSION, MATCHMAKING):
            await server.transport.serve(protocol, answer)
        trainer = world.swarm.certificate("alice", Role.TRAINER, lifetime_s=3600)
        alice = await world.peer("alice", trainer)
        stream = await converse(alice, server, MATCHMAKING)
        assert await seconds_until_the_end(stream) == pytest.approx(3600, abs=2.0)
        await asyncio.sleep(1.0)
        await converse(alice, server, SESSION)
        with pytest.raises(NotAuthorised, match="is for"):
            await converse(alice, server, MATCHMAKING)

    rules = replace(PrivateSwarm().rules, admission=Admission.OPEN, anyone=frozenset({Role.CLIENT}))
    run(scenario, PrivateSwarm(rules=rules))


def test_streams_live_on_with_a_renewed_certificate() -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        client = await world.peer("alice", world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600))
        stream = await converse(client, server)
        await asyncio.sleep(2400)
        client.membership.replace_certificate(world.swarm.certificate("alice", Role.CLIENT, now=EPOCH + 2400))
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
            await client.handshakes.ensure(server.peer_id, SESSION, deadline_s=DEADLINE_S)
        assert "clock of this machine is 1560 minutes behind the clocks of peers" in info.value.hint

    run(scenario)


def test_a_restarted_peer_is_admitted_again() -> None:
    async def scenario(world: World) -> None:
        client = await world.member("alice")
        for _ in range(2):
            async with world.swarm.member(world.network, "bob", ANY_ROLE) as server:
                await server.transport.serve(SESSION, answer)
                await converse(client, server)
            await asyncio.sleep(1.0)

    run(scenario)


def test_nothing_is_kept_of_a_peer_that_left() -> None:
    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        async with world.swarm.member(world.network, "alice", ANY_ROLE) as client:
            await converse(client, server)
            assert server.handshakes.admitted.by_peer
        await asyncio.sleep(1.0)
        assert not server.handshakes.admitted.by_peer
        assert not server.handshakes.admitted.streams
        assert not server.handshakes._tasks

    run(scenario)
