"""Who is let in: a pure decision over what the swarm file says, what a peer shows, and who is revoked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.membership.quotas import Quotas
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire.roles import ANY_ROLE, Role, name_roles

if TYPE_CHECKING:
    from swarmnet_protocols.membership.certificates import Certificate
    from swarmnet_protocols.membership.revocations import Revocations

MIN_LIFETIME_S = 3600
MAX_LIFETIME_S = 90 * 24 * 3600
"""Of a certificate."""
MAX_KEYS = 16
"""That may sign, of everybody whom a swarm file names."""

_ASK = "ask whoever runs the swarm for an invite"


class Admission(StrEnum):
    """Who is a member."""

    OPEN = "open"
    """Everybody."""
    CERTIFICATE = "certificate"
    """Who has a certificate."""
    ALLOW_LIST = "allow-list"
    """Whose peer id stands in the swarm file, or who was given a certificate all the same."""


@dataclass(frozen=True)
class Rules:
    """What the swarm file says about membership."""

    swarm: bytes
    """Id of the swarm, 32 bytes."""
    admission: Admission
    keys: Mapping[bytes, float] = field(default_factory=dict)
    """Public keys that may sign certificates, grants and revocations, and until when (Unix time)."""
    anyone: frozenset[Role] = ANY_ROLE
    """With ``OPEN``: the roles of a peer that shows no certificate."""
    allow: Mapping[PeerId, frozenset[Role]] = field(default_factory=dict)
    """With ``ALLOW_LIST``: the members and their roles."""
    certificate_lifetime_s: float = 7 * 24 * 3600.0
    revocation_refresh_s: float = 30.0
    """How often members compare their revocations."""
    quotas: Quotas = field(default_factory=Quotas)
    serial: int = 0
    """Of the swarm file."""
    models: frozenset[bytes] = frozenset()
    """Manifest hashes of the models the swarm is for; none listed: any."""

    def check_model(self, name: str, manifest: bytes) -> None:
        """Raise ``NotAuthorised`` for a model the swarm is not for."""
        if self.models and manifest not in self.models:
            raise NotAuthorised(
                f"the swarm is not for {name}, or not for these files of it (manifest {manifest.hex()[:16]}…)",
                hint="`swarmnet swarm show` lists its models, `swarmnet model show` what is here",
            )

    @property
    def needs_certificate(self) -> bool:
        """Whether nobody is a member without a certificate."""
        return self.admission is Admission.CERTIFICATE

    def believe(self, key: bytes, now: float) -> bool:
        """Whether the signature of ``key`` counts at Unix time ``now``.

        A key that is listed with an end counted until then. A key that is not listed never counted: it was stolen, or belongs to a stranger.
        """
        return now < self.keys.get(key, -math.inf)


@dataclass(frozen=True)
class Member:
    """A peer that was let in."""

    peer: PeerId
    roles: frozenset[Role]
    until: float = math.inf
    """Unix time at which its certificate ends."""


def check_current(certificate: "Certificate", *, rules: Rules, now: float) -> None:
    """Raise ``NotAuthorised`` unless ``rules`` believe the issuer of ``certificate`` and it is valid at ``now``."""
    if certificate.swarm != rules.swarm:
        raise NotAuthorised("the certificate is of another swarm", hint=_ASK)
    if not rules.believe(certificate.issuer, now):
        raise NotAuthorised("the certificate was signed by nobody who may", hint=_ASK)
    if not all(rules.believe(key, certificate.admitted_at) for key in certificate.admitted_by):
        raise NotAuthorised(
            "the certificate goes back to a key that the swarm does not trust any more", hint=_ASK
        )
    if now < certificate.not_before:
        raise NotAuthorised(
            f"the certificate begins in {certificate.not_before - now:.0f} s",
            hint="check the clock of this machine and of the one that issued it",
        )
    if now >= certificate.not_after:
        raise NotAuthorised(
            f"the certificate ended {now - certificate.not_after:.0f} s ago",
            hint="ask for a new invite; if it should still be valid, check the clock of this machine",
        )


def _is_current(certificate: "Certificate", rules: Rules, now: float) -> bool:
    try:
        check_current(certificate, rules=rules, now=now)
    except NotAuthorised:
        return False
    return True


def admit(
    rules: Rules,
    certificate: "Certificate | None",
    peer: PeerId,
    needed: frozenset[Role],
    revocations: "Revocations",
    now: float,
) -> Member:
    """``peer`` as a member with at least one of the roles ``needed``. ``peer`` is the id that the transport has proven.

    Raises ``NotAuthorised``, saying why, for everybody else. ``certificate`` comes from ``open_certificate``; one that has ended
    takes nothing from a peer who needs none.
    """
    if certificate is not None and not rules.needs_certificate and not _is_current(certificate, rules, now):
        certificate = None
    if certificate is not None:
        check_current(certificate, rules=rules, now=now)
        if certificate.peer != peer:
            raise NotAuthorised("the certificate is for another peer", hint=_ASK)
    if why := revocations.why_out(peer, certificate):
        raise NotAuthorised(why, hint=_ASK)
    match rules.admission:
        case Admission.OPEN:
            roles = rules.anyone
        case Admission.ALLOW_LIST:
            if peer not in rules.allow and certificate is None:
                raise NotAuthorised(
                    "this peer is not in the swarm's list of members",
                    hint=f"ask whoever runs the swarm to list {peer}",
                )
            roles = rules.allow.get(peer, frozenset())
        case Admission.CERTIFICATE:
            if certificate is None:
                raise NotAuthorised("this swarm admits members only, and no certificate was shown", hint=_ASK)
            roles = frozenset()
    if certificate is not None:
        roles |= certificate.roles
    if not roles & needed:
        raise NotAuthorised(
            f"this takes the role {name_roles(needed).replace(', ', ' or ')}; the peer has {name_roles(roles)}",
            hint="ask whoever runs the swarm for an invite with that role",
        )
    return Member(peer, roles, certificate.not_after if certificate else math.inf)
