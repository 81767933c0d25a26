"""The key and the files of the swarm's owner on this machine, which the owner may change while a
peer runs.

With them this peer certifies itself, and an issuer also admits others. So `swarm sign`,
`rotate-key` and `revoke` need no restart.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised, OutOfResources
from swarmnet_protocols.machine.aio import in_background, persist
from swarmnet_protocols.membership.certificates import NO_PEER, Admittance, issue
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.membership.issuer import IssuedCertificates, Issuer
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.membership.signed import Signer
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire.roles import ANY_ROLE

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the files. A change counts once it is that old, because a rotation
replaces first the swarm file and then the key."""
SEEN_S = 60.0
"""Seconds between two records of the connected members."""


@dataclass(frozen=True)
class OwnerFiles:
    """Files of this machine that the owner of the swarm may change while a peer runs."""

    swarm_file: Callable[[], bytes]
    """Reads the file that the owner signs. Raises ``ConfigError``."""
    revocations: Callable[[], bytes]
    """Reads the owner's revocation list; empty without one. Raises ``ConfigError``."""
    key: Callable[[], Signer | None]
    """Reads the key of the authority or an issuer; None if the owner keeps none here. Raises
    ``ConfigError``."""
    client: PeerId = NO_PEER
    """The client on this machine, which the certificate names too; empty without one."""
    issued: Path | None = None
    """Folder for the records of an issuer. None: this peer certifies itself only."""
    paths: tuple[Path, ...] = ()
    """The files that these functions read. When one changes, all are read again."""

    def read(self) -> tuple[bytes, bytes, bytes] | None:
        """Return the swarm file, the public key and the revocations; None if they cannot be read
        now."""
        try:
            key = self.key()
            return self.swarm_file(), key.public_key if key else b"", self.revocations()
        except ConfigError:
            return None

    def stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return inode, size and time of each file, or None for a missing file."""
        return tuple(map(_stamp, self.paths))

    def certify(self, membership: Membership) -> bool:
        """Give ``membership`` a certificate by the key in all roles, if it needs one or a renewal
        is due. Returns whether the key may do so.
        """
        key, rules, now = self.key(), membership.rules, membership.clock()
        if key is None or not rules.trusts(key.public_key, now):
            return False
        with suppress(NotAuthorised):
            membership.check()
            if not membership.certificate or now < (membership.renew_at or 0.0):
                return True
        admittance = Admittance(membership.peer, ANY_ROLE, client=self.client)
        membership.replace_certificate(
            issue(admittance, swarm=rules.swarm, key=key, now=now, lifetime_s=rules.certificate_lifetime_s)
        )
        return True


class OwnKey:
    """The owner's key, used under the current rules."""

    def __init__(self, owner: OwnerFiles, handshakes: Handshakes) -> None:
        self._owner = owner
        self._handshakes = handshakes
        self._membership = handshakes.membership
        self._rules = self._membership.rules
        """The rules under which the key was last used."""
        self._issued: IssuedCertificates | None = None
        self.issuer: Issuer | None = None
        """Admits others; None if this peer is no issuer, or its key is not trusted now."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["OwnKey"]:
        """Use the key and follow the owner's files while the context is open.

        The key is used under a new swarm file at once, before this peer's certificate is checked
        under the new rules. Raises ``ConfigError`` for the key of an issuer that the rules do not
        name.
        """
        loops: list[Callable[[], Coroutine[Any, Any, NoReturn]]] = [self._follow]
        with ExitStack() as stack:
            if self._owner.issued is not None:
                self._issued = stack.enter_context(IssuedCertificates.open(self._owner.issued))
                loops.append(partial(self._record_seen, self._owner.issued))
            self._start_issuing()
            listeners = self._membership.listeners
            listeners.append(self._on_change)
            stack.callback(listeners.remove, self._on_change)
            async with in_background(*(persist("the owner's key", each) for each in loops)):
                yield self

    def certify(self) -> bool:
        """Renew this peer's certificate if that is due. Returns whether the key may do so."""
        return self._owner.certify(self._membership)

    def _start_issuing(self) -> None:
        self.issuer = None
        if self._issued is not None and (key := self._owner.key()) is not None:
            membership = self._membership
            self.issuer = Issuer(key, membership.rules, self._issued, now=membership.clock())

    def _on_change(self) -> None:
        if self._rules is not self._membership.rules:
            self._rules = self._membership.rules
            self._take()

    def _take(self) -> None:
        """Certify this peer by the key, and issue with it, under the current rules."""
        try:
            self.certify()
            self._start_issuing()
        except (ConfigError, OutOfResources) as error:
            _log.warning("the owner's key is not used: %s", error)

    async def _follow(self) -> NoReturn:
        """Take over what the owner changes: swarm file, key and revocations."""
        used: tuple[object, ...] | None = None
        before: tuple[object, ...] | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            now = await asyncio.to_thread(self._owner.stamps)
            is_settled, before = now == before, now
            if now == used or not is_settled:
                continue
            files = await asyncio.to_thread(self._owner.read)
            if files is None:
                continue
            used = now
            swarm_file, _, revocations = files
            self._membership.adopt_swarm_file(swarm_file)
            self._take()
            if revocations:
                try:
                    self._membership.add_revocations([revocations])
                except (IntegrityError, NotAuthorised) as error:
                    _log.warning("the owner's revocation list is not used: %s", error)

    async def _record_seen(self, folder: Path) -> NoReturn:
        """Record which members are connected, for `swarm members`."""
        while True:
            await asyncio.sleep(SEEN_S)
            admitted, now = self._handshakes.admitted.by_peer, self._membership.clock()
            peers = {peer: each.name for peer, each in admitted.items()}
            await asyncio.to_thread(_see, folder, peers, now)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _see(folder: Path, peers: Mapping[PeerId, str], now: float) -> None:
    """Record that ``peers`` are connected. The connection of the event loop's thread cannot be used
    in another one."""
    with IssuedCertificates.open(folder) as issued:
        issued.see(peers, now)
