"""Subnet limits: when a limit on inbound streams or sessions is reached, the subnet that holds most of them gives one up.

Identities cost nothing and addresses within a subnet little, so neither counts alone. A peer with many identities in one subnet evicts
its own, and the only peer of a subnet keeps what it has.
"""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.resources import Rate, Resource, ResourceManager
from swarmnet_protocols.net.stream_scope import MAX_WAIT_S, StreamScope
from swarmnet_protocols.timing import Timing

_SUBNET_BITS = {"ip4": 24, "ip6": 48}
"""Prefix length of what one customer of a provider has at most."""
_HOST_BITS = {"ip4": 32, "ip6": 64}
"""An IPv6 host may use any address of its /64."""

T = TypeVar("T")


@dataclass(frozen=True)
class Place(Generic[T]):
    """``amount`` of a resource, held by ``holder`` of ``peer`` in ``subnet``. The lowest ``rank`` is evicted first."""

    subnet: str
    peer: PeerId
    amount: int
    rank: tuple[float, ...]
    holder: T


class Occupancy(Generic[T]):
    """The places of a limited resource, by subnet and peer, and whose place is evicted."""

    def __init__(self, places: Iterable[Place[T]] = ()) -> None:
        self._places: dict[str, dict[PeerId, dict[T, Place[T]]]] = {}
        self._of_subnet: Counter[str] = Counter()
        self._of_peer: Counter[PeerId] = Counter()
        for place in places:
            self.add(place)

    def add(self, place: Place[T]) -> None:
        self._places.setdefault(place.subnet, {}).setdefault(place.peer, {})[place.holder] = place
        self._of_subnet[place.subnet] += place.amount
        self._of_peer[place.peer] += place.amount

    def remove(self, place: Place[T]) -> None:
        """Remove a place that was added."""
        peers = self._places[place.subnet]
        del peers[place.peer][place.holder]
        self._of_subnet[place.subnet] -= place.amount
        self._of_peer[place.peer] -= place.amount
        if not peers[place.peer]:
            del peers[place.peer]
        if not self._of_peer[place.peer]:
            del self._of_peer[place.peer]
        if not peers:
            del self._places[place.subnet], self._of_subnet[place.subnet]

    def victim(self, may_evict: Callable[[T], bool]) -> T | None:
        """The holder to evict: in the subnet that holds the most, of the peer that holds the most, the one with the lowest rank.

        Subnets and peers without a holder that may be evicted are passed over. None if there is none at all.
        """
        for subnet_amount in sorted(set(self._of_subnet.values()), reverse=True):
            peers = [
                (peer, holders)
                for subnet, in_subnet in self._places.items()
                if self._of_subnet[subnet] == subnet_amount
                for peer, holders in in_subnet.items()
            ]
            for peer_amount in sorted({self._of_peer[peer] for peer, _ in peers}, reverse=True):
                places = (
                    place
                    for peer, holders in peers
                    if self._of_peer[peer] == peer_amount
                    for place in holders.values()
                    if may_evict(place.holder)
                )
                if (first := min(places, key=lambda place: place.rank, default=None)) is not None:
                    return first.holder
        return None


class SubnetLimits:
    """Accepts inbound streams. When the system limit is reached, an unknown peer's stream is evicted from the largest subnet."""

    def __init__(self, resources: ResourceManager, timing: Timing) -> None:
        self._resources = resources
        self._timing = timing
        self._streams = Occupancy[StreamScope]()
        self._accepted = 0

    def accept(self, peer: PeerId, address: str) -> StreamScope:
        """The scope of a stream that ``peer`` opened from a multiaddr. Raises ``ResourceLimitReached``."""
        now = asyncio.get_running_loop().time()
        peer_scope = self._resources.peer(peer, now)
        peer_scope.check_rate(Rate.FRAMES, MAX_WAIT_S, now)  # a peer over its rate evicts no other
        is_full = not peer_scope.can_reserve(Resource.INBOUND_STREAMS, 1)
        if is_full and peer_scope.available(Resource.INBOUND_STREAMS) >= 1:
            self._evict()
        scope = StreamScope.inbound(self._resources, peer, self._timing)
        self._accepted += 1
        place = Place(subnet_of(address) or peer, peer, 1, (self._accepted,), scope)
        self._streams.add(place)
        scope.on_close = lambda: self._streams.remove(place)
        return scope

    def _evict(self) -> None:
        victim = self._streams.victim(lambda scope: scope.peer_scope.is_unknown)
        if victim is not None:
            victim.evict()


def subnet_of(address: str) -> str:
    """The subnet of a multiaddr (/24 or /48), of the relay if it leads through one; empty without an IP address."""
    return _network_of(address, _SUBNET_BITS)


def host_of(address: str) -> str:
    """The host of a multiaddr: an IPv4 address or an IPv6 /64; empty without an IP address."""
    return _network_of(address, _HOST_BITS)


def _network_of(address: str, prefix_bits: Mapping[str, int]) -> str:
    match address.split("/"):
        case ["", "ip4" | "ip6" as family, host, *_]:
            with suppress(ValueError):
                return str(ipaddress.ip_network(f"{host}/{prefix_bits[family]}", strict=False))
    return ""
