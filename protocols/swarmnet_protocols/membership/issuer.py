"""An issuer gives new certificates for invites and for certificates that will expire, and records
each on disk."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarmnet_protocols.errors import ConfigError, NotAuthorised, OutOfResources
from swarmnet_protocols.membership.certificates import NO_PEER, Admittance, issue, open_certificate, peers_of
from swarmnet_protocols.membership.invites import Grant, open_redemption
from swarmnet_protocols.membership.membership import Revoked, check_renewable
from swarmnet_protocols.membership.revocations import Revocations
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.membership.signed import Signer
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import Role

ISSUED_NAME = "issued.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS issued (
    peer TEXT NOT NULL,
    invite BLOB NOT NULL,
    roles TEXT NOT NULL,
    first_at INTEGER NOT NULL,
    certificate BLOB NOT NULL,
    label TEXT NOT NULL DEFAULT '',
    client TEXT NOT NULL DEFAULT '',
    seen_at INTEGER NOT NULL DEFAULT 0,
    name TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (invite, peer)
) STRICT, WITHOUT ROWID
"""
_ADDED = {
    "label": "TEXT NOT NULL DEFAULT ''",
    "client": "TEXT NOT NULL DEFAULT ''",
    "seen_at": "INTEGER NOT NULL DEFAULT 0",
    "name": "TEXT NOT NULL DEFAULT ''",
}
"""Columns that the file of an older version lacks."""
_SELECT = "SELECT peer, invite, roles, first_at, certificate, label, client, seen_at, name FROM issued"


@dataclass(frozen=True)
class Issued:
    """An admitted peer, its invite, and its newest certificate."""

    peer: PeerId
    invite: bytes
    roles: frozenset[Role]
    first_at: int
    certificate: bytes
    """Sealed."""
    label: str = ""
    """The owner's note in the invite."""
    client: PeerId = NO_PEER
    """The client on the same machine; empty without one."""
    seen_at: int = 0
    """Unix time at which the issuer last had a connection to the member; 0 if never."""
    name: str = ""
    """The name that the node gave itself when it was last seen."""


class IssuedCertificates:
    """Records of peers and the invites that they redeemed, in one SQLite file (0600).

    A method returns once its change is on disk. Methods raise ``OutOfResources`` when the file
    cannot be read or written.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    @contextmanager
    def open(cls, directory: Path) -> Iterator["IssuedCertificates"]:
        """Open the records in ``directory``. Raises ``ConfigError`` for a file in another
        format."""
        path = directory / ISSUED_NAME
        try:
            path.touch(mode=0o600)
            # Threads use the connection one after another.
            with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as connection:
                connection.execute(_SCHEMA)
                has = {row[1] for row in connection.execute("PRAGMA table_info(issued)")}
                for column in _ADDED.keys() - has:
                    connection.execute(f"ALTER TABLE issued ADD COLUMN {column} {_ADDED[column]}")
                yield cls(connection)
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{path} cannot be used as a list of members: {error}",
                hint="restore it from a backup; without it, uses of invites are counted from zero",
            ) from error

    def members(self) -> Sequence[Issued]:
        """Return every admitted peer, the oldest first."""
        with self._transaction():
            rows = self._connection.execute(f"{_SELECT} ORDER BY first_at, peer, invite").fetchall()
        return [_read(row) for row in rows]

    def find(self, peer: PeerId, invite: bytes) -> Issued | None:
        with self._transaction():
            row = self._connection.execute(
                f"{_SELECT} WHERE peer = ? AND invite = ?", (peer, invite)
            ).fetchone()
        return _read(row) if row else None

    def see(self, peers: Mapping[PeerId, str], now: float) -> None:
        """Record that nodes and clients of members are connected, with their names."""
        with self._transaction("IMMEDIATE"):
            self._connection.executemany(
                "UPDATE issued SET seen_at = :now, name = iif(peer = :peer, :name, name)"
                " WHERE peer = :peer OR client = :peer",
                [{"now": int(now), "peer": peer, "name": name} for peer, name in peers.items()],
            )

    def record(self, issued: Issued, *, uses: int | None) -> bool:
        """Record a certificate, unless ``uses`` other peers have redeemed the invite.

        Returns whether it was recorded. ``uses`` None: no limit.
        """
        with self._transaction("IMMEDIATE"):
            if uses is not None:
                (used,) = self._connection.execute(
                    "SELECT COUNT(*) FROM issued WHERE invite = ? AND peer != ?", (issued.invite, issued.peer)
                ).fetchone()
                if used >= uses:
                    return False
            self._connection.execute(
                "INSERT INTO issued (peer, invite, roles, first_at, certificate, label, client, seen_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET roles = excluded.roles, certificate = excluded.certificate,"
                " client = excluded.client",
                (
                    issued.peer,
                    issued.invite,
                    " ".join(issued.roles),
                    issued.first_at,
                    issued.certificate,
                    issued.label,
                    issued.client,
                    issued.seen_at,
                ),
            )
        return True

    @contextmanager
    def _transaction(self, kind: str = "DEFERRED") -> Iterator[None]:
        """Run a transaction. Raises ``OutOfResources`` when the file cannot be read or written."""
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
                f"the list of members cannot be used: {error}", hint="check the disk of the issuer"
            ) from error


class Issuer:
    """Signs certificates with a key that the rules of the swarm trust.

    Issuers do not share records, so each issuer allows the full number of uses of an invite.
    """

    def __init__(self, key: Signer, rules: Rules, issued: IssuedCertificates, *, now: float) -> None:
        """Set up the issuer. Raises ``ConfigError`` for a key that the swarm file does not name."""
        if not rules.trusts(key.public_key, now):
            raise ConfigError(
                "this key may not issue certificates for this swarm",
                hint=f'list "ed25519:{key.public_key.hex()}" under issuers in swarm.toml and sign it',
            )
        self.key = key
        self._rules = rules
        self._issued = issued

    def redeem(self, request: pb.Redeem, peer: PeerId, revocations: Revocations, now: float) -> bytes:
        """Return a sealed certificate for ``peer``, the id that the transport has authenticated.

        A peer may redeem an invite again, which counts as the same use. Raises ``NotAuthorised`` if
        ``peer`` may not redeem the invite, and ``IntegrityError`` for a damaged request.
        """
        grant, node, client = check_redemption(request, peer, self._rules, revocations, now)
        admittance = Admittance(node, grant.terms.roles, grant.id, grant.signer, client=client)
        return self._certify(admittance, now, grant)

    def renew(self, request: pb.Renew, peer: PeerId, revocations: Revocations, now: float) -> bytes:
        """Return the successor of a certificate of ``peer``.

        Raises ``NotAuthorised`` or ``IntegrityError``.
        """
        sealed = request.certificate
        certificate = check_renewable(self._rules, sealed, peer, revocations, now)
        node, client = peers_of(request.machine, peer, self._rules.swarm)
        if node != certificate.peer or not client:
            node, client = certificate.peer, certificate.client
        first = certificate.first or sealed
        renewal = Admittance(node, certificate.roles, certificate.invite, first=first, client=client)
        return self._certify(renewal, now, None)

    def _certify(self, admittance: Admittance, now: float, grant: Grant | None) -> bytes:
        last = self._issued.find(admittance.peer, admittance.invite)
        # A fresh certificate that lacks the client is replaced once.
        has_client = last is not None and (last.client or not admittance.client)
        if last and has_client and last.roles == admittance.roles and self._is_fresh(last.certificate, now):
            return last.certificate
        sealed = issue(
            admittance,
            swarm=self._rules.swarm,
            key=self.key,
            now=now,
            lifetime_s=self._rules.certificate_lifetime_s,
        )
        issued = Issued(
            admittance.peer,
            admittance.invite,
            admittance.roles,
            int(now),
            sealed,
            grant.terms.label if grant else "",
            admittance.client,
        )
        if not self._issued.record(issued, uses=grant.terms.uses if grant else None):
            raise NotAuthorised("this invite is used up", hint="ask for a new one")
        return sealed

    def _is_fresh(self, sealed: bytes, now: float) -> bool:
        """Tell whether a certificate is new enough to be returned again.

        A peer that asks often then costs no signature and no write.
        """
        try:
            return now < open_certificate(sealed, rules=self._rules, now=now).renew_at
        except NotAuthorised:
            return False


def check_redemption(
    request: pb.Redeem, peer: PeerId, rules: Rules, revocations: Revocations, now: float
) -> tuple[Grant, PeerId, PeerId]:
    """Return the grant in ``request``, which ``peer`` may redeem while the grant has uses left, and
    the node and the client that it admits.

    ``peer`` is the id that the transport has authenticated. Raises ``NotAuthorised`` if ``peer``
    may not redeem the grant, and ``IntegrityError`` for a damaged request.
    """
    grant, node, client = open_redemption(request, peer, rules=rules, now=now)
    if revocations.revokes_invite(grant.id):
        raise NotAuthorised("this invite was revoked", hint="ask for a new one")
    for each in (node, client):
        if revocation := revocations.find_revocation(each, None):
            raise Revoked(*revocation)
    return grant, node, client


def _read(row: tuple[str, bytes, str, int, bytes, str, str, int, str]) -> Issued:
    peer, invite, roles, first_at, certificate, label, client, seen_at, name = row
    return Issued(
        PeerId(peer),
        invite,
        frozenset(map(Role, roles.split())),
        first_at,
        certificate,
        label,
        PeerId(client),
        seen_at,
        name,
    )
