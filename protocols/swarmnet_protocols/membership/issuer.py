"""An issuer: turns invites and ending certificates into new certificates, and remembers durably whom it let in."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarmnet_protocols.errors import ConfigError, NotAuthorised, OutOfResources
from swarmnet_protocols.membership.certificates import Admittance, issue, open_certificate
from swarmnet_protocols.membership.invites import Grant, open_redemption
from swarmnet_protocols.membership.revocations import Revocations
from swarmnet_protocols.membership.rules import Rules, admit
from swarmnet_protocols.membership.signed import Signer
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import ANY_ROLE, Role

LEDGER_NAME = "issued.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS issued (
    peer TEXT NOT NULL,
    invite BLOB NOT NULL,
    roles TEXT NOT NULL,
    first_at INTEGER NOT NULL,
    certificate BLOB NOT NULL,
    PRIMARY KEY (invite, peer)
) STRICT, WITHOUT ROWID
"""


@dataclass(frozen=True)
class Issued:
    """Somebody who was let in: the invite that was used and the newest certificate that goes back to it."""

    peer: PeerId
    invite: bytes
    roles: frozenset[Role]
    first_at: int
    certificate: bytes
    """Sealed."""


class Ledger:
    """Who was let in by which invite, in one SQLite file (0600). What it has answered, it has written to disk.

    Methods raise ``OutOfResources`` when the file cannot be read or written.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    @contextmanager
    def open(cls, directory: Path) -> Iterator["Ledger"]:
        """The ledger in ``directory``. Raises ``ConfigError`` for a file that is none."""
        path = directory / LEDGER_NAME
        try:
            path.touch(mode=0o600)
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute(_SCHEMA)
                yield cls(connection)
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{path} cannot be used as a list of members: {error}",
                hint="restore it from a backup; without it, uses of invites are counted anew",
            ) from error

    def members(self) -> Sequence[Issued]:
        """Everybody who was let in, oldest first."""
        with self._transaction():
            rows = self._connection.execute(
                "SELECT peer, invite, roles, first_at, certificate FROM issued ORDER BY first_at, peer, invite"
            ).fetchall()
        return [_read(row) for row in rows]

    def find(self, peer: PeerId, invite: bytes) -> Issued | None:
        with self._transaction():
            row = self._connection.execute(
                "SELECT peer, invite, roles, first_at, certificate FROM issued WHERE peer = ? AND invite = ?",
                (peer, invite),
            ).fetchone()
        return _read(row) if row else None

    def admit(self, issued: Issued, *, uses: int | None) -> bool:
        """Note a certificate. False, and nothing is noted, if ``uses`` other peers have used the invite already."""
        with self._transaction("IMMEDIATE"):
            if uses is not None:
                (used,) = self._connection.execute(
                    "SELECT COUNT(*) FROM issued WHERE invite = ? AND peer != ?", (issued.invite, issued.peer)
                ).fetchone()
                if used >= uses:
                    return False
            self._connection.execute(
                "INSERT INTO issued VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET roles = excluded.roles, certificate = excluded.certificate",
                (issued.peer, issued.invite, " ".join(issued.roles), issued.first_at, issued.certificate),
            )
        return True

    @contextmanager
    def _transaction(self, kind: str = "DEFERRED") -> Iterator[None]:
        """All of it or nothing. Raises ``OutOfResources`` when the disk does not let us."""
        try:
            self._connection.execute(f"BEGIN {kind}")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise OutOfResources(
                f"the list of members cannot be used: {error}", hint="look after the disk of the issuer"
            ) from error


class Issuer:
    """Answers who asks to be let in, with a key that the swarm's rules believe.

    Each issuer counts the uses of an invite for itself.
    """

    def __init__(self, key: Signer, rules: Rules, ledger: Ledger, *, now: float) -> None:
        """Raises ``ConfigError`` for a key that the swarm file does not name."""
        if not rules.believe(key.public_key, now):
            raise ConfigError(
                "this key may not issue certificates for this swarm",
                hint=f'list "ed25519:{key.public_key.hex()}" under issuers in swarm.toml and sign it',
            )
        self._key = key
        self._rules = rules
        self._ledger = ledger

    def redeem(self, request: pb.Redeem, peer: PeerId, revocations: Revocations, now: float) -> bytes:
        """A sealed certificate for ``peer``, which is the id the transport has proven.

        Asking again gives a certificate again and uses nothing up. Raises ``NotAuthorised`` or ``IntegrityError``.
        """
        grant = open_redemption(request, peer, rules=self._rules, now=now)
        if revocations.revokes_invite(grant.id):
            raise NotAuthorised("this invite was revoked", hint="ask for a new one")
        if why := revocations.why_out(peer, None):
            raise NotAuthorised(why, hint="ask whoever runs the swarm")
        return self._certify(Admittance(peer, grant.terms.roles, grant.id, grant.signer), now, grant)

    def renew(self, sealed: bytes, peer: PeerId, revocations: Revocations, now: float) -> bytes:
        """The successor of a certificate of ``peer`` that is still valid. Raises ``NotAuthorised`` or ``IntegrityError``."""
        certificate = open_certificate(sealed, rules=self._rules, now=now)
        admit(self._rules, certificate, peer, ANY_ROLE, revocations, now)
        renewal = Admittance(peer, certificate.roles, certificate.invite, first=certificate.first or sealed)
        return self._certify(renewal, now, None)

    def _certify(self, admittance: Admittance, now: float, grant: Grant | None) -> bytes:
        last = self._ledger.find(admittance.peer, admittance.invite)
        if last and last.roles == admittance.roles and self._is_fresh(last.certificate, now):
            return last.certificate
        sealed = issue(
            admittance,
            swarm=self._rules.swarm,
            key=self._key,
            now=now,
            lifetime_s=self._rules.certificate_lifetime_s,
        )
        issued = Issued(admittance.peer, admittance.invite, admittance.roles, int(now), sealed)
        if not self._ledger.admit(issued, uses=grant.terms.uses if grant else None):
            raise NotAuthorised("this invite is used up", hint="ask for a new one")
        return sealed

    def _is_fresh(self, sealed: bytes, now: float) -> bool:
        """Whether a certificate can be given again: so who asks often costs no signatures and no writes."""
        try:
            return now < open_certificate(sealed, rules=self._rules, now=now).renew_at
        except NotAuthorised:
            return False


def _read(row: tuple[str, bytes, str, int, bytes]) -> Issued:
    peer, invite, roles, first_at, certificate = row
    return Issued(PeerId(peer), invite, frozenset(map(Role, roles.split())), first_at, certificate)
