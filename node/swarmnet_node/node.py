"""A node: chooses, loads and serves blocks.

1. Choose blocks, and resolve conflicts with other nodes that join.
2. Load them, and wait until every expert that they lack is within reach.
3. Serve and announce them. Move to other blocks when the swarm needs them more.
4. Leave after the sessions have moved.

``Node`` receives its dependencies (transport, directory, clocks), so the simulator can run whole
nodes. ``start.py`` gives it the real ones.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, Protocol

import torch

from swarmnet_node.claims import ClaimReader
from swarmnet_node.engine.counters import EngineCounters
from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.stage import Stage
from swarmnet_node.experts.expert_cache import CacheCounters
from swarmnet_node.experts.trunk import ExpertOptions, Trunk
from swarmnet_node.host_checks import HostChecker, Trial, trial_inputs
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_node.hosting.counters import HostCounters
from swarmnet_node.hosting.host import Host, HostedModel
from swarmnet_node.hosting.locating import keep_located
from swarmnet_node.hosting.reports import Reporter, add_counts
from swarmnet_node.hosting.served_blocks import ServedBlocks
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.relocating import LoadedBlocks, OtherModels, Placed, Relocator
from swarmnet_node.running_node import Dependencies, Hosted, RunningNode, Services
from swarmnet_protocols.directory.announcer import Announcement
from swarmnet_protocols.directory.expert_announcements import format_experts
from swarmnet_protocols.directory.host_announcements import HostSample, host_announcement, shortened
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.fetching.server import WeightServer
from swarmnet_protocols.machine.aio import cancel, in_background, persist, race
from swarmnet_protocols.net.protocol_ids import PING, REPORT, WEIGHTS
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.coordinates import OwnCoordinate
from swarmnet_protocols.routing.model_needs import ServedModel
from swarmnet_protocols.routing.outlook import Outlook
from swarmnet_protocols.routing.placement import Choice, choose_span, resolve_claims
from swarmnet_protocols.routing.relocation import Relocation, Remembered, shrink
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


class HostableModels(OtherModels, Protocol):
    """The models that a node may switch to, and what it would host of them."""

    async def hosting(self, manifest: bytes, weight_bytes: int, limits: OwnerLimits) -> "Hosting":
        """Return the hosting of one of the models, within ``limits``.

        If the limits do not bound memory, the blocks take at most ``weight_bytes``, like the
        current ones. Raises ``SwarmnetError`` if the model cannot be read or does not fit.
        """


@dataclass(frozen=True, kw_only=True)
class Hosting(Hosted):
    """The blocks that a node hosts: ``placed``, or ``num_blocks`` where the swarm needs them most.

    ``load(start, end)`` loads the stage: on the torch thread, or on another thread for a move.
    """

    load: Callable[[int, int], Stage]
    load_on_cpu: Callable[[int, int], Stage] | None = None
    """Loads blocks into the machine's memory, to check other hosts. None if ``load`` does that."""
    num_blocks: int = 0
    may_move: bool = False
    """Whether the node may serve other blocks when the swarm needs them more, and fewer when its
    owner allows less memory."""
    most_blocks: int = 0
    """The number of blocks that it may grow to when it moves. 0 forbids growing."""
    max_cache_bytes: int = 1 << 30
    limits: ClientLimits = field(default_factory=ClientLimits)
    experts: ExpertOptions | None = None
    """Options for experts that peers compute for the node, and the node for other hosts. None if
    the node has all experts of its blocks."""
    others: HostableModels | None = None
    """The models that the node may switch to. None if it keeps its own."""

    # What the supervisor tells the node.
    fitting: Callable[[int], int] = int
    """Takes the node's number of blocks. Returns how many its owner's limits allow, at least 1."""
    has_room: Callable[[int], bool] = lambda _: True
    """Returns whether this many bytes of further weights fit into the memory."""
    on_move: Callable[[], None] = lambda: None
    """Called when the node has moved to other blocks while it serves."""

    # What changes from one run of the node to the next.
    placed: Placed | None = None
    former_model: str = ""
    """The name of the model before a switch to this one. Empty if the node joined with this one."""
    model_reason: str = ""
    """The reason why the node switched, for its owner."""
    memory: Remembered = field(default_factory=Remembered)
    """What the node remembers of the swarm and of its relocations."""

    @property
    def is_chosen(self) -> bool:
        """Whether the blocks of the node are already known."""
        return self.placed is not None


class Node(RunningNode):
    """A node that hosts whole blocks."""

    def __init__(self, dependencies: Dependencies, hosting: Hosting) -> None:
        super().__init__(dependencies, hosting)
        self._hosting = hosting
        self._own = OwnCoordinate(dependencies.rng)
        self._checker = HostChecker(dependencies.transport, self._own, dependencies.rng, dependencies.timing)
        self._claims = ClaimReader(
            dependencies.directory,
            hosting.manifest,
            dependencies.rng,
            self._checker,
            me=dependencies.transport.peer_id,
            blocks=hosting.total_blocks,
        )
        self.placed = hosting.placed or Placed((0, hosting.num_blocks), "")
        self.memory = hosting.memory
        self.relocation: Relocation | None = None
        """What the node announces that it will do. None if it stays."""
        self.limits_changed = asyncio.Event()
        self._step_s = 0.0
        self._dropping = 0
        """The number of blocks that it drops once their sessions are handed over."""
        self._relocating: asyncio.Task[None] | None = None
        self._contexts = AsyncExitStack()
        self._engine_context = AsyncExitStack()
        self.host: Host | None = None
        """The host that serves the blocks. None until they are loaded."""
        self.experts = Trunk()
        """The routed experts of the blocks."""

    # ---- start and stop -------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._contexts, Services.on(self._dependencies.transport) as services:
            try:
                # The host answers pings once it serves.
                await PING.serve(services, self._answer_pings, self._dependencies.timing)
                await self._choose()
                await self._serve(await self._load(services), services)
                async with in_background(
                    persist("the announcement", self._announcer.run),
                    persist("the network coordinate", self._keep_located),
                    persist("the catalog", self._listing.run),
                ):
                    if self._hosting.may_move or self._hosting.others is not None:
                        self._relocating = asyncio.create_task(self._relocate(), name="relocate")
                    yield
            finally:
                await cancel(self._relocating)
                await self._stop()
                # A late status request must not keep the blocks in memory.
                self.host, self.experts = None, Trunk()

    async def _choose(self) -> None:
        """Choose blocks, unless they are known, and announce that the node joins with them."""
        if self._hosting.placed is None:
            await self._choose_span()
        elif self._hosting.may_move:
            await self._fit()
        self._state = pb.HOST_STATE_JOINING
        await self._announcer.announce()

    async def _load(self, services: Services) -> Stage:
        """Load the blocks. Measure them as soon as every expert that they lack is within reach."""
        dependencies, hosting = self._dependencies, self._hosting
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
        dependencies, hosting = self._dependencies, self._hosting
        self.host = host = Host(
            services,
            ServedBlocks(await self._start_engine(stage), self.span[0]),
            HostedModel(dependencies.directory.swarm, hosting.manifest),
            timing=dependencies.timing,
            limits=hosting.limits,
            coordinate=lambda: self._own.coordinate,
            clock=dependencies.clock,
        )
        self._contexts.callback(host.adapters.clear)
        await host.serve()
        if hosting.library is not None:
            weights = WeightServer(hosting.library, lambda: bool(host.sessions))
            await WEIGHTS.serve(services, weights.handle, dependencies.timing)
        self._state = pb.HOST_STATE_ONLINE
        await self._announcer.announce()
        self._log("online")

    async def _relocate(self) -> None:
        relocator = Relocator(self, self._claims, self._hosting.others, self._dependencies, self._checker)
        await persist("the choice of blocks", relocator.run)

    async def _answer_pings(self, stream: TypedStream[session_pb2.Pong, session_pb2.Ping]) -> None:
        """Show other hosts that this node exists, while it chooses and loads its blocks."""

        def pong(nonce: int) -> session_pb2.Pong:
            start, end = self.span
            return session_pb2.Pong(nonce=nonce, manifest=self._hosting.manifest, start=start, end=end)

        await answer_pings(stream, pong)

    async def _measure_first(self, stage: Stage) -> float:
        """Run ``_measure`` as soon as every expert that the stage lacks is within reach."""
        options = self._hosting.experts
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

    def describe(self) -> report_pb2.HostReport:
        engine = self.engine
        report = report_pb2.HostReport(
            record=self._record(),
            model=self._public_model,
            total_blocks=self._hosting.total_blocks,
            queue_s=engine.queue_s if engine else 0.0,
            cache_bytes=engine.cache_bytes if engine else 0,
            cache_bytes_limit=engine.max_cache_bytes if engine else self._hosting.max_cache_bytes,
            forwards=engine.counters.forwards if engine else 0,
            positions=engine.counters.positions if engine else 0,
        )
        self.experts.describe(report)
        return report

    def status(self) -> NodeStatus:
        cached = self.experts.cache.counters if self.experts.cache else CacheCounters()
        status = super().status()
        status.blocks_reason = self.placed.reason
        status.moved_from.extend(self.placed.moved_from or ())
        status.former_model = self._hosting.former_model
        status.model_reason = self._hosting.model_reason
        status.switching_to = self.relocation.model if self.relocation and self._leaving else ""
        status.experts_needed = cached.needed
        status.expert_hit_rate = cached.hit_rate
        status.expert_prediction_rate = cached.prediction_rate
        return status

    def finish(self, grace_s: float) -> None:
        relocating = self._relocating
        if self._leaving is None and relocating is not None and relocating is not asyncio.current_task():
            relocating.cancel()
        super().finish(grace_s)

    async def _dismiss(self) -> None:
        if self.host is not None:
            await self.host.leave()

    def hosting_again(self) -> Hosting:
        """Return the hosting of the next run: the same blocks after a pause, or the blocks of a
        move."""
        placed = self.placed
        if self.relocation is not None and not self.relocation.is_switch:
            placed = placed.after(self.relocation)
        return replace(self._hosting, placed=placed, memory=self.memory)

    def report(self) -> report_pb2.NodeReport:
        if self.host is None and self._state != pb.HOST_STATE_JOINING:
            raise Unreachable("this node is not serving")
        report = super().report()
        counters = self.host.counters if self.host else HostCounters()
        add_counts(report.host, counters, self.host.session_pairs() if self.host else ())
        return report

    # ---- the directory --------------------------------------------------------------------------

    def _log(self, event: str) -> None:
        start, end = self.span
        fields = {
            "peer": self._dependencies.transport.peer_id,
            "model": self._hosting.model,
            "blocks": f"{start}:{end}",
        }
        _log.info(event, extra=fields | {"sessions": len(self.host.sessions) if self.host else 0})

    async def _choose_span(self) -> None:
        """Find the blocks that the swarm needs most, counting the intents of other joining
        nodes."""
        me, total = self._dependencies.transport.peer_id, self._hosting.total_blocks
        length = min(self._hosting.num_blocks, total)
        claims, _ = await self._claims.read(moved=True)
        choice = choose_span(claims, blocks=total, length=length, rng=random.Random(me))
        for _ in range(INTENT_ROUNDS):
            self._adopt(choice)
            await self._announcer.announce()
            await asyncio.sleep(self._dependencies.timing.intent_s * self._dependencies.rng.uniform(0.9, 1.1))
            claims, usual = await self._claims.read(moved=True)
            mine = Claim(me, *self.span, usual, settled=False)
            choice = resolve_claims(mine, claims, blocks=total)
            if (choice.start, choice.end) == self.span:
                break
        self._adopt(choice)

    def _adopt(self, choice: Choice) -> None:
        self.placed = replace(self.placed, span=(choice.start, choice.end), reason=choice.reason)

    # ---- relocating -----------------------------------------------------------------------------

    @property
    def claim(self) -> Claim:
        """The claim of this node to the blocks that it serves."""
        start, end = self.placed.span
        return Claim(
            self._dependencies.transport.peer_id,
            start,
            end,
            (end - start) / self._step_s,
            may_move=self._hosting.may_move,
            may_switch=self._hosting.others is not None,
        )

    @property
    def model(self) -> ServedModel:
        """The model of this node, without claims."""
        hosting = self._hosting
        if hosting.others is not None:
            return hosting.others.own()
        return ServedModel(hosting.manifest, hosting.model, hosting.total_blocks, 1.0, ())

    @property
    def capacity(self) -> int:
        """The number of blocks that the owner's limits allow now, at least 1."""
        start, end = self.span
        return self._hosting.fitting(end - start)

    @property
    def _next_span(self) -> tuple[int, int] | None:
        """The blocks of its model that the node is about to move to."""
        return self.relocation.span if self.relocation and not self.relocation.is_switch else None

    @property
    def blocks_to_drop(self) -> int:
        """The number of blocks in memory that the node is about to drop."""
        start, end = self.span
        return self._dropping + (max(0, end - start - self.capacity) if self._hosting.may_move else 0)

    def has_room_for(self, blocks: int) -> bool:
        """Return whether the memory has room for ``blocks`` more blocks next to the current ones.

        False on an accelerator: the caches take all its memory.
        """
        if self.engine is None or self.engine.stage.is_on_accelerator:
            return False
        stage = self.engine.stage
        return self._hosting.has_room(blocks * stage.weight_bytes // stage.blocks)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of its blocks. 0 until they are loaded."""
        return self.engine.stage.weight_bytes if self.engine else 0

    async def load(self, span: tuple[int, int]) -> LoadedBlocks:
        """Load blocks while sessions go on. Raises the errors of loading."""
        # Not on the torch thread, which computes sessions.
        stage = await asyncio.get_running_loop().run_in_executor(None, self._hosting.load, *span)
        return LoadedBlocks(stage, await self._measure(stage))

    async def make_trial(self, span: tuple[int, int]) -> Trial:
        """Return random inputs for some current blocks, and their outputs.

        Raises ``Unreachable`` if the node does not serve these blocks.
        """
        if self.host is None or not self.host.blocks.have(span):
            raise Unreachable(f"this node does not serve blocks {span[0]}:{span[1]}")
        stage = self.host.blocks.stage(span)
        inputs = self.trial_inputs()
        compute = partial(stage.run_sequences, inputs, (len(inputs),))
        outputs = await self.host.blocks.engine.compute_pass(lambda: compute, len(inputs))
        return Trial(span, inputs, outputs.float())

    def trial_inputs(self) -> torch.Tensor:
        """Return random inputs for any block. Raises ``Unreachable`` if the node serves no
        blocks."""
        if self.engine is None:
            raise Unreachable("this node does not serve")
        return trial_inputs(self.engine.stage.hidden_size, self._dependencies.rng)

    async def compute(self, block: int, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return the outputs of a block that the node lacks, loaded for this alone.

        None if the memory has no room for it, or if it cannot be fetched.
        """
        hosting, stage = self._hosting, self.engine.stage if self.engine else None
        if stage is None or not hosting.has_room(stage.weight_bytes // stage.blocks):
            return None

        def outputs() -> torch.Tensor:
            loaded = (hosting.load_on_cpu or hosting.load)(block, block + 1)
            return loaded.run_sequences(inputs, (len(inputs),)).float()

        try:
            return await asyncio.get_running_loop().run_in_executor(None, outputs)
        except SwarmnetError as error:
            _log.info("block %d could not be loaded for a check: %s", block, error)
            return None

    async def _fit(self) -> None:
        """Choose fewer blocks before they are loaded, if the owner allows less memory by now."""
        start, end = self.span
        if self.capacity >= end - start:
            return
        claims: list[Claim] = []
        # the owner's limit counts even without the directory
        with contextlib.suppress(SwarmnetError):
            claims, _ = await self._claims.read(blocks=self.span)
        mine = Claim(self._dependencies.transport.peer_id, start, end, usual_speed(claims))
        outlook = Outlook([mine, *claims], blocks=self._hosting.total_blocks)
        self.placed = self.placed.after(shrink(outlook, mine, self.capacity))

    async def move(self, loaded: LoadedBlocks, drain_s: float) -> None:
        """Serve the blocks of ``relocation``.

        Hand sessions of the former blocks over within ``drain_s``, then drop these blocks.
        """
        host, former, former_context = self.host, self.engine, self._engine_context
        if host is None or former is None or self.relocation is None:
            return
        engine = await self._start_engine(loaded.stage, former)
        self.placed, self.relocation = self.placed.after(self.relocation), None
        self._step_s = loaded.step_s
        host.move(ServedBlocks(engine, self.span[0]))
        await self._tell_of_move()
        await host.drain(former, drain_s)
        await former_context.aclose()

    async def shrink(self, drain_s: float) -> None:
        """Serve only the blocks of ``relocation``, a part of the current ones.

        Hand sessions of the other blocks over within ``drain_s``, then drop these blocks.
        """
        host, engine = self.host, self.engine
        if host is None or engine is None or self.relocation is None:
            return
        start, end = self.relocation.span
        stage = await engine.run_on_torch_thread(partial(host.blocks.stage, (start, end)))
        step_s = await self._measure(stage)
        self._dropping = engine.stage.blocks - stage.blocks
        try:
            self.placed, self.relocation = self.placed.after(self.relocation), None
            self._step_s = step_s
            engine.stage = stage
            host.move(ServedBlocks(engine, start))
            await self._tell_of_move()
            await host.drain(engine, drain_s)
        finally:
            self._dropping = 0

    async def _tell_of_move(self) -> None:
        self._log("moved")
        self._hosting.on_move()
        await self.try_to_announce()

    async def _start_engine(self, stage: Stage, former: Engine | None = None) -> Engine:
        """Return an engine that runs until its context, or the node's context, ends.

        It continues with the counters and the limits of ``former``.
        """
        self._engine_context = await self._contexts.enter_async_context(AsyncExitStack())
        return await self._engine_context.enter_async_context(
            Engine(
                stage,
                self._dependencies.executor,
                self._dependencies.transport.resources,
                max_cache_bytes=former.max_cache_bytes if former else self._hosting.max_cache_bytes,
                client_cache_bytes=self._hosting.limits.client_cache_bytes,
                counters=former.counters if former else EngineCounters(),
                stopwatch=self._dependencies.stopwatch,
            ).running()
        )

    async def _measure(self, stage: Stage) -> float:
        """Return the seconds for one token through the stage.

        The best of three forwards after a warm-up counts. Sessions compute between the forwards.
        """
        inputs = torch.zeros(1, stage.hidden_size)
        now = self._dependencies.stopwatch

        def forward() -> float:
            started = now()
            stage.forward([(stage.new_sequence(), inputs)])
            return now() - started

        loop = asyncio.get_running_loop()
        times = [await loop.run_in_executor(self._dependencies.executor, forward) for _ in range(4)]
        return max(min(times[1:]), MIN_STEP_S)

    # ---- announcements --------------------------------------------------------------------------

    async def _keep_located(self) -> NoReturn:
        dependencies = self._dependencies
        hosts = HostSample(dependencies.directory, self._hosting.manifest, dependencies.rng)
        me = dependencies.transport.peer_id
        await keep_located(self._checker.call, hosts, me, dependencies.rng, dependencies.timing)

    def _facts(self) -> tuple[object, ...]:
        return (self._announced_state,)

    @property
    def _announced_state(self) -> "pb.HostState":
        """The state for clients. A host without experts in reach cannot compute its blocks, so it
        is joining."""
        is_short = bool(self.experts.missing)
        return pb.HOST_STATE_JOINING if is_short and self._state == pb.HOST_STATE_ONLINE else self._state

    async def withdraw(self, relocation: Relocation) -> None:
        """Announce that the node stays. Within its model, its next announcement says so."""
        self.relocation = None
        if relocation.is_switch:
            with contextlib.suppress(SwarmnetError):  # the announcement expires soon
                await self._intent(relocation, pb.HOST_STATE_LEAVING).publish(self._dependencies.directory)

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
            yield self.experts.service.announcement(
                self._dependencies.transport,
                pb.HOST_STATE_LEAVING if leaving else pb.HOST_STATE_ONLINE,
                version=self._hosting.version,
                public_name=self._hosting.public_name,
                lifetime_s=self._dependencies.timing.record_s,
            )

    def _announcement(self, record: pb.HostRecord) -> Announcement:
        record.version, record.public_name = self._hosting.version, self._hosting.public_name
        return host_announcement(record, self._dependencies.transport, self._dependencies.timing.record_s)

    def _record(self) -> pb.HostRecord:
        """Return what this node announces and reports about itself, without addresses and
        coordinate."""
        engine, next_span = self.engine, self._next_span or (0, 0)
        return pb.HostRecord(
            manifest=self._hosting.manifest,
            start=self.span[0],
            end=self.span[1],
            state=self._announced_state,
            step_s=self._step_s,
            token_s=engine.token_s if engine else 0.0,
            cache_bytes_free=max(0, engine.max_cache_bytes - engine.cache_bytes) if engine else 0,
            room=engine.room if engine else 0,
            sessions=len(self.host.sessions) if self.host else 0,
            precision=engine.stage.precision if engine else "",
            load=engine.load.at(engine.stopwatch()) if engine else 0.0,
            next_start=next_span[0],
            next_end=next_span[1],
            stays=not self._hosting.may_move,
            may_switch=self._hosting.others is not None,
            missing_experts=shortened(format_experts(self.experts.missing)),
        )
