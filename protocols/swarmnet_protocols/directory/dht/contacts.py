"""Contacts of DHT peers: signed addresses that are sent with DHT calls and answers.

hivemind's DHT names peers by id, and relies on libp2p's own Kademlia for their addresses. Kademlia
stores records of any peer, members or not, so p2pd runs without it. Instead a peer sends its own
contact with each call. An answer that names peers contains their contacts.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory.host_announcements import MAX_ADDRESSES
from swarmnet_protocols.directory.records import Check, Publisher, Record, open_valid
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import records_pb2 as pb

TOPIC = "contact"
LIFETIME_S = 3600.0
MAX_CONTACT_BYTES = 3072
MAX_CONTACTS = 64
"""Most contacts in one answer."""
MAX_KNOWN = 4096
"""Most contacts that are kept; the most recently used stay. At most 12 MiB."""


class Contacts:
    """This peer's contact, and the contacts of the peers it may dial."""

    def __init__(
        self,
        publisher: Publisher,
        addresses: Callable[[], Sequence[str]],
        check: Check = lambda _: None,
    ) -> None:
        """Make the contacts of one peer.

        - ``addresses`` returns this peer's current addresses, with its peer id.
        - ``check`` checks whether a signer is a member.
        """
        self._publisher = publisher
        self._check = check
        self._addresses = addresses
        self._mine: tuple[Record, bytes] | None = None
        self._known: OrderedDict[PeerId, tuple[Record, bytes]] = OrderedDict()
        self._sealed: set[bytes] = set()
        """The sealed contacts in ``_known``. Their signatures need no second check."""

    def mine(self) -> bytes:
        """Return the sealed contact of this peer.

        Renews it when the addresses or the certificate change, or half of its lifetime is over.
        """
        body = pb.ContactRecord(addresses=self._addresses()[:MAX_ADDRESSES]).SerializeToString()
        expires_by, content = self._publisher.clock() + LIFETIME_S / 2, (body, self._publisher.certificate())
        mine = self._mine
        if mine is None or (mine[0].body, mine[0].certificate) != content or mine[0].expires_at < expires_by:
            mine = self._mine = self._publisher.seal(TOPIC, body, lifetime_s=LIFETIME_S)
        return mine[1]

    def learn(self, contacts: Iterable[bytes], *, only: PeerId | None = None) -> None:
        """Keep the valid contacts, or with ``only`` just the contact of that peer."""
        new = [each for each in contacts if len(each) <= MAX_CONTACT_BYTES and each not in self._sealed]
        swarm, now = self._publisher.swarm, self._publisher.clock()
        for sealed in new[:MAX_CONTACTS]:
            for record in open_valid([sealed], swarm=swarm, now=now, check=self._check):
                peer = record.peer_id
                before = self._known.get(peer)
                is_newer = before is None or before[0].sequence < record.sequence
                if record.topic == TOPIC and is_newer and only in (None, peer):
                    self._forget(peer)
                    self._known[peer] = record, sealed
                    self._sealed.add(sealed)
        while len(self._known) > MAX_KNOWN:
            self._forget(next(iter(self._known)))

    def _forget(self, peer: PeerId) -> None:
        if peer in self._known:
            self._sealed.remove(self._known.pop(peer)[1])

    def of(self, peers: Iterable[PeerId]) -> list[bytes]:
        """Return the sealed contacts of ``peers``, without unknown peers and expired contacts."""
        now = self._publisher.clock()
        found = (self._known[peer] for peer in dict.fromkeys(peers) if peer in self._known)
        return [sealed for record, sealed in found if record.expires_at > now][:MAX_CONTACTS]

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Return the addresses that ``peer`` announced; empty if the peer is unknown."""
        if peer not in self._known:
            return ()
        self._known.move_to_end(peer)
        try:
            contact = pb.ContactRecord.FromString(self._known[peer][0].body)
        except DecodeError:
            return ()
        return tuple(contact.addresses[:MAX_ADDRESSES])


def contacts_in(message: bytes) -> list[bytes]:
    """Return the contacts sent with a call or an answer. Raises ``DecodeError``."""
    return list(pb.WithContacts.FromString(message).contacts)


def with_contacts(message: bytes, contacts: Sequence[bytes]) -> bytes:
    """Append ``contacts`` to one of hivemind's calls or answers.

    They get a field number that hivemind does not know and skips.
    """
    return message + pb.WithContacts(contacts=contacts).SerializeToString()
