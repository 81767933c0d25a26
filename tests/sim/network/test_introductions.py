"""The addresses that a host dials for a client that names the next hop: signed by that hop, and
few."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import pytest

from swarmnet_protocols.directory import host_announcements
from swarmnet_protocols.directory.host_announcements import hosts_topic, signed_addresses
from swarmnet_protocols.directory.records import Record, seal
from swarmnet_protocols.errors import PeerUnreachable
from swarmnet_protocols.net import PeerId, ProtocolSpec, Stream, Transport, TransportWrapper
from swarmnet_protocols.net.dialling import IntroducedTransport, Introductions
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.resource_limits import PEER_DIALS
from swarmnet_protocols.net.protocol_ids import LINK
from swarmnet_protocols.wire import records_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import Patch, defence, nothing, replacing
from tests.support.attacks.raw_client import Stranger, session_reply, with_stranger
from tests.support.attacks.switched_off import skip_signatures
from tests.support.swarm.swarm_lab import EPOCH, SWARM, Lab, Reference, peer, simulate

ADDRESSES = ("/ip4/93.184.216.34/tcp/4001",)
MANIFEST = bytes(range(32))
DEADLINE_S = 2.5
HOST = Identity.from_seed(b"host")
GOOD = Record(SWARM, hosts_topic(MANIFEST, HOST.peer_id), HOST.public_key, 1, EPOCH + 45, b"")


def announced(record: Record = GOOD, signer: Identity = HOST, manifest: bytes = MANIFEST) -> bytes:
    body = records_pb2.HostRecord(manifest=manifest, addresses=ADDRESSES).SerializeToString()
    return seal(signer, replace(record, body=body, signer=signer.public_key))


def read(record: bytes) -> tuple[str, ...]:
    return signed_addresses(record, HOST.peer_id, MANIFEST, swarm=SWARM, now=EPOCH)


def test_a_host_dials_the_addresses_that_the_next_hop_signed() -> None:
    assert read(announced()) == ADDRESSES


@defence(
    "a next hop is dialled at addresses that it signed",
    off=replacing(host_announcements, "open_valid", skip_signatures),
    record=announced()[:-1] + b"x",
)
@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff",
        announced()[:-1] + b"x",
        announced(signer=Identity.from_seed(b"mallory")),
        announced(replace(GOOD, swarm=bytes([1] * 32))),
        announced(replace(GOOD, topic=hosts_topic(bytes(32), HOST.peer_id))),
        announced(replace(GOOD, topic=f"hosts/{MANIFEST.hex()}")),
        announced(replace(GOOD, topic="identity/x")),
        announced(replace(GOOD, expires_at=EPOCH - 1)),
        announced(replace(GOOD, expires_at=EPOCH + 48 * 3600)),
    ],
)
def test_addresses_without_the_signature_of_the_next_hop_are_refused(record: bytes) -> None:
    assert read(record) == ()


class Dialled(TransportWrapper):
    """Counts the attempts to connect; none succeeds."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.attempts: list[PeerId] = []
        self.fails_after_s = 0.0

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        self.attempts.append(peer)
        await asyncio.sleep(self.fails_after_s)
        raise PeerUnreachable("connection refused")


def with_dialled(reference: Reference, talk: Callable[[Dialled], Awaitable[None]]) -> None:
    async def scenario(lab: Lab) -> None:
        async with lab.network.transport(lab.peer_id("a")) as transport:
            await talk(Dialled(transport))

    simulate(reference, scenario, limit_s=7200)


@defence(
    "a client learns neither why a next hop is unreachable nor how soon that was known",
    off=replacing(IntroducedTransport, "open", TransportWrapper.open),
    addresses=ADDRESSES,
    fails_after_s=0.0,
)
@pytest.mark.parametrize("addresses", [(), ADDRESSES])
@pytest.mark.parametrize("fails_after_s", [0.0, 1.0, 100.0])
def test_every_failure_looks_the_same_and_takes_as_long(
    reference: Reference, addresses: tuple[str, ...], fails_after_s: float
) -> None:
    async def talk(dialled: Dialled) -> None:
        dialled.fails_after_s = fails_after_s
        clock = asyncio.get_running_loop().time
        transport = Introductions(dialled).by(dialled.resources.peer("client", clock()))
        began = clock()
        with pytest.raises(PeerUnreachable) as caught:
            await transport.open(HOST.peer_id, LINK, addresses=addresses, deadline_s=DEADLINE_S)
        assert str(caught.value) == "the next hop was not reached"
        assert clock() - began == pytest.approx(DEADLINE_S)
        assert caught.value.__cause__ is None
        assert len(dialled.attempts) == bool(addresses)

    with_dialled(reference, talk)


@defence("the dials that a client causes are limited", off=replacing(IntroducedTransport, "_charge", nothing))
def test_the_dials_that_a_client_causes_are_limited_for_it_alone(reference: Reference) -> None:
    async def talk(dialled: Dialled) -> None:
        clock = asyncio.get_running_loop().time
        introductions = Introductions(dialled)

        async def ask(asker: str, number: int) -> None:
            transport = introductions.by(dialled.resources.peer(asker, clock()))
            with pytest.raises(PeerUnreachable):
                await transport.open(
                    PeerId(f"{asker}{number}"), LINK, addresses=ADDRESSES, deadline_s=DEADLINE_S
                )

        async with asyncio.TaskGroup() as group:
            for number in range(300):
                group.create_task(ask("mallory", number))
        assert PEER_DIALS.burst <= len(dialled.attempts) <= PEER_DIALS.burst + 1
        await ask("alice", 1)
        assert dialled.attempts[-1] == "alice1"
        began, attempts = clock(), len(dialled.attempts)
        while clock() - began < 60:
            await ask("mallory", 1)
        assert len(dialled.attempts) - attempts <= 60 * PEER_DIALS.per_s + 1

    with_dialled(reference, talk)


def try_all_at_once(patch: Patch) -> None:
    patch.setattr(
        Introductions,
        "by",
        lambda self, asker: IntroducedTransport(self._transport, asker, WeakValueDictionary()),
    )


@defence("a next hop is dialled once at a time", off=try_all_at_once)
def test_a_next_hop_is_dialled_once_at_a_time(reference: Reference) -> None:
    async def talk(dialled: Dialled) -> None:
        dialled.fails_after_s = 1.0
        clock = asyncio.get_running_loop().time
        introductions = Introductions(dialled)

        async def ask(asker: str) -> None:
            transport = introductions.by(dialled.resources.peer(asker, clock()))
            with pytest.raises(PeerUnreachable):
                await transport.open(HOST.peer_id, LINK, addresses=ADDRESSES, deadline_s=DEADLINE_S)

        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(ask(f"client{number}"))
        assert len(dialled.attempts) == 3

    with_dialled(reference, talk)


@pytest.mark.parametrize("next_hop", ["unknown", "dead", "elsewhere"])
def test_a_client_learns_nothing_of_a_next_hop_that_is_not_reached(
    reference: Reference, next_hop: str
) -> None:
    """Three peers: one that does not exist, one that has signed its addresses, and one that is
    reachable and has signed nothing."""

    async def talk(stranger: Stranger) -> None:
        identity = peer(next_hop)
        topic = hosts_topic(stranger.lab.manifest, identity.peer_id)
        signed = Record(SWARM, topic, identity.public_key, 1, EPOCH + 45, b"")
        record = announced(signed, identity, stranger.lab.manifest) if next_hop == "dead" else b""
        async with stranger.lab.network.transport(peer("elsewhere").peer_id):
            clock = asyncio.get_running_loop().time
            began = clock()
            hop = pb.Peer(id=identity.peer_id, record=record, session=bytes(range(16)))
            lost = await session_reply(await stranger.send_open(next=hop))
            assert lost == pb.SessionReply(link_lost=pb.LinkLost(epoch=1, peer=identity.peer_id))
            assert clock() - began == pytest.approx(stranger.lab.timing.open_s, abs=0.2)

    with_stranger(reference, talk)
