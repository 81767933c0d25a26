"""A node: chooses its blocks, loads them, serves them, announces them, and leaves after its sessions have moved.

``Node.run`` receives its dependencies (transport, directory, clocks), so that the simulator runs whole nodes; ``start.py`` gives it the real ones.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import NoReturn

import torch

from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.stage import Stage
from swarmnet_node.hosting.announcement import Announcement
from swarmnet_node.hosting.host import Host, HostedModel
from swarmnet_node.hosting.host_limits import HostLimits
from swarmnet_node.hosting.locating import keep_located
from swarmnet_node.hosting.reports import Reporter, describe_host
from swarmnet_node.owner.control import NodeStatus
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.catalog import CatalogModel, keep_model_announced
from swarmnet_protocols.directory.host_announcements import HostSample, hosts_topic
from swarmnet_protocols.directory.node_reports import clean
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.fetching.server import Library, WeightServer
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.machine.clock import Clock, wall_clock
from swarmnet_protocols.machine.core_lock import NO_CORE_LOCK, CoreLock
from swarmnet_protocols.net import Handler, ProtocolSpec, Stream, Transport, TransportWrapper
from swarmnet_protocols.net.protocol_ids import REPORT, WEIGHTS
from swarmnet_protocols.routing.coordinates import OwnCoordinate
from swarmnet_protocols.routing.placement import Choice, choose_span, resolve_claims
from swarmnet_protocols.routing.throughput import Claim
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import records_pb2 as pb
from swarmnet_protocols.wire import report_pb2

_log = logging.getLogger(__name__)

MIN_STEP_S = 1e-6
"""Least measured seconds of a step: 0 would mean that it is not measured."""
HOSTS_READ = 512
"""Announcements of other hosts that a node reads to choose its blocks, about."""
_NOT_SERVING = (pb.HOST_STATE_LEAVING, pb.HOST_STATE_PAUSED)
INTENT_ROUNDS = 5
"""Rounds in which a joining node reads the other nodes' intents. Each round resolves one more conflict; then it keeps its choice."""


@dataclass(frozen=True)
class Dependencies:
    """The dependencies of a node: transport, directory, clocks, randomness."""

    transport: Transport
    directory: Directory
    executor: Executor
    rng: random.Random
    timing: Timing = field(default_factory=Timing)
    stopwatch: Callable[[], float] = time.perf_counter
    """Clock for the times of forwards. The loop's own clock stands still while the loop is blocked."""
    core_lock: CoreLock = NO_CORE_LOCK
    """Lock for computing, where nodes share the cores of a machine."""
    clock: Clock = wall_clock
    """Clock by which records expire."""
    warning: Callable[[], str] = str
    """A warning for the owner; empty if there is none."""


@dataclass(frozen=True)
class Hosting:
    """The blocks that a node hosts: ``blocks`` [start, end), or ``num_blocks`` where the swarm needs them most.

    ``blocks_reason``: why it hosts ``blocks``, for its owner.

    ``load(start, end)`` loads the stage. It is called on the torch thread.
    """

    model: str
    manifest: bytes
    total_blocks: int
    load: Callable[[int, int], Stage]
    blocks: tuple[int, int] | None = None
    blocks_reason: str = "named by the owner"
    num_blocks: int = 0
    max_cache_bytes: int = 1 << 30
    swarm_name: str = ""
    public_name: str = ""
    version: str = "0"
    limits: HostLimits = field(default_factory=HostLimits)
    library: Library | None = None
    """The weights that this machine serves to members; None: none."""


class Node:
    """A running node. Made by ``run``."""

    def __init__(self, dependencies: Dependencies, hosting: Hosting) -> None:
        self._dependencies = dependencies
        self._hosting = hosting
        self._state = pb.HOST_STATE_CHOOSING
        self._hosts = HostSample(
            dependencies.directory, hosting.manifest, dependencies.rng, wanted=HOSTS_READ
        )
        self._own = OwnCoordinate(dependencies.rng)
        self._span = hosting.blocks or (0, hosting.num_blocks)
        self._reason = hosting.blocks_reason if hosting.blocks else ""
        self._step_s = 0.0
        self._engine: Engine | None = None
        self._host: Host | None = None
        self._started = asyncio.get_running_loop().time()
        self._leaving: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    @asynccontextmanager
    async def run(cls, dependencies: Dependencies, hosting: Hosting) -> AsyncIterator["Node"]:
        """A node that serves while the context is open. Raises what loading raises."""
        node = cls(dependencies, hosting)
        if hosting.blocks is None:
            await node._choose()
        node._state = pb.HOST_STATE_JOINING
        await node._announce()
        loop = asyncio.get_running_loop()
        stage = await loop.run_in_executor(dependencies.executor, hosting.load, *node._span)
        node._step_s = await loop.run_in_executor(
            dependencies.executor, _measure, stage, dependencies.stopwatch
        )
        async with (
            Engine.run(
                stage,
                dependencies.executor,
                dependencies.transport.resources,
                max_cache_bytes=hosting.max_cache_bytes,
                core_lock=dependencies.core_lock,
                stopwatch=dependencies.stopwatch,
            ) as engine,
            Services.on(dependencies.transport) as services,
        ):
            node._engine = engine
            host = Host(
                services,
                engine,
                HostedModel(dependencies.directory.swarm, hosting.manifest, node._span[0]),
                timing=dependencies.timing,
                limits=hosting.limits,
                clock=dependencies.clock,
            )
            node._host = host
            host.coordinate = lambda: node._own.coordinate
            await host.serve()
            await services.serve(REPORT, Reporter(node.report).handle)
            if hosting.library is not None:
                weights = WeightServer(hosting.library, lambda: bool(host.sessions), dependencies.timing)
                await services.serve(WEIGHTS, weights.handle)
            node._state = pb.HOST_STATE_ONLINE
            await node._announce()
            node._log("online")
            announcing = asyncio.create_task(node._keep_announcing(), name="announce")
            locating = asyncio.create_task(
                keep_located(
                    dependencies.transport,
                    HostSample(dependencies.directory, hosting.manifest, dependencies.rng),
                    node._own,
                    dependencies.rng,
                    dependencies.timing,
                ),
                name="locate",
            )
            model = CatalogModel(hosting.manifest, clean(hosting.model), hosting.total_blocks)
            listing = asyncio.create_task(keep_model_announced(dependencies.directory, model), name="catalog")
            try:
                yield node
            finally:
                await cancel(announcing, listing, locating, node._leaving)
                host.adapters.clear()
                if node._leaving is None:
                    # New clients must not choose this host. Clients that use it notice the end of its streams.
                    node._state = pb.HOST_STATE_LEAVING
                    with contextlib.suppress(SwarmnetError, TimeoutError):
                        async with asyncio.timeout(1.0):
                            await node._announce()
                # A late status request must not keep the blocks in memory.
                node._engine = node._host = None

    @property
    def span(self) -> tuple[int, int]:
        return self._span

    @property
    def blocks_reason(self) -> str:
        """Why the node hosts these blocks; empty while it chooses them."""
        return self._reason

    @property
    def engine(self) -> Engine | None:
        """None before the blocks are loaded."""
        return self._engine

    @property
    def host(self) -> Host | None:
        """None before the blocks are loaded."""
        return self._host

    def status(self) -> NodeStatus:
        """The status of the node."""
        engine, host = self._engine, self._host
        return NodeStatus(
            peer_id=self._dependencies.transport.peer_id,
            state=pb.HostState.Name(self._state).removeprefix("HOST_STATE_").lower(),
            model=self._hosting.model,
            manifest=self._hosting.manifest,
            start=self._span[0],
            end=self._span[1],
            total_blocks=self._hosting.total_blocks,
            addresses=tuple(self._dependencies.transport.addresses()),
            uptime_s=asyncio.get_running_loop().time() - self._started,
            sessions=len(host.sessions) if host else 0,
            cache_bytes=engine.cache_bytes if engine else 0,
            cache_bytes_limit=engine.max_cache_bytes if engine else self._hosting.max_cache_bytes,
            weight_bytes=engine.stage.weight_bytes if engine else 0,
            tokens=engine.counters.positions if engine else 0,
            forwards=engine.counters.forwards if engine else 0,
            version=self._hosting.version,
            swarm=self._hosting.swarm_name,
            warning=self._dependencies.warning(),
            reach=self._dependencies.transport.reach(),
            blocks_reason=self._reason,
            refused_stores=self._dependencies.directory.refused,
        )

    def finish(self, grace_s: float) -> None:
        """Take no new sessions and ask clients to move; ``finished`` when they have, or after ``grace_s``."""
        if self._leaving is None:
            self._log("leaving")
            self._leaving = asyncio.create_task(self._leave(grace_s), name="leave")

    async def rest(self) -> NoReturn:
        """Announce, until cancelled, that the node is paused. Not for a node inside ``run``."""
        self._state = pb.HOST_STATE_PAUSED
        self._log("paused")
        with contextlib.suppress(SwarmnetError):
            await self._announce()
        await self._keep_announcing()

    async def finished(self) -> None:
        """Wait until ``finish`` is done. Raises the error of ``fail``."""
        await asyncio.shield(self._ended)

    def fail(self, error: SwarmnetError) -> None:
        """The node cannot go on: ``finished`` raises ``error``."""
        if not self._ended.done():
            self._ended.set_exception(error)

    async def _leave(self, grace_s: float) -> None:
        self._state = pb.HOST_STATE_LEAVING
        try:
            async with asyncio.timeout(grace_s):
                # Clients are told even when the directory is out of reach.
                with contextlib.suppress(SwarmnetError):
                    await self._announce()
                if self._host is not None:
                    await self._host.leave()
        except TimeoutError:
            pass
        finally:
            if not self._ended.done():
                self._ended.set_result(None)

    def report(self) -> report_pb2.NodeReport:
        """The report for dashboards. Raises ``Unreachable`` while the node does not serve."""
        if self._host is None:
            raise Unreachable("this node is not serving")
        return describe_host(
            self.status(),
            self._host.engine,
            self._host.counters,
            self._host.session_pairs(),
            step_s=self._step_s,
            public_name=self._hosting.public_name,
        )

    # ---- the directory ----------------------------------------------------------------------------------

    def _log(self, event: str) -> None:
        start, end = self._span
        fields = {
            "peer": self._dependencies.transport.peer_id,
            "model": self._hosting.model,
            "blocks": f"{start}:{end}",
        }
        _log.info(event, extra=fields | {"sessions": len(self._host.sessions) if self._host else 0})

    async def _choose(self) -> None:
        """Find the blocks that the swarm needs most, counting the intents of other joining nodes."""
        me, total = self._dependencies.transport.peer_id, self._hosting.total_blocks
        length = min(self._hosting.num_blocks, total)
        claims, _ = await self._claims()
        choice = choose_span(claims, blocks=total, length=length, rng=random.Random(me))
        for _ in range(INTENT_ROUNDS):
            self._take(choice)
            await self._announce()
            await asyncio.sleep(self._dependencies.timing.intent_s * self._dependencies.rng.uniform(0.9, 1.1))
            claims, usual = await self._claims()
            mine = Claim(me, *self._span, usual, settled=False)
            choice = resolve_claims(mine, claims, blocks=total)
            if (choice.start, choice.end) == self._span:
                break
        self._take(choice)

    def _take(self, choice: Choice) -> None:
        self._span, self._reason = (choice.start, choice.end), choice.reason

    async def _claims(self) -> tuple[list[Claim], float]:
        """The blocks that others serve or intend to, and the blocks per second to expect of a host that is not measured yet."""
        others = [
            (each.info, each.body.state != pb.HOST_STATE_CHOOSING)
            for each in await self._hosts.refresh()
            if each.info.peer != self._dependencies.transport.peer_id
            and each.body.state not in _NOT_SERVING
            and not each.is_incompatible
        ]
        # Nodes that join at the same time and see the same records compute the same value.
        usual = median([1 / info.block_s for info, _ in others if info.step_s > 0] or [1.0])
        return [
            Claim(info.peer, info.start, info.end, 1 / info.block_s if info.step_s > 0 else usual, settled)
            for info, settled in others
        ], usual

    async def _keep_announcing(self) -> NoReturn:
        timing, transport = self._dependencies.timing, self._dependencies.transport
        clock = asyncio.get_running_loop().time
        while True:
            announced = transport.addresses()
            announce_at = clock() + timing.announce_s * self._dependencies.rng.uniform(0.8, 1.0)
            while (left_s := announce_at - clock()) > 0:
                await asyncio.sleep(min(left_s, timing.address_check_s))
                if transport.addresses() != announced:  # a relay or a network has changed
                    break
            with contextlib.suppress(SwarmnetError):  # the record outlives a missed announcement
                await self._announce()

    async def _announce(self) -> None:
        announcement = Announcement(
            self._hosting.manifest,
            self._span,
            self._state,
            self._dependencies.transport.addresses(),
            step_s=self._step_s,
            sessions=len(self._host.sessions) if self._host else 0,
            version=self._hosting.version,
            public_name=self._hosting.public_name,
            reach=self._dependencies.transport.reach(),
            coordinate=self._own.coordinate,
        )
        await self._dependencies.directory.publish(
            hosts_topic(self._hosting.manifest, self._dependencies.transport.peer_id),
            announcement.record(self._engine).SerializeToString(),
            lifetime_s=self._dependencies.timing.record_s,
        )


def _measure(stage: Stage, now: Callable[[], float]) -> float:
    """Seconds for one token through the stage: the best of a few forwards after one to warm up."""
    inputs = torch.zeros(1, stage.hidden_size)
    times = []
    for _ in range(4):
        started = now()
        stage.forward([(stage.new_sequence(), inputs)])
        times.append(now() - started)
    return max(min(times[1:]), MIN_STEP_S)


class Services(TransportWrapper):
    """A transport whose handlers end with the context, while the transport below lives on: it outlives a node that its owner pauses.

    When the context ends, the streams of its handlers are closed, and the transport below keeps no reference to them.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._handlers: dict[str, Handler] = {}
        self._serving: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def on(cls, transport: Transport) -> AsyncIterator["Services"]:
        """Serve on ``transport`` while the context is open. Afterwards streams are closed as they come."""
        services = cls(transport)
        try:
            yield services
        finally:
            services._handlers.clear()
            await cancel(*services._serving)

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
