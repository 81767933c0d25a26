"""Invites: strings that a newcomer exchanges for its first certificate.

1. An authority signs a grant, which names the public key of the invite. The string contains the
   grant and the private key.
2. The newcomer signs its own peer id with the private key and sends the result to an issuer.
3. The issuer checks it and answers with a certificate.

The request works for one peer id only. So nothing that an issuer or an eavesdropper sees admits
another peer.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised
from swarmnet_protocols.membership.certificates import (
    ID_BYTES,
    MAX_PEER_CHARS,
    peers_of,
    roles_from_wire,
    roles_to_wire,
)
from swarmnet_protocols.membership.rules import MAX_LIFETIME_S, Rules
from swarmnet_protocols.membership.signed import Signer, decode, seal, unseal
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import KEY_BYTES, Identity, verify
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import Role

PREFIX = "swn1"
MAX_USES = 10_000
MAX_VALID_S = MAX_LIFETIME_S
"""Longest lifetime of an invite in seconds. It bounds how long a revocation of the invite must be
kept."""
MAX_BOOTSTRAPS = 8
MAX_ADDRESS_CHARS = 512
MAX_GRANT_BYTES = 1024
MAX_LABEL_CHARS = 64
MAX_INVITE_CHARS = 8192

_CHECKSUM_BYTES = 4
_GRANT = b"swarmnet-grant-1"
_PROOF = b"swarmnet-redeem-1"


@dataclass(frozen=True)
class InviteTerms:
    """The terms of an invite.

    ``not_after`` is a Unix time in seconds. ``peer`` is the only peer that may redeem it; None:
    any. ``label`` is the owner's note on whom it is for; issuers list it with the members.
    """

    roles: frozenset[Role]
    not_after: int
    uses: int = 1
    peer: PeerId | None = None
    label: str = ""


@dataclass(frozen=True)
class Grant:
    """The signed part of an invite."""

    swarm: bytes
    id: bytes
    terms: InviteTerms
    key: bytes
    signer: bytes


@dataclass(frozen=True)
class Invite:
    """The content of an invite string: the grant, the seed of the private key, and addresses to
    join at.
    """

    grant: Grant
    sealed_grant: bytes
    seed: bytes
    bootstrap: tuple[str, ...]


def make_invite(terms: InviteTerms, *, swarm: bytes, key: Signer, bootstrap: Sequence[str]) -> str:
    """Return an invite with ``terms``, signed by ``key``. ``MAX_LABEL_CHARS`` bounds the label.

    The newcomer joins at the first ``MAX_BOOTSTRAPS`` addresses of ``bootstrap``. Raises
    ``ValueError`` without a role, and for a number of uses outside [1, ``MAX_USES``].
    """
    if not terms.roles or not 1 <= terms.uses <= MAX_USES:
        raise ValueError(f"an invite needs a role and 1 to {MAX_USES} uses")
    seed = secrets.token_bytes(KEY_BYTES)
    grant = pb.Grant(
        swarm=swarm,
        id=secrets.token_bytes(ID_BYTES),
        roles=roles_to_wire(terms.roles),
        not_after=terms.not_after,
        uses=terms.uses,
        key=_key(seed).public_key,
        peer=terms.peer or "",
        label=terms.label,
    )
    message = pb.Invite(grant=seal(_GRANT, grant, key), seed=seed, bootstrap=list(bootstrap)[:MAX_BOOTSTRAPS])
    data = message.SerializeToString(deterministic=True)
    return PREFIX + _encode(data + _checksum(data))


def is_invite(text: str) -> bool:
    """Return whether ``text`` begins as an invite does."""
    return text.lstrip().startswith(PREFIX)


def read_invite(text: str, *, now: float) -> Invite:
    """Read the invite in a pasted string, ignoring white space.

    Raises ``ConfigError`` for an incomplete or changed invite, and ``NotAuthorised`` for one that
    has expired at ``now``. The signer is not checked, since that needs the swarm file.
    """
    damaged = ConfigError("the invite is damaged", hint="copy all of it again, from swn1 to the end")
    text = "".join(text.split())
    if len(text) > MAX_INVITE_CHARS or not re.fullmatch(rf"{PREFIX}[A-Za-z0-9_-]+", text):
        raise damaged
    encoded = text.removeprefix(PREFIX)
    try:
        data = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except ValueError as error:
        raise damaged from error
    canonical = _encode(data) == encoded
    data, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if not canonical or checksum != _checksum(data):
        raise damaged
    try:
        message = decode(pb.Invite, data)
        grant = _open_grant(message.grant)
    except IntegrityError as error:
        raise damaged from error
    too_long = any(len(address) > MAX_ADDRESS_CHARS for address in message.bootstrap)
    if len(message.seed) != KEY_BYTES or len(message.bootstrap) > MAX_BOOTSTRAPS or too_long:
        raise damaged
    if _key(message.seed).public_key != grant.key:
        raise damaged
    _check_expiry(grant, now)
    return Invite(grant, message.grant, message.seed, tuple(message.bootstrap))


def redemption(invite: Invite, peer: PeerId, machine: pb.Machine | None = None) -> pb.Redeem:
    """Return the message that lets ``peer`` redeem ``invite`` at an issuer, for itself and the
    other peer of ``machine``."""
    proof = _key(invite.seed).sign(_proof_bytes(invite.grant.id, peer))
    return pb.Redeem(grant=invite.sealed_grant, proof=proof, machine=machine)


def open_redemption(
    request: pb.Redeem, peer: PeerId, *, rules: Rules, now: float
) -> tuple[Grant, PeerId, PeerId]:
    """Return the grant that ``peer`` redeems, checked except for its number of uses, and the node
    and the client that it admits.

    ``peer`` is the id that the transport has authenticated. Raises ``IntegrityError`` for a damaged
    request, and ``NotAuthorised`` for one that ``peer`` may not make.
    """
    grant = _open_grant(request.grant)
    if grant.swarm != rules.swarm:
        raise NotAuthorised("the invite is to another swarm")
    if not rules.trusts(grant.signer, now):
        raise NotAuthorised(
            "the invite was signed by a key that the swarm does not trust", hint="ask for a new invite"
        )
    _check_expiry(grant, now)
    node, client = peers_of(request.machine, peer, rules.swarm)
    if grant.terms.peer not in {None, node, client}:
        raise NotAuthorised("the invite is for another peer", hint=f"ask for an invite for {peer}")
    if not verify(grant.key, request.proof, _proof_bytes(grant.id, peer)):
        raise NotAuthorised("the request is not signed with the key of the invite")
    return grant, node, client


def _open_grant(data: bytes) -> Grant:
    message, signer = unseal(_GRANT, pb.Grant, data, max_body_bytes=MAX_GRANT_BYTES)
    roles = roles_from_wire(message.roles)
    if len(message.id) != ID_BYTES or len(message.key) != KEY_BYTES or len(message.peer) > MAX_PEER_CHARS:
        raise IntegrityError("the invite has an id, key or peer of the wrong size")
    if not 1 <= message.uses <= MAX_USES:
        raise IntegrityError(f"an invite has 1 to {MAX_USES} uses")
    if len(message.label) > MAX_LABEL_CHARS or not message.label.isprintable():
        raise IntegrityError(f"the label of an invite is at most {MAX_LABEL_CHARS} printable characters")
    peer = PeerId(message.peer) if message.peer else None
    terms = InviteTerms(roles, message.not_after, message.uses, peer, message.label)
    return Grant(message.swarm, message.id, terms, message.key, signer)


def _check_expiry(grant: Grant, now: float) -> None:
    if now >= grant.terms.not_after:
        raise NotAuthorised(
            f"the invite ended {now - grant.terms.not_after:.0f} s ago",
            hint="ask for a new one; if it should still be valid, check the clock of this machine",
        )


def _key(seed: bytes) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(seed))


def _proof_bytes(invite: bytes, peer: PeerId) -> bytes:
    return _PROOF + b"\0" + invite + peer.encode()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]
