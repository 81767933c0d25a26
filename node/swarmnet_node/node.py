"""A node: chooses, loads and serves blocks.

1. Choose blocks, and resolve conflicts with other nodes that join.
2. Load them, and wait until every expert that they lack is within reach.
3. Serve and announce them. ``relocating.py`` moves the node when the swarm needs other blocks more.
4. Leave after the sessions have moved.

``Node`` receives its dependencies (transport, directory, clocks), so the simulator can run whole
nodes. ``start.py`` gives it the real ones.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

from swarmnet_node.claims import ClaimReader
from swarmnet_node.engine.counters import EngineCounters
from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.stage import Stage
from swarmnet_node.experts.trunk import Trunk
from swarmnet_node.host_checks import HostChecker
from swarmnet_node.hosted_blocks import Hosting, Placed
from swarmnet_node.hosting.counters import HostCounters
from swarmnet_node.hosting.host import Host
from swarmnet_node.hosting.locating import keep_located
from swarmnet_node.hosting.reports import Reporter, add_counts
from swarmnet_node.hosting.served_blocks import ServedBlocks
from swarmnet_node.running_node import Dependencies, RunningNode, Services
from swarmnet_protocols.directory.announcer import Announcement
from swarmnet_protocols.directory.expert_announcements import format_experts
from swarmnet_protocols.directory.host_announcements import HostSample, host_announcement, shortened
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.machine.aio import persist, race
from swarmnet_protocols.net.protocol_ids import PING, REPORT
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.quantization.products import SOURCE
from swarmnet_protocols.routing.coordinates import OwnCoordinate
from swarmnet_protocols.routing.outlook import Outlook
from swarmnet_protocols.routing.placement import Choice, choose_span, resolve_claims
from swarmnet_protocols.routing.relocation import Relocation, shrink
from swarmnet_protocols.routing.throughput import Claim, usual_speed
from swarmnet_protocols.session.pings import answer_pings
from swarmnet_protocols.wire import records_pb2 as pb
from swarmnet_protocols.wire import report_pb2, session_pb2
from swarmnet_protocols.wire.control_pb2 import NodeStatus

_log = logging.getLogger(__name__)

MIN_STEP_S = 1e-6
"""Smallest measured seconds of a step. 0 would mean that it is not measured."""
INTENT_ROUNDS = 5
"""Number of times that a joining node reads other nodes' intents and may change its choice. Each
time resolves one more conflict."""


class Node(RunningNode):
    """A node that hosts whole blocks."""

    def __init__(self, dependencies: Dependencies, hosting: Hosting) -> None:
        super().__init__(dependencies, hosting)
        self.hosting = hosting
        self._own = OwnCoordinate(dependencies.rng)
        self.checker = HostChecker(dependencies.transport, self._own, dependencies.rng, dependencies.timing)
        self.claims = ClaimReader(dependencies, self.checker, hosting.manifest, hosting.total_blocks)
        self.placed = hosting.placed or Placed((0, hosting.num_blocks), "")
        self.memory = hosting.memory
        self.relocation: Relocation | None = None
        """The relocation that the node has announced, or None. If the node ends for the relocation,
        the supervisor of the node completes it."""
        self.limits_changed = asyncio.Event()
        """Set when the owner has changed the limits."""
        self._step_s = 0.0
        self._dropping = 0
        """The number of blocks that the node will drop once their sessions are handed over."""
        self._engine_context = AsyncExitStack()
        self.host: Host | None = None
        """The host that serves the blocks. None until they are loaded."""
        self.experts = Trunk()
        """The routed experts of the blocks."""

    # ---- start and stop -------------------------------------------------------------------------

    async def _start(self, services: Services) -> None:
        # The host answers pings once it serves.
        await PING.serve(services, self._answer_pings, self.dependencies.timing)
        await self._choose()
        await self._serve(await self._load(services), services)

    def _background(self) -> Iterable[Coroutine[Any, Any, object]]:
        yield from super()._background()
        yield persist("the network coordinate", self._keep_located)

    async def _stop(self) -> None:
        await super()._stop()
        # A late status request must not keep the blocks in memory.
        self.host, self.experts = None, Trunk()

    async def _choose(self) -> None:
        """Choose blocks, unless they are known, and announce that the node joins with them."""
        if self.hosting.placed is None:
            await self._choose_span()
        elif self.hosting.may_move:
            await self._fit()
        self._state = pb.HOST_STATE_JOINING
        await self._announcer.announce()

    async def _load(self, services: Services) -> Stage:
        """Load the blocks. Measure them as soon as every expert that they lack is within reach."""
        dependencies, hosting = self.dependencies, self.hosting
        loop = asyncio.get_running_loop()
        stage = await loop.run_in_executor(dependencies.executor, hosting.load, *self.span)
        if hosting.experts is not None:
            self.experts = await self._contexts.enter_async_context(
                Trunk.run(
                    stage,
                    self.span[0],
                    hosting.experts,
                    dependencies,
                    services,
                    manifest=hosting.manifest,
                    has_room=hosting.has_room,
                )
            )
        await REPORT.serve(services, Reporter(self.report).handle)
        if self.experts.dispatcher is not None:
            await self._announcer.announce()  # other hosts may wait for these experts
        self._step_s = await self._measure_first(stage)
        return stage

    async def _serve(self, stage: Stage, services: Services) -> None:
        """Serve clients with the loaded blocks, and announce them as online."""
        dependencies, hosting = self.dependencies, self.hosting
        self.host = host = Host(
            services,
            ServedBlocks(await self._start_engine(stage), self.span[0]),
            swarm=dependencies.directory.swarm,
            manifest=hosting.manifest,
            timing=dependencies.timing,
            limits=hosting.limits,
            coordinate=lambda: self._own.coordinate,
            clock=dependencies.clock,
        )
        self._contexts.callback(host.adapters.clear)
        await host.serve()
        await self._serve_weights(services, lambda: bool(host.sessions))
        self._state = pb.HOST_STATE_ONLINE
        await self._announcer.announce()
        self._log("online")

    async def _answer_pings(self, stream: TypedStream[session_pb2.Pong, session_pb2.Ping]) -> None:
        """Show other hosts that this node exists, while it chooses and loads its blocks."""

        def pong(nonce: int) -> session_pb2.Pong:
            start, end = self.span
            return session_pb2.Pong(nonce=nonce, manifest=self.hosting.manifest, start=start, end=end)

        await answer_pings(stream, pong)

    async def _measure_first(self, stage: Stage) -> float:
        """Run ``_measure`` as soon as every expert that the stage lacks is within reach."""
        options = self.hosting.experts
        while self.experts.dispatcher is not None and options is not None:
            # While a host waits, announce it with its own experts and the experts that it waits
            # for.
            complete = self.experts.dispatcher.complete(options.notice)
            await race(complete, self._announcer.run(), self._listing.run())
            try:
                return await self._measure(stage)
            except Refusal as refusal:  # a peer has failed meanwhile
                _log.info("not measured: %s", refusal.detail)
        return await self._measure(stage)

    @property
    def span(self) -> tuple[int, int]:
        return self.placed.span

    @property
    def engine(self) -> Engine | None:
        """The engine that computes the blocks. None until they are loaded."""
        return self.host.blocks.engine if self.host else None

    async def _dismiss(self) -> None:
        if self.host is not None:
            await self.host.leave()

    def hosting_again(self) -> Hosting:
        """Return the hosting of the next run: the same blocks after a pause, or the blocks of a
        move."""
        placed = self.placed
        if self.relocation is not None and not self.relocation.is_switch:
            placed = placed.after(self.relocation)
        return replace(self.hosting, placed=placed, memory=self.memory)

    # ---- choosing -------------------------------------------------------------------------------

    async def _choose_span(self) -> None:
        """Find the blocks that the swarm needs most, counting the intents of other joining
        nodes."""
        me, total = self.dependencies.transport.peer_id, self.hosting.total_blocks
        length = min(self.hosting.num_blocks, total)
        claims, _ = await self.claims.read(moved=True)
        choice = choose_span(claims, blocks=total, length=length, rng=random.Random(me))
        for _ in range(INTENT_ROUNDS):
            self._adopt(choice)
            await self._announcer.announce()
            await asyncio.sleep(self.dependencies.timing.intent_s * self.dependencies.rng.uniform(0.9, 1.1))
            claims, usual = await self.claims.read(moved=True)
            mine = Claim(me, *self.span, usual, settled=False)
            choice = resolve_claims(mine, claims, blocks=total)
            if (choice.start, choice.end) == self.span:
                break
        self._adopt(choice)

    def _adopt(self, choice: Choice) -> None:
        self.placed = replace(self.placed, span=(choice.start, choice.end), reason=choice.reason)

    async def _fit(self) -> None:
        """Choose fewer blocks before they are loaded, if the owner allows less memory by now."""
        start, end = self.span
        if self.capacity >= end - start:
            return
        claims: list[Claim] = []
        # the owner's limit counts even without the directory
        with contextlib.suppress(SwarmnetError):
            claims, _ = await self.claims.read(blocks=self.span)
        mine = Claim(self.dependencies.transport.peer_id, start, end, usual_speed(claims))
        outlook = Outlook([mine, *claims], blocks=self.hosting.total_blocks)
        self.placed = self.placed.after(shrink(outlook, mine, self.capacity))

    # ---- relocating -----------------------------------------------------------------------------

    @property
    def claim(self) -> Claim:
        """The claim of this node to the blocks that it serves."""
        start, end = self.placed.span
        return Claim(
            self.dependencies.transport.peer_id,
            start,
            end,
            (end - start) / self._step_s,
            may_move=self.hosting.may_move,
            may_switch=self.hosting.others is not None,
        )

    @property
    def capacity(self) -> int:
        """The number of blocks that the owner's limits allow now, at least 1."""
        start, end = self.span
        return self.hosting.fitting(end - start)

    @property
    def _next_span(self) -> tuple[int, int] | None:
        """The blocks of its model that the node is about to move to."""
        return self.relocation.span if self.relocation and not self.relocation.is_switch else None

    @property
    def blocks_to_drop(self) -> int:
        """The number of blocks in memory that the node is about to drop."""
        start, end = self.span
        return self._dropping + (max(0, end - start - self.capacity) if self.hosting.may_move else 0)

    async def move(self, stage: Stage, drain_s: float) -> None:
        """Serve the blocks of ``relocation``, which ``stage`` has.

        Hand sessions of the former blocks over within ``drain_s``, then drop these blocks.
        """
        host, relocation, former_context = self.host, self.relocation, self._engine_context
        if host is None or relocation is None:
            return
        step_s = await self._measure(stage)
        engine = await self._start_engine(stage, host.blocks.engine)
        await self._serve_instead(host, engine, relocation, step_s, drain_s)
        await former_context.aclose()

    async def shrink(self, drain_s: float) -> None:
        """Serve only the blocks of ``relocation``, a part of the current ones.

        Hand sessions of the other blocks over within ``drain_s``, then drop these blocks.
        """
        host, relocation = self.host, self.relocation
        if host is None or relocation is None:
            return
        engine = host.blocks.engine
        stage = await engine.run_on_torch_thread(partial(host.blocks.stage, relocation.span))
        step_s = await self._measure(stage)
        self._dropping = engine.stage.blocks - stage.blocks
        try:
            engine.stage = stage
            await self._serve_instead(host, engine, relocation, step_s, drain_s)
        finally:
            self._dropping = 0

    async def _serve_instead(
        self, host: Host, engine: Engine, relocation: Relocation, step_s: float, drain_s: float
    ) -> None:
        """Serve with ``engine`` after ``relocation``, and hand sessions of dropped blocks over."""
        former = host.blocks.engine
        self.placed, self.relocation, self._step_s = self.placed.after(relocation), None, step_s
        host.move(ServedBlocks(engine, self.span[0]))
        self._log("moved")
        self.hosting.on_move()
        await self.try_to_announce()
        await host.drain(former, drain_s)

    async def _start_engine(self, stage: Stage, former: Engine | None = None) -> Engine:
        """Return an engine that runs until ``_engine_context``, or the context of the node, ends.

        It continues with the counters and the limits of ``former``.
        """
        self._engine_context = await self._contexts.enter_async_context(AsyncExitStack())
        return await self._engine_context.enter_async_context(
            Engine(
                stage,
                self.dependencies.executor,
                self.dependencies.transport.resources,
                max_cache_bytes=former.max_cache_bytes if former else self.hosting.max_cache_bytes,
                client_cache_bytes=self.hosting.limits.client_cache_bytes,
                counters=former.counters if former else EngineCounters(self.dependencies.given),
                stopwatch=self.dependencies.stopwatch,
            ).running()
        )

    async def _measure(self, stage: Stage) -> float:
        """Return the seconds for one token through the stage.

        The best of three forwards after a warm-up counts. Sessions compute between the forwards.
        """
        inputs = np.zeros((1, stage.hidden_size), np.float32)
        now = self.dependencies.stopwatch

        def forward() -> float:
            started = now()
            stage.forward([(stage.new_sequence(), inputs)])
            return now() - started

        loop = asyncio.get_running_loop()
        times = [await loop.run_in_executor(self.dependencies.executor, forward) for _ in range(4)]
        return max(min(times[1:]), MIN_STEP_S)

    # ---- what others see ------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of its blocks. 0 until they are loaded."""
        return self.engine.stage.weight_bytes if self.engine else 0

    def describe(self) -> report_pb2.HostReport:
        engine = self.engine
        report = report_pb2.HostReport(
            record=self._record(),
            model=self._public_model,
            total_blocks=self.hosting.total_blocks,
            queue_s=engine.queue_s if engine else 0.0,
            cache_bytes=engine.cache_bytes if engine else 0,
            cache_bytes_limit=engine.max_cache_bytes if engine else self.hosting.max_cache_bytes,
            forwards=engine.counters.forwards if engine else 0,
            positions=engine.counters.positions if engine else 0,
        )
        self.experts.describe(report)
        return report

    def status(self) -> NodeStatus:
        status = super().status()
        status.blocks_reason = self.placed.reason
        status.moved_from.extend(self.placed.moved_from or ())
        status.former_model = self.hosting.former_model
        status.model_reason = self.hosting.model_reason
        status.switching_to = self.relocation.model if self.relocation and self._leaving else ""
        if self.engine and not self.engine.stage.is_on_accelerator:
            status.kernels = native_code.loaded_target(SOURCE)
        if self.experts.cache is not None:
            cached = self.experts.cache.counters
            status.experts_needed = cached.needed
            status.expert_hit_rate = cached.hit_rate
            status.expert_prediction_rate = cached.prediction_rate
        return status

    def report(self) -> report_pb2.NodeReport:
        if self.host is None and self._state != pb.HOST_STATE_JOINING:
            raise Unreachable("this node is not serving")
        report = super().report()
        counters = self.host.counters if self.host else HostCounters()
        add_counts(report.host, counters, self.host.session_pairs() if self.host else ())
        return report

    def _log_fields(self) -> dict[str, object]:
        start, end = self.span
        return {"blocks": f"{start}:{end}", "sessions": len(self.host.sessions) if self.host else 0}

    async def _keep_located(self) -> NoReturn:
        dependencies = self.dependencies
        hosts = HostSample(dependencies.directory, self.hosting.manifest, dependencies.rng)
        me = dependencies.transport.peer_id
        await keep_located(self.checker.call, hosts, me, dependencies.rng, dependencies.timing)

    def _facts(self) -> tuple[object, ...]:
        return (self._announced_state,)

    @property
    def _announced_state(self) -> "pb.HostState":
        """The state for clients. A host without experts in reach cannot compute its blocks, so it
        is joining."""
        is_short = bool(self.experts.missing)
        return pb.HOST_STATE_JOINING if is_short and self._state == pb.HOST_STATE_ONLINE else self._state

    async def withdraw(self, relocation: Relocation) -> None:
        """Announce that the node stays in its model, if ``relocation`` is a switch. After a move
        within the model, the next announcement of the node says so."""
        self.relocation = None
        if relocation.is_switch:
            with contextlib.suppress(SwarmnetError):  # the announcement expires soon
                await self._intent(relocation, pb.HOST_STATE_LEAVING).publish(self.dependencies.directory)

    def _intent(self, switch: Relocation, state: "pb.HostState") -> Announcement:
        """Return the announcement of the blocks that this node takes after ``switch``."""
        return self._announcement(
            pb.HostRecord(manifest=switch.manifest, start=switch.start, end=switch.end, state=state)
        )

    def _announcements(self) -> Iterable[Announcement]:
        record = self._record()
        if self._own.coordinate is not None:
            record.coordinate.extend(self._own.coordinate.numbers())
        yield self._announcement(record)
        if self.relocation is not None and self.relocation.is_switch:
            yield self._intent(self.relocation, pb.HOST_STATE_CHOOSING)
        if self.experts.service is not None:
            leaving = self._state == pb.HOST_STATE_LEAVING
            state = pb.HOST_STATE_LEAVING if leaving else pb.HOST_STATE_ONLINE
            yield self.experts.service.announcement(self.dependencies, self.hosting, state)

    def _announcement(self, record: pb.HostRecord) -> Announcement:
        record.version, record.public_name = self.hosting.version, self.hosting.public_name
        return host_announcement(record, self.dependencies.transport, self.dependencies.timing.record_s)

    def _record(self) -> pb.HostRecord:
        """Return what this node announces and reports about itself, without addresses and
        coordinate."""
        engine, next_span = self.engine, self._next_span or (0, 0)
        return pb.HostRecord(
            manifest=self.hosting.manifest,
            start=self.span[0],
            end=self.span[1],
            state=self._announced_state,
            step_s=self._step_s,
            token_s=engine.token_s if engine else 0.0,
            cache_bytes_free=max(0, engine.max_cache_bytes - engine.cache_bytes) if engine else 0,
            room=engine.room if engine else 0,
            sessions=len(self.host.sessions) if self.host else 0,
            precision=engine.stage.precision if engine else "",
            arithmetic=engine.stage.arithmetic if engine else "",
            load=engine.load.at(engine.stopwatch()) if engine else 0.0,
            next_start=next_span[0],
            next_end=next_span[1],
            stays=not self.hosting.may_move,
            may_switch=self.hosting.others is not None,
            missing_experts=shortened(format_experts(self.experts.missing)),
        )
