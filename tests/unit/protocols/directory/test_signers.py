"""In a private swarm, records count only if a member signed them whose role may publish them, until
it is revoked."""

import pytest

from swarmnet_protocols.directory.records import Publisher, open_valid
from swarmnet_protocols.directory.signers import Signers
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.wire.roles import Role
from tests.defences import defence, nothing, replacing
from tests.support.network.private_swarm import EPOCH, LIFETIME_S, PrivateSwarm, identity_of

SWARM = PrivateSwarm()
ALICE = identity_of("alice")
READER = identity_of("reader")
CERTIFICATE = SWARM.certificate("alice", Role.HOST)


class World:
    """A reader of the private swarm, at a time that tests set."""

    def __init__(self, rules: Rules = SWARM.rules) -> None:
        self.now = EPOCH
        self.membership = Membership(rules, READER.peer_id, lambda: self.now)
        self.signers = Signers(self.membership)

    def reads(self, topic: str = "hosts/00/0", certificate: bytes = b"", signer: Identity = ALICE) -> bool:
        """Whether the reader takes a record that ``signer`` has published with ``certificate``."""
        publisher = Publisher(signer, self.membership.rules.swarm, lambda: self.now, lambda: certificate)
        _, sealed = publisher.seal(topic, b"", lifetime_s=60.0)
        swarm = self.membership.rules.swarm
        return bool(list(open_valid([sealed], swarm=swarm, now=self.now, check=self.signers.check)))


def test_a_record_of_a_member_is_read() -> None:
    assert World().reads(certificate=CERTIFICATE)


@defence(
    "records of a private swarm are of members", off=replacing(Signers, "check", nothing), certificate=b""
)
@pytest.mark.parametrize(
    "certificate",
    [
        b"",
        b"junk",
        SWARM.certificate("bob", Role.HOST),
        SWARM.certificate("alice", Role.HOST, swarm=bytes([1] * 32)),
        SWARM.certificate("alice", Role.HOST, now=EPOCH - 2 * LIFETIME_S),
    ],
    ids=["none", "damaged", "of another peer", "of another swarm", "ended"],
)
def test_a_record_whose_signer_has_no_valid_certificate_is_not_read(certificate: bytes) -> None:
    assert not World().reads(certificate=certificate)


@pytest.mark.parametrize(
    ("role", "topics"),
    [
        (Role.HOST, {"hosts/00/0", "experts/00", "relays", "catalog"}),
        (Role.TRAINER, {"train/00", "relays", "catalog"}),
        (Role.BOOTSTRAP, {"relays", "catalog"}),
        (Role.CLIENT, set()),
        (Role.OBSERVER, set()),
    ],
)
def test_members_publish_what_belongs_to_their_role(role: Role, topics: set[str]) -> None:
    certificate = SWARM.certificate("alice", role)
    every = ("hosts/00/0", "experts/00", "train/00", "relays", "catalog")
    assert {topic for topic in every if World().reads(topic, certificate)} == topics


def test_records_of_a_peer_are_not_read_once_it_is_revoked() -> None:
    world = World()
    assert world.reads(certificate=CERTIFICATE)
    world.membership.add_revocations([SWARM.revocation(ALICE.peer_id)])
    assert not world.reads(certificate=CERTIFICATE)


def test_records_are_not_read_after_their_certificate_has_ended() -> None:
    world = World()
    assert world.reads(certificate=CERTIFICATE)
    world.now += 2 * LIFETIME_S
    assert not world.reads(certificate=CERTIFICATE)


def test_the_swarm_file_lists_who_may_publish_without_a_certificate() -> None:
    rules = Rules(
        bytes(32),
        Admission.ALLOW_LIST,
        allow={ALICE.peer_id: frozenset({Role.HOST}), READER.peer_id: frozenset({Role.CLIENT})},
    )
    world = World(rules)
    assert world.reads()
    assert not world.reads(signer=READER)
    assert not world.reads(signer=identity_of("mallory"))


def test_in_an_open_swarm_all_peers_may_publish() -> None:
    assert World(Rules(bytes(32), Admission.OPEN)).reads()


def test_a_certificate_cannot_be_taken_off_a_record_or_exchanged() -> None:
    world = World()
    publisher = Publisher(ALICE, SWARM.rules.swarm, lambda: world.now, lambda: CERTIFICATE)
    record, sealed = publisher.seal("hosts/00/0", b"", lifetime_s=60.0)
    other = SWARM.certificate("alice", Role.HOST, Role.TRAINER)
    for changed in (sealed.replace(CERTIFICATE, other), sealed.replace(CERTIFICATE, b"")):
        assert not list(open_valid([changed], swarm=record.swarm, now=world.now))
