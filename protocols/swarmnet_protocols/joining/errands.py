"""Short connections of peers that are not members: redeem an invite, renew a certificate that has
ended, pair by a code, spread a revocation list.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from swarmnet_protocols.errors import ConfigError, SwarmnetError, Unreachable
from swarmnet_protocols.joining.local_network import find_addresses
from swarmnet_protocols.joining.network import LOOPBACK, permitted, transport_class
from swarmnet_protocols.joining.pairing import HOUSES, MAX_HOUSES, Found, knock, try_code
from swarmnet_protocols.machine.files import scratch_folder
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.multiaddr import peer_in
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.protocol_ids import PAIRING, REVOCATIONS
from swarmnet_protocols.timing import Timing

if TYPE_CHECKING:
    from swarmnet_protocols.machine.clock import Clock
    from swarmnet_protocols.membership.handshake import Handshakes
    from swarmnet_protocols.membership.invites import Invite
    from swarmnet_protocols.membership.signed import Signer
    from swarmnet_protocols.wire import membership_pb2 as pb

T = TypeVar("T")

FETCH_S = 30.0
"""Timeout in seconds for one peer to fetch a revocation list."""


async def redeem(
    invite: "Invite", identity_path: Path, machine: "pb.Machine", accept: "Callable[[pb.Admitted], T]"
) -> T:
    """Exchange ``invite`` for the swarm file and a certificate of the peers of ``machine``. Raises
    what :func:`ask_issuers` raises."""
    from swarmnet_protocols.membership.invites import redemption
    from swarmnet_protocols.net.identity import Identity
    from swarmnet_protocols.wire import membership_pb2 as pb

    peer = Identity.load_or_create(identity_path).peer_id
    request = pb.AdmissionRequest(redeem=redemption(invite, peer, machine))
    where = Whereabouts(invite.grant.swarm, invite.bootstrap, mdns=not invite.bootstrap)
    return await ask_issuers(request, where, identity_path, accept)


@dataclass(frozen=True)
class Whereabouts:
    """The places where a peer that is no member now may find peers of a swarm."""

    swarm: bytes
    named: tuple[str, ...]
    """Addresses that the owner gave. They are dialled as they are."""
    seen: tuple[str, ...] = ()
    """Addresses that peers announced. They must pass ``net/dialling.py``."""
    mdns: bool = False
    """True if the local network is searched, too, when no address answers."""


async def ask_issuers(
    request: "pb.AdmissionRequest",
    where: Whereabouts,
    identity_path: Path,
    accept: "Callable[[pb.Admitted], T]",
) -> T:
    """Ask for a certificate of the identity in ``identity_path``, which is no member now.

    ``accept`` checks the swarm file and the certificate: see ``admission.request_admission``.
    Raises what that function raises, and ``ConfigError`` if there is no address.
    """
    from swarmnet_protocols.joining.admission import request_admission
    from swarmnet_protocols.machine.clock import wall_clock

    async def ask(named: Sequence[str], seen: Sequence[str]) -> T:
        config = P2pdConfig(identity_path, listen=LOOPBACK, named=tuple(named), only_dials=True)
        async with transport_class().create(config) as transport:
            addresses = (*named, *permitted(transport, seen))
            return await request_admission(transport, addresses, request, accept, wall_clock)

    if where.named or where.seen:
        try:
            return await ask(where.named, where.seen)
        except Unreachable:
            if not where.mdns:
                raise
    if not where.mdns or not (found := await find_addresses(where.swarm)):
        raise ConfigError(
            "no address of a peer is known, and no peer of the swarm was found in the local network",
            hint="give the address of a peer in the swarm: --bootstrap ADDR",
        )
    return await ask(found, ())


@dataclass(frozen=True)
class Paired:
    """The invite that a house gave, and where to redeem it."""

    invite: str
    house: str
    """The name of the swarm."""
    addresses: tuple[str, ...]
    """Addresses of the house."""


async def pair(
    identity_path: Path,
    name: str,
    choose: Callable[[Sequence[str]], Awaitable[int]],
    ask: Callable[[str, int | None], Awaitable[str]],
) -> Paired:
    """Find a house in the local network and get an invite for the identity in ``identity_path``.

    - ``name``: the name of this machine. The house shows it, and labels the invite with it.
    - ``choose``: returns which of several houses to enter.
    - ``ask``: returns the code that somebody types. It takes the name of the house, and the result
      of the last try as in :func:`try_code`; None at first.

    Raises ``Unreachable`` if there is no house, and ``NotAuthorised`` if it refuses.
    """
    places: dict[PeerId, list[str]] = {}
    for each in await find_addresses(HOUSES):
        places.setdefault(peer_in(each), []).append(each)
    named = tuple(each for addresses in places.values() for each in addresses)
    config = P2pdConfig(identity_path, listen=LOOPBACK, named=named, only_dials=True)
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(transport_class().create(config))
        found: list[Found] = []
        refusal: SwarmnetError | None = None
        for peer in [each for each in places if each != transport.peer_id][:MAX_HOUSES]:
            try:
                door = await PAIRING.open(transport, peer, Timing(), addresses=places[peer])
                stack.callback(door.close)
                found.append(await knock(door, name))
            except SwarmnetError as error:
                refusal = refusal or error
        if not found:
            raise refusal or Unreachable(
                "no swarm that pairs was found in the local network",
                hint="type `swarmnet start` on the first computer. Some wireless networks keep their devices apart: then use an invite, swarmnet join INVITE",
            )
        house = found[await choose([each.name for each in found]) if len(found) > 1 else 0]
        last: int | None = None
        while True:
            result = await try_code(house, await ask(house.name, last), transport.peer_id)
            if isinstance(result, str):
                return Paired(result, house.name, tuple(places[house.stream.peer]))
            last = result


async def push_revocations(
    sealed: bytes, addresses: Sequence[str], *, rules: Rules, key: "Signer", clock: "Clock"
) -> list[PeerId]:
    """Give the sealed revocation list to the peers at ``addresses``, which spread it.

    Returns the peers that have the list afterwards. Without addresses, the peers in the local
    network get it. ``key`` signed the list. It also signs a certificate, valid for an hour, that
    lets this process join.
    """
    from swarmnet_protocols.membership.certificates import Admittance, issue
    from swarmnet_protocols.membership.handshake import Handshakes
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.membership.rules import MIN_LIFETIME_S
    from swarmnet_protocols.net.identity import Identity
    from swarmnet_protocols.wire.roles import Role

    with scratch_folder() as scratch:
        identity_path = scratch / "identity.key"
        membership = Membership(rules, Identity.load_or_create(identity_path).peer_id, clock)
        admittance = Admittance(membership.peer, frozenset({Role.OBSERVER}))
        certificate = issue(
            admittance, swarm=rules.swarm, key=key, now=clock(), lifetime_s=float(MIN_LIFETIME_S)
        )
        membership.replace_certificate(certificate)
        membership.add_revocations([sealed])
        addresses = addresses or await find_addresses(rules.swarm)
        config = P2pdConfig(identity_path, listen=LOOPBACK, named=tuple(addresses))
        async with (
            transport_class().create(config) as transport,
            Handshakes(transport, membership, Timing()).running() as handshakes,
        ):
            return await send_revocations(handshakes, addresses)


async def send_revocations(handshakes: "Handshakes", addresses: Sequence[str]) -> list[PeerId]:
    """Complete a handshake with each peer at ``addresses``.

    Returns the peers that have all of this peer's revocations afterwards.
    """
    peers = await asyncio.gather(*(_send_revocations(handshakes, address) for address in addresses))
    return sorted({peer for peer in peers if peer is not None})


async def _send_revocations(handshakes: "Handshakes", address: str) -> PeerId | None:
    peer = peer_in(address)
    try:
        async with asyncio.timeout(FETCH_S):
            await handshakes.ensure(peer, REVOCATIONS, addresses=[address], deadline_s=FETCH_S)
            await handshakes.wait_revocations_known(peer)
    except (SwarmnetError, TimeoutError):
        return None
    return peer
