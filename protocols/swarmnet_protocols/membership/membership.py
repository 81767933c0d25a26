"""Membership: decide whether a peer is a member, and keep this peer's certificate and revocation
lists.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised, OutOfResources
from swarmnet_protocols.machine.aio import within
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.membership.certificates import (
    MAX_CERTIFICATE_BYTES,
    RENEWABLE_S,
    Certificate,
    check_current,
    open_certificate,
)
from swarmnet_protocols.membership.revocations import MAX_LIST_BYTES, Revocations
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net import PeerId, ProtocolSpec
from swarmnet_protocols.wire.roles import ANY_ROLE, Role, name_roles

_log = logging.getLogger(__name__)

CERTIFICATE_NAME = "certificate"
REVOCATIONS_NAME = "revocations"
CLOCK_CHECK_S = 600.0
"""Longest sleep in seconds before the clock is read again, since somebody may set it."""
_ASK_FOR_INVITE = "ask the owner of the swarm for an invite"
_ASK_FOR_ROLE = "ask the owner of the swarm for an invite with that role"
_SEALED_BYTES = 256
"""Bytes that a signature adds to a message, rounded up."""


class Revoked(NotAuthorised):
    """A peer, its certificate or its invite is on ``revocation_list``, a sealed list."""

    def __init__(self, message: str, revocation_list: bytes) -> None:
        super().__init__(message, hint="ask the owner of the swarm")
        self.revocation_list = revocation_list


@dataclass(frozen=True)
class Member:
    """A peer that was admitted."""

    peer: PeerId
    roles: frozenset[Role]
    until: float = math.inf
    """Unix time at which its certificate ends."""


class Membership:
    """The proof of this peer's membership, and the rules for other peers.

    With a ``folder``, certificate and revocation lists outlive the process.
    """

    def __init__(
        self,
        rules: Rules,
        peer: PeerId,
        clock: Clock,
        *,
        folder: Path | None = None,
        adopt: Callable[[bytes], Rules] | None = None,
        swarm_file: Callable[[], bytes] | None = None,
    ) -> None:
        """Load certificate and lists from ``folder``. Raises ``ConfigError`` if it cannot be read.

        - ``adopt`` stores a newer swarm file and returns its rules. It raises ``ConfigError`` or
          ``IntegrityError`` for an invalid or older file.
        - ``swarm_file`` reads the swarm file that the rules come from. It raises ``ConfigError`` if
          that fails.
        """
        self.rules = rules
        self.peer = peer
        self.clock = clock
        self.listeners: list[Callable[[], None]] = []
        """Callbacks for a change of the certificate, the rules or the revocations."""
        self.adopt = adopt
        self.swarm_file = swarm_file
        self.certificate = b""
        """The sealed certificate of this peer; empty without one."""
        self._own: Certificate | None = None
        self._revocations = Revocations()
        self._doubted = frozenset[bytes]()
        """Signers whose list is from the folder. It may be outdated: see :attr:`me`."""
        self._folder = folder
        if folder is not None:
            self._read(folder)

    @property
    def is_public(self) -> bool:
        """True if every peer is a member and no key can revoke one. Then there are no
        handshakes."""
        return self.rules.admission is Admission.OPEN and not self.rules.keys

    @property
    def revocations(self) -> Revocations:
        """The revocation lists whose signers the rules trust now."""
        return self._revocations.trusted(rules=self.rules, now=self.clock())

    @property
    def me(self) -> Member:
        """Return this peer as a member, by the same decision as for any other peer.

        A list that revokes this peer may be outdated in two cases. It is older than the
        certificate: no issuer certifies a revoked peer. Or it comes from the folder, and no other
        peer has shown it again. Peers with a newer list admit this peer and hand that list over.
        Raises ``NotAuthorised`` if this peer is not a member.
        """
        if self._own is None:
            self._own = self.open(self.certificate)
        issued_at = self._own.issued_at if self._own is not None else -math.inf
        revocations = self.revocations.pardoning(self.peer, issued_at, self._doubted)
        return admit(self.rules, self._own, self.peer, ANY_ROLE, revocations, self.clock())

    @property
    def renew_at(self) -> float | None:
        """Unix time at which to renew the certificate; None without one."""
        return self._own.renew_at if self._own else None

    def check(self) -> None:
        """Raise ``NotAuthorised`` with the reason unless this peer is a member."""
        _ = self.me

    async def ended(self) -> NoReturn:
        """Wait until this peer is no longer a member. Raises ``NotAuthorised`` with the reason."""
        changed = asyncio.Event()
        self.listeners.append(changed.set)
        try:
            while True:
                left_s = self.me.until - self.clock()
                await within(min(max(left_s, 1.0), CLOCK_CHECK_S), changed.wait())
                changed.clear()
        finally:
            self.listeners.remove(changed.set)

    def open(self, sealed: bytes) -> Certificate | None:
        """Open the certificate that a peer shows; None for an empty one.

        Where members need no certificate, an expired or untrusted one counts as none, but a damaged
        one is always an error. Raises ``NotAuthorised`` for an invalid certificate.
        """
        if not sealed:
            return None
        try:
            return open_certificate(sealed, rules=self.rules, now=self.clock())
        except IntegrityError as error:
            raise NotAuthorised(f"the certificate is damaged: {error}") from error
        except NotAuthorised:
            if self.rules.needs_certificate:
                raise
            return None

    def admit(self, peer: PeerId, certificate: Certificate | None) -> Member:
        """Return ``peer`` as a member in any role. Raises as :func:`admit` does."""
        return admit(self.rules, certificate, peer, ANY_ROLE, self.revocations, self.clock())

    def adopt_swarm_file(self, data: bytes) -> None:
        """Adopt the rules of a newer swarm file. An invalid or older one is logged and ignored."""
        if self.adopt is None:
            return
        try:
            rules = self.adopt(data)
        except (ConfigError, IntegrityError) as error:
            _log.info("the swarm file of an issuer is not used: %s", error)
            return
        if rules.swarm == self.rules.swarm and rules != self.rules:
            self.rules = rules
            self._notify_listeners()

    def replace_certificate(self, sealed: bytes) -> None:
        """Replace the certificate of this peer.

        Raises ``NotAuthorised`` for a certificate that is invalid or for another peer. Raises
        ``OutOfResources`` if it cannot be written; this process uses it anyway.
        """
        certificate = self.open(sealed)
        if certificate is None or not certificate.roles_of(self.peer):
            raise NotAuthorised("this is not a certificate for this peer")
        self.certificate, self._own = sealed, certificate
        self._notify_listeners()
        if self._folder is not None:
            try:
                write_whole(self._folder / CERTIFICATE_NAME, sealed)
            except OSError as error:
                raise OutOfResources(
                    f"cannot write the certificate into {self._folder}: {error.strerror}",
                    hint="check the disk of this machine",
                ) from error

    def add_revocations(self, sealed: Iterable[bytes]) -> None:
        """Take the sealed lists that are newer.

        Raises ``IntegrityError`` or ``NotAuthorised`` if one is invalid.
        """
        old, given = self.revocations, list(sealed)
        updated = old.updated(given, rules=self.rules, now=self.clock())
        shown = {each for each in self._doubted if (held := updated.of(each)) and held.sealed in given}
        if updated is old and not shown:
            return
        self._revocations, self._doubted = updated, self._doubted - shown
        self._notify_listeners()
        if self._folder is None:
            return
        for signer in updated.serials:
            new = updated.of(signer)
            if new is not None and new is not old.of(signer):
                try:
                    write_whole(self._folder / REVOCATIONS_NAME / signer.hex(), new.sealed)
                except OSError as error:  # after a restart it is fetched again
                    _log.warning("cannot write the revocations to %s: %s", self._folder, error.strerror)

    def _notify_listeners(self) -> None:
        for listener in list(self.listeners):
            listener()

    def _read(self, folder: Path) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                self.certificate = _read_file(
                    folder / CERTIFICATE_NAME, MAX_CERTIFICATE_BYTES + _SEALED_BYTES
                )
            for signer in self.rules.keys:
                # The list of a signer that is not trusted is ignored; a damaged one is fetched
                # again.
                with contextlib.suppress(FileNotFoundError, IntegrityError, NotAuthorised):
                    sealed = _read_file(
                        folder / REVOCATIONS_NAME / signer.hex(), MAX_LIST_BYTES + _SEALED_BYTES
                    )
                    self._revocations = self._revocations.updated(
                        [sealed], rules=self.rules, now=self.clock()
                    )
            self._doubted = frozenset(self._revocations.serials)
        except OSError as error:
            raise ConfigError(
                f"cannot read the membership in {folder}: {error.strerror}", hint="choose another --data-dir"
            ) from error


def admit(
    rules: Rules,
    certificate: Certificate | None,
    peer: PeerId,
    needed: frozenset[Role],
    revocations: Revocations,
    now: float,
) -> Member:
    """Return ``peer`` as a member with at least one of the roles ``needed``.

    - ``peer``: the id that the transport has authenticated.
    - ``certificate``: the result of ``open_certificate``. Where members need none, a certificate
      that is not valid at ``now`` is ignored.

    Raises ``Revoked`` if a list names the peer, its certificate or its invite. Raises
    ``NotAuthorised`` with the reason if ``peer`` is not a member or lacks the roles.
    """
    if certificate is not None and not rules.needs_certificate and not _is_current(certificate, rules, now):
        certificate = None
    if certificate is not None:
        check_current(certificate, rules=rules, now=now)
        check_bearer(certificate, peer)
    if revocation := revocations.find_revocation(peer, certificate):
        raise Revoked(*revocation)
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
        roles |= certificate.roles_of(peer)
    if not roles & needed:
        raise NotAuthorised(
            f"this takes the role {name_roles(needed).replace(', ', ' or ')}; the peer has {name_roles(roles)}",
            hint=_ASK_FOR_ROLE,
        )
    return Member(peer, roles, certificate.not_after if certificate else math.inf)


def check_bearer(certificate: Certificate, peer: PeerId) -> None:
    """Raise ``NotAuthorised`` unless ``certificate`` names ``peer``."""
    if not certificate.roles_of(peer):
        raise NotAuthorised("the certificate is for another peer", hint=_ASK_FOR_INVITE)


def check_renewable(
    rules: Rules, sealed: bytes, peer: PeerId, revocations: Revocations, now: float
) -> Certificate:
    """Return the certificate in ``sealed``, which ``peer`` may renew. It may have ended
    ``RENEWABLE_S`` ago, so that members return from an absence.

    Raises ``NotAuthorised``, and ``IntegrityError`` for a damaged certificate.
    """
    certificate = open_certificate(sealed, rules=rules, now=now, ended_s=RENEWABLE_S)
    check_bearer(certificate, peer)
    if revocation := revocations.find_revocation(peer, certificate):
        raise Revoked(*revocation)
    return certificate


def check_role(member: Member, roles: frozenset[Role], protocol: ProtocolSpec) -> None:
    """Raise ``NotAuthorised`` unless ``member`` has one of ``roles``, as ``protocol`` needs."""
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


def _read_file(path: Path, max_bytes: int) -> bytes:
    """Read at most ``max_bytes`` of a file. The signature of a truncated file is not valid."""
    with path.open("rb") as file:
        return file.read(max_bytes)
