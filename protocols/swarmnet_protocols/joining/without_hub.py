"""Resolve a model by its name from peers of the swarm, when the hub does not answer or lacks it."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet_protocols.errors import ConfigError, Unreachable
from swarmnet_protocols.joining.network import Network, connect

if TYPE_CHECKING:
    from swarmnet_protocols.models import LocalModel, Progress


def resolve_in_swarm(
    name: str,
    enter: Callable[[], Network],
    *,
    cache_dir: Path,
    progress: "Progress | None" = None,
    max_disk_bytes: int | None = None,
) -> "LocalModel":
    """Return the model with this name. ``max_disk_bytes`` is as for ``resolve``.

    If the hub does not answer or lacks the model, peers send its outline. That needs a swarm,
    entered by ``enter``, whose file names the model. Do not call this on a thread with a running
    loop. Raises what ``resolve``, ``enter`` and ``connect`` raise.
    """
    from swarmnet_protocols.models import resolve

    find = partial(resolve, name, cache_dir=cache_dir, progress=progress, max_disk_bytes=max_disk_bytes)
    try:
        return find()
    except (ConfigError, Unreachable):
        network = enter()
        model = network.rules.names.get(name)
        if model is None:
            raise
        asyncio.run(_fetch(name, model, network, cache_dir))
    return find()


async def _fetch(name: str, model: bytes, network: Network, cache_dir: Path) -> None:
    from swarmnet_protocols.directory.host_announcements import read_hosts
    from swarmnet_protocols.fetching.peers import SwarmPeers
    from swarmnet_protocols.models.outline import fetch_outline
    from swarmnet_protocols.timing import Timing

    async with connect(network, client_mode=True) as (transport, directory):
        peers = SwarmPeers(network.rules.pieces_hashes, Timing(), network.rules.models)
        peers.attach(transport, partial(read_hosts, directory))
        await fetch_outline(peers, name, model, cache_dir)
