"""Subnet limits: at a limit on inbound streams or sessions, one of the largest subnet is evicted.

Identities cost nothing, and addresses within a subnet cost little. So shares are counted by subnet
first and by peer second. An attacker with many identities in one subnet evicts its own streams, and
the only peer of another subnet keeps its streams.
"""

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import PeerId, Stream
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import Reservation, ResourceManager, Scope
from swarmnet_protocols.net.limits.stream_scope import MAX_WAIT_S, StreamScope
from swarmnet_protocols.timing import Timing

_SUBNET_BITS = {"ip4": 24, "ip6": 48}
"""Prefix lengths of the largest range that a provider gives to one customer."""
_HOST_BITS = {"ip4": 32, "ip6": 64}
"""An IPv6 host may use any address of its /64."""
MAX_SILENT = 256
"""Most inbound streams of unknown peers that have not received a message.

Each may buffer some hundred KiB that no other limit counts. With fewer, a distant peer may lose a
stream before its first message comes."""
MAX_SILENT_PER_SUBNET = 48

T = TypeVar("T")


@dataclass(frozen=True)
class Place(Generic[T]):
    """``amount`` of a resource, held by ``holder`` of ``peer`` in ``subnet``.

    The lowest ``rank`` is evicted first. Without ranks, the oldest place is.
    """

    subnet: str
    peer: PeerId
    amount: int
    rank: tuple[float, ...] | None
    holder: T


class _Subnet(Generic[T]):
    def __init__(self) -> None:
        self.amount = 0
        self.places: dict[PeerId, dict[T, Place[T]]] = {}


class Occupancy(Generic[T]):
    """The places of a limited resource by subnet and peer, to choose which one is evicted."""

    def __init__(self, places: Iterable[Place[T]] = ()) -> None:
        self._subnets: dict[str, _Subnet[T]] = {}
        self._peer_amounts: Counter[PeerId] = Counter()
        self.total = 0
        """The amount that all places hold."""
        for place in places:
            self.add(place)

    def add(self, place: Place[T]) -> None:
        subnet = self._subnets.setdefault(place.subnet, _Subnet())
        subnet.places.setdefault(place.peer, {})[place.holder] = place
        subnet.amount += place.amount
        self._peer_amounts[place.peer] += place.amount
        self.total += place.amount

    def remove(self, place: Place[T]) -> None:
        """Remove a place that was added."""
        subnet = self._subnets[place.subnet]
        subnet.amount -= place.amount
        self.total -= place.amount
        self._peer_amounts[place.peer] -= place.amount
        if not self._peer_amounts[place.peer]:
            del self._peer_amounts[place.peer]
        del subnet.places[place.peer][place.holder]
        if not subnet.places[place.peer]:
            del subnet.places[place.peer]
        if not subnet.places:
            del self._subnets[place.subnet]

    def amount_of(self, subnet: str) -> int:
        """Return the amount that the places of a subnet hold."""
        return self._subnets[subnet].amount if subnet in self._subnets else 0

    def victim(self, may_evict: Callable[[T], bool], subnet: str | None = None) -> T | None:
        """Return the holder to evict; None if none may be evicted.

        The choice is in ``subnet``, by default the subnet with the largest amount. There it is the
        holder with the lowest rank of the peer with the largest amount. Subnets and peers whose
        holders may not be evicted are skipped.
        """
        subnets = list(self._subnets.values()) if subnet is None else [self._subnets[subnet]]
        for amount in sorted({subnet.amount for subnet in subnets}, reverse=True):
            largest = [subnet for subnet in subnets if subnet.amount == amount]
            peer_amounts = {self._peer_amounts[peer] for subnet in largest for peer in subnet.places}
            for peer_amount in sorted(peer_amounts, reverse=True):
                places = (
                    place
                    for subnet in largest
                    for peer, held in subnet.places.items()
                    if self._peer_amounts[peer] == peer_amount
                    for place in held.values()
                    if may_evict(place.holder)
                )
                if (first := next(places, None)) is not None:
                    if first.rank is not None:
                        first = min(first, *places, first, key=lambda place: place.rank or ())
                    return first.holder
        return None


class SubnetLimits:
    """Accepts inbound streams. When there are too many, a stream of an unknown peer in the largest
    subnet is evicted.

    Streams on which an unknown peer has sent no message yet have limits of their own,
    ``MAX_SILENT`` and ``MAX_SILENT_PER_SUBNET``. At a limit, one of them is evicted.
    """

    def __init__(self, resources: ResourceManager, timing: Timing) -> None:
        self._resources = resources
        self._timing = timing
        self._streams = Occupancy[StreamScope]()
        self._silent = Occupancy[StreamScope]()

    def accept(self, peer: PeerId, address: str) -> StreamScope:
        """Return the scope of a stream that ``peer`` opened from ``address``, a multiaddr.

        Raises ``ResourceLimitReached``.
        """
        now = loop_time()
        subnet = subnet_of(address)
        peer_scope = self._resources.peer(peer, now, subnet)
        peer_scope.check_rate(Rate.FRAMES, MAX_WAIT_S, now)  # a peer over its rate evicts no other
        is_full = not peer_scope.can_reserve(Resource.INBOUND_STREAMS, 1)
        if is_full and peer_scope.available(Resource.INBOUND_STREAMS) >= 1:
            self._evict_from(self._streams)
        scope = StreamScope.inbound(self._resources, peer, self._timing)
        place = Place(subnet or peer, peer, 1, None, scope)
        self._streams.add(place)
        scope.on_close = lambda: self._streams.remove(place)
        if peer_scope.is_unknown:
            is_full = self._silent.amount_of(place.subnet) >= MAX_SILENT_PER_SUBNET
            made_room = is_full and self._evict_from(self._silent, place.subnet)
            if not made_room and self._silent.total >= MAX_SILENT:
                self._evict_from(self._silent)
            self._silent.add(place)
            scope.on_first_message = lambda: self._silent.remove(place)
        return scope

    def _evict_from(self, streams: Occupancy[StreamScope], subnet: str | None = None) -> bool:
        """Evict a stream of an unknown peer. Return whether there was one."""
        victim = streams.victim(lambda scope: scope.peer_scope.is_unknown, subnet)
        if victim is not None:
            victim.evict()
        return victim is not None


class SubnetSlots:
    """Slots for inbound streams that wait for something. Each slot takes 1 of ``resource`` in the
    ``system`` scope.

    When all are taken, a new stream evicts the oldest stream of the subnet with the most slots.
    Honest peers send their first message at once, so they seldom lose a slot.
    """

    def __init__(self, system: Scope, resource: Resource) -> None:
        self._system = system
        self._resource = resource
        self._holders: dict[Stream, tuple[Reservation, str]] = {}
        """Each stream's reservation and subnet, oldest first."""

    @contextmanager
    def slot(self, stream: Stream) -> Iterator[None]:
        """Hold a slot while the context is open. Raises ``ResourceLimitReached`` if the peer used
        its share.
        """
        if stream.scope.available(self._resource) >= 1:
            self._make_room()
        reservation = stream.scope.reserve(self._resource)
        self._holders[stream] = reservation, subnet_of(stream.address) or stream.peer
        try:
            yield
        finally:
            self._holders.pop(stream, None)
            reservation.release()

    def has(self, stream: Stream) -> bool:
        """Return whether ``stream`` still has its slot."""
        return stream in self._holders

    def _make_room(self) -> None:
        """End the oldest streams of the largest subnets until the system has a slot."""
        while self._system.available(self._resource) < 1:
            oldest = self._oldest_of_largest_subnet()
            if oldest is None:
                return
            self._holders.pop(oldest)[0].release()
            oldest.close()

    def _oldest_of_largest_subnet(self) -> Stream | None:
        places = [
            Place(subnet, stream.peer, 1, (number,), stream)
            for number, (stream, (_, subnet)) in enumerate(self._holders.items())
        ]
        return Occupancy(places).victim(lambda _: True)


def subnet_of(address: str) -> str:
    """Return the subnet (/24 or /48) of a multiaddr, or of its relay; empty without an IP
    address."""
    return _network_of(address, _SUBNET_BITS)


def host_of(address: str) -> str:
    """Return the host of a multiaddr: an IPv4 address or an IPv6 /64; empty without an IP
    address."""
    return _network_of(address, _HOST_BITS)


def _network_of(address: str, prefix_bits: Mapping[str, int]) -> str:
    match address.split("/"):
        case ["", "ip4" | "ip6" as family, host, *_]:
            with suppress(ValueError):
                return str(ipaddress.ip_network(f"{host}/{prefix_bits[family]}", strict=False))
    return ""
