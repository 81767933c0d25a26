"""What one peer has and knows of a swarm: the rules, its own certificate, and who is revoked."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised, OutOfResources
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.membership.certificates import MAX_CERTIFICATE_BYTES, Certificate, open_certificate
from swarmnet_protocols.membership.revocations import MAX_LIST_BYTES, Revocations
from swarmnet_protocols.membership.rules import Admission, Member, Rules, admit
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire.roles import ANY_ROLE

_log = logging.getLogger(__name__)

CERTIFICATE_NAME = "certificate"
REVOCATIONS_NAME = "revocations"
LOOK_S = 600.0
"""The longest sleep before the clock is read again: somebody may set it."""
_SEALED_BYTES = 256
"""What a signature adds to a statement, and room."""


class Revoked(NotAuthorised):
    """A list of revocations names the peer; ``evidence`` is that list, sealed."""

    def __init__(self, message: str, evidence: bytes) -> None:
        super().__init__(message, hint="ask whoever runs the swarm")
        self.evidence = evidence


class Membership:
    """Kept in ``folder``, if there is one, so that a certificate and what is revoked outlive the process."""

    def __init__(self, rules: Rules, peer: PeerId, clock: Clock, *, folder: Path | None = None) -> None:
        """Raises ``ConfigError`` for a folder that cannot be read."""
        self.rules = rules
        self.peer = peer
        self.clock = clock
        self.listeners: list[Callable[[], None]] = []
        """Called when our certificate, the rules or the revocations have changed."""
        self.adopt: Callable[[bytes], Rules] | None = None
        """Keeps a newer swarm file and gives its rules. Raises ``ConfigError`` or ``IntegrityError`` for one that will not do."""
        self.swarm_file: Callable[[], bytes] | None = None
        """Reads the swarm file that the rules come from. Raises ``ConfigError`` when it cannot."""
        self.certificate = b""
        """Our own, sealed; empty if we have none."""
        self._own: Certificate | None = None
        self._revocations = Revocations()
        self._folder = folder
        if folder is not None:
            self._read(folder)

    @property
    def is_public(self) -> bool:
        """Whether anybody is a member and nobody could revoke that: then there is nothing to be shown."""
        return self.rules.admission is Admission.OPEN and not self.rules.keys

    @property
    def revocations(self) -> Revocations:
        """Who is out, by the word of those whom the rules believe now."""
        return self._revocations.believed(rules=self.rules, now=self.clock())

    @property
    def me(self) -> Member:
        """Ourselves, as we would let us in. Raises ``NotAuthorised`` if we would not."""
        if self._own is None:
            self._own = self.open(self.certificate)
        return self.admit(self.peer, self._own)

    @property
    def renew_at(self) -> float | None:
        """When to ask for the next certificate; None without one."""
        return self._own.renew_at if self._own else None

    def check(self) -> None:
        """Raise ``NotAuthorised``, saying why, unless we are a member ourselves."""
        _ = self.me

    async def ended(self) -> NoReturn:
        """Wait until we are no member any more. Raises ``NotAuthorised``, saying why."""
        changed = asyncio.Event()
        self.listeners.append(changed.set)
        try:
            while True:
                left_s = self.me.until - self.clock()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(max(left_s, 1.0), LOOK_S)):
                        await changed.wait()
                changed.clear()
        finally:
            self.listeners.remove(changed.set)

    def open(self, sealed: bytes) -> Certificate | None:
        """The certificate somebody shows, None for an empty one. Raises ``NotAuthorised`` for one that will not do.

        Where others are members without one, one that will not do counts as none.
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
        """``peer`` as a member in whatever roles. Raises ``NotAuthorised``, or of it ``Revoked``."""
        revocations = self.revocations
        for signer in revocations.serials:
            named = revocations.of(signer)
            if named is not None and (why := Revocations([named]).why_out(peer, certificate)):
                raise Revoked(why, named.sealed)
        return admit(self.rules, certificate, peer, ANY_ROLE, revocations, self.clock())

    def take_swarm_file(self, data: bytes) -> None:
        """Go by the rules of a newer swarm file from now on. One that will not do, an older one too, changes nothing."""
        if self.adopt is None:
            return
        try:
            rules = self.adopt(data)
        except (ConfigError, IntegrityError) as error:
            _log.info("an issuer's swarm file is not taken: %s", error)
            return
        if rules.swarm == self.rules.swarm and rules != self.rules:
            self.rules = rules
            self._say_changed()

    def take_certificate(self, sealed: bytes) -> None:
        """Have a new certificate of our own. Raises ``NotAuthorised`` for one that will not do.

        Raises ``OutOfResources`` when it cannot be written; it counts all the same, as long as this process lives.
        """
        certificate = self.open(sealed)
        if certificate is None or certificate.peer != self.peer:
            raise NotAuthorised("this is no certificate for this peer")
        self.certificate, self._own = sealed, certificate
        self._say_changed()
        if self._folder is not None:
            try:
                write_whole(self._folder / CERTIFICATE_NAME, sealed)
            except OSError as error:
                raise OutOfResources(
                    f"cannot write the certificate into {self._folder}: {error.strerror}",
                    hint="look after the disk of this machine",
                ) from error

    def take_revocations(self, sealed: Iterable[bytes]) -> None:
        """Learn lists of revocations. Raises ``IntegrityError`` or ``NotAuthorised`` if one is not as it should be."""
        old = self.revocations
        learned = old.learn(sealed, rules=self.rules, now=self.clock())
        if learned is old:
            return
        self._revocations = learned
        self._say_changed()
        if self._folder is None:
            return
        for signer in learned.serials:
            new = learned.of(signer)
            if new is not None and new is not old.of(signer):
                try:
                    write_whole(self._folder / REVOCATIONS_NAME / signer.hex(), new.sealed)
                except OSError as error:  # others have it too: it is fetched again after a restart
                    _log.warning("cannot keep the revocations in %s: %s", self._folder, error.strerror)

    def _say_changed(self) -> None:
        for listener in list(self.listeners):
            listener()

    def _read(self, folder: Path) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                self.certificate = _read_file(
                    folder / CERTIFICATE_NAME, MAX_CERTIFICATE_BYTES + _SEALED_BYTES
                )
            for signer in self.rules.keys:
                # A signer who is not believed any more revokes nobody; a damaged file is fetched again.
                with contextlib.suppress(FileNotFoundError, IntegrityError, NotAuthorised):
                    sealed = _read_file(
                        folder / REVOCATIONS_NAME / signer.hex(), MAX_LIST_BYTES + _SEALED_BYTES
                    )
                    self._revocations = self._revocations.learn([sealed], rules=self.rules, now=self.clock())
        except OSError as error:
            raise ConfigError(
                f"cannot read the membership in {folder}: {error.strerror}", hint="choose another --data-dir"
            ) from error


def _read_file(path: Path, max_bytes: int) -> bytes:
    """What is in a file. A larger one is cut, and no signature holds for that."""
    with path.open("rb") as file:
        return file.read(max_bytes)
