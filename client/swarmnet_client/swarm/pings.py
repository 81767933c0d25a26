"""Pings to the hosts that a client knows, which measure their delays and queueing times."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import PING
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.chain_search import HostInfo
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb

PINGED_PER_BLOCK = 4
"""Hosts of each block that a client pings, so that every part of a chain is chosen among measured hosts."""
PINGED_HOSTS = 24
"""Hosts that a client pings although every block has enough of them."""
MAX_PINGED_HOSTS = 96
"""Hosts to which a client keeps a ping stream, at most. Others have an unknown delay, which the chain search takes for a high one."""
SMOOTHING = 0.3
"""Weight of the newest ping in the running mean of a host's delay."""


def drawn(hosts: Collection[HostInfo], pinged: Set[PeerId], rng: random.Random) -> list[HostInfo]:
    """The hosts to ping besides those of ``pinged``: each host has the same chance, whatever its peer id and its announcement.

    Drawn are hosts of blocks with fewer than ``PINGED_PER_BLOCK`` pinged hosts, and further ones up to ``PINGED_HOSTS``.
    """
    known = Counter(block for host in hosts if host.peer in pinged for block in range(host.start, host.end))
    others = [host for host in hosts if host.peer not in pinged]
    rng.shuffle(others)
    chosen, left = [], []
    for host in others:
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
        """``on_failure`` is called with a host that does not answer; it is pinged again after the next ``follow``."""
        self.delay_s: dict[PeerId, float] = {}
        """Seconds from the client to the host, one way."""
        self.queue_s: dict[PeerId, float] = {}
        """Seconds that a step waits in the host's queue, as the host reports."""
        self._transport = transport
        self._timing = timing
        self._rng = rng
        self._on_failure = on_failure
        self._pings: dict[PeerId, asyncio.Task[None]] = {}

    def follow(self, hosts: Mapping[PeerId, HostInfo]) -> None:
        """Ping some of these hosts from now on, and no others. Measurements of other hosts are dropped."""
        for peer in [peer for peer, task in self._pings.items() if task.done() or peer not in hosts]:
            self._pings.pop(peer).cancel()
        for measured in (self.delay_s, self.queue_s):
            for peer in measured.keys() - hosts.keys():
                del measured[peer]
        for host in drawn(hosts.values(), self._pings.keys(), self._rng):
            self._pings[host.peer] = asyncio.create_task(self._ping(host))

    async def close(self) -> None:
        """End all ping streams."""
        await cancel(*self._pings.values())

    async def _ping(self, host: HostInfo) -> None:
        """Ping one host until it fails."""
        try:
            stream = await self._transport.open(
                host.peer, PING, addresses=host.addresses, deadline_s=self._timing.open_s
            )
        except SwarmnetError:
            self._on_failure(host.peer)
            return
        pings = TypedStream(stream, pb.Ping, pb.Pong, silence_s=self._timing.pong_s)
        try:
            while True:
                await self._ping_once(pings)
                await asyncio.sleep(self._timing.ping_s)
        except SwarmnetError:
            self._on_failure(host.peer)
        finally:
            stream.close()

    async def _ping_once(self, stream: TypedStream[pb.Ping, pb.Pong]) -> None:
        clock = asyncio.get_running_loop().time
        nonce = self._rng.getrandbits(63)
        sent_at = clock()
        await stream.send(pb.Ping(nonce=nonce))
        pong, _ = await stream.receive()
        if pong.nonce != nonce:
            raise ProtocolViolation(f"{stream.peer} answered another ping")
        measured_s = (clock() - sent_at) / 2
        known_s = self.delay_s.get(stream.peer, measured_s)
        self.delay_s[stream.peer] = known_s + SMOOTHING * (measured_s - known_s)
        self.queue_s[stream.peer] = pong.queue_s if 0 <= pong.queue_s < math.inf else 0.0
