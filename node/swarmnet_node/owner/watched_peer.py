"""A peer without blocks that a command runs until it is stopped, such as a bootstrap peer.

Its owner watches and stops it in the same ways as a node: see ``control.py``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from swarmnet_node.owner.machine import USAGE_EVERY_S, OwnersMachine
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.machine.aio import in_background, persist
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.net import Transport
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.wire import control_pb2
from swarmnet_protocols.wire.control_pb2 import NodeStatus


def peer_status(transport: Transport, directory: Directory) -> NodeStatus:
    """Return the status of a peer as far as its transport and the directory know it."""
    return NodeStatus(
        peer_id=transport.peer_id,
        addresses=transport.addresses(),
        warning=directory.warning(),
        reach=transport.reach(),
        refused_stores=directory.refused,
        known_peers=directory.known_peers,
    )


@dataclass(frozen=True)
class Purpose:
    """The purpose of a command in a swarm. ``command``: its name, such as ``bootstrap``."""

    command: str
    swarm_name: str
    folder: Path
    """The data directory, which stores the traffic of the month."""
    link: LinkLimiter
    add: Callable[[NodeStatus], None] = lambda _: None
    """Adds to a status the facts that only this command knows."""


class WatchedPeer:
    """The peer of a command, as its owner sees it. Made by ``run``."""

    def __init__(
        self, purpose: Purpose, transport: Transport, directory: Directory, machine: OwnersMachine
    ) -> None:
        self.stopping = asyncio.Event()
        """Set when the owner stops the command."""
        self.resources: ResourceManager = transport.resources
        self._purpose = purpose
        self._transport = transport
        self._directory = directory
        self._machine = machine
        self._version = version("swarmnet-p2p")
        self._started = asyncio.get_running_loop().time()

    @classmethod
    @asynccontextmanager
    async def run(
        cls, purpose: Purpose, transport: Transport, directory: Directory
    ) -> AsyncIterator["WatchedPeer"]:
        """Count the traffic of the month while the context is open."""
        machine = OwnersMachine(purpose.folder, purpose.link, wall_clock, lambda _: None)
        peer = cls(purpose, transport, directory, machine)
        try:
            async with in_background(persist("the count of traffic", peer._keep_usage)):
                yield peer
        finally:
            machine.close()

    def status(self) -> NodeStatus:
        """Return the status of the peer."""
        status = peer_status(self._transport, self._directory)
        status.command, status.swarm = self._purpose.command, self._purpose.swarm_name
        status.version = self._version
        status.state = "leaving" if self.stopping.is_set() else "online"
        status.uptime_s = asyncio.get_running_loop().time() - self._started
        status.ram_bytes = self._machine.ram_bytes()
        status.usage.CopyFrom(control_pb2.Usage(**asdict(self._machine.usage())))
        self._purpose.add(status)
        return status

    def finish(self, grace_s: float) -> None:
        """Stop the command. No session runs here, so nothing has to move away."""
        self.stopping.set()

    async def _keep_usage(self) -> NoReturn:
        while True:
            await asyncio.sleep(USAGE_EVERY_S)
            await asyncio.get_running_loop().run_in_executor(None, self._machine.save_usage)
