"""Rules for addresses from the network: which ones are dialled, and how many dials a peer may
cause.

A signature on an address proves who published it, not who listens there. Without rules, a peer
could make others dial into networks that it cannot reach itself, or make many peers dial one
victim. The rules apply to every address from the network. Addresses that the owner of this machine
gave are dialled without a check.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from swarmnet_protocols.errors import PeerUnreachable, SwarmnetError
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import PeerId, ProtocolSpec, Stream, Transport, TransportWrapper
from swarmnet_protocols.net.limits.resource_limits import Rate
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.net.multiaddr import PEER_ID, IPAddress, Multiaddr, parse_multiaddr

_log = logging.getLogger(__name__)

MAX_DIALLED = 8
"""Most addresses of one peer that are dialled in one attempt."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LOOPBACK_NETWORKS: tuple[Network, ...] = (
    ipaddress.ip_network("127.0.0.0/8"),
    ipaddress.ip_network("::1/128"),
)
_PRIVATE_NETWORKS: tuple[Network, ...] = (
    *map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")),
    ipaddress.ip_network("fc00::/7"),
)
_CARRIES_IPV4 = tuple(
    map(
        ipaddress.ip_network,
        ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"),
    )
)
"""IPv6 ranges that routers translate to arbitrary IPv4 addresses."""
_BROADCAST = ipaddress.ip_address("255.255.255.255")


def dialable(peer: PeerId, addresses: Iterable[str], networks: Sequence[Network]) -> tuple[str, ...]:
    """Return the addresses where ``peer`` may be dialled, in order and at most ``MAX_DIALLED``.

    An address must be a public IP address or lie in ``networks`` (:func:`shared_networks`). Names
    are never resolved. For an address through a relay, the relay's address decides.
    """
    found: dict[str, None] = {}
    for address in addresses:
        if len(found) == MAX_DIALLED:
            break
        if (clean := _clean(peer, address, networks)) is not None:
            found[clean] = None
    return tuple(found)


def shared_networks(interfaces: Iterable[tuple[str, str]], named: Sequence[str]) -> tuple[Network, ...]:
    """Return the private networks where addresses of other peers may be dialled.

    - ``interfaces``: the addresses and netmasks of this machine.
    - ``named``: the multiaddrs that its owner named, to listen, announce and bootstrap.

    A private network is shared if this machine has an interface in it, or the owner named an
    address in it. Loopback is shared if all addresses that the owner named are on loopback, or the
    machine has no other interface. Then the whole swarm is on this machine.
    """
    attached = [ip for address, netmask in interfaces if (ip := _interface(address, netmask)) is not None]
    found = {each.network for each in attached if not _is_special(each.ip) and each.network.num_addresses > 1}
    owners = [ip_of(each) for each in named]
    if all(each.ip.is_loopback for each in attached) or (
        owners and all(ip is not None and ip.is_loopback for ip in owners)
    ):
        found.update(LOOPBACK_NETWORKS)
    found.update(
        network for network in _PRIVATE_NETWORKS for ip in owners if ip is not None and ip in network
    )
    return tuple(sorted(found, key=str))


def own_interfaces() -> list[tuple[str, str]]:
    """Return the IP addresses and netmasks of this machine."""
    import psutil

    return [
        (each.address, each.netmask or "")
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]


def ip_of(address: str) -> IPAddress | None:
    """Return the IP address of a multiaddr; None for any other text."""
    parsed = parse_multiaddr(address)
    return parsed.ip if parsed is not None else None


def is_loopback(address: str) -> bool:
    """Return whether only this machine can dial a multiaddr."""
    ip = ip_of(address)
    return ip is not None and ip.is_loopback


def may_dial_back(ip: IPAddress, networks: Sequence[Network]) -> bool:
    """Tell whether a connected peer may ask this machine to dial a port of its own address ``ip``.

    The connection proves that a peer is there, so private networks are allowed. Loopback and
    link-local addresses are allowed only in ``networks``, because a proxy or a tunnel on this
    machine makes strangers appear there.
    """
    if any(ip in network for network in networks):
        return True
    return not _is_special(ip) and not any(ip in network for network in _CARRIES_IPV4)


def relay_of(address: str) -> tuple[PeerId, str] | None:
    """Return the relay of a circuit address and the relay's own multiaddr, with its peer id.

    None for any other address.
    """
    before, circuit, _ = address.partition("/p2p-circuit")
    base, _, relay = before.rpartition("/p2p/")
    return (PeerId(relay), before) if circuit and base else None


class Introductions:
    """Opens streams to peers that other peers named, one attempt per named peer at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._dialling: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()

    def by(self, asker: Scope) -> "IntroducedTransport":
        """Return a transport that opens streams for a peer and charges the dials to its scope
        ``asker``.
        """
        return IntroducedTransport(self._transport, asker, self._dialling)


class IntroducedTransport(TransportWrapper):
    """Opens streams without telling why an attempt fails.

    Reasons would tell the asking peer what is at addresses that it cannot reach itself.
    """

    def __init__(
        self, transport: Transport, asker: Scope, dialling: "WeakValueDictionary[PeerId, asyncio.Lock]"
    ) -> None:
        super().__init__(transport)
        self._asker = asker
        self._dialling = dialling

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        """Open a stream as ``Transport.open`` does.

        Every failure is the same ``PeerUnreachable``, raised only after ``deadline_s``.
        """
        when = loop_time() + deadline_s
        try:
            async with asyncio.timeout_at(when), self._dialling.setdefault(peer, asyncio.Lock()):
                if not await self.is_connected(peer):
                    self._charge(addresses, loop_time())
                return await super().open(peer, protocol, addresses=addresses, deadline_s=deadline_s)
        except (SwarmnetError, TimeoutError) as error:
            _log.info("%s, named by another peer, was not reached: %s", peer, error)
        await asyncio.sleep(when - loop_time())
        raise PeerUnreachable("the next hop was not reached")

    def _charge(self, addresses: Sequence[str], now: float) -> None:
        if not addresses:
            raise PeerUnreachable("it is not connected and has no signed address")
        self._asker.check_rate(Rate.DIALS, 0.0, now)
        self._asker.charge(Rate.DIALS, 1, now)


def _clean(peer: PeerId, address: str, networks: Sequence[Network]) -> str | None:
    """Return ``address`` in canonical form without the peer id; None if it may not be dialled."""
    parsed = parse_multiaddr(address.removesuffix(f"/p2p/{peer}"))
    if parsed is None or parsed.port == 0 or not _may_dial(parsed.ip, networks):
        return None
    match parsed:
        case Multiaddr(kind="tcp", rest=rest) | Multiaddr(kind="udp", rest=("quic-v1", *rest)):
            pass
        case _:
            return None
    match rest:
        case []:
            return str(parsed)
        case ["p2p", relay, "p2p-circuit"] if PEER_ID.fullmatch(relay) and relay != peer:
            return str(parsed)
    return None


def _may_dial(ip: IPAddress, networks: Sequence[Network]) -> bool:
    if any(ip in network for network in networks):
        return True
    return ip.is_global and not _is_special(ip) and not any(ip in network for network in _CARRIES_IPV4)


def _is_special(ip: IPAddress) -> bool:
    """Tell whether no other machine can have this address.

    That holds for loopback, link-local, multicast, unspecified and broadcast addresses.
    """
    return ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip == _BROADCAST


def _interface(address: str, netmask: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface | None:
    """Return an address of this machine with its network; None if it is neither IPv4 nor IPv6."""
    with suppress(ValueError):
        ip = ipaddress.ip_address(address.partition("%")[0])
        bits = int(ipaddress.ip_address(netmask)) if netmask else (1 << ip.max_prefixlen) - 1
        return ipaddress.ip_interface((ip, bits.bit_count()))
    return None
