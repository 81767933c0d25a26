"""Whose statements about the addresses of a peer count, and how many contacts are kept."""

import pytest

from swarmnet_protocols.directory.dht import contacts as dht_contacts
from swarmnet_protocols.directory.dht.contacts import (
    LIFETIME_S,
    MAX_CONTACT_BYTES,
    MAX_CONTACTS,
    TOPIC,
    Contacts,
    contacts_in,
    with_contacts,
)
from swarmnet_protocols.directory.records import Publisher
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.wire import records_pb2 as pb
from tests.defences import defence, replacing
from tests.support.attacks.switched_off import skip_signatures

SWARM = bytes(32)
ALICE, BOB, MALLORY = (Identity.from_seed(name) for name in (b"alice", b"bob", b"mallory"))


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.reached_at = ["/ip4/198.51.100.1/tcp/4001"]

    def contacts(self, identity: Identity, swarm: bytes = SWARM) -> Contacts:
        return Contacts(Publisher(identity, swarm, self.clock), lambda: self.reached_at)


def test_the_reports_of_a_peer_are_kept_and_passed_on() -> None:
    world = World()
    alice, bob, third = (world.contacts(each) for each in (ALICE, BOB, MALLORY))
    bob.learn([alice.mine()], only=ALICE.peer_id)
    assert bob.addresses_of(ALICE.peer_id) == tuple(world.reached_at)
    third.learn(bob.of([ALICE.peer_id, BOB.peer_id]))
    assert third.addresses_of(ALICE.peer_id) == tuple(world.reached_at)
    assert third.addresses_of(BOB.peer_id) == ()


def test_a_contact_is_sealed_anew_only_when_it_must_be() -> None:
    world = World()
    alice, bob = world.contacts(ALICE), world.contacts(BOB)
    first = alice.mine()
    assert alice.mine() == first
    world.clock.now += 0.6 * LIFETIME_S
    assert alice.mine() != first
    world.reached_at = ["/ip4/198.51.100.9/tcp/4001"]
    for sealed in alice.mine(), first:  # an older one changes nothing
        bob.learn([sealed])
        assert bob.addresses_of(ALICE.peer_id) == ("/ip4/198.51.100.9/tcp/4001",)
    world.clock.now += 2 * LIFETIME_S
    assert bob.of([ALICE.peer_id]) == []


def tampered(sealed: bytes) -> bytes:
    return sealed[:-1] + bytes([sealed[-1] ^ 1])


@defence(
    "the addresses of a peer are signed by it", off=replacing(dht_contacts, "open_valid", skip_signatures)
)
def test_a_peer_signs_its_own_addresses() -> None:
    world = World()
    bob = world.contacts(BOB)
    bob.learn(
        [tampered(world.contacts(ALICE).mine()), world.contacts(ALICE, bytes([1]) * 32).mine(), b"", b"\xff"]
    )
    assert bob.addresses_of(ALICE.peer_id) == ()


def learn_any_contact(patch: pytest.MonkeyPatch) -> None:
    learn = Contacts.learn
    patch.setattr(Contacts, "learn", lambda self, contacts, **_: learn(self, contacts))


@defence("a DHT caller announces only its own addresses", off=learn_any_contact)
def test_a_caller_can_give_only_its_own_contact() -> None:
    world = World()
    bob = world.contacts(BOB)
    bob.learn([world.contacts(ALICE).mine()], only=MALLORY.peer_id)
    assert bob.addresses_of(ALICE.peer_id) == ()


def test_a_record_of_something_else_is_no_contact() -> None:
    world = World()
    body = pb.ContactRecord(addresses=world.reached_at).SerializeToString()
    _, sealed = Publisher(ALICE, SWARM, world.clock).seal("identity/", body, lifetime_s=60.0)
    bob = world.contacts(BOB)
    bob.learn([sealed])
    assert bob.addresses_of(ALICE.peer_id) == ()


@defence("contacts in a DHT answer are limited", off=replacing(dht_contacts, "MAX_CONTACTS", 1 << 30))
def test_an_answer_teaches_few_contacts_of_limited_size() -> None:
    world = World()
    bob = world.contacts(BOB)
    many = [Identity.from_seed(bytes([number])) for number in range(MAX_CONTACTS + 2)]
    bob.learn([world.contacts(each).mine() for each in many])
    assert [bool(bob.addresses_of(each.peer_id)) for each in many] == [True] * MAX_CONTACTS + [False] * 2
    body = pb.ContactRecord(addresses=["x" * MAX_CONTACT_BYTES]).SerializeToString()
    _, sealed = Publisher(ALICE, SWARM, world.clock).seal(TOPIC, body, lifetime_s=60.0)
    bob.learn([sealed])
    assert bob.addresses_of(ALICE.peer_id) == ()


def test_the_contacts_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_contacts, "MAX_KNOWN", 2)
    world = World()
    reader = world.contacts(Identity.from_seed(b"reader"))
    reader.learn([world.contacts(ALICE).mine()])
    reader.learn([world.contacts(BOB).mine()])
    assert reader.addresses_of(ALICE.peer_id)
    reader.learn([world.contacts(MALLORY).mine()])
    known = [bool(reader.addresses_of(each.peer_id)) for each in (ALICE, BOB, MALLORY)]
    assert known == [True, False, True]


def test_contacts_travel_beside_a_message_of_hivemind() -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from hivemind.proto import dht_pb2

    call = dht_pb2.FindRequest(keys=[bytes(20)], peer=dht_pb2.NodeInfo(node_id=bytes(20)))
    data = with_contacts(call.SerializeToString(), [b"one", b"another"])
    assert contacts_in(data) == [b"one", b"another"]
    read = dht_pb2.FindRequest.FromString(data)
    assert (list(read.keys), read.peer) == (list(call.keys), call.peer)
