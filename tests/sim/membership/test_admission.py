"""Admission of newcomers: by invites, at issuers directly and by referral."""

import asyncio
import contextlib
import random
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet_protocols.errors import NotAuthorised, StreamEnded, Unreachable
from swarmnet_protocols.joining import admission
from swarmnet_protocols.joining.admission import ISSUERS_TOPIC, RETRY_PAUSES_S, request_admission
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.membership.certificates import RENEWABLE_S, open_certificate
from swarmnet_protocols.membership.invites import redemption
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.membership.signed import seal
from swarmnet_protocols.net import Message, PeerId, Stream
from swarmnet_protocols.net.limits import subnets
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.net.limits.subnets import subnet_of
from swarmnet_protocols.net.protocol_ids import ADMISSION
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import Role
from tests.defences import defence, nothing, replacing
from tests.support.network.admission_lab import World, address, redeem, run
from tests.support.network.memory_directory import MemoryDirectory
from tests.support.network.memory_network import MemoryTransport
from tests.support.network.private_swarm import AUTHORITY, EPOCH, LIFETIME_S, identity_of, virtual_clock

DEADLINE_S = 5.0


def test_an_invite_for_one_use_admits_one_peer_and_answers_it_again(tmp_path: Path) -> None:
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


def test_a_newcomer_whose_clock_is_wrong_is_told_so(tmp_path: Path) -> None:
    """A clock that is behind takes an ended invite for a valid one."""

    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        await asyncio.sleep(7200.0)
        newcomer = await world.stranger("newcomer")
        request = pb.AdmissionRequest(redeem=redemption(world.invite(), newcomer.peer_id))
        with pytest.raises(NotAuthorised, match="the invite ended") as info:
            await request_admission(
                newcomer, [address(issuer.peer_id)], request, lambda admitted: admitted, lambda: EPOCH
            )
        assert "120 minutes behind" in info.value.hint

    run(tmp_path, scenario)


def test_an_overheard_redemption_is_worthless(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        invite = world.invite(address(issuer.peer_id), uses=5)
        newcomer, mallory = await world.stranger("newcomer"), await world.stranger("mallory")
        request = pb.AdmissionRequest(redeem=redemption(invite, newcomer.peer_id))
        with pytest.raises(NotAuthorised, match="not signed with the key of the invite"):
            await request_admission(
                mallory, invite.bootstrap, request, lambda admitted: admitted, virtual_clock
            )

    run(tmp_path, scenario)


def test_a_member_that_is_no_issuer_redirects_a_newcomer(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.issuer("issuer")
        member = await world.member("member", world.swarm.certificate("member", Role.HOST))
        await asyncio.sleep(0.1)  # the issuer has said where it is
        newcomer = await world.stranger("newcomer")
        assert (await redeem(newcomer, world.invite(address(member.peer_id)))).certificate

    run(tmp_path, scenario)


def test_a_slow_directory_delays_only_requests_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World) -> None:
        answers = asyncio.Event()

        async def lookup(_self: MemoryDirectory, _topic: str) -> tuple[()]:
            await answers.wait()
            return ()

        monkeypatch.setattr(MemoryDirectory, "lookup", lookup)
        member = await world.member("member", world.swarm.certificate("member", Role.HOST))
        waiting = []
        for number in range(3):
            newcomer = await world.stranger(f"newcomer {number}")
            waiting.append(asyncio.create_task(redeem(newcomer, world.invite(address(member.peer_id)))))
        await asyncio.sleep(1.0)
        request = pb.SwarmFileRequest(certificate=world.swarm.certificate("other", Role.CLIENT))
        async with asyncio.timeout(DEADLINE_S):
            reply = await asked(
                await world.stranger("other"), member.peer_id, pb.AdmissionRequest(swarm_file=request)
            )
        assert reply.WhichOneof("kind") == "swarm_file"
        assert not any(task.done() for task in waiting)
        answers.set()
        for task in waiting:
            with pytest.raises(Unreachable, match="no issuer"):
                await task

    run(tmp_path, scenario)


async def asked(asker: MemoryTransport, peer: PeerId, request: pb.AdmissionRequest) -> pb.AdmissionReply:
    stream = await ADMISSION.open(asker, peer)
    return (await stream.ask(request))[0]


@defence(
    "a peer that proves nothing gets no swarm file",
    off=replacing(Membership, "admit", nothing),
    role="member",
)
@defence(
    "a peer that proves nothing gets no addresses of issuers",
    off=replacing(admission, "check_redemption", nothing),
    role="member",
)
@pytest.mark.parametrize("role", ["issuer", "member"])
def test_a_peer_that_proves_nothing_learns_nothing_of_the_swarm(role: str, tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        member = await world.member("member", world.swarm.certificate("member", Role.HOST))
        await asyncio.sleep(0.1)  # the issuer has said where it is
        one = issuer if role == "issuer" else member
        one.membership.swarm_file = lambda: b"names of members and models"
        one.membership.rules = replace(one.membership.rules, serial=8)
        outsider, newcomer = await world.stranger("outsider"), await world.stranger("newcomer")
        foreign = world.swarm.certificate("outsider", Role.HOST, swarm=bytes([1]) * 32)
        ended = world.swarm.certificate("outsider", Role.HOST, now=EPOCH - LIFETIME_S - RENEWABLE_S)
        overheard = redemption(world.invite(uses=5), newcomer.peer_id)
        withdrawn = world.invite()
        one.membership.add_revocations([world.swarm.revocation(invites=(withdrawn.grant.id,))])
        revoked = redemption(withdrawn, outsider.peer_id)
        for certificate in (b"", foreign, ended, world.swarm.certificate("member", Role.HOST)):
            file = pb.SwarmFileRequest(serial=7, certificate=certificate)
            for request in (
                pb.AdmissionRequest(swarm_file=file),
                pb.AdmissionRequest(renew=pb.Renew(certificate=certificate)),
            ):
                with pytest.raises(Refused):
                    await asked(outsider, one.peer_id, request)
        for invite in (pb.Redeem(), overheard, revoked):
            with pytest.raises(Refused):
                await asked(outsider, one.peer_id, pb.AdmissionRequest(redeem=invite))
        mine = pb.SwarmFileRequest(serial=7, certificate=world.swarm.certificate("newcomer", Role.CLIENT))
        reply = await asked(newcomer, one.peer_id, pb.AdmissionRequest(swarm_file=mine))
        assert reply.swarm_file == b"names of members and models"

    run(tmp_path, scenario)


def test_without_an_issuer_a_newcomer_gets_an_error(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        member = await world.member("member", world.swarm.certificate("member", Role.HOST))
        newcomer = await world.stranger("newcomer")
        with pytest.raises(Unreachable, match="no issuer"):
            await redeem(newcomer, world.invite(address(member.peer_id), address(identity_of("x").peer_id)))

    run(tmp_path, scenario)


def test_a_revoked_invite_admits_no_peer(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        invite = world.invite(address(issuer.peer_id))
        issuer.membership.add_revocations([world.swarm.revocation(invites=(invite.grant.id,))])
        with pytest.raises(NotAuthorised, match="revoked"):
            await redeem(await world.stranger("newcomer"), invite)

    run(tmp_path, scenario)


def test_invalid_addresses_are_not_handed_out(tmp_path: Path) -> None:
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


def test_a_newcomer_that_sends_nothing_times_out(tmp_path: Path) -> None:
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
            with pytest.raises(StreamEnded):
                await stream.receive()

    run(tmp_path, scenario)


@defence("silent newcomers are evicted", off=replacing(Scope, "available", lambda *_: 1 << 30))
def test_silent_newcomers_keep_no_other_newcomer_out(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        issuer.raw.resources.limit(Resource.PENDING_ADMISSIONS, system=8)
        for number in range(20):
            stranger = await world.stranger(f"silent {number}")
            await stranger.open(issuer.peer_id, ADMISSION, deadline_s=DEADLINE_S)
        assert issuer.raw.resources.system.used[Resource.PENDING_ADMISSIONS] == 8
        newcomer = await world.stranger("newcomer")
        assert (await redeem(newcomer, world.invite(address(issuer.peer_id)))).certificate

    run(tmp_path, scenario)


@defence(
    "one subnet does not fill the pending handshakes",
    off=replacing(subnets, "subnet_of", lambda _: "one subnet"),
)
def test_many_identities_in_one_subnet_evict_each_other(tmp_path: Path) -> None:
    """A distant newcomer needs a while for its request; meanwhile the attacker opens new
    streams."""

    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        issuer.raw.resources.limit(Resource.PENDING_ADMISSIONS, system=8)
        newcomer = await world.stranger("newcomer")
        world.network.move(newcomer.peer_id, "/ip4/198.51.100.7/tcp/4001")
        stream = await newcomer.open(issuer.peer_id, ADMISSION, deadline_s=DEADLINE_S)
        for number in range(20):
            stranger = await world.stranger(f"silent {number}")
            world.network.move(stranger.peer_id, f"/ip4/203.0.113.{number}/tcp/4001")
            await stranger.open(issuer.peer_id, ADMISSION, deadline_s=DEADLINE_S)
        request = pb.AdmissionRequest(redeem=redemption(world.invite(), newcomer.peer_id))
        await stream.send(Message(request.SerializeToString()))
        assert pb.AdmissionReply.FromString((await stream.receive()).header).admitted.certificate

    run(tmp_path, scenario)


@defence("newcomers that ask without end are evicted", off=replacing(Scope, "available", lambda *_: 1 << 30))
def test_endless_requests_keep_no_other_newcomer_from_asking(tmp_path: Path) -> None:
    """Forty identities of one subnet, each of which asks again after every answer."""

    async def scenario(world: World) -> None:
        issuer = await world.issuer("issuer")
        question = Message(pb.AdmissionRequest(renew=pb.Renew()).SerializeToString())

        async def ask_without_end(number: int) -> None:
            stranger = await world.stranger(f"asks {number}")
            world.network.move(stranger.peer_id, f"/ip4/203.0.113.{number}/tcp/4001")
            while True:
                stream = await stranger.open(issuer.peer_id, ADMISSION, deadline_s=DEADLINE_S)
                with contextlib.suppress(StreamEnded):
                    await stream.send(question)
                    await stream.receive()
                stream.close()

        asking = [asyncio.create_task(ask_without_end(number)) for number in range(40)]
        await asyncio.sleep(5.0)
        newcomer = await world.stranger("newcomer")
        world.network.move(newcomer.peer_id, "/ip4/198.51.100.7/tcp/4001")
        request = pb.AdmissionRequest(redeem=redemption(world.invite(), newcomer.peer_id))
        stream = await newcomer.open(issuer.peer_id, ADMISSION, deadline_s=DEADLINE_S)
        await stream.send(Message(request.SerializeToString()))
        try:
            assert pb.AdmissionReply.FromString((await stream.receive()).header).admitted.certificate
        finally:
            await cancel(*asking)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("address", "other", "same"),
    [
        ("/ip4/203.0.113.5/tcp/1", "/ip4/203.0.113.200/udp/2/quic-v1", True),
        ("/ip4/203.0.113.5/tcp/1", "/ip4/203.0.114.5/tcp/1", False),
        ("/ip6/2001:db8:1::1/tcp/1", "/ip6/2001:db8:1:ffff::2/tcp/1", True),
        ("/ip6/2001:db8:1::1/tcp/1", "/ip6/2001:db8:2::1/tcp/1", False),
        ("/ip4/203.0.113.5/tcp/1/p2p/R/p2p-circuit", "/ip4/203.0.113.5/tcp/1/p2p/R/p2p-circuit", True),
    ],
)
def test_addresses_of_one_subnet_are_recognised(address: str, other: str, same: bool) -> None:
    assert subnet_of(address)
    assert (subnet_of(address) == subnet_of(other)) is same


@pytest.mark.parametrize("address", ["", "/memory/0", "/ip4/nonsense/tcp/1", "/dns4/example.org/tcp/1"])
def test_other_addresses_have_no_subnet(address: str) -> None:
    assert not subnet_of(address)


def test_a_newcomer_whose_stream_closes_without_an_answer_tries_again(tmp_path: Path) -> None:
    """An overloaded peer closes streams without an answer."""

    async def scenario(world: World) -> None:
        overloaded = await world.stranger("issuer")
        came = 0

        async def answer(stream: Stream) -> None:
            nonlocal came
            came += 1
            if came > len(RETRY_PAUSES_S):
                await stream.receive()
                admitted = pb.AdmissionReply(admitted=pb.Admitted(certificate=b"a certificate"))
                await stream.send(Message(admitted.SerializeToString()))

        await overloaded.serve(ADMISSION, answer)
        newcomer = await world.stranger("newcomer")
        admitted = await redeem(newcomer, world.invite(address(overloaded.peer_id)))
        assert admitted.certificate == b"a certificate"

    run(tmp_path, scenario)
