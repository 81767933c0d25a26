"""Limits on p2pd's connections, by host, by subnet and in total, and on its memory.

p2pd itself limits neither. Once a second, this process:

1. lists p2pd's connections and closes those beyond the limits, idle ones first and known peers
   last;
2. disconnects unknown peers if p2pd's memory is above its limit;
3. restarts p2pd if its memory stays there.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from swarmnet_protocols.errors import PeerUnreachable
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.net.limits.subnets import host_of, subnet_of
from swarmnet_protocols.net.p2pd.config import ConnectionLimits
from swarmnet_protocols.net.p2pd.daemon import P2pd, unpack_multiaddr, unpack_peer

_log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between two checks. p2pd accepts about 500 connections a second on two cores, of 100 kB
each."""
RECHECK_S = 0.2
"""Seconds to the next check after a check that closed connections."""
NEW_S = 5.0
"""A connection without streams counts as new for this many seconds, and then as idle."""
RELIEF_S = 3.0
"""Seconds above the memory limit, with unknown peers disconnected, until p2pd is restarted."""
STREAM_BYTES = 96 << 10
"""Memory of p2pd for one stream: a buffer of 32 KiB for each direction, and go-libp2p's own
state."""


class Use(IntEnum):
    """The use of a connection. The lowest value is closed first."""

    IDLE = 0
    NEW = 1
    USED = 2
    """The peer has open streams."""
    KNOWN = 3
    """The peer is known, or this process dialled it."""


@dataclass(frozen=True)
class ListedConnection:
    peer: bytes
    """The peer id in binary form."""
    peer_id: PeerId
    host: str
    """See ``host_of``."""
    subnet: str
    """See ``subnet_of``."""
    since: float
    """Time at which the connection was first listed."""


def excess(
    connections: Iterable[ListedConnection], use: Callable[[ListedConnection], Use], limits: ConnectionLimits
) -> list[ListedConnection]:
    """Return the connections to close so that the rest is within ``limits``.

    The least used connections are closed first. Among equally used connections of one host or
    subnet, the newest are closed first. If there are still too many in total, the subnet with the
    most connections loses some.
    """
    closing: list[ListedConnection] = []
    kept = sorted(connections, key=lambda each: (-use(each), each.since))
    for place, cap in (_host, limits.per_host), (_subnet, limits.per_subnet):
        counts = Counter[Hashable]()
        within: list[ListedConnection] = []
        for each in kept:
            counts[place(each)] += 1
            (within if counts[place(each)] <= cap else closing).append(each)
        kept = within
    places = defaultdict[tuple[Use, str], int](int)
    ranked = []
    for each in kept:
        rank = use(each), each.subnet
        ranked.append((-rank[0], places[rank], each.since))
        places[rank] += 1
    order = sorted(range(len(kept)), key=ranked.__getitem__)
    return closing + [kept[number] for number in order[limits.total :]]


def _host(each: ListedConnection) -> str:
    return each.host


def _subnet(each: ListedConnection) -> str:
    return each.subnet


class Connections:
    """The connections of a p2pd with the times they were first listed."""

    def __init__(self, real_address: Callable[[str], str] = str) -> None:
        """``real_address``: see ``Endpoint.real_address``."""
        self._real_address = real_address
        self._known: dict[tuple[bytes, bytes], ListedConnection] = {}

    def update(self, listed: Iterable[tuple[bytes, bytes]], now: float) -> Sequence[ListedConnection]:
        """Return the connections for a list of peers and multiaddrs in binary form."""
        self._known = {key: self._known.get(key) or self._connection(*key, now) for key in listed}
        return list(self._known.values())

    def _connection(self, peer: bytes, packed_address: bytes, now: float) -> ListedConnection:
        address = self._real_address(unpack_multiaddr(packed_address))
        return ListedConnection(peer, unpack_peer(peer), host_of(address), subnet_of(address), now)


class ConnectionGuard:
    """Keeps a p2pd within its limits."""

    def __init__(
        self,
        daemon: P2pd,
        resources: ResourceManager,
        limits: ConnectionLimits,
        max_memory_bytes: int,
        real_address: Callable[[str], str] = str,
    ) -> None:
        self._daemon = daemon
        self._resources = resources
        self._limits = limits
        self._max_memory_bytes = max_memory_bytes
        self._connections = Connections(real_address)
        self._dialled: dict[PeerId, float] = {}
        """Connected peers that this process dialled → time of the dial."""
        self._above_since: float | None = None

    def dialled(self, peer: PeerId) -> None:
        """Record that this process dialled ``peer``, which protects its connections."""
        self._dialled[peer] = loop_time()

    def has_dialled(self, peer: PeerId) -> bool:
        """Return whether this process dialled ``peer``, which is connected."""
        return peer in self._dialled

    async def run(self) -> bool:
        """Check until p2pd ends (False), or must restart because its memory stays above the limit
        (True).
        """
        self._above_since = None
        wait_s = CHECK_S
        while self._daemon.process.returncode is None:
            await asyncio.sleep(wait_s)
            wait_s = CHECK_S
            try:
                if await self._check():
                    wait_s = RECHECK_S
            except PeerUnreachable as error:
                _log.debug("p2pd does not list its connections: %s", error)
            if self._must_restart():
                return True
        return False

    async def _check(self) -> bool:
        """Close the connections beyond the limits. Returns whether there were any."""
        now = loop_time()
        connections = self._connections.update(await self._daemon.packed_connections(), now)
        connected = {each.peer_id for each in connections}
        self._dialled = {peer: at for peer, at in self._dialled.items() if peer in connected or at >= now}
        limit_bytes = self._max_memory_bytes + STREAM_BYTES * self._resources.known_peer_streams()
        if self._daemon.memory_bytes() <= limit_bytes:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = now
            _log.warning("p2pd uses more than %d MiB: disconnecting unknown peers", limit_bytes >> 20)

        def use(each: ListedConnection) -> Use:
            return self._use(each, now)

        closing = excess(connections, use, self._limits)
        # unused connections first; at the next check, all connections of unknown peers
        if self._above_since is not None:
            needed = Use.USED if self._above_since == now else Use.KNOWN
            closing += [each for each in connections if use(each) < needed]
        if peers := list(dict.fromkeys(each.peer for each in closing)):
            _log.debug("disconnecting %d peers", len(peers))
            await self._daemon.disconnect_all(peers)
        return bool(peers)

    def _must_restart(self) -> bool:
        """Tell whether the memory has been above the limit for ``RELIEF_S``."""
        now = loop_time()
        return self._above_since is not None and now - self._above_since >= RELIEF_S

    def _use(self, each: ListedConnection, now: float) -> Use:
        scope = self._resources.find(each.peer_id)
        if each.peer_id in self._dialled or (scope is not None and not scope.is_unknown):
            return Use.KNOWN
        if scope is not None and (scope.used[Resource.INBOUND_STREAMS] or scope.used[Resource.CALLS]):
            return Use.USED
        return Use.NEW if now - each.since < NEW_S else Use.IDLE
