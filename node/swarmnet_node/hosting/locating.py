"""A host's own network coordinate. Pings to a few other hosts of its model keep correcting it."""

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
"""Hosts that are pinged in turn. Few, so that connections are reused. Drawn at random, so that no
host can choose to be one of them."""
FIRST_ROUNDS = 2 * NEIGHBOURS
"""Number of first pings. They go out ``FIRST_FACTOR`` times as often, so a new host soon has a
coordinate."""
FIRST_FACTOR = 5


async def keep_located(
    call: Callable[[HostInfo], Awaitable[bool]],
    hosts: HostSample,
    me: PeerId,
    rng: random.Random,
    timing: Timing,
) -> NoReturn:
    """Ping a host every ``Timing.locate_s`` until cancelled.

    ``call`` pings a host, and returns whether it answered.
    """
    neighbours: list[HostInfo] = []
    rounds = 0
    while True:
        await asyncio.sleep(timing.locate_s / (FIRST_FACTOR if rounds < FIRST_ROUNDS else 1))
        if rounds % NEIGHBOURS == 0 or not neighbours:
            with contextlib.suppress(SwarmnetError):  # keep the current neighbours
                neighbours = _drawn(neighbours, await hosts.refresh(), me, rng)
        rounds += 1
        if neighbours:
            host = neighbours[rounds % len(neighbours)]
            if not await call(host):
                neighbours.remove(host)


def _drawn(before: list[HostInfo], found: list[HostInfo], own: PeerId, rng: random.Random) -> list[HostInfo]:
    """Return up to ``NEIGHBOURS`` online hosts: first hosts of ``before``, then others drawn at
    random."""
    online = {host.peer: host for host in found if host.online and host.peer != own}
    kept = [online.pop(host.peer) for host in before if host.peer in online]
    others = list(online.values())
    return kept + rng.sample(others, min(len(others), NEIGHBOURS - len(kept)))
