"""A host: admits sessions, links, passes and adapter uploads of clients.

1. A client opens a session, and the previous hop opens a link to it (``session.py``). The session
   ends with the client's stream.
2. A client that trains sends passes. Each pass has its own stream and keeps no state
   (``passes.py``).
3. Clients upload adapters on separate streams, before the sessions and passes that name them
   (``adapter_store.py``).

When all slots are taken, the host ends a session, pass or link without work (``slots.py``).
``client_limits.py`` has the limits.

The path of a step of a session:

1. ``Host._serve_link`` receives the link of the upstream hop, finds its session and passes the link
   to ``HostedSession.accept``.
2. ``HostedSession._read`` decodes each step; ``_work`` applies steps one after another in
   ``_apply``.
3. ``_apply`` gives each row its KV cache and waits for ``Engine.compute``, which batches steps of
   several sessions.
4. The activation log stores the outputs, and ``LinkSender`` sends them from there to the next hop.
   The last hop sends them to the client on the session's stream.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.scheduler import expected_wait_s
from swarmnet_node.hosting.adapter_store import AdapterReceiver, AdapterStore, AdapterStream
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_node.hosting.counters import HostCounters, Pair
from swarmnet_node.hosting.passes import HostedPass, PassStream
from swarmnet_node.hosting.served_blocks import ServedBlocks
from swarmnet_node.hosting.session import (
    HostedSession,
    LinkStream,
    SessionParts,
    SessionStream,
    leaving,
)
from swarmnet_node.hosting.slots import IDLE_S, Slot, Slots, idle, slot_to_evict
from swarmnet_protocols.directory.host_announcements import signed_addresses
from swarmnet_protocols.errors import DeadlineExceeded, OutOfResources, ProtocolViolation
from swarmnet_protocols.machine.aio import News, all_of, loop_time, race
from swarmnet_protocols.machine.clock import Clock, wall_clock
from swarmnet_protocols.net import PeerId, Stream, Transport
from swarmnet_protocols.net.dialling import Introductions
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import RETRY_S, Scope
from swarmnet_protocols.net.protocol_ids import ADAPTER, LINK, PASS, PING, SESSION
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.coordinates import Coordinate
from swarmnet_protocols.session.activation_log import REPLAY_POSITIONS
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.link import NextHop
from swarmnet_protocols.session.pings import answer_pings
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

SESSION_ID_BYTES = 16
LEAVE_LOOK_S = 1.0
"""Seconds between two checks for remaining sessions while the host leaves."""


if TYPE_CHECKING:
    from swarmnet_node.engine.torch_layers.adapters import StageAdapter


class Host:
    """Serves clients with the blocks of one engine."""

    def __init__(  # noqa: PLR0913 - what is served, and how
        self,
        transport: Transport,
        blocks: ServedBlocks,
        *,
        swarm: bytes,
        manifest: bytes,
        timing: Timing,
        limits: ClientLimits,
        coordinate: Callable[[], Coordinate] = Coordinate,
        clock: Clock = wall_clock,
    ) -> None:
        """``coordinate`` returns the network coordinate of this host, for pongs."""
        self.blocks = blocks
        """The blocks for new work. Work that has begun on other blocks continues there."""
        self.timing = timing
        self.limits = limits
        self.transport = transport
        self.leaving = False
        self.counters = HostCounters()
        self._system = transport.resources.system
        self.adapters = AdapterStore(self._system, idle_s=limits.adapter_idle_s)
        largest_step_bytes = REPLAY_POSITIONS * blocks.engine.stage.hidden_size * ElementType.FLOAT32.itemsize
        limits.set_on(transport.resources, largest_step_bytes)
        self._swarm = swarm
        self._manifest = manifest
        self._coordinate = coordinate
        self._clock = clock
        self._session_parts = SessionParts(
            limits.log_bytes,
            timing,
            self.counters,
            Introductions(transport),
            self.next_hop,
            self.make_room,
            self._check_wait,
        )
        self._sessions: dict[bytes, HostedSession] = {}
        self._session_slots = Slots(self._system, Resource.SESSIONS)
        self._pass_slots = Slots(self._system, Resource.PASSES)
        self._pending_link_slots = Slots(self._system, Resource.PENDING_LINKS)
        self._passes: Counter[Engine] = Counter()
        """Running passes of each engine."""
        self._changed = News()

    async def serve(self) -> None:
        """Accept sessions, links, passes, adapters and pings until the transport closes."""
        await SESSION.serve(self.transport, self._serve_session, self.timing)
        await LINK.serve(self.transport, self._serve_link, self.timing)
        await PASS.serve(self.transport, self._serve_pass, self.timing)
        await ADAPTER.serve(self.transport, self._serve_upload, self.timing)
        await PING.serve(self.transport, self._serve_pings, self.timing)

    @property
    def sessions(self) -> Sequence[HostedSession]:
        return tuple(self._sessions.values())

    def session_pairs(self) -> list[Pair]:
        """Return the peers before and after each linked session."""
        return [pair for session in self.sessions if (pair := session.pair) is not None]

    def next_hop(self, next: pb.Peer, epoch: int) -> NextHop:
        """Return the next hop that a client names, with the addresses that this hop signed itself,
        if any."""
        peer, now = PeerId(next.id), self._clock()
        addresses = signed_addresses(next.record, peer, self._manifest, swarm=self._swarm, now=now)
        return NextHop(peer, addresses, next.session, epoch)

    def shed(self) -> None:
        """End the session that holds the most memory, if any. Its client continues on another
        host."""
        if self._sessions:
            largest = max(self._sessions.values(), key=lambda session: session.held_bytes)
            largest.end(
                Refusal(refusal_pb2.REASON_OUT_OF_RESOURCES, "this host is over its owner's limit", RETRY_S)
            )

    async def leave(self) -> None:
        """Refuse new work, ask clients to move, and return when everything has ended.

        A session without work for ``IDLE_S`` is ended: its client does not answer, and waits for
        nothing.
        """
        self.leaving = True
        await all_of(*(session.announce_leaving() for session in self.sessions))
        since = loop_time()

        def is_free() -> bool:
            return not self._sessions and not self._system.used[Resource.PASSES]

        while not is_free():
            now = loop_time()
            for session in self.sessions:
                if now >= since + IDLE_S and session.slot.is_idle(now):
                    session.end(leaving())
            await self._changed.until(is_free, LEAVE_LOOK_S)

    def move(self, blocks: ServedBlocks) -> None:
        """Serve ``blocks`` from now on.

        Sessions and passes that are already here continue on the old blocks until ``drain``.
        """
        if blocks.engine is not self.blocks.engine:
            self.adapters.clear()  # they belong to other blocks
        self.blocks = blocks

    async def drain(self, engine: Engine, within_s: float) -> None:
        """Ask clients to move their sessions off ``engine``, and return when they have.

        ``engine`` is a former engine, or the current one with fewer blocks. For a former engine,
        wait for its passes too. Sessions that remain after ``within_s`` are ended.
        """
        is_former = engine is not self.blocks.engine

        def left() -> list[HostedSession]:
            return [
                session
                for session in self.sessions
                if session.engine is engine and (is_former or not self.blocks.have(session.span))
            ]

        def drained() -> bool:
            return not left() and not (is_former and self._passes[engine])

        await all_of(*(session.announce_leaving(moves=True) for session in left()))
        if not await self._changed.until(drained, within_s):
            for session in left():
                session.end(Refusal(refusal_pb2.REASON_LEAVING, "this host serves other blocks now"))
                await session.freed.wait()

    async def _serve_session(self, client: SessionStream) -> None:
        request, _ = await client.receive()
        if request.HasField("resume"):
            await self._resume_session(request.resume, client)
            return
        with ExitStack() as held:
            try:
                session = self._admit(request, client, held)
            except Refusal as refusal:
                self._refuse(client, refusal)
                return
            self._sessions[session.id] = session
            await self._changed.tell()
            try:
                await session.run()
            except DeadlineExceeded:
                self.counters.clients_lost += 1
                raise
            finally:
                del self._sessions[session.id]
                await self._changed.tell()

    async def _resume_session(self, wanted: pb.Resume, client: SessionStream) -> None:
        session = self._sessions.get(wanted.session)
        if session is None or not session.belongs_to(client.peer):
            self._refuse(client, Refusal(refusal_pb2.REASON_UNKNOWN_SESSION, "no such session"))
            return
        await session.resume(client)

    def _admit(self, request: pb.SessionRequest, client: SessionStream, held: ExitStack) -> HostedSession:
        if not request.HasField("open"):
            raise ProtocolViolation("a session begins with Open")
        wanted = request.open
        if len(wanted.session) != SESSION_ID_BYTES or wanted.session in self._sessions:
            raise ProtocolViolation("a session id is 16 fresh bytes")
        self._check_served(wanted)
        if wanted.spare and self._is_used():
            raise idle()
        self._check_wait(client.peer, continues=wanted.continues, is_batch=wanted.batch)
        adapter = self._use_adapter(wanted, client.peer, held)
        session = HostedSession(self._session_parts, self.blocks, wanted, client, adapter)
        # Last, because it may evict the session of another client.
        held.enter_context(self._session_slots.acquire(session.slot, client.stream.scope))
        if not wanted.spare:
            self._end_spares()
        self._count_client(client.peer)
        return session

    def _count_client(self, client: PeerId) -> None:
        self.blocks.engine.counters.given.clients.add(client)

    def _check_wait(
        self,
        client: PeerId,
        own: HostedSession | None = None,
        *,
        continues: bool = False,
        is_batch: bool = False,
    ) -> None:
        """Raise ``Refusal`` if new work of ``client`` would wait too long.

        ``own``: the session with that work, if it exists already. ``continues``: the work continues
        an answer, so it may wait longer. ``is_batch``: the work is a batch, and waits for others.
        """
        queued: Counter[PeerId] = Counter()
        is_batch = is_batch or (own is not None and own.slot.is_batch)
        for session in self.sessions:
            waits_for = is_batch or not session.slot.is_batch
            if waits_for and session is not own and session.engine is self.blocks.engine:
                queued[session.stream.peer] += session.queued_positions
        wait_s = expected_wait_s(queued, client, self.blocks.engine.position_s)
        if wait_s > self.limits.max_session_wait_s(continues=continues):
            raise Refusal.overloaded(wait_s)

    def _is_used(self) -> bool:
        """Return whether a client waits for work of this host, or did so a moment ago."""
        now = loop_time()
        return any(not session.slot.is_idle(now) for session in self.sessions) or bool(self._passes.total())

    def _end_spares(self) -> None:
        """End the standbys that may stay only while this host has no other work."""
        for session in self.sessions:
            if session.slot.is_spare:
                session.slot.evict()

    async def make_room(self, scope: Scope, cache_bytes: int, is_batch: bool) -> None:
        """End idle sessions until ``cache_bytes`` more of KV caches fit.

        Ends batches, too, unless ``is_batch``: the caches are those of a batch.

        Ends none if the limits of ``scope`` do not allow that many bytes.
        """
        while self._system.available(Resource.CACHE) < cache_bytes <= scope.available(Resource.CACHE):
            held = {session.slot: session for session in self.sessions}
            amounts = {slot: session.cache_bytes for slot, session in held.items()}
            now = loop_time()
            evicted = slot_to_evict(held, now, amounts.__getitem__, for_batch=is_batch)
            if evicted is None:
                return
            evicted.evict()
            await held[evicted].freed.wait()

    def _refuse(self, stream: TypedStream[Any, Any], error: Exception) -> None:
        refusal = Refusal.of(error)
        self.counters.refuse(refusal, stream.peer)
        stream.refuse(refusal)

    @asynccontextmanager
    async def _refusing(self, stream: TypedStream[Any, Any]) -> AsyncIterator[None]:
        """Refuse the client's request, with the reason, if serving it inside the context fails."""
        try:
            yield
        except (ProtocolViolation, OutOfResources, Refusal) as error:
            self._refuse(stream, error)

    def _use_adapter(
        self, wanted: pb.Open | pb.Begin, client: PeerId, adapters: ExitStack
    ) -> "StageAdapter | None":
        """Return the adapter that the client names. It stays in the store while ``adapters`` is
        open."""
        adapter = adapters.enter_context(self.adapters.use(client, wanted.adapter))
        if adapter is not None:
            try:
                adapter.check_span(wanted.span.start, wanted.span.end)
            except ProtocolViolation as error:
                raise Refusal.of(error) from error
        return adapter

    def _check_served(self, wanted: pb.Open | pb.Begin | pb.Upload) -> None:
        if self.leaving:
            raise leaving()
        if wanted.swarm != self._swarm:
            raise Refusal(refusal_pb2.REASON_WRONG_SWARM, "this host belongs to another swarm")
        if wanted.manifest != self._manifest:
            raise Refusal(refusal_pb2.REASON_WRONG_MODEL, f"this host serves {self._manifest.hex()[:16]}")
        blocks = self.blocks
        if not blocks.have((wanted.span.start, wanted.span.end)):
            raise Refusal(
                refusal_pb2.REASON_WRONG_SPAN, f"this host serves blocks {blocks.start}:{blocks.end}"
            )

    async def _serve_pass(self, client: PassStream) -> None:
        request, _ = await client.receive()
        if not request.HasField("begin"):
            raise ProtocolViolation("a pass begins with Begin")
        async with self._refusing(client):
            await self._run_pass(request.begin, client)

    async def _run_pass(self, wanted: pb.Begin, client: PassStream) -> None:
        self._check_served(wanted)
        engine = self.blocks.engine
        stage = self.blocks.stage((wanted.span.start, wanted.span.end))

        with ExitStack() as held:
            adapter = self._use_adapter(wanted, client.peer, held)
            served = HostedPass(wanted, stage, engine, client, self.timing, adapter)
            # Last, because it may evict the pass of another client.
            held.enter_context(self._pass_slots.acquire(served.slot, client.stream.scope))
            self._passes[engine] += 1
            self._count_client(client.peer)
            try:
                await served.run()
            finally:
                # Removes the entry at 0, which would keep the engine's weights in memory.
                self._passes -= Counter([engine])
                await self._changed.tell()

    async def _serve_upload(self, client: AdapterStream) -> None:
        request, _ = await client.receive()
        if not request.HasField("upload"):
            raise ProtocolViolation("an adapter begins with Upload")
        async with self._refusing(client):
            self._check_served(request.upload)
            engine = self.blocks.engine
            first_loaded = self.blocks.start - engine.stage.first
            await AdapterReceiver(
                request.upload, self.adapters, engine, first_loaded, client, self.timing.heartbeat_s
            ).run()

    async def _serve_link(self, link: LinkStream) -> None:
        request, _ = await link.receive()
        if not request.HasField("link") or len(request.link.session) != SESSION_ID_BYTES:
            raise ProtocolViolation("a link begins with Link")
        try:
            await race(
                self._accept_link(link, request.link),
                link.send_heartbeats(self.timing.heartbeat_s, lambda: pb.LinkReply(heartbeat=pb.Heartbeat())),
            )
        except Refusal as refusal:
            self._refuse(link, refusal)

    async def _accept_link(self, link: LinkStream, wanted: pb.Link) -> None:
        session = await self._session_of(wanted.session, link.stream)
        with link.stream.scope.reserve(Resource.LINKS):
            await session.accept(link, wanted.epoch)

    async def _session_of(self, session_id: bytes, stream: Stream) -> HostedSession:
        """Return the session that a link names. Wait if the link arrives before its session.

        Raises ``Refusal`` if nobody opens such a session in time.
        """
        session = self._sessions.get(session_id)
        if session is not None:
            return session

        slot = Slot.of(stream)
        try:
            async with asyncio.timeout(self.timing.link_wait_s):
                with self._pending_link_slots.acquire(slot, stream.scope):
                    await race(self._changed.until(lambda: session_id in self._sessions), slot.eviction())
                return self._sessions[session_id]
        except TimeoutError:
            raise Refusal(refusal_pb2.REASON_UNKNOWN_SESSION, "no such session") from None

    async def _serve_pings(self, client: TypedStream[pb.Pong, pb.Ping]) -> None:
        await answer_pings(client, self._pong)

    def _pong(self, nonce: int) -> pb.Pong:
        engine = self.blocks.engine
        return pb.Pong(
            nonce=nonce,
            queue_s=engine.queue_s,
            sessions=len(self._sessions),
            cache_free=max(0.0, 1 - engine.cache_bytes / max(1, engine.max_cache_bytes)),
            coordinate=self._coordinate().numbers(),
            busy=engine.busy.at(engine.stopwatch()),
            manifest=self._manifest,
            start=self.blocks.start,
            end=self.blocks.end,
        )
