"""Revocation lists: peers, certificates and invites that end before they expire.

1. Every authority and issuer signs its own list. For each signer, the list with the highest serial
   is valid.
2. Every entry of any valid list is revoked. So two signers that revoke at the same time do not
   overwrite each other.
3. Once everything that an entry revokes has expired, the next signature drops the entry.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from swarmnet_protocols.errors import IntegrityError, NotAuthorised
from swarmnet_protocols.membership.certificates import (
    CLOCK_SKEW_S,
    ID_BYTES,
    MAX_PEER_CHARS,
    RENEWABLE_S,
    Certificate,
)
from swarmnet_protocols.membership.rules import MAX_KEYS, MAX_LIFETIME_S, Rules
from swarmnet_protocols.membership.signed import Signer, seal, unseal
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import membership_pb2 as pb

MAX_ENTRIES = 4096
"""Most entries of one list, of all kinds together."""
MAX_LIST_BYTES = 256 << 10
MAX_LISTS = MAX_KEYS
KEPT_S = 2 * (MAX_LIFETIME_S + RENEWABLE_S) + CLOCK_SKEW_S
"""Seconds that an entry stays on a list. An issuer without the list may renew a revoked
certificate, or redeem a revoked invite, until ``RENEWABLE_S`` after its end. The new certificate
then lives up to ``MAX_LIFETIME_S`` more, and can be renewed as long after that."""

_KIND = b"swarmnet-revocations-1"


@dataclass(frozen=True)
class RevokedIds:
    """The entries of a list."""

    peers: frozenset[PeerId] = frozenset()
    certificates: frozenset[bytes] = frozenset()
    invites: frozenset[bytes] = frozenset()
    since: Mapping[PeerId | bytes, int] = field(default_factory=dict)
    """Entry → Unix time of its revocation. A missing entry has no known time."""

    def in_order(self) -> tuple[PeerId | bytes, ...]:
        """Return all entries in the order of the message."""
        return (*sorted(self.peers), *sorted(self.certificates), *sorted(self.invites))

    def adding(
        self, *, peers: frozenset[PeerId] = frozenset(), invites: frozenset[bytes] = frozenset()
    ) -> "RevokedIds":
        """Return these entries and the given ones. A given entry that is here already gets a new
        date.
        """
        since = {each: then for each, then in self.since.items() if each not in {*peers, *invites}}
        return RevokedIds(self.peers | peers, self.certificates, self.invites | invites, since)

    def still_needed(self, now: float, *, peers_for_ever: bool) -> "RevokedIds":
        """Return the entries that stay on the list at ``now``, all with a date.

        An entry without a date counts as revoked just now. ``peers_for_ever`` keeps every peer, for
        a swarm whose members need no certificate that expires.
        """
        since = {each: self.since.get(each, int(now)) for each in self.in_order()}
        kept = {each for each, then in since.items() if now < then + KEPT_S}
        if peers_for_ever:
            kept |= self.peers
        since = {each: since[each] for each in kept}
        return RevokedIds(self.peers & kept, self.certificates & kept, self.invites & kept, since)


@dataclass(frozen=True)
class RevocationList:
    """The list of one signer. ``sealed`` is its signed form."""

    signer: bytes
    serial: int
    revoked: RevokedIds
    sealed: bytes

    def replaces(self, other: "RevocationList | None") -> bool:
        return other is None or self.serial > other.serial


class Revocations:
    """The newest list of each signer. Immutable."""

    def __init__(self, lists: Iterable[RevocationList] = ()) -> None:
        self._lists: dict[bytes, RevocationList] = {}
        for each in lists:
            if each.replaces(self._lists.get(each.signer)):
                self._lists[each.signer] = each

    @property
    def serials(self) -> Mapping[bytes, int]:
        """Return signer's key → serial of its list."""
        return {signer: each.serial for signer, each in self._lists.items()}

    def newer_than(self, serials: Mapping[bytes, int]) -> tuple[bytes, ...]:
        """Return the sealed lists that a peer with these ``serials`` lacks."""
        return tuple(
            self._lists[signer].sealed
            for signer in sorted(self._lists)
            if serials.get(signer, -1) < self._lists[signer].serial
        )

    def updated(self, sealed: Iterable[bytes], *, rules: Rules, now: float) -> "Revocations":
        """Return these lists, updated with the newer ones of ``sealed``; ``self`` if none is newer.

        If a list is invalid, raises what :func:`open_list` raises, and takes none.
        """
        opened = [open_list(data, rules=rules, now=now) for data in sealed]
        if not any(each.replaces(self._lists.get(each.signer)) for each in opened):
            return self
        return Revocations([*self._lists.values(), *opened])

    def of(self, signer: bytes) -> RevocationList | None:
        """Return the list of one signer."""
        return self._lists.get(signer)

    def trusted(self, *, rules: Rules, now: float) -> "Revocations":
        """Return the lists whose signers ``rules`` trust at ``now``."""
        return Revocations(each for each in self._lists.values() if rules.trusts(each.signer, now))

    def pardoning(self, peer: PeerId, since: float, signers: Container[bytes] = ()) -> "Revocations":
        """Return these lists without entries of ``peer`` that are dated before Unix time ``since``
        or in the lists of ``signers``."""
        return Revocations(
            replace(each, revoked=replace(each.revoked, peers=each.revoked.peers - {peer}))
            if each.signer in signers or 0 < each.revoked.since.get(peer, 0) < since
            else each
            for each in self._lists.values()
        )

    def find_revocation(self, peer: PeerId, certificate: Certificate | None) -> tuple[str, bytes] | None:
        """Return why ``peer`` with ``certificate`` is revoked, and the sealed list that says so.

        None if it is not revoked.
        """
        for each in self._lists.values():
            if peer in each.revoked.peers or (certificate and certificate.peer in each.revoked.peers):
                return "this peer was revoked", each.sealed
            if certificate is not None and certificate.id in each.revoked.certificates:
                return "this certificate was revoked", each.sealed
            if certificate is not None and certificate.invite in each.revoked.invites:
                return "the invite of this certificate was revoked", each.sealed
        return None

    def revokes_invite(self, invite: bytes) -> bool:
        return any(invite in each.revoked.invites for each in self._lists.values())


def sign_list(revoked: RevokedIds, *, serial: int, swarm: bytes, key: Signer) -> bytes:
    """Return a sealed list. Raises ``ValueError`` if it has more than ``MAX_ENTRIES``."""
    if len(revoked.in_order()) > MAX_ENTRIES:
        raise ValueError(f"a revocation list has {MAX_ENTRIES} entries at most")
    message = pb.RevocationList(
        swarm=swarm,
        serial=serial,
        peers=sorted(revoked.peers),
        certificates=sorted(revoked.certificates),
        invites=sorted(revoked.invites),
        since=[revoked.since.get(each, 0) for each in revoked.in_order()] if revoked.since else [],
    )
    return seal(_KIND, message, key)


def open_list(data: bytes, *, rules: Rules, now: float) -> RevocationList:
    """Open the list in ``data``.

    Raises ``IntegrityError`` if it is damaged or over the limits. Raises ``NotAuthorised`` if it is
    of another swarm, or of a signer that ``rules`` do not trust at ``now``.
    """
    message, signer = unseal(_KIND, pb.RevocationList, data, max_body_bytes=MAX_LIST_BYTES)
    if message.swarm != rules.swarm:
        raise NotAuthorised("the revocation list is of another swarm")
    if not rules.trusts(signer, now):
        raise NotAuthorised("the revocation list was signed by a key that the swarm does not trust")
    ids = (*message.certificates, *message.invites)
    if len(message.peers) + len(ids) > MAX_ENTRIES:
        raise IntegrityError(f"a revocation list has more than {MAX_ENTRIES} entries")
    if any(len(each) != ID_BYTES for each in ids) or any(len(p) > MAX_PEER_CHARS for p in message.peers):
        raise IntegrityError("a revocation list has an entry of the wrong size")
    revoked = RevokedIds(
        frozenset(map(PeerId, message.peers)), frozenset(message.certificates), frozenset(message.invites)
    )
    entries = revoked.in_order()
    if (*message.peers, *ids) != entries or len(message.since) not in {0, len(entries)}:
        raise IntegrityError("the entries of a revocation list are not sorted, or not all dated")
    since = {each: then for each, then in zip(entries, message.since, strict=False) if then}
    return RevocationList(signer, message.serial, replace(revoked, since=since), data)
