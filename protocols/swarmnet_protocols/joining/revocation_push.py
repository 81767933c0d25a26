"""Telling a swarm who is revoked, from the machine of whoever revokes."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.membership.certificates import Admittance, issue
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.membership.rules import MIN_LIFETIME_S, Rules
from swarmnet_protocols.membership.signed import Signer
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.protocol_ids import REVOCATIONS
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire.roles import Role

HEARD_S = 30.0
"""How long a peer may take to fetch a list."""


async def spread(
    sealed: bytes, addresses: Sequence[str], *, rules: Rules, key: Signer, clock: Clock
) -> list[PeerId]:
    """Give the list ``sealed`` to the peers at ``addresses``; those who have it now. They tell the others.

    ``key`` signed the list; it also makes us a member for as long as this takes.
    """
    from swarmnet_protocols.joining.network import LOOPBACK
    from swarmnet_protocols.net.p2pd.transport import P2pdConfig, P2pdTransport

    with TemporaryDirectory(prefix="swarmnet-") as scratch:  # 0700
        identity_path = Path(scratch, "identity.key")
        membership = Membership(rules, Identity.load_or_create(identity_path).peer_id, clock)
        admittance = Admittance(membership.peer, frozenset({Role.OBSERVER}))
        certificate = issue(
            admittance, swarm=rules.swarm, key=key, now=clock(), lifetime_s=float(MIN_LIFETIME_S)
        )
        membership.take_certificate(certificate)
        membership.take_revocations([sealed])
        async with (
            P2pdTransport.create(
                P2pdConfig(identity_path, listen=LOOPBACK, named=tuple(addresses))
            ) as transport,
            Handshakes.run(transport, membership, Timing()) as door,
        ):
            return await tell(door, addresses)


async def tell(door: Handshakes, addresses: Sequence[str]) -> list[PeerId]:
    """Meet the peers at ``addresses``; those who then have all the revocations that we have."""
    told = await asyncio.gather(*(_tell(door, address) for address in addresses))
    return sorted({peer for peer in told if peer is not None})


async def _tell(door: Handshakes, address: str) -> PeerId | None:
    peer = PeerId(address.rpartition("/p2p/")[2])
    try:
        async with asyncio.timeout(HEARD_S):
            await door.enter(peer, REVOCATIONS, addresses=[address], deadline_s=HEARD_S)
            await door.told(peer)
    except (SwarmnetError, TimeoutError):
        return None
    return peer
