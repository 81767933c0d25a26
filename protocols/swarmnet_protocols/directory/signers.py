"""Who may sign records of a private swarm: members, each kind of record by those whose role has to
do with it.

Any member with a role in the directory may store records, also those of others. So every peer that
stores or reads a record checks that its signer is a member: by the certificate in the record, the
list in the swarm file, and the revocations.
"""

from collections import OrderedDict

from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.membership.certificates import Certificate
from swarmnet_protocols.membership.membership import Membership, admit
from swarmnet_protocols.net.protocol_ids import DHT_STORE
from swarmnet_protocols.wire.roles import Role

_ROLES = {
    "hosts/": frozenset({Role.HOST}),
    "experts/": frozenset({Role.HOST}),
    "train/": frozenset({Role.TRAINER}),
}
"""The roles whose members publish under topics that begin so. Elsewhere: every role that stores
records."""
_MAX_OPENED = 2048
"""Certificates whose signatures are not checked again: at most 3 MiB."""


class Signers:
    """Checks the signers of records by the rules of one swarm, as this peer knows them now."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._opened: OrderedDict[bytes, Certificate] = OrderedDict()

    def check(self, record: Record) -> None:
        """Raise ``NotAuthorised`` unless the signer of ``record``, which is verified, is a member
        that may publish it."""
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
        """Whether ``check`` accepts ``record``."""
        try:
            self.check(record)
        except NotAuthorised:
            return False
        return True

    def _certificate(self, sealed: bytes) -> Certificate | None:
        """The certificate in ``sealed``; ``admit`` checks its times and signers at every use.
        Raises ``NotAuthorised`` for an invalid one."""
        if (known := self._opened.get(sealed)) is not None:
            self._opened.move_to_end(sealed)
            return known
        certificate = self._membership.open(sealed)
        if certificate is not None:
            self._opened[sealed] = certificate
            while len(self._opened) > _MAX_OPENED:
                self._opened.popitem(last=False)
        return certificate
