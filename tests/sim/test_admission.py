"""How a newcomer gets in, and how a member stays: invites, issuers near and far, certificates that end."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from swarmnet_protocols.directory import MemoryBoard, MemoryDirectory
from swarmnet_protocols.errors import IntegrityError, NotAuthorised, StreamEnded, Unreachable
from swarmnet_protocols.membership.admission import ISSUERS_TOPIC, Admissions, IssuerConfig, ask
from swarmnet_protocols.membership.certificates import open_certificate
from swarmnet_protocols.membership.invites import Invite, Terms, make_invite, read_invite, redemption
from swarmnet_protocols.membership.roles import Role
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.membership.signed import seal
from swarmnet_protocols.protocol_ids import ADMISSION, SESSION
from swarmnet_protocols.transport import Message, PeerId, Stream
from swarmnet_protocols.transport.memory import LinkProfile, MemoryNetwork, MemoryTransport
from swarmnet_protocols.wire import membership_pb2 as pb
from tests.support import virtual_time
from tests.support.private_swarm import (
    AUTHORITY,
    EPOCH,
    PrivateSwarm,
    Someone,
    identity_of,
    virtual_clock,
)

T = TypeVar("T")
DEADLINE_S = 5.0


class World:
    """An issuer, and whoever comes."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.02))
        self.board = MemoryBoard(self.network, virtual_clock)
        self.swarm = PrivateSwarm()
        self.folder = folder
        self._stack = stack

    def directory(self, name: str) -> MemoryDirectory:
        return MemoryDirectory(self.board, identity_of(name), self.swarm.rules.swarm)

    async def issuer(self, name: str) -> Someone:
        """A member who lets others in."""
        folder = self.folder / name
        folder.mkdir()
        someone = await self.enter(self.swarm.peer(self.network, name))
        config = IssuerConfig(AUTHORITY, folder, b"the swarm file")
        config.certify(someone.membership)
        await self.enter(Admissions.run(someone.raw, someone.membership, self.directory(name), issuer=config))
        return someone

    async def member(self, name: str, certificate: bytes, *bootstrap: str) -> Someone:
        someone = await self.enter(self.swarm.peer(self.network, name, certificate))
        someone.membership.check()
        await self.enter(
            Admissions.run(someone.raw, someone.membership, self.directory(name), bootstrap=bootstrap)
        )
        return someone

    async def stranger(self, name: str) -> MemoryTransport:
        return await self.enter(self.network.transport(identity_of(name).peer_id))

    async def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        return await self._stack.enter_async_context(context)

    def invite(self, *bootstrap: str, uses: int = 1, not_after: float = EPOCH + 3600) -> Invite:
        terms = Terms(frozenset({Role.CLIENT}), int(not_after), uses)
        text = make_invite(terms, swarm=self.swarm.rules.swarm, key=AUTHORITY, bootstrap=bootstrap)
        return read_invite(text, now=EPOCH)


def run(folder: Path, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await scenario(World(folder, stack))

    virtual_time.run(main())


async def redeem(transport: MemoryTransport, invite: Invite) -> pb.Admitted:
    request = pb.AdmissionRequest(redeem=redemption(invite, transport.peer_id))
    return await ask(transport, invite.bootstrap, request, lambda admitted: admitted)


def address(peer: PeerId) -> str:
    return f"/memory/0/p2p/{peer}"


def test_an_invite_lets_in_whom_it_says_and_once(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        invite = world.invite(address(issuer.peer_id))
        newcomer = await world.stranger("newcomer")
        admitted = await redeem(newcomer, invite)
        assert admitted.swarm_file == b"the swarm file"
        certificate = open_certificate(admitted.certificate, rules=world.swarm.rules, now=EPOCH)
        assert (certificate.peer, certificate.roles) == (newcomer.peer_id, frozenset({Role.CLIENT}))
        again = await redeem(newcomer, invite)  # the answer to the first may have been lost
        assert again.certificate == admitted.certificate
        with pytest.raises(NotAuthorised, match="used up"):
            await redeem(await world.stranger("second"), invite)

    run(tmp_path, scenario)


def test_who_overhears_a_redemption_gains_nothing(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        invite = world.invite(address(issuer.peer_id), uses=5)
        newcomer, mallory = await world.stranger("newcomer"), await world.stranger("mallory")
        request = pb.AdmissionRequest(redeem=redemption(invite, newcomer.peer_id))
        with pytest.raises(NotAuthorised, match="without its key"):
            await ask(mallory, invite.bootstrap, request, lambda admitted: admitted)

    run(tmp_path, scenario)


def test_somebody_who_issues_nothing_sends_the_newcomer_on(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.issuer("issuer")
        member = await world.member("member", world.swarm.certificate("member", Role.HOST))
        await asyncio.sleep(0.1)  # the issuer has said where it is
        newcomer = await world.stranger("newcomer")
        assert (await redeem(newcomer, world.invite(address(member.peer_id)))).certificate

    run(tmp_path, scenario)


def test_without_an_issuer_there_is_nobody_to_ask(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        member = await world.member("member", world.swarm.certificate("member", Role.HOST))
        newcomer = await world.stranger("newcomer")
        with pytest.raises(Unreachable, match="nobody"):
            await redeem(newcomer, world.invite(address(member.peer_id), address(identity_of("x").peer_id)))

    run(tmp_path, scenario)


def test_a_revoked_invite_lets_nobody_in(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        invite = world.invite(address(issuer.peer_id))
        issuer.membership.take_revocations([world.swarm.revocation(invites=(invite.grant.id,))])
        with pytest.raises(NotAuthorised, match="revoked"):
            await redeem(await world.stranger("newcomer"), invite)

    run(tmp_path, scenario)


def test_a_certificate_renews_itself_when_two_thirds_of_it_are_over(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        certificate = world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600)
        alice = await world.member("alice", certificate, address(issuer.peer_id))
        await issuer.transport.serve(SESSION, echo)
        stream = await alice.transport.open(issuer.peer_id, SESSION, deadline_s=DEADLINE_S)
        await asyncio.sleep(2100)
        assert alice.membership.certificate == certificate
        await asyncio.sleep(400)
        assert alice.membership.certificate != certificate
        await asyncio.sleep(7200)  # its session never noticed
        await stream.send(Message(b"still here?"))
        assert (await stream.receive()).header == b"still here?"

    run(tmp_path, scenario)


def test_a_member_goes_on_under_a_key_that_came_with_its_renewal(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        old, new = world.swarm.rules, identity_of("new authority")
        rotated = replace(old, keys={**old.keys, new.public_key: math.inf})
        issuer = await world.enter(world.swarm.peer(world.network, "issuer"))
        issuer.membership.rules = rotated
        (tmp_path / "issuer").mkdir()
        config = IssuerConfig(new, tmp_path / "issuer", b"the new file")
        config.certify(issuer.membership)
        await world.enter(
            Admissions.run(issuer.raw, issuer.membership, world.directory("issuer"), issuer=config)
        )
        certificate = world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600)
        alice = await world.member("alice", certificate, address(issuer.peer_id))
        adopted: list[bytes] = []

        def adopt(data: bytes) -> Rules:
            adopted.append(data)
            if len(adopted) == 1:
                raise IntegrityError("older than the one used before")
            return rotated

        alice.membership.adopt = adopt
        await asyncio.sleep(2500)
        assert adopted
        await asyncio.sleep(100)
        assert set(adopted) == {b"the new file"}
        assert alice.membership.rules == rotated
        assert alice.membership.certificate != certificate

    run(tmp_path, scenario)


@pytest.mark.parametrize("answer", [b"", b"garbage", b"our own"])
def test_who_says_it_is_an_issuer_and_is_none_keeps_nobody_from_renewing(
    tmp_path: Path, answer: bytes
) -> None:
    async def scenario(world: World) -> None:
        certificate = world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600)
        alice = await world.member("alice", certificate)
        asked = []

        async def admit(stream: Stream) -> None:
            await stream.receive()
            asked.append(answer)
            given = pb.Admitted(certificate=certificate if answer == b"our own" else answer)
            await stream.send(Message(pb.AdmissionReply(admitted=given).SerializeToString()))

        liars = [await world.stranger(f"liar {number}") for number in range(60)]
        for number, liar in enumerate(liars):
            await liar.serve(ADMISSION, admit)
            said = pb.IssuerRecord(addresses=[address(liar.peer_id)])
            body = seal(b"swarmnet-issuer-1", said, identity_of(f"liar {number}"))
            await world.directory(f"liar {number}").publish(ISSUERS_TOPIC, body, lifetime_s=3600)
        await asyncio.sleep(2450)
        assert 16 <= len(asked) <= 5 * 16  # once a minute
        await world.issuer("issuer")
        await asyncio.sleep(200)
        assert alice.membership.certificate != certificate

    run(tmp_path, scenario)


def test_addresses_that_are_none_are_not_handed_out(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.issuer("issuer")
        for number in range(16):
            await world.stranger(f"mallory {number}")
            said = pb.IssuerRecord(addresses=[f"/{number}" + "/x" * 7000])
            body = seal(b"swarmnet-issuer-1", said, AUTHORITY)
            await world.directory(f"mallory {number}").publish(ISSUERS_TOPIC, body, lifetime_s=3600)
        member = await world.member("member", world.swarm.certificate("member", Role.HOST))
        await asyncio.sleep(0.1)
        newcomer = await world.stranger("newcomer")
        assert (await redeem(newcomer, world.invite(address(member.peer_id)))).certificate

    run(tmp_path, scenario)


def test_a_late_issuer_stops_nobody_until_the_certificate_ends(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        server = await world.member("server", world.swarm.certificate("server", Role.HOST))
        await server.transport.serve(SESSION, echo)
        certificate = world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600)
        alice = await world.member("alice", certificate, address(identity_of("issuer").peer_id))
        stream = await alice.transport.open(server.peer_id, SESSION, deadline_s=DEADLINE_S)
        await asyncio.sleep(3400)
        await stream.send(Message(b"still here?"))
        assert (await stream.receive()).header == b"still here?"
        await world.issuer("issuer")
        await asyncio.sleep(400)
        assert alice.membership.certificate != certificate
        await stream.send(Message(b"still here?"))
        assert (await stream.receive()).header == b"still here?"

    run(tmp_path, scenario)


def test_a_revoked_member_is_not_renewed(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        issuer.membership.take_revocations([world.swarm.revocation(identity_of("mallory").peer_id)])
        certificate = world.swarm.certificate("mallory", Role.CLIENT, lifetime_s=3600)
        mallory = await world.member("mallory", certificate, address(issuer.peer_id))
        with pytest.raises(NotAuthorised, match="ended"):
            await mallory.transport.died()
        assert mallory.membership.certificate == certificate

    run(tmp_path, scenario)


def test_who_asks_and_says_nothing_is_gone_in_time(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        silent = [
            await (await world.stranger(f"stranger {number}")).open(
                issuer.peer_id, ADMISSION, deadline_s=DEADLINE_S
            )
            for number in range(200)
        ]

        async def end(stream: Stream) -> None:
            with pytest.raises(StreamEnded):
                await stream.receive()

        async with asyncio.timeout(10.0):
            await asyncio.gather(*map(end, silent))
        newcomer = await world.stranger("newcomer")
        assert (await redeem(newcomer, world.invite(address(issuer.peer_id)))).certificate

    run(tmp_path, scenario)


def test_garbage_is_refused(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        stranger, rng = await world.stranger("mallory"), random.Random(0)
        for _ in range(100):
            stream = await stranger.open(issuer.peer_id, ADMISSION, deadline_s=DEADLINE_S)
            await stream.send(Message(rng.randbytes(rng.randrange(300))))
            try:
                reply = pb.AdmissionReply.FromString((await stream.receive()).header)
            except StreamEnded:
                continue
            assert reply.HasField("refused")

    run(tmp_path, scenario)


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())
