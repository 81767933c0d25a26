"""The key and the files of the swarm's owner on this machine, which the owner may change while a
peer runs.

With them this peer certifies itself, and an issuer also admits others. So `swarm sign`,
`rotate-key` and `revoke` need no restart.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised, OutOfResources
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.membership.issuer import IssuedCertificates, Issuer, OwnerContents, OwnerFiles
from swarmnet_protocols.net import PeerId

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the files. A change counts once it is as old as that, because a
rotation replaces first the swarm file and then the key."""
SEEN_S = 60.0
"""Seconds between two records of which members are connected."""


class OwnKey:
    """The owner's key, used under the current rules. Made by :meth:`use`."""

    def __init__(self, owner: OwnerFiles, handshakes: Handshakes, issued: IssuedCertificates | None) -> None:
        self._owner = owner
        self._handshakes = handshakes
        self._membership = handshakes.membership
        self._issued = issued
        self.issuer: Issuer | None = None
        """Admits others; None if this peer is no issuer, or its key is not trusted now."""

    @classmethod
    @contextmanager
    def use(cls, owner: OwnerFiles, handshakes: Handshakes) -> Iterator["OwnKey"]:
        """Use the key under each new swarm file at once, before this peer's certificate is checked
        under the new rules, while the context is open.

        Raises ``ConfigError`` for the key of an issuer that the rules do not name.
        """
        membership = handshakes.membership
        with ExitStack() as stack:
            issued = None
            if owner.issued is not None:
                issued = stack.enter_context(IssuedCertificates.open(owner.issued))
            own = cls(owner, handshakes, issued)
            own._start_issuing()
            rules = membership.rules

            def on_change() -> None:
                nonlocal rules
                if rules is not membership.rules:
                    rules = membership.rules
                    own._take()

            membership.listeners.append(on_change)
            stack.callback(membership.listeners.remove, on_change)
            yield own

    def certify(self) -> bool:
        """Renew this peer's certificate if that is due. Returns whether the key may do so."""
        return self._owner.certify(self._membership)

    def _start_issuing(self) -> None:
        self.issuer = None
        if self._issued is not None and (key := self._owner.key()) is not None:
            membership = self._membership
            self.issuer = Issuer(key, membership.rules, self._issued, now=membership.clock())

    def _take(self) -> None:
        """Certify this peer by the key, and issue with it, under the current rules."""
        try:
            self.certify()
            self._start_issuing()
        except (ConfigError, OutOfResources) as error:
            _log.warning("the owner's key is not used: %s", error)

    async def follow(self) -> NoReturn:
        """Take over what the owner changes: swarm file, key and revocations."""
        used: OwnerContents | None = None
        before: OwnerContents | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            now = await asyncio.to_thread(self._owner.read)
            is_settled, before = now == before, now
            if now is None or now == used or not is_settled:
                continue
            used = now
            self._membership.adopt_swarm_file(now.swarm_file)
            self._take()
            if now.revocations:
                try:
                    self._membership.add_revocations([now.revocations])
                except (IntegrityError, NotAuthorised) as error:
                    _log.warning("the owner's revocation list is not used: %s", error)

    async def record_seen(self) -> NoReturn:
        """Record which members are connected, for `swarm members`."""
        while True:
            await asyncio.sleep(SEEN_S)
            if self._owner.issued is not None:
                peers, now = list(self._handshakes.admitted.by_peer), self._membership.clock()
                await asyncio.to_thread(_see, self._owner.issued, peers, now)


def _see(folder: Path, peers: Sequence[PeerId], now: float) -> None:
    """Record that ``peers`` are connected. The connection of the event loop's thread cannot be used
    in another one."""
    with IssuedCertificates.open(folder) as issued:
        issued.see(peers, now)
