"""Resolve a model by its name from peers of the swarm, when the hub does not answer or lacks it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError, Unreachable
from swarmnet_protocols.joining.network import Network, connect
from swarmnet_protocols.models.public_names import is_path

if TYPE_CHECKING:
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.models import LocalModel, Progress
    from swarmnet_protocols.net import Transport

    Unknown = Callable[[str, Directory], Awaitable[None]]


def resolve_in_swarm(
    name: str,
    enter: Callable[[], Network],
    *,
    cache_dir: Path,
    progress: "Progress | None" = None,
    max_disk_bytes: int | None = None,
    unknown: "Unknown | None" = None,
) -> "LocalModel":
    """Return the model with this name. ``max_disk_bytes`` is as for ``resolve``.

    If the hub does not answer or lacks the model, peers send its outline. The name is looked up in
    the swarm file, then among the models that peers announce, then among the jobs whose revisions
    they announce. A job stands for its newest revision. ``unknown`` gets a name that is none of
    these, and may raise an error that says more. ``enter`` enters the swarm. Do not call this on a
    thread with a running loop. Raises what ``resolve``, ``enter`` and ``connect`` raise.
    """
    from swarmnet_protocols.models import resolve

    find = partial(resolve, cache_dir=cache_dir, progress=progress, max_disk_bytes=max_disk_bytes)
    try:
        return find(name)
    except (ConfigError, Unreachable):
        network = enter()
        if name not in network.rules.names and is_path(name):
            raise
        found = asyncio.run(_fetch(name, network, cache_dir, unknown))
        if found is None:
            raise
    return find(found)


async def _fetch(name: str, network: Network, cache_dir: Path, unknown: "Unknown | None") -> str | None:
    """Fetch the outline of a model from peers. Return the model's name in the swarm, or None if the
    swarm knows no such model.

    Raises ``Unreachable`` if the swarm knows the model, and no peer has the outline.
    """
    from swarmnet_protocols.directory.catalog import announced_model
    from swarmnet_protocols.directory.revisions import announced_revision

    listed = network.rules.names.get(name)
    async with AsyncExitStack() as stack:
        try:
            transport, directory = await stack.enter_async_context(connect(network, client_mode=True))
        except Unreachable:
            if listed is None:
                return None
            raise
        model = listed or await announced_model(directory, name)
        if model is None:
            revision = await announced_revision(directory, name)
            if revision is None:
                if unknown is not None:
                    await unknown(name, directory)
                return None
            name, model = revision.name, revision.manifest
        await _fetch_outline((transport, directory), network, name, model, cache_dir)
    return name


async def resolve_announced(
    name: str, manifest: bytes, connection: "tuple[Transport, Directory]", network: Network, **where: Any
) -> "LocalModel":
    """Return the model with this manifest hash, which hosts announce under ``name``.

    Peers chose the name, so no path of this machine is meant. If the name means another model here,
    or none, peers send the outline. ``where``: the folders and limits of ``resolve``. Raises as
    ``resolve``, and ``Unreachable`` if no peer has the outline.
    """
    from swarmnet_protocols.models import resolve

    find = partial(resolve, published=True, **where)
    with suppress(ConfigError, Unreachable):
        found = await asyncio.to_thread(find, name)
        if found.manifest.hash == manifest:
            return found
        name = f"{name}@{manifest.hex()}"
    await _fetch_outline(connection, network, name, manifest, where["cache_dir"])
    found = await asyncio.to_thread(find, name)
    if found.manifest.hash != manifest:
        raise ConfigError(f"the files of {name} on this machine are not what its hosts have")
    return found


async def _fetch_outline(
    connection: "tuple[Transport, Directory]", network: Network, name: str, model: bytes, cache_dir: Path
) -> None:
    from swarmnet_protocols.directory.host_announcements import read_hosts
    from swarmnet_protocols.fetching.peers import SwarmPeers
    from swarmnet_protocols.models.outline import fetch_outline
    from swarmnet_protocols.timing import Timing

    transport, directory = connection
    peers = SwarmPeers(network.rules.pieces_hashes, Timing(), network.rules.models)
    peers.attach(transport, partial(read_hosts, directory))
    await fetch_outline(peers, name, model, cache_dir)
