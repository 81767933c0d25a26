"""Telling a swarm who is revoked, from the machine of whoever revokes."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from swarmnet_protocols.clock import Clock
from swarmnet_protocols.errors import NotAuthorised, StreamEnded, SwarmnetError
from swarmnet_protocols.identity import Identity
from swarmnet_protocols.membership.certificates import Admittance, issue
from swarmnet_protocols.membership.door import Door
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.membership.revocations import MAX_LISTS, open_list
from swarmnet_protocols.membership.roles import Role
from swarmnet_protocols.membership.rules import MIN_LIFETIME_S, Rules
from swarmnet_protocols.membership.signed import Signer
from swarmnet_protocols.protocol_ids import REVOCATIONS
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.transport import Message, PeerId, Transport
from swarmnet_protocols.transport.talking import receive_within
from swarmnet_protocols.wire import door_pb2 as pb

HEARD_S = 30.0
"""How long a peer may take to fetch a list."""
ASK_AGAIN_S = 0.25


async def spread(
    sealed: bytes, addresses: Sequence[str], *, rules: Rules, key: Signer, clock: Clock
) -> list[PeerId]:
    """Give the list ``sealed`` to the peers at ``addresses``; those who have it now. They tell the others.

    ``key`` signed the list; it also makes us a member for as long as this takes.
    """
    from swarmnet_protocols.network import LOOPBACK
    from swarmnet_protocols.transport.p2pd import P2pdConfig, P2pdTransport

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
            P2pdTransport.create(P2pdConfig(identity_path, listen=LOOPBACK)) as transport,
            Door.run(transport, membership, Timing()) as door,
        ):
            return await tell(transport, door, addresses, key.public_key)


async def tell(transport: Transport, door: Door, addresses: Sequence[str], signer: bytes) -> list[PeerId]:
    """Meet the peers at ``addresses``, who thereby learn our revocations; those who have ``signer``'s list now."""
    told = await asyncio.gather(*(_tell(transport, door, address, signer) for address in addresses))
    return sorted({peer for peer in told if peer is not None})


async def _tell(transport: Transport, door: Door, address: str, signer: bytes) -> PeerId | None:
    peer, timing = PeerId(address.rpartition("/p2p/")[2]), Timing()
    try:
        async with asyncio.timeout(HEARD_S):
            await door.enter(peer, REVOCATIONS, addresses=[address], deadline_s=timing.open_s)
            while True:
                if await _has(transport, door.membership, peer, signer):
                    return peer
                await asyncio.sleep(ASK_AGAIN_S)
    except (SwarmnetError, TimeoutError):
        return None


async def _has(transport: Transport, membership: Membership, peer: PeerId, signer: bytes) -> bool:
    """Whether ``peer`` has the list of ``signer`` that we have, or a newer one."""
    ours = membership.revocations.serials[signer]
    stream = await transport.open(peer, REVOCATIONS, deadline_s=Timing().open_s)
    try:
        await stream.send(Message(pb.RevocationsRequest().SerializeToString()))
        with contextlib.suppress(StreamEnded, NotAuthorised):
            for _ in range(MAX_LISTS):
                sealed = bytes((await receive_within(stream, Timing().chunk_s)).payload)
                theirs = open_list(sealed, rules=membership.rules, now=membership.clock())
                if theirs.signer == signer and theirs.serial >= ours:
                    return True
    finally:
        stream.close()
    return False
