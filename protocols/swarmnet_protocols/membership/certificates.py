"""Certificates: signed statements that a peer is a member of a swarm, with roles and an end.

A certificate names its peer, and libp2p authenticates the peer's id on every connection. So no
other peer can use the certificate. It may also name the client on the same machine. Then the node
and the client of a machine need only one certificate. The life of a certificate:

1. An issuer makes it with :func:`issue`.
2. Other peers check it with :func:`open_certificate`.
3. A renewal contains the certificate that first admitted its peer. The renewal is valid only while
   the keys behind that first admission are trusted, no matter which issuers have renewed it since.
4. It ends at its own time. If a stolen key is removed from the swarm file, every membership that
   goes back to that key ends, too.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarmnet_protocols.errors import IntegrityError, NotAuthorised
from swarmnet_protocols.membership.rules import MAX_LIFETIME_S, MIN_LIFETIME_S, Rules
from swarmnet_protocols.membership.signed import Signer, seal, unseal
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import KEY_BYTES, Identity, public_key_of, verify
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import Role

ID_BYTES = 16
MAX_PEER_CHARS = 128
MAX_CERTIFICATE_BYTES = 1024
CLOCK_SKEW_S = 600
"""Seconds that a certificate is dated back, because issuer's and verifier's clocks may each be five
minutes off."""

RENEWABLE_S = 30 * 24 * 3600
"""Seconds after its end in which a certificate can still be renewed. With less, a member that was
away for some weeks needs a new invite. With more, revocations are kept longer."""

NO_PEER = PeerId("")
"""In place of the client of a machine that has none."""
_KIND = b"swarmnet-certificate-1"
_CONSENT = b"swarmnet-machine-1"
_ASK_FOR_INVITE = "ask the owner of the swarm for an invite"


@dataclass(frozen=True)
class Certificate:
    """A certificate that was opened. Times are Unix seconds."""

    swarm: bytes
    peer: PeerId
    roles: frozenset[Role]
    not_before: int
    not_after: int
    id: bytes
    invite: bytes
    """Id of the invite redeemed for this certificate or its first predecessor; empty without
    one."""
    issuer: bytes
    """Public key that signed it."""
    admitted_by: tuple[bytes, ...] = ()
    """Keys behind the first admission: the issuer's, and the key that signed the invite."""
    admitted_at: float = 0.0
    """Unix time of the first admission."""
    first: bytes = b""
    """The sealed certificate that first admitted the peer; empty if that is this one."""
    client: PeerId = NO_PEER
    """The client on the same machine; empty without one."""

    def roles_of(self, peer: PeerId) -> frozenset[Role]:
        """Return the roles that this certificate gives ``peer``; none to a peer that it does not
        name."""
        if peer == self.peer:
            return self.roles
        if not peer or peer != self.client:
            return frozenset()
        asks = {Role.CLIENT} if Role.HOST in self.roles else set()
        return self.roles - {Role.HOST, Role.BOOTSTRAP} | asks

    @property
    def issued_at(self) -> int:
        """Unix time at which it was issued."""
        return self.not_before + CLOCK_SKEW_S

    @property
    def renew_at(self) -> float:
        """Unix time after two thirds of its lifetime."""
        return self.not_before + (self.not_after - self.not_before) * 2 / 3


@dataclass(frozen=True)
class Admittance:
    """The decision of an issuer: the content of a certificate before it is signed."""

    peer: PeerId
    roles: frozenset[Role]
    invite: bytes = b""
    grant_signer: bytes = b""
    """Public key that signed the invite."""
    first: bytes = b""
    """The sealed certificate that first admitted the peer; empty if that is this one."""
    client: PeerId = NO_PEER
    """The client on the same machine; empty without one."""


def issue(admittance: Admittance, *, swarm: bytes, key: Signer, now: float, lifetime_s: float) -> bytes:
    """Return a sealed certificate, valid from ``CLOCK_SKEW_S`` before ``now`` for ``lifetime_s``
    after it.

    Raises ``ValueError`` for a lifetime outside [``MIN_LIFETIME_S``, ``MAX_LIFETIME_S``], and
    without a role.
    """
    if not MIN_LIFETIME_S <= lifetime_s <= MAX_LIFETIME_S:
        raise ValueError(f"a certificate cannot be valid for {lifetime_s} s")
    if not admittance.roles:
        raise ValueError("a certificate needs a role")
    message = pb.Certificate(
        swarm=swarm,
        peer=admittance.peer,
        roles=roles_to_wire(admittance.roles),
        not_before=int(now) - CLOCK_SKEW_S,
        not_after=int(now + lifetime_s),
        id=secrets.token_bytes(ID_BYTES),
        invite=admittance.invite,
        grant_signer=admittance.grant_signer,
        first=admittance.first,
        client=admittance.client,
    )
    return seal(_KIND, message, key)


def open_certificate(data: bytes, *, rules: Rules, now: float, ended_s: float = 0.0) -> Certificate:
    """Open the certificate in ``data``, and check everything except which peer shows it.

    It may have ended ``ended_s`` seconds ago. Raises ``IntegrityError`` if it is not in canonical
    form, or not signed by the key it names. Raises ``NotAuthorised`` as :func:`check_current` does.
    """
    certificate = _open(data)
    check_current(certificate, rules=rules, now=now, ended_s=ended_s)
    return certificate


def check_current(certificate: Certificate, *, rules: Rules, now: float, ended_s: float = 0.0) -> None:
    """Raise ``NotAuthorised`` unless ``certificate`` is valid at ``now`` in the swarm of ``rules``.

    Trusted keys must have signed it. It may have ended ``ended_s`` seconds ago.
    """
    if certificate.swarm != rules.swarm:
        raise NotAuthorised("the certificate is of another swarm", hint=_ASK_FOR_INVITE)
    if not rules.trusts(certificate.issuer, now):
        raise NotAuthorised(
            "the certificate was signed by a key that the swarm does not trust",
            hint=f"{_ASK_FOR_INVITE}; if that is you, give the folder with swarm.toml and authority.key",
        )
    if not all(rules.trusts(key, certificate.admitted_at) for key in certificate.admitted_by):
        raise NotAuthorised(
            "the certificate goes back to a key that the swarm does not trust any more", hint=_ASK_FOR_INVITE
        )
    if now < certificate.not_before:
        raise NotAuthorised(
            f"the certificate begins in {certificate.not_before - now:.0f} s",
            hint="check the clock of this machine and of the one that issued it",
        )
    if now >= certificate.not_after + ended_s:
        raise NotAuthorised(
            f"the certificate ended {now - certificate.not_after:.0f} s ago",
            hint="ask for a new invite; if it should still be valid, check the clock of this machine",
        )


def _open(data: bytes) -> Certificate:
    """Open the certificate in ``data`` and the one inside it.

    Signatures and form are checked, but not signers and times.
    """
    message, issuer = unseal(_KIND, pb.Certificate, data, max_body_bytes=MAX_CERTIFICATE_BYTES)
    roles = roles_from_wire(message.roles)
    if not 0 < len(message.peer) <= MAX_PEER_CHARS or len(message.id) != ID_BYTES:
        raise IntegrityError("the certificate has no peer or no id")
    if len(message.client) > MAX_PEER_CHARS:
        raise IntegrityError("the certificate names a client with an id of the wrong size")
    if len(message.invite) not in {0, ID_BYTES} or len(message.grant_signer) not in {0, KEY_BYTES}:
        raise IntegrityError("the certificate has an invalid invite id or signer")
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
        client=PeerId(message.client),
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


def machine_of(node: Identity, client: PeerId, swarm: bytes) -> pb.Machine:
    """Return the message that asks for a certificate for ``node`` and the client on its machine."""
    return pb.Machine(node=node.peer_id, client=client, consent=node.sign(_consent_bytes(swarm, client)))


def peers_of(machine: pb.Machine, sender: PeerId, swarm: bytes) -> tuple[PeerId, PeerId]:
    """Return the node and the client for which ``sender`` asks; the client is empty without one.

    Without the node's consent, a newcomer could name another member as its node, and that member
    would be revoked in its place. Raises ``NotAuthorised``.
    """
    if not machine.node:
        return sender, NO_PEER
    node, client = PeerId(machine.node), PeerId(machine.client)
    if len(client) > MAX_PEER_CHARS or sender not in {node, client} or node == client:
        raise NotAuthorised("the request names two other peers as one machine")
    try:
        key = public_key_of(node)
    except ValueError as error:
        raise NotAuthorised(str(error)) from error
    if not verify(key, machine.consent, _consent_bytes(swarm, client)):
        raise NotAuthorised("the node that the request names did not sign it")
    return node, client


def _consent_bytes(swarm: bytes, client: PeerId) -> bytes:
    return _CONSENT + b"\0" + swarm + client.encode()


def roles_to_wire(roles: Iterable[Role]) -> list[str]:
    """Return roles for a message: in ascending order, each once."""
    wanted = set(roles)
    return [f"ROLE_{role.name}" for role in Role if role in wanted]


def roles_from_wire(numbers: Iterable[int]) -> frozenset[Role]:
    """Return the roles of a message.

    Raises ``IntegrityError`` if there are none, or if :func:`roles_to_wire` would write them
    differently.
    """
    listed = list(numbers)
    roles = frozenset(role for role in Role if pb.Role.Value(f"ROLE_{role.name}") in listed)
    if not roles or [pb.Role.Value(name) for name in roles_to_wire(roles)] != listed:
        raise IntegrityError("the roles are not a list of known ones in order")
    return roles
