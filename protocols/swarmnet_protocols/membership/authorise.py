"""The admission decision: a pure function of the swarm's rules, a peer's certificate and the revocations."""

import math
from dataclasses import dataclass

from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.membership.certificates import Certificate, check_current
from swarmnet_protocols.membership.revocations import Revocations
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net import PeerId, ProtocolSpec
from swarmnet_protocols.wire.roles import Role, name_roles

_ASK_FOR_INVITE = "ask the owner of the swarm for an invite"
_ASK_FOR_ROLE = "ask the owner of the swarm for an invite with that role"


@dataclass(frozen=True)
class Member:
    """A peer that was admitted."""

    peer: PeerId
    roles: frozenset[Role]
    until: float = math.inf
    """Unix time at which its certificate ends."""


def admit(
    rules: Rules,
    certificate: Certificate | None,
    peer: PeerId,
    needed: frozenset[Role],
    revocations: Revocations,
    now: float,
) -> Member:
    """``peer`` as a member with at least one of the roles ``needed``. ``peer`` is the id that the transport has authenticated.

    ``certificate`` comes from ``open_certificate``. Where members need none, one that is not valid at ``now`` is ignored. Raises
    ``NotAuthorised`` with the reason if ``peer`` is no member or lacks the roles.
    """
    if certificate is not None and not rules.needs_certificate and not _is_current(certificate, rules, now):
        certificate = None
    if certificate is not None:
        check_current(certificate, rules=rules, now=now)
        if certificate.peer != peer:
            raise NotAuthorised("the certificate is for another peer", hint=_ASK_FOR_INVITE)
    if reason := revocations.reason_revoked(peer, certificate):
        raise NotAuthorised(reason, hint=_ASK_FOR_INVITE)
    match rules.admission:
        case Admission.OPEN:
            roles = rules.anyone
        case Admission.ALLOW_LIST:
            if peer not in rules.allow and certificate is None:
                raise NotAuthorised(
                    "this peer is not in the swarm's list of members",
                    hint=f"ask the owner of the swarm to list {peer}",
                )
            roles = rules.allow.get(peer, frozenset())
        case Admission.CERTIFICATE:
            if certificate is None:
                raise NotAuthorised(
                    "this swarm admits members only, and no certificate was shown", hint=_ASK_FOR_INVITE
                )
            roles = frozenset()
    if certificate is not None:
        roles |= certificate.roles
    if not roles & needed:
        raise NotAuthorised(
            f"this takes the role {name_roles(needed).replace(', ', ' or ')}; the peer has {name_roles(roles)}",
            hint=_ASK_FOR_ROLE,
        )
    return Member(peer, roles, certificate.not_after if certificate else math.inf)


def check_role(member: Member, roles: frozenset[Role], protocol: ProtocolSpec) -> None:
    """Raise ``NotAuthorised`` unless ``member`` has one of ``roles``, which ``protocol`` needs."""
    if not member.roles & roles:
        raise NotAuthorised(
            f"{protocol.id} is for {name_roles(roles)}; {member.peer} is in the swarm as {name_roles(member.roles)}",
            hint=_ASK_FOR_ROLE,
        )


def _is_current(certificate: Certificate, rules: Rules, now: float) -> bool:
    try:
        check_current(certificate, rules=rules, now=now)
    except NotAuthorised:
        return False
    return True
