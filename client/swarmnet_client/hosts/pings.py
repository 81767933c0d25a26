"""Pings to the hosts that a client knows. They measure delays and queueing times."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import closing, suppress
from typing import Any

from swarmnet_protocols.averages import averaged
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import PING
from swarmnet_protocols.routing.coordinates import Coordinate, OwnCoordinate
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.session.pings import PingStream, ping
from swarmnet_protocols.timing import Timing

PINGED_PER_BLOCK = 4
"""Hosts of each block that a client pings, so that every part of a chain has measured hosts."""
PINGED_HOSTS = 24
"""A client pings at least this many hosts, even if fewer would be enough for
``PINGED_PER_BLOCK``."""
MAX_PINGED_HOSTS = 96
"""Most ping streams of a client. The chain search assumes a high delay to hosts without one."""
SMOOTHING = 0.3
"""Weight of the newest ping in the running mean of a host's delay."""


def drawn(
    hosts: Collection[HostInfo],
    pinged: Set[PeerId],
    rng: random.Random,
    expected_s: Callable[[HostInfo], float] = lambda _: 0.0,
) -> list[HostInfo]:
    """Draw the hosts to ping in addition to ``pinged``.

    1. Hosts of blocks with fewer than ``PINGED_PER_BLOCK`` pinged hosts.
    2. Further hosts, up to ``PINGED_HOSTS``.

    Hosts are compared in random pairs, and the better by ``expected_s`` comes first. So near and
    idle hosts are pinged more often, but at most twice as often as others: ``expected_s`` rests on
    announcements, which may be false.
    """
    known = Counter(block for host in hosts if host.peer in pinged for block in range(host.start, host.end))
    others = [host for host in hosts if host.peer not in pinged]
    rng.shuffle(others)
    others.sort(key=lambda host: host.start)  # hosts of about the same blocks are paired
    pairs = [sorted(others[each : each + 2], key=expected_s) for each in range(0, len(others), 2)]
    better, worse = [pair[0] for pair in pairs], [host for pair in pairs for host in pair[1:]]
    rng.shuffle(better)
    rng.shuffle(worse)
    chosen, left = [], []
    for host in [*better, *worse]:
        blocks = range(host.start, host.end)
        if any(known[block] < PINGED_PER_BLOCK for block in blocks):
            known.update(blocks)
            chosen.append(host)
        else:
            left.append(host)
    missing = max(0, PINGED_HOSTS - len(pinged) - len(chosen))
    return [*chosen, *left[:missing]][: max(0, MAX_PINGED_HOSTS - len(pinged))]


class PingMonitor:
    """One ping stream to each of at most ``MAX_PINGED_HOSTS`` hosts, which are drawn at random."""

    def __init__(
        self,
        transport: Transport,
        timing: Timing,
        rng: random.Random,
        on_failure: Callable[[PeerId], None],
    ) -> None:
        """``on_failure`` is called with a host that does not answer.

        That host is pinged again after the next ``follow``.
        """
        self.delay_s: dict[PeerId, float] = {}
        """Seconds from the client to the host, one way."""
        self.queue_s: dict[PeerId, float] = {}
        """Seconds that a step waits in the host's queue, as the host reports."""
        self.busy: dict[PeerId, float] = {}
        """Share of recent seconds that the host spent computing, as it reports."""
        self.cache_free: dict[PeerId, float] = {}
        """Share of the host's memory for KV caches that is free, as the host reports."""
        self.coordinates: dict[PeerId, Coordinate] = {}
        """The coordinates of the hosts, as they report."""
        self.own = OwnCoordinate(rng)
        """The coordinate of this client."""
        self._transport = transport
        self._timing = timing
        self._rng = rng
        self._on_failure = on_failure
        self._pings: dict[PeerId, asyncio.Task[None]] = {}

    def follow(
        self, hosts: Mapping[PeerId, HostInfo], expected_s: Callable[[HostInfo], float] = lambda _: 0.0
    ) -> None:
        """Ping some of these hosts from now on, and no others. Measurements of other hosts are
        dropped.

        ``expected_s``: as for ``drawn``.
        """
        for peer in [peer for peer, task in self._pings.items() if task.done() or peer not in hosts]:
            self._pings.pop(peer).cancel()
        measurements: tuple[dict[PeerId, Any], ...] = (
            self.delay_s,
            self.queue_s,
            self.busy,
            self.cache_free,
            self.coordinates,
        )
        for measured in measurements:
            for peer in measured.keys() - hosts.keys():
                del measured[peer]
        for host in drawn(hosts.values(), self._pings.keys(), self._rng, expected_s):
            self._pings[host.peer] = asyncio.create_task(self._ping(host))

    async def close(self) -> None:
        """End all ping streams."""
        await cancel(*self._pings.values())

    async def _ping(self, host: HostInfo) -> None:
        with suppress(SwarmnetError):
            pings = await PING.open(self._transport, host.peer, self._timing, addresses=host.addresses)
            with closing(pings):
                while True:
                    await self._ping_once(pings)
                    await asyncio.sleep(self._timing.ping_s)
        self._on_failure(host.peer)

    async def _ping_once(self, stream: PingStream) -> None:
        answer, peer = await ping(stream, self._rng), stream.peer
        self.delay_s[peer] = averaged(self.delay_s.get(peer, 0.0), answer.delay_s, SMOOTHING)
        self.queue_s[peer] = answer.queue_s
        self.busy[peer] = answer.busy
        self.cache_free[peer] = answer.cache_free
        if answer.coordinate is not None:
            self.coordinates[peer] = answer.coordinate
            self.own.measured(peer, answer.coordinate, answer.delay_s)
