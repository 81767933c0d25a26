"""Revocations: who is out before its certificate ends.

Every authority and issuer signs a list of its own. Of each signer the list with the highest serial counts, and what any
of them names is out, so that two who revoke at the same time undo nothing of each other's. What was revoked so long ago that it has
ended by itself leaves the list when it is next signed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from swarmnet_protocols.errors import IntegrityError, NotAuthorised
from swarmnet_protocols.membership.certificates import (
    CLOCK_SKEW_S,
    ID_BYTES,
    MAX_PEER_CHARS,
    Certificate,
)
from swarmnet_protocols.membership.rules import MAX_KEYS, MAX_LIFETIME_S, Rules
from swarmnet_protocols.membership.signed import Signer, seal, unseal
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import membership_pb2 as pb

MAX_ENTRIES = 4096
"""Of all kinds together, in one list."""
MAX_LIST_BYTES = 256 << 10
MAX_LISTS = MAX_KEYS
KEPT_S = 2 * MAX_LIFETIME_S + CLOCK_SKEW_S
"""How long something stays on a list: an invite may be redeemed, or a certificate renewed, by an issuer that has not heard yet, and what
comes of that lives once more as long as any certificate."""

_KIND = b"swarmnet-revocations-1"


@dataclass(frozen=True)
class Named:
    """What a list names."""

    peers: frozenset[PeerId] = frozenset()
    certificates: frozenset[bytes] = frozenset()
    invites: frozenset[bytes] = frozenset()
    since: Mapping[PeerId | bytes, int] = field(default_factory=dict)
    """Unix time at which each was revoked; of what is missing it is not known."""

    def in_order(self) -> tuple[PeerId | bytes, ...]:
        """All of it, as a list has it."""
        return (*sorted(self.peers), *sorted(self.certificates), *sorted(self.invites))

    def naming(
        self, *, peers: frozenset[PeerId] = frozenset(), invites: frozenset[bytes] = frozenset()
    ) -> "Named":
        """With these too, which are revoked now, whether or not they were before."""
        since = {each: then for each, then in self.since.items() if each not in {*peers, *invites}}
        return Named(self.peers | peers, self.certificates, self.invites | invites, since)

    def still_needed(self, now: float, *, peers_for_ever: bool) -> "Named":
        """What has to stay on the list at ``now``, all of it dated: what is new was revoked just now.

        ``peers_for_ever``: where a peer is a member without a certificate, nothing of it ends by itself.
        """
        since = {each: self.since.get(each, int(now)) for each in self.in_order()}
        kept = {each for each, then in since.items() if now < then + KEPT_S}
        if peers_for_ever:
            kept |= self.peers
        since = {each: since[each] for each in kept}
        return Named(self.peers & kept, self.certificates & kept, self.invites & kept, since)


@dataclass(frozen=True)
class RevocationList:
    """What one signer says. ``sealed`` is what others are given."""

    signer: bytes
    serial: int
    named: Named
    sealed: bytes

    def replaces(self, other: "RevocationList | None") -> bool:
        return other is None or self.serial > other.serial


class Revocations:
    """The newest list of every signer. Immutable."""

    def __init__(self, lists: Iterable[RevocationList] = ()) -> None:
        self._lists: dict[bytes, RevocationList] = {}
        for each in lists:
            if each.replaces(self._lists.get(each.signer)):
                self._lists[each.signer] = each

    @property
    def serials(self) -> Mapping[bytes, int]:
        """The serial of every signer's list, by its key."""
        return {signer: each.serial for signer, each in self._lists.items()}

    def newer_than(self, serials: Mapping[bytes, int]) -> tuple[bytes, ...]:
        """The sealed lists that somebody with these ``serials`` lacks; with none, all lists."""
        return tuple(
            self._lists[signer].sealed
            for signer in sorted(self._lists)
            if serials.get(signer, -1) < self._lists[signer].serial
        )

    def learn(self, sealed: Iterable[bytes], *, rules: Rules, now: float) -> "Revocations":
        """With the lists in ``sealed`` that are newer; this very object if none is.

        Raises ``IntegrityError`` or ``NotAuthorised``, and takes nothing, if one of them is not as it should be.
        """
        opened = [open_list(data, rules=rules, now=now) for data in sealed]
        if not any(each.replaces(self._lists.get(each.signer)) for each in opened):
            return self
        return Revocations([*self._lists.values(), *opened])

    def of(self, signer: bytes) -> RevocationList | None:
        """The list of one signer."""
        return self._lists.get(signer)

    def believed(self, *, rules: Rules, now: float) -> "Revocations":
        """Without the lists of signers whom ``rules`` do not believe any more."""
        return Revocations(each for each in self._lists.values() if rules.believe(each.signer, now))

    def why_out(self, peer: PeerId, certificate: Certificate | None) -> str | None:
        """Why ``peer`` with ``certificate`` is out; None if it is not."""
        for each in self._lists.values():
            if peer in each.named.peers:
                return "this peer was revoked"
            if certificate is not None and certificate.id in each.named.certificates:
                return "this certificate was revoked"
            if certificate is not None and certificate.invite in each.named.invites:
                return "the invite of this certificate was revoked"
        return None

    def revokes_invite(self, invite: bytes) -> bool:
        return any(invite in each.named.invites for each in self._lists.values())


def sign_list(named: Named, *, serial: int, swarm: bytes, key: Signer) -> bytes:
    """A sealed list. Raises ``ValueError`` if it has more than ``MAX_ENTRIES``."""
    if len(named.in_order()) > MAX_ENTRIES:
        raise ValueError(f"a revocation list has {MAX_ENTRIES} entries at most")
    message = pb.RevocationList(
        swarm=swarm,
        serial=serial,
        peers=sorted(named.peers),
        certificates=sorted(named.certificates),
        invites=sorted(named.invites),
        since=[named.since.get(each, 0) for each in named.in_order()] if named.since else [],
    )
    return seal(_KIND, message, key)


def open_list(data: bytes, *, rules: Rules, now: float) -> RevocationList:
    """The list in ``data``, checked. Raises ``IntegrityError`` for one that is changed or over the limits, and
    ``NotAuthorised`` for one of another swarm or of a signer whom ``rules`` do not believe at ``now``."""
    message, signer = unseal(_KIND, pb.RevocationList, data, max_body_bytes=MAX_LIST_BYTES)
    if message.swarm != rules.swarm:
        raise NotAuthorised("the revocations are of another swarm")
    if not rules.believe(signer, now):
        raise NotAuthorised("the revocations were signed by nobody who may")
    ids = (*message.certificates, *message.invites)
    if len(message.peers) + len(ids) > MAX_ENTRIES:
        raise IntegrityError(f"a revocation list has more than {MAX_ENTRIES} entries")
    if any(len(each) != ID_BYTES for each in ids) or any(len(p) > MAX_PEER_CHARS for p in message.peers):
        raise IntegrityError("a revocation list names something that cannot be")
    named = Named(
        frozenset(map(PeerId, message.peers)), frozenset(message.certificates), frozenset(message.invites)
    )
    entries = named.in_order()
    if (*message.peers, *ids) != entries or len(message.since) not in {0, len(entries)}:
        raise IntegrityError("the entries of a revocation list are not sorted, or not all dated")
    since = {each: then for each, then in zip(entries, message.since, strict=False) if then}
    return RevocationList(signer, message.serial, replace(named, since=since), data)
