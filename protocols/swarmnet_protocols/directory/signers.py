"""The signers of the records of a private swarm: members whose role fits the kind of record.

Any member with a role in the directory may store records, also records of others. So every peer
that stores or reads a record checks that its signer is a member. It uses the certificate in the
record, the list in the swarm file, and the revocations.
"""

from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.membership.certificates import Certificate
from swarmnet_protocols.membership.membership import Membership, admit
from swarmnet_protocols.net.protocol_ids import DHT_STORE
from swarmnet_protocols.wire.roles import Role

_ROLES = {
    "hosts/": frozenset({Role.HOST}),
    "experts/": frozenset({Role.HOST}),
    "train/": frozenset({Role.TRAINER}),
}
"""Topic prefix → roles that may publish under it. Under other topics, every role that may store
records may also publish."""
_MAX_OPENED = 2048
"""Most certificates that are remembered as checked: at most 3 MiB."""


class Signers:
    """Checks the signers of records by the current rules of one swarm."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._opened: Latest[bytes, Certificate] = Latest(_MAX_OPENED)

    def check(self, record: Record) -> None:
        """Check that the signer of a verified ``record`` is a member that may publish it.

        Raises ``NotAuthorised``.
        """
        membership = self._membership
        if membership.is_public:
            return
        roles = next((_ROLES[each] for each in _ROLES if record.topic.startswith(each)), DHT_STORE.roles)
        certificate = self._certificate(record.certificate)
        admit(
            membership.rules,
            certificate,
            record.peer_id,
            roles,
            membership.revocations,
            membership.clock(),
        )

    def admits(self, record: Record) -> bool:
        """Return whether ``check`` accepts ``record``."""
        try:
            self.check(record)
        except NotAuthorised:
            return False
        return True

    def _certificate(self, sealed: bytes) -> Certificate | None:
        """Open a certificate, or return it as opened before.

        The caller passes it to ``admit``, which checks times and signers every time. Raises
        ``NotAuthorised`` for an invalid certificate.
        """
        certificate = self._opened.get(sealed) or self._membership.open(sealed)
        if certificate is not None:
            self._opened[sealed] = certificate
        return certificate
