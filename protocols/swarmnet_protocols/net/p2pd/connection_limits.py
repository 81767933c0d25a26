"""What strangers may hold of p2pd itself: connections, by address, by subnet and in all, and memory.

p2pd answers some protocols of libp2p without asking us, and limits neither connections nor memory. So its connections are looked at once
a second, whatever they run over, and those beyond the caps are closed: idle ones first, those at work with us last.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from swarmnet_protocols.errors import PeerUnreachable
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.p2pd.daemon import P2pd, unpack_multiaddr, unpack_peer
from swarmnet_protocols.net.resources import Resource, ResourceManager
from swarmnet_protocols.net.subnets import host_of, subnet_of

_log = logging.getLogger(__name__)

LOOK_S, LOOK_AGAIN_S = 1.0, 0.2
"""Between two looks, and after one that found too much: in a second p2pd takes some 500 connections of 100 kB each on two cores."""
NEW_S = 5.0
"""A new connection is given so long to be put to use."""
RELIEF_S = 3.0
"""Above its limit of memory, p2pd is given so long without strangers before it is restarted."""


STREAM_BYTES = 96 << 10
"""What p2pd takes for a stream: buffers of 32 KiB each way, and its own of each."""


class Worth(IntEnum):
    """What a connection is to us: the least goes first."""

    IDLE = 0
    NEW = 1
    USED = 2
    """The peer has streams open to us."""
    KNOWN = 3
    """We serve it, have let it in, or have dialled it."""


@dataclass(frozen=True)
class Connection:
    peer: bytes
    """Packed, as p2pd takes it."""
    peer_id: PeerId
    host: str
    """As of ``host_of``."""
    subnet: str
    """As of ``subnet_of``."""
    since: float
    """When it was first seen."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Caps on connections. One home or campus has one address; 512 connections take about 60 MB of p2pd's memory."""

    each_host: int = 64
    each_subnet: int = 256
    in_all: int = 512


def excess(
    connections: Iterable[Connection], worth: Callable[[Connection], Worth], limits: ConnectionLimits
) -> list[Connection]:
    """Those to close so that the others are within ``limits``.

    Of one host or subnet the least worth go first, among equals the newest. In all, of the least worth those from where most come from.
    """
    closed: list[Connection] = []
    kept = sorted(connections, key=lambda each: (-worth(each), each.since))
    for place, cap in (_host, limits.each_host), (_subnet, limits.each_subnet):
        counts = Counter[Hashable]()
        within: list[Connection] = []
        for each in kept:
            counts[place(each)] += 1
            (within if counts[place(each)] <= cap else closed).append(each)
        kept = within
    places = defaultdict[tuple[Worth, str], int](int)
    ranked = []
    for each in kept:
        rank = worth(each), each.subnet
        ranked.append((-rank[0], places[rank], each.since))
        places[rank] += 1
    order = sorted(range(len(kept)), key=ranked.__getitem__)
    return closed + [kept[number] for number in order[limits.in_all :]]


def _host(each: Connection) -> str:
    return each.host


def _subnet(each: Connection) -> str:
    return each.subnet


class Connections:
    """The connections of a p2pd, each with when it was first seen."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], Connection] = {}

    def see(self, listed: Iterable[tuple[bytes, bytes]], now: float) -> Sequence[Connection]:
        """Those that p2pd lists ``now``, as peer and multiaddr."""
        self._known = {key: self._known.get(key) or _connection(*key, now) for key in listed}
        return list(self._known.values())


def _connection(peer: bytes, packed_address: bytes, now: float) -> Connection:
    try:
        address = unpack_multiaddr(packed_address)
    except ValueError:  # of a kind that we do not know
        address = ""
    return Connection(peer, unpack_peer(peer), host_of(address), subnet_of(address), now)


class Guard:
    """Keeps a p2pd within its limits."""

    def __init__(
        self, daemon: P2pd, resources: ResourceManager, limits: ConnectionLimits, max_memory_bytes: int
    ) -> None:
        self._daemon = daemon
        self._resources = resources
        self._limits = limits
        self._max_memory_bytes = max_memory_bytes
        self._connections = Connections()
        self._dialled: dict[PeerId, float] = {}
        """When we dialled those who are connected."""
        self._above_since: float | None = None

    def dialled(self, peer: PeerId) -> None:
        """We have connected to ``peer``: it is known as long as it is connected."""
        self._dialled[peer] = asyncio.get_running_loop().time()

    async def keep(self) -> bool:
        """Do so until p2pd ends, or must be restarted because its memory stays above the limit: whether that is so."""
        self._above_since = None
        wait_s = LOOK_S
        while self._daemon.process.returncode is None:
            await asyncio.sleep(wait_s)
            wait_s = LOOK_S
            try:
                if await self._look():
                    wait_s = LOOK_AGAIN_S
            except PeerUnreachable as error:
                _log.debug("the connections of p2pd are not seen: %s", error)
            if self._is_worn():
                return True
        return False

    async def _look(self) -> bool:
        """Close what is too much: whether anything was."""
        now = asyncio.get_running_loop().time()
        connections = self._connections.see(await self._daemon.packed_connections(), now)
        there = {each.peer_id for each in connections}
        self._dialled = {peer: at for peer, at in self._dialled.items() if peer in there or at >= now}
        limit_bytes = self._max_memory_bytes + STREAM_BYTES * self._resources.known_peer_streams()
        if self._daemon.memory_bytes() <= limit_bytes:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = now
            _log.warning("p2pd holds more than %d MiB: strangers are disconnected", limit_bytes >> 20)

        def worth(each: Connection) -> Worth:
            return self._worth(each, now)

        closing = excess(connections, worth, self._limits)
        if (
            self._above_since is not None
        ):  # first those who do nothing, at the next look everybody whom we do not know
            needed = Worth.USED if self._above_since == now else Worth.KNOWN
            closing += [each for each in connections if worth(each) < needed]
        if peers := list(dict.fromkeys(each.peer for each in closing)):
            _log.debug("%d peers are disconnected", len(peers))
            await self._daemon.disconnect_all(peers)
        return bool(peers)

    def _is_worn(self) -> bool:
        """Whether it has held too much memory for a while although strangers are gone."""
        now = asyncio.get_running_loop().time()
        return self._above_since is not None and now - self._above_since >= RELIEF_S

    def _worth(self, each: Connection, now: float) -> Worth:
        scope = self._resources.find(each.peer_id)
        if each.peer_id in self._dialled or (scope is not None and not scope.is_unknown):
            return Worth.KNOWN
        if scope is not None and (scope.used[Resource.INBOUND_STREAMS] or scope.used[Resource.CALLS]):
            return Worth.USED
        return Worth.NEW if now - each.since < NEW_S else Worth.IDLE
