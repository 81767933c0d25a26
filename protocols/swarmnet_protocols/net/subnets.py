"""Where the streams come from that others open, so that no one place takes all the room there is for strangers."""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.meter import MAX_OWED_S, Meter
from swarmnet_protocols.net.resources import Rate, Resource, ResourceManager
from swarmnet_protocols.timing import Timing

_PREFIX_BITS = {"ip4": 24, "ip6": 48}
"""What one customer of a provider has at most: in it, addresses cost as little as identities."""
_HOST_BITS = {"ip4": 32, "ip6": 64}


T = TypeVar("T")


@dataclass(frozen=True)
class Place(Generic[T]):
    """What ``holder`` holds: so much, of the part ``origin`` of the network, for ``peer``. The lowest ``rank`` goes first."""

    origin: str
    peer: PeerId
    amount: int
    rank: tuple[float, ...]
    holder: T


def first_to_go(places: Sequence[Place[T]], may_go: Callable[[T], bool]) -> T | None:
    """Who is to give way, of those who may, so that somebody else has room; None if nobody may.

    It is of the origin that holds the most, and there of the peer that holds the most: who has many identities in one place displaces
    its own, and who has one place keeps it.
    """
    of_origin, of_peer = Counter[str](), Counter[PeerId]()
    for place in places:
        of_origin[place.origin] += place.amount
        of_peer[place.peer] += place.amount
    going = [place for place in places if may_go(place.holder)]
    if not going:
        return None
    return min(going, key=lambda place: (-of_origin[place.origin], -of_peer[place.peer], place.rank)).holder


class SubnetLimits:
    """Streams that others opened, by origin. Where there is no room for one more, somebody whom we do not know has to go.

    It is the first of those who come from where most come from: who has many identities in one place displaces its own, and
    whoever means well is known before its turn comes.
    """

    def __init__(self, resources: ResourceManager, timing: Timing) -> None:
        self._resources = resources
        self._timing = timing
        self._crowds: dict[str, dict[Meter, None]] = {}

    def admit(self, peer: PeerId, address: str) -> Meter:
        """The meter of a stream that ``peer`` opens from there. Raises ``ResourceLimitReached`` when it may not have one more itself."""
        now = asyncio.get_running_loop().time()
        scope = self._resources.peer(peer, now)
        scope.check_rate(Rate.FRAMES, MAX_OWED_S, now)  # who owes too much displaces nobody
        if scope.available(Resource.INBOUND_STREAMS) >= 1 and not scope.can_reserve(
            Resource.INBOUND_STREAMS, 1
        ):
            self._displace()
        meter = Meter.of_theirs(self._resources, peer, self._timing)
        origin = origin_of(address) or peer
        self._crowds.setdefault(origin, {})[meter] = None
        meter.on_close = lambda: self._leave(origin, meter)
        return meter

    def _displace(self) -> None:
        for crowd in sorted(self._crowds.values(), key=len, reverse=True):
            for meter in crowd:
                if meter.scope.is_unknown:
                    meter.drop()
                    return

    def _leave(self, origin: str, meter: Meter) -> None:
        crowd = self._crowds[origin]
        del crowd[meter]
        if not crowd:
            del self._crowds[origin]


def origin_of(address: str) -> str:
    """The part of the network that a multiaddr lies in; empty for one without an IP address. Through a relay, it is the relay's."""
    return _network_of(address, _PREFIX_BITS)


def host_of(address: str) -> str:
    """As ``origin_of``, of one host: of IPv6 a /64, in which a host may have any address."""
    return _network_of(address, _HOST_BITS)


def _network_of(address: str, prefix_bits: Mapping[str, int]) -> str:
    match address.split("/"):
        case ["", "ip4" | "ip6" as family, host, *_]:
            with suppress(ValueError):
                return str(ipaddress.ip_network(f"{host}/{prefix_bits[family]}", strict=False))
    return ""
