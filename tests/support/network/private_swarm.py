"""A private swarm on a simulated network: an authority, and members with the certificates that a
test chooses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

from swarmnet_protocols.membership.certificates import Admittance, issue
from swarmnet_protocols.membership.guarded_transport import GuardedTransport
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.membership.revocations import RevokedIds, sign_list
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire.roles import Role
from tests.support.network.memory_network import MemoryNetwork, MemoryTransport

EPOCH = 1_800_000_000.0
AUTHORITY = Identity.from_seed(b"authority")
LIFETIME_S = 24 * 3600.0


def virtual_clock() -> float:
    """Unix time that advances with the loop's clock."""
    return EPOCH + asyncio.get_running_loop().time()


def identity_of(name: str) -> Identity:
    return Identity.from_seed(name.encode())


@dataclass
class Someone:
    """A peer, member or not, with its handshakes and the transport below them."""

    identity: Identity
    raw: MemoryTransport
    transport: GuardedTransport
    handshakes: Handshakes
    membership: Membership

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id


@dataclass
class PrivateSwarm:
    """The authority of a private swarm, and its network."""

    rules: Rules = field(
        default_factory=lambda: Rules(bytes(32), Admission.CERTIFICATE, keys={AUTHORITY.public_key: inf})
    )
    timing: Timing = field(default_factory=Timing)

    def certificate(
        self, name: str, *roles: Role, now: float = EPOCH, lifetime_s: float = LIFETIME_S, swarm: bytes = b""
    ) -> bytes:
        """A sealed certificate for the peer called ``name``."""
        return self.certify(identity_of(name).peer_id, *roles, now=now, lifetime_s=lifetime_s, swarm=swarm)

    def certify(
        self,
        peer: PeerId,
        *roles: Role,
        now: float = EPOCH,
        lifetime_s: float = LIFETIME_S,
        swarm: bytes = b"",
    ) -> bytes:
        """A sealed certificate for a peer."""
        admittance = Admittance(peer, frozenset(roles))
        return issue(
            admittance, swarm=swarm or self.rules.swarm, key=AUTHORITY, now=now, lifetime_s=lifetime_s
        )

    def revocation(self, *peers: PeerId, invites: tuple[bytes, ...] = (), serial: int = 1) -> bytes:
        """A sealed revocation list of the authority."""
        named = RevokedIds(peers=frozenset(peers), invites=frozenset(invites))
        return sign_list(named, serial=serial, swarm=self.rules.swarm, key=AUTHORITY)

    @asynccontextmanager
    async def peer(
        self, network: MemoryNetwork, name: str, certificate: bytes = b"", public_name: str = ""
    ) -> AsyncIterator[Someone]:
        """A peer that presents ``certificate``, valid or not, and calls itself ``public_name``."""
        identity = identity_of(name)
        membership = Membership(self.rules, identity.peer_id, virtual_clock)
        membership.certificate = certificate
        async with (
            network.transport(identity.peer_id) as raw,
            Handshakes(raw, membership, self.timing, public_name).running() as handshakes,
        ):
            yield Someone(identity, raw, GuardedTransport(raw, handshakes), handshakes, membership)

    @asynccontextmanager
    async def member(
        self, network: MemoryNetwork, name: str, roles: frozenset[Role]
    ) -> AsyncIterator[Someone]:
        """A peer with a valid certificate."""
        async with self.peer(network, name, self.certificate(name, *roles)) as someone:
            yield someone
