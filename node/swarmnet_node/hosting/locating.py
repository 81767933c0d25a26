"""A host's own network coordinate, which it corrects by pinging a few other hosts of its model from time to time."""

import asyncio
import contextlib
import random
from typing import NoReturn

from swarmnet_protocols.directory.host_announcements import Announced, HostSample
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import PING
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.chain_search import HostInfo
from swarmnet_protocols.routing.coordinates import OwnCoordinate
from swarmnet_protocols.session.pings import PingStream, ping
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb

NEIGHBOURS = 16
"""Hosts that are pinged in turn: few, so that connections are reused, and drawn at random, so that no host can choose to be among them."""
FIRST_ROUNDS = 2 * NEIGHBOURS
"""Number of first pings, which are sent ``FIRST_FACTOR`` times as often, so that a new host soon has a coordinate."""
FIRST_FACTOR = 5


async def keep_located(
    transport: Transport, hosts: HostSample, own: OwnCoordinate, rng: random.Random, timing: Timing
) -> NoReturn:
    """Ping a host every ``Timing.locate_s`` and correct ``own``, until cancelled."""
    neighbours: list[HostInfo] = []
    rounds = 0
    while True:
        await asyncio.sleep(timing.locate_s / (FIRST_FACTOR if rounds < FIRST_ROUNDS else 1))
        if rounds % NEIGHBOURS == 0 or not neighbours:
            with contextlib.suppress(SwarmnetError):  # the present neighbours are kept
                neighbours = _drawn(neighbours, await hosts.refresh(), transport.peer_id, rng)
        rounds += 1
        if neighbours:
            host = neighbours[rounds % len(neighbours)]
            try:
                await _measure(transport, host, own, rng, timing)
            except SwarmnetError:
                neighbours.remove(host)


def _drawn(before: list[HostInfo], found: list[Announced], own: PeerId, rng: random.Random) -> list[HostInfo]:
    """``NEIGHBOURS`` hosts that are online: those of ``before``, and others drawn at random."""
    online = {each.info.peer: each.info for each in found if each.info.online and each.info.peer != own}
    kept = [online.pop(host.peer) for host in before if host.peer in online]
    others = list(online.values())
    return kept + rng.sample(others, min(len(others), NEIGHBOURS - len(kept)))


async def _measure(
    transport: Transport, host: HostInfo, own: OwnCoordinate, rng: random.Random, timing: Timing
) -> None:
    stream = await transport.open(host.peer, PING, addresses=host.addresses, deadline_s=timing.open_s)
    with contextlib.closing(stream):
        pings: PingStream = TypedStream(stream, pb.Ping, pb.Pong, silence_s=timing.pong_s)
        answer = await ping(pings, rng)
        if answer.coordinate is not None:
            own.measured(host.peer, answer.coordinate, answer.delay_s)
