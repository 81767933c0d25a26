"""A host's own network coordinate, which it corrects by pinging a few other hosts of its model from time to time."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import NoReturn

from swarmnet_protocols.directory.host_announcements import HostSample
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.timing import Timing

NEIGHBOURS = 16
"""Hosts that are pinged in turn: few, so that connections are reused, and drawn at random, so that no host can choose to be among them."""
FIRST_ROUNDS = 2 * NEIGHBOURS
"""Number of first pings, which are sent ``FIRST_FACTOR`` times as often, so that a new host soon has a coordinate."""
FIRST_FACTOR = 5


async def keep_located(
    call: Callable[[HostInfo], Awaitable[bool]],
    hosts: HostSample,
    me: PeerId,
    rng: random.Random,
    timing: Timing,
) -> NoReturn:
    """Ping a host every ``Timing.locate_s``, until cancelled. ``call`` pings one, and returns whether it answered."""
    neighbours: list[HostInfo] = []
    rounds = 0
    while True:
        await asyncio.sleep(timing.locate_s / (FIRST_FACTOR if rounds < FIRST_ROUNDS else 1))
        if rounds % NEIGHBOURS == 0 or not neighbours:
            with contextlib.suppress(SwarmnetError):  # the present neighbours are kept
                neighbours = _drawn(neighbours, await hosts.refresh(), me, rng)
        rounds += 1
        if neighbours:
            host = neighbours[rounds % len(neighbours)]
            if not await call(host):
                neighbours.remove(host)


def _drawn(before: list[HostInfo], found: list[HostInfo], own: PeerId, rng: random.Random) -> list[HostInfo]:
    """``NEIGHBOURS`` hosts that are online: those of ``before``, and others drawn at random."""
    online = {host.peer: host for host in found if host.online and host.peer != own}
    kept = [online.pop(host.peer) for host in before if host.peer in online]
    others = list(online.values())
    return kept + rng.sample(others, min(len(others), NEIGHBOURS - len(kept)))
