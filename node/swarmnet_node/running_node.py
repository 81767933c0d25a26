"""The base of nodes that host blocks and of nodes that host only experts.

1. A node gets its dependencies, then runs once in the context of ``running``.
2. Its services end with that context.
3. It leaves: it takes no new work, and ends when nobody uses it any more.
"""

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from swarmnet_node.hosting.reports import describe_reach
from swarmnet_node.owner.given import Given
from swarmnet_node.owner.watched_peer import peer_status
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement, Announcer
from swarmnet_protocols.directory.catalog import CatalogModel, model_announcer
from swarmnet_protocols.directory.host_announcements import clean, state_name
from swarmnet_protocols.fetching.server import Library, WeightServer
from swarmnet_protocols.machine.aio import cancel, in_background, loop_time, persist
from swarmnet_protocols.machine.clock import Clock, wall_clock
from swarmnet_protocols.models.public_names import name_for_peers
from swarmnet_protocols.net import Handler, ProtocolSpec, Stream, Transport, TransportWrapper
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.net.protocol_ids import WEIGHTS
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import records_pb2 as pb
from swarmnet_protocols.wire import report_pb2
from swarmnet_protocols.wire.control_pb2 import NodeStatus

_log = logging.getLogger(__name__)

LAST_ANNOUNCEMENT_S = 1.0
"""Seconds that a node which ends at once waits until the directory has its last announcement."""


@dataclass(frozen=True)
class Dependencies:
    """The dependencies of a node: transport, directory, clocks, randomness."""

    transport: Transport
    directory: Directory
    executor: Executor
    """The torch thread."""
    rng: random.Random
    timing: Timing = field(default_factory=Timing)
    stopwatch: Callable[[], float] = time.perf_counter
    """Clock for the times of forwards. The loop's own clock stands still while the loop is
    blocked."""
    clock: Clock = wall_clock
    """Clock that decides when records expire."""
    warning: Callable[[], str] = str
    """A warning for the owner. Empty if there is none."""
    given: Given = field(default_factory=Given)
    """Totals of the work of this machine since its data directory exists."""


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """The model of a node, and the facts about the node that others see."""

    model: str
    """The name that the owner gave. Others see it without its path."""
    manifest: bytes
    total_blocks: int
    """Blocks of the whole model."""
    context: int = 0
    """Most positions of a sequence; 0 until the model is read."""
    size_bytes: int = 0
    """Size of all blocks in the files; 0 until the model is read."""
    swarm_name: str = ""
    public_name: str = ""
    version: str = "0"
    """The version of the software."""
    library: Library | None = None
    """The weights that this machine serves to members, or None."""


class Ending:
    """The end of something that runs until it has finished or failed."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def finished(self) -> None:
        """Wait until it has finished. Raises the error of ``fail``."""
        await asyncio.shield(self._ended)

    def fail(self, error: Exception) -> None:
        """Make ``finished`` raise ``error``, unless it has already finished."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def end(self) -> None:
        """Mark it as finished, unless it has already failed."""
        if not self._ended.done():
            self._ended.set_result(None)


class RunningNode(Ending, ABC):
    """A node that runs once, in the context of ``running``. Its status can be read at any time."""

    def __init__(self, dependencies: Dependencies, hosted: Hosted) -> None:
        super().__init__()
        self.dependencies = dependencies
        self._hosted = hosted
        self._public_model = clean(name_for_peers(hosted.model))
        self._state = pb.HOST_STATE_CHOOSING
        self._started = loop_time()
        self.leaving = asyncio.Event()
        """Set when the node begins to leave."""
        self._leaving: asyncio.Task[None] | None = None
        self._contexts = AsyncExitStack()
        """Contexts that end with the run of the node, after its services."""
        directory, rng, timing = dependencies.directory, dependencies.rng, dependencies.timing
        self._announcer = Announcer(
            directory,
            rng,
            self._announcements,
            timing.announce_s,
            facts=lambda: (dependencies.transport.addresses(), *self._facts()),
            check_s=timing.address_check_s,
            ending=self._announcements,
        )
        model = CatalogModel(
            hosted.manifest, self._public_model, hosted.total_blocks, hosted.context, hosted.size_bytes
        )
        self._listing = model_announcer(directory, rng, model)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Choose, load and serve until the context ends. Entered once the node serves.

        Raises the errors of loading.
        """
        async with self._contexts, Services(self.dependencies.transport).running() as services:
            try:
                await self._start(services)
                async with in_background(*self._background()):
                    yield
            finally:
                await self._stop()

    @abstractmethod
    async def _start(self, services: "Services") -> None:
        """Choose, load and serve."""

    def _background(self) -> Iterable[Coroutine[Any, Any, object]]:
        """Yield what runs while the node serves."""
        yield persist("the announcement", self._announcer.run)
        yield persist("the catalog", self._listing.run)

    async def _serve_weights(self, services: "Services", is_busy: Callable[[], bool]) -> None:
        """Serve the model's weights to members, as far as ``is_busy`` allows."""
        if (library := self._hosted.library) is not None:
            handler = WeightServer(library, is_busy).handle
            await WEIGHTS.serve(services, handler, self.dependencies.timing)

    @abstractmethod
    def describe(self) -> report_pb2.HostReport:
        """Return what the node says about itself to its owner and to dashboards."""

    def status(self) -> NodeStatus:
        """Return the status of the node, at any time."""
        dependencies, hosted, host = self.dependencies, self._hosted, self.describe()
        status = peer_status(dependencies.transport, dependencies.directory)
        status.MergeFrom(
            NodeStatus(
                command="join",
                state=state_name(host.record.state),
                model=hosted.model,
                host=host,
                uptime_s=self._uptime_s,
                weight_bytes=self.weight_bytes,
                version=hosted.version,
                swarm=hosted.swarm_name,
                public_name=hosted.public_name,
                warning=dependencies.warning(),
                given=dependencies.given.message(),
            )
        )
        return status

    def report(self) -> report_pb2.NodeReport:
        """Return the report for dashboards. Raises ``Unreachable`` while the node does not
        serve."""
        hosted, reach = self._hosted, self.dependencies.transport.reach()
        return report_pb2.NodeReport(
            version=hosted.version,
            public_name=hosted.public_name,
            uptime_s=self._uptime_s,
            host=self.describe(),
            reach=describe_reach(reach),
            given=self.dependencies.given.message(),
        )

    @property
    def resources(self) -> ResourceManager:
        """Resources that other peers hold here."""
        return self.dependencies.transport.resources

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""

    @property
    def is_online(self) -> bool:
        """True if the node serves now."""
        return self._state == pb.HOST_STATE_ONLINE

    @property
    def span(self) -> tuple[int, int]:
        """The blocks [start, end) that the node serves. (0, 0) for none."""
        return 0, 0

    def finish(self, grace_s: float) -> None:
        """Take no new work, and ask clients and hosts to use other nodes.

        ``finished`` returns when they do, or after ``grace_s``.
        """
        if self._leaving is None:
            self._log("leaving")
            self.leaving.set()
            self._leaving = asyncio.create_task(self._leave(grace_s), name="leave")

    async def rest(self) -> NoReturn:
        """Announce, until cancelled, that the node is paused. Do not call this inside
        ``running``."""
        self._state = pb.HOST_STATE_PAUSED
        self._log("paused")
        await self.keep_announced()

    async def keep_announced(self) -> NoReturn:
        """Announce the node's state again and again, until cancelled."""
        await self._announcer.run()

    async def try_to_announce(self) -> None:
        """Announce, unless the directory does not answer."""
        await self._announcer.try_to_announce()

    async def _leave(self, grace_s: float) -> None:
        self._state = pb.HOST_STATE_LEAVING
        try:
            async with asyncio.timeout(grace_s), asyncio.TaskGroup() as leaving:
                # Tell clients and hosts at once, even when the directory is out of reach.
                leaving.create_task(self._announcer.withdraw())
                leaving.create_task(self._dismiss())
        except TimeoutError:
            pass
        finally:
            self.end()

    async def _stop(self) -> None:
        """Leave at once, unless the node has left. Clients and hosts notice that its streams
        end."""
        await cancel(self._leaving)
        if self._leaving is None:
            self._state = pb.HOST_STATE_LEAVING
            await self._announcer.withdraw(LAST_ANNOUNCEMENT_S)

    @property
    def _uptime_s(self) -> float:
        return loop_time() - self._started

    @abstractmethod
    async def _dismiss(self) -> None:
        """Take no new work, and return when no client or host uses the node any more."""

    @abstractmethod
    def _announcements(self) -> Iterable[Announcement]:
        """Return what the node announces in its current state."""

    @abstractmethod
    def _facts(self) -> tuple[object, ...]:
        """Return the facts, beyond addresses, that the node announces as soon as they change."""

    def _log(self, event: str) -> None:
        fields = {"peer": self.dependencies.transport.peer_id, "model": self._hosted.model}
        _log.info(event, extra=fields | self._log_fields())

    @abstractmethod
    def _log_fields(self) -> dict[str, object]:
        """Return the description of the hosted part for the log."""


class Services(TransportWrapper):
    """A transport whose handlers end with the context.

    The transport below outlives a node that its owner pauses. When the context ends, the handlers'
    streams are closed, and the transport below keeps no reference to them.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._handlers: dict[str, Handler] = {}
        self._serving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Services"]:
        """Serve while the context is open. Afterwards new streams are closed at once."""
        try:
            yield self
        finally:
            self._handlers.clear()
            await cancel(*self._serving)

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        self._handlers[protocol.id] = handler

        async def serve(stream: Stream) -> None:
            handler = self._handlers.get(protocol.id)
            task = asyncio.current_task()
            if handler is None or task is None:
                return
            self._serving.add(task)
            try:
                await handler(stream)
            finally:
                self._serving.discard(task)

        await super().serve(protocol, serve)
