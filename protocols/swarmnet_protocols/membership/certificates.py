"""Certificates: that a peer is a member of a swarm, in which roles, and until when.

A certificate names the peer it is for, and libp2p proves that id on every connection: shown by anybody else, or again by
whoever overheard it, it is worth nothing.

A renewal carries the certificate that first admitted its peer. It counts only while the keys behind that admission do, whichever
issuers renewed it since: when a stolen key is taken out of the swarm file, every membership that it made up ends with it.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.membership.rules import MAX_LIFETIME_S, MIN_LIFETIME_S, Rules, check_current
from swarmnet_protocols.membership.signed import Signer, seal, unseal
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import KEY_BYTES
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import Role

ID_BYTES = 16
MAX_PEER_CHARS = 128
MAX_CERTIFICATE_BYTES = 1024
CLOCK_SKEW_S = 600
"""A certificate begins so long before it is issued: the clocks of its issuer and its judge may each be five minutes off."""

_KIND = b"swarmnet-certificate-1"


@dataclass(frozen=True)
class Certificate:
    """What an authority or issuer of a swarm says of one peer. Times are Unix seconds."""

    swarm: bytes
    peer: PeerId
    roles: frozenset[Role]
    not_before: int
    not_after: int
    id: bytes
    invite: bytes
    """The id of the invite it goes back to; empty without one."""
    issuer: bytes
    """The key that signed it."""
    admitted_by: tuple[bytes, ...] = ()
    """The keys that its membership goes back to: of the issuer that admitted the peer, and of the signer of its invite."""
    admitted_at: float = 0.0
    """When they did, Unix time."""
    first: bytes = b""
    """Of a renewal: the sealed certificate that admitted the peer."""

    @property
    def renew_at(self) -> float:
        """When two thirds of its life are over."""
        return self.not_before + (self.not_after - self.not_before) * 2 / 3


@dataclass(frozen=True)
class Admittance:
    """Who shall be a member, as what: what an issuer decides."""

    peer: PeerId
    roles: frozenset[Role]
    invite: bytes = b""
    grant_signer: bytes = b""
    """The key that signed the invite."""
    first: bytes = b""
    """Of a renewal: the sealed certificate that admitted the peer."""


def issue(admittance: Admittance, *, swarm: bytes, key: Signer, now: float, lifetime_s: float) -> bytes:
    """A sealed certificate that begins ``CLOCK_SKEW_S`` before ``now`` and ends ``lifetime_s`` after it.

    Raises ``ValueError`` for a lifetime outside of what is allowed, and when there is no role.
    """
    if not MIN_LIFETIME_S <= lifetime_s <= MAX_LIFETIME_S:
        raise ValueError(f"a certificate cannot be valid for {lifetime_s} s")
    if not admittance.roles:
        raise ValueError("a certificate needs a role")
    message = pb.Certificate(
        swarm=swarm,
        peer=admittance.peer,
        roles=to_wire(admittance.roles),
        not_before=int(now) - CLOCK_SKEW_S,
        not_after=int(now + lifetime_s),
        id=secrets.token_bytes(ID_BYTES),
        invite=admittance.invite,
        grant_signer=admittance.grant_signer,
        first=admittance.first,
    )
    return seal(_KIND, message, key)


def open_certificate(data: bytes, *, rules: Rules, now: float) -> Certificate:
    """The certificate in ``data``, once everything that can be said without knowing who shows it is checked.

    Raises ``IntegrityError`` for one that is not in the one accepted encoding or not signed by the key it names, and
    ``NotAuthorised`` for one of another swarm, signed by nobody whom ``rules`` believe, not valid yet, or expired.
    """
    certificate = _open(data)
    check_current(certificate, rules=rules, now=now)
    return certificate


def _open(data: bytes) -> Certificate:
    """The certificate in ``data``, with the one in it that admitted the peer, whoever signed them and however old they are."""
    message, issuer = unseal(_KIND, pb.Certificate, data, max_body_bytes=MAX_CERTIFICATE_BYTES)
    roles = from_wire(message.roles)
    if not 0 < len(message.peer) <= MAX_PEER_CHARS or len(message.id) != ID_BYTES:
        raise IntegrityError("the certificate has no peer or no id")
    if len(message.invite) not in {0, ID_BYTES} or len(message.grant_signer) not in {0, KEY_BYTES}:
        raise IntegrityError("the certificate names no invite as it should")
    if not 0 < message.not_after - message.not_before <= MAX_LIFETIME_S + CLOCK_SKEW_S:
        raise IntegrityError("the certificate is valid for longer than is allowed")
    certificate = Certificate(
        swarm=message.swarm,
        peer=PeerId(message.peer),
        roles=roles,
        not_before=message.not_before,
        not_after=message.not_after,
        id=message.id,
        invite=message.invite,
        issuer=issuer,
        admitted_by=(issuer, message.grant_signer or issuer),
        admitted_at=message.not_before + CLOCK_SKEW_S,
    )
    if not message.first:
        return certificate
    first = _open(message.first)
    same = (first.swarm, first.peer, first.invite) == (message.swarm, message.peer, message.invite)
    if first.first or message.grant_signer or not same or not roles <= first.roles:
        raise IntegrityError("the certificate does not renew the one it goes back to")
    return replace(
        certificate, admitted_by=first.admitted_by, admitted_at=first.admitted_at, first=message.first
    )


def to_wire(roles: Iterable[Role]) -> list[str]:
    """Roles as a message takes them: in growing order, each once."""
    wanted = set(roles)
    return [f"ROLE_{role.name}" for role in Role if role in wanted]


def from_wire(numbers: Iterable[int]) -> frozenset[Role]:
    """The roles of a message. Raises ``IntegrityError`` unless there is one and they stand as :func:`to_wire` gives them."""
    listed = list(numbers)
    roles = frozenset(role for role in Role if pb.Role.Value(f"ROLE_{role.name}") in listed)
    if not roles or [pb.Role.Value(name) for name in to_wire(roles)] != listed:
        raise IntegrityError("the roles are not a list of known ones in order")
    return roles
