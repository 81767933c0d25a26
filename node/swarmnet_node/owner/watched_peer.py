"""A peer without blocks that a command runs until it is stopped, such as a bootstrap peer.

Its owner watches and stops it in the same ways as a node: see ``control.py``. A ``GuestPeer``, such
as a training worker, also keeps its owner's limits, and pauses.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn, Self

from swarmnet_node.owner.guard import Guard
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.owner.machine import USAGE_EVERY_S, OwnersMachine
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.machine.aio import in_background, loop_time, persist
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
    limits: OwnerLimits = field(default_factory=OwnerLimits)
    """The limits of a ``GuestPeer``."""
    limit_computing: Callable[[OwnerLimits], None] = lambda _: None
    """Applies the limits on cores and on the device's memory."""


class WatchedPeer:
    """The peer of a command, as its owner sees it."""

    def __init__(self, purpose: Purpose, transport: Transport, directory: Directory) -> None:
        self.stopping = asyncio.Event()
        """Set when the owner stops the command."""
        self.resources: ResourceManager = transport.resources
        self._purpose = purpose
        self._transport = transport
        self._directory = directory
        self._machine = OwnersMachine(purpose.folder, purpose.link, wall_clock, purpose.limit_computing)
        self._version = version("swarmnet-p2p")
        self._started = loop_time()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Count the traffic of the month while the context is open."""
        try:
            await self._begin()
            async with in_background(persist("the watch over the machine", self._watch)):
                yield self
        finally:
            self._machine.close()

    def status(self) -> NodeStatus:
        """Return the status of the peer."""
        status = peer_status(self._transport, self._directory)
        status.command, status.swarm = self._purpose.command, self._purpose.swarm_name
        status.version = self._version
        status.state = "leaving" if self.stopping.is_set() else "online"
        status.uptime_s = loop_time() - self._started
        status.ram_bytes = self._machine.ram_bytes()
        status.usage.CopyFrom(control_pb2.Usage(**asdict(self._machine.usage())))
        self._purpose.add(status)
        return status

    def finish(self, grace_s: float) -> None:
        """Stop the command. No session runs here, so nothing has to move away."""
        self.stopping.set()

    async def _begin(self) -> None:
        """Prepare to watch."""

    async def _watch(self) -> NoReturn:
        while True:
            await asyncio.sleep(USAGE_EVERY_S)
            await asyncio.get_running_loop().run_in_executor(None, self._machine.save_usage)


class GuestPeer(WatchedPeer):
    """The peer of a command that works only while its owner's limits allow it."""

    def __init__(self, purpose: Purpose, transport: Transport, directory: Directory) -> None:
        super().__init__(purpose, transport, directory)
        self._changed = asyncio.Event()
        self.guard = Guard(self._machine, purpose.limits, self._changed.set)
        self.is_working = False

    async def must_rest(self) -> str:
        """Wait until the limits forbid to work, or until the command stops.

        Return the reason of the limits. It is empty if the command stops.
        """
        while not (reason := self.guard.reason()) and not self.stopping.is_set():
            await self._next_change()
        return reason

    async def may_work(self, tell: Callable[[str], None]) -> bool:
        """Wait until the limits let the command work. Return False if it is stopped before.

        ``tell`` hears each reason to wait.
        """
        told = ""
        while (reason := self.guard.reason()) and not self.stopping.is_set():
            if reason != told:
                tell(told := reason)
            await self._next_change()
        return not self.stopping.is_set()

    def status(self) -> NodeStatus:
        status = super().status()
        self.guard.describe(status, "" if self.is_working else self.guard.reason())
        return status

    def finish(self, grace_s: float) -> None:
        super().finish(grace_s)
        self._changed.set()

    def pause(self, for_s: float = math.inf) -> None:
        """Free the memory for ``for_s`` seconds or until ``resume``."""
        self.guard.pause(for_s)

    def resume(self) -> None:
        """End ``pause``."""
        self.guard.resume()

    def limits(self) -> OwnerLimits:
        return self.guard.limits

    def set_limits(self, limits: OwnerLimits) -> None:
        """Apply other limits. Raises ``OutOfResources`` for less memory than is in use."""
        used = self._machine.ram_bytes()
        if self.is_working and limits.max_ram_bytes is not None and limits.max_ram_bytes < used:
            raise OutOfResources(
                f"a limit --max-ram of {limits.max_ram_bytes >> 20} MiB is below the {used >> 20} MiB in use",
                hint="pause or finish it first, or choose a higher limit",
            )
        self.guard.set_limits(limits)

    async def _begin(self) -> None:
        await self.guard.observe()

    async def _watch(self) -> NoReturn:
        await self.guard.watch()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
