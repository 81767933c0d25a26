"""Renewal of membership: certificates that expire, issuers that are late or lie, swarm files and
keys that change."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet_protocols.errors import IntegrityError, NotAuthorised
from swarmnet_protocols.joining.admission import FILE_S, ISSUERS_TOPIC, renewal, request_admission
from swarmnet_protocols.joining.own_key import OwnerFiles
from swarmnet_protocols.membership.certificates import open_certificate
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.membership.signed import seal
from swarmnet_protocols.net import Message, Stream
from swarmnet_protocols.net.protocol_ids import ADMISSION, SESSION
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import Role
from tests.support.network.admission_lab import World, address, run
from tests.support.network.conversations import echo
from tests.support.network.private_swarm import AUTHORITY, EPOCH, LIFETIME_S, identity_of, virtual_clock

DEADLINE_S = 5.0


def test_members_take_a_newer_file_from_their_bootstrap_peer(tmp_path: Path) -> None:
    """With an allow list members have no certificate to renew, but they learn of added members."""

    async def scenario(world: World) -> None:
        older = replace(world.swarm.rules, serial=1)
        newer = replace(
            world.swarm.rules, serial=2, allow={identity_of("carol").peer_id: frozenset({Role.HOST})}
        )
        bob = await world.member("bob", world.swarm.certificate("bob", Role.HOST))
        alice = await world.member("alice", world.swarm.certificate("alice", Role.HOST), address(bob.peer_id))
        bob.membership.rules, bob.membership.swarm_file = older, lambda: b"the file"
        alice.membership.rules, alice.membership.adopt = older, lambda data: {b"the file": newer}[data]
        await asyncio.sleep(2 * FILE_S)
        assert alice.membership.rules == older
        bob.membership.rules = newer
        await asyncio.sleep(FILE_S + 1.0)
        assert alice.membership.rules == newer

    run(tmp_path, scenario)


def test_a_certificate_is_renewed_after_two_thirds_of_its_lifetime(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        certificate = world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600)
        alice = await world.member("alice", certificate, address(issuer.peer_id))
        await issuer.transport.serve(SESSION, echo)
        stream = await alice.transport.open(issuer.peer_id, SESSION, deadline_s=DEADLINE_S)
        await stream.send(Message(b"here"))
        await stream.receive()
        await asyncio.sleep(2100)
        assert alice.membership.certificate == certificate
        await asyncio.sleep(400)
        assert alice.membership.certificate != certificate
        await asyncio.sleep(7200)  # its session never noticed
        await stream.send(Message(b"still here?"))
        assert (await stream.receive()).header == b"still here?"

    run(tmp_path, scenario)


def test_a_member_accepts_a_new_key_that_came_with_its_renewal(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        old, new = world.swarm.rules, identity_of("new authority")
        rotated = replace(old, keys={**old.keys, new.public_key: math.inf})
        issuer = await world.enter(world.swarm.peer(world.network, "issuer"))
        issuer.membership.rules = rotated
        (tmp_path / "issuer").mkdir()
        issuer.membership.swarm_file = lambda: b"the new file"
        owner = OwnerFiles(lambda: b"", lambda: b"", lambda: new, issued=tmp_path / "issuer")
        await world.issue(issuer, "issuer", owner)
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


def test_the_owners_files_are_read_once_for_each_change(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        read, path = list[bytes](), tmp_path / "swarm.toml"
        path.write_bytes(b"first")

        def swarm_file() -> bytes:
            read.append(path.read_bytes())
            return b""

        owner = OwnerFiles(swarm_file, lambda: b"", lambda: AUTHORITY, issued=tmp_path, paths=(path,))
        await world.issue(await world.enter(world.swarm.peer(world.network, "issuer")), "issuer", owner)
        await asyncio.sleep(100)
        assert read == [b"first"]
        path.write_bytes(b"the second")
        await asyncio.sleep(100)
        assert read == [b"first", b"the second"]

    run(tmp_path, scenario)


def test_a_member_returns_after_its_certificate_ended_by_any_member(tmp_path: Path) -> None:
    """It was away for a week longer than its certificate, and knows one member, which is no
    issuer."""

    async def scenario(world: World) -> None:
        await world.issuer("issuer")
        bob = await world.member("bob", world.swarm.certificate("bob", Role.HOST))
        await asyncio.sleep(0.1)  # the issuer has said where it is
        ended = world.swarm.certificate("alice", Role.CLIENT, now=EPOCH - LIFETIME_S - 7 * 24 * 3600)
        alice = await world.stranger("alice")

        async def ask() -> pb.Admitted:
            request, known = renewal(ended, None), [address(bob.peer_id)]
            return await request_admission(alice, known, request, lambda found: found, virtual_clock)

        renewed = open_certificate((await ask()).certificate, rules=world.swarm.rules, now=virtual_clock())
        assert renewed.peer == alice.peer_id
        bob.membership.add_revocations([world.swarm.revocation(alice.peer_id)])
        with pytest.raises(NotAuthorised, match="revoked"):
            await ask()

    run(tmp_path, scenario)


@pytest.mark.parametrize("answer", [b"", b"garbage", b"our own"])
def test_a_false_issuer_prevents_no_renewal(tmp_path: Path, answer: bytes) -> None:
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


def test_without_an_issuer_a_member_stays_until_its_certificate_ends(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        server = await world.member("server", world.swarm.certificate("server", Role.HOST))
        await server.transport.serve(SESSION, echo)
        certificate = world.swarm.certificate("alice", Role.CLIENT, lifetime_s=3600)
        alice = await world.member("alice", certificate, address(identity_of("issuer").peer_id))
        stream = await alice.transport.open(server.peer_id, SESSION, deadline_s=DEADLINE_S)
        await stream.send(Message(b"here"))
        await stream.receive()
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
        issuer.membership.add_revocations([world.swarm.revocation(identity_of("mallory").peer_id)])
        certificate = world.swarm.certificate("mallory", Role.CLIENT, lifetime_s=3600)
        mallory = await world.member("mallory", certificate, address(issuer.peer_id))
        with pytest.raises(NotAuthorised, match="ended"):
            await mallory.transport.died()
        assert mallory.membership.certificate == certificate

    run(tmp_path, scenario)
