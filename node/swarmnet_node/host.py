"""Hosting: the host's side of sessions, links, passes and adapters.

A client opens a session; the hop before us opens a link to it and sends steps; each step is computed once, logged, and
sent on by the session's feeder, or home to the client when we are the last hop. The session, with its caches, ends
with the client's stream. A pass, for somebody who trains, is a stream of its own that leaves nothing behind. Adapters come on
streams of their own, before the sessions and passes that name them.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from swarmnet_node.adapter_store import AdapterStore, Quota
from swarmnet_node.adapters import StageAdapter
from swarmnet_node.engine import Engine
from swarmnet_node.offers import HostedOffer
from swarmnet_node.passes import HostedPass
from swarmnet_node.session import HostedSession
from swarmnet_protocols.aio import race
from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.protocol_ids import ADAPTER, LINK, PASS, PING, SESSION
from swarmnet_protocols.session.link import Refused
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.transport import Message, PeerId, Stream, Transport
from swarmnet_protocols.transport.talking import parse, receive_within
from swarmnet_protocols.wire import session_pb2 as pb

SESSION_ID_BYTES = 16


@dataclass(frozen=True)
class HostLimits:
    """What strangers may take of a host, besides the cache bytes the engine accounts for."""

    sessions: int = 256
    sessions_per_client: int = 64
    early_links: int = 256
    log_bytes: int = 256 << 20
    passes: int = 16
    passes_per_client: int = 4
    adapters: int = 256
    adapters_per_client: int = 16
    adapter_bytes: int = 512 << 20
    adapter_bytes_per_client: int = 128 << 20
    adapter_idle_s: float = 1800.0


@dataclass(frozen=True)
class Offer:
    """What a host serves, and to whom: blocks from ``start`` on of the model ``manifest``, to clients of ``swarm``."""

    swarm: bytes
    manifest: bytes
    start: int


class Host:
    """Serves the sessions of one engine. Blocks are numbered as in the whole model."""

    def __init__(
        self,
        transport: Transport,
        engine: Engine,
        offer: Offer,
        *,
        timing: Timing,
        limits: HostLimits,
    ) -> None:
        self.engine = engine
        self.start = offer.start
        self.end = offer.start + engine.stage.blocks
        self.timing = timing
        self.limits = limits
        self.transport = transport
        self.leaving = False
        self.adapters = AdapterStore(
            per_client=Quota(limits.adapter_bytes_per_client, limits.adapters_per_client),
            in_all=Quota(limits.adapter_bytes, limits.adapters),
            idle_s=limits.adapter_idle_s,
        )
        self._offer = offer
        self._sessions: dict[bytes, HostedSession] = {}
        self._passes: Counter[PeerId] = Counter()
        self._early_links = 0
        self._changed = asyncio.Condition()

    async def serve(self) -> None:
        """Accept sessions, links, passes, adapters and pings until the transport closes."""
        await self.transport.serve(SESSION, self._session)
        await self.transport.serve(LINK, self._link)
        await self.transport.serve(PASS, self._pass)
        await self.transport.serve(ADAPTER, self._adapter)
        await self.transport.serve(PING, self._ping)

    @property
    def sessions(self) -> Sequence[HostedSession]:
        return tuple(self._sessions.values())

    async def leave(self) -> None:
        """Refuse new sessions and passes, ask the clients of sessions to move, and return when none is left of either."""
        self.leaving = True
        await asyncio.gather(*(session.say_leaving() for session in self.sessions))
        async with self._changed:
            await self._changed.wait_for(lambda: not self._sessions and not self._passes)

    async def _session(self, stream: Stream) -> None:
        message = await receive_within(stream, self.timing.reply_s)
        request = parse(pb.SessionRequest, message.header)
        with ExitStack() as adapters:
            try:
                session = self._admit(request, stream, adapters)
            except Refused as refusal:
                await stream.send(Message(pb.SessionReply(refused=refused(refusal)).SerializeToString()))
                return
            self._sessions[session.id] = session
            await self._say_changed()
            try:
                await session.run()
            finally:
                del self._sessions[session.id]
                await self._say_changed()

    async def _say_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _admit(self, request: pb.SessionRequest, stream: Stream, adapters: ExitStack) -> HostedSession:
        if not request.HasField("open"):
            raise ProtocolViolation("a session begins with Open")
        wanted = request.open
        if len(wanted.session) != SESSION_ID_BYTES or wanted.session in self._sessions:
            raise ProtocolViolation("a session id is 16 fresh bytes")
        self._check_offered(wanted)
        theirs = sum(session.stream.peer == stream.peer for session in self._sessions.values())
        if len(self._sessions) >= self.limits.sessions or theirs >= self.limits.sessions_per_client:
            raise Refused(pb.REASON_OUT_OF_MEMORY, f"{theirs} of {len(self._sessions)} sessions are yours")
        return HostedSession(self, wanted, stream, self._use_adapter(wanted, stream.peer, adapters))

    def _use_adapter(
        self, wanted: pb.Open | pb.Begin, client: PeerId, adapters: ExitStack
    ) -> StageAdapter | None:
        """What the client means by its adapter, which stays for as long as ``adapters`` is open."""
        adapter = adapters.enter_context(self.adapters.use(client, wanted.adapter))
        if adapter is not None:
            try:
                adapter.check_span(wanted.span.start, wanted.span.end)
            except ProtocolViolation as error:
                raise Refused(pb.REASON_PROTOCOL, str(error)) from error
        return adapter

    def _check_offered(self, wanted: pb.Open | pb.Begin | pb.Offer) -> None:
        if self.leaving:
            raise Refused(pb.REASON_LEAVING, "this host is about to stop")
        if wanted.swarm != self._offer.swarm:
            raise Refused(pb.REASON_WRONG_SWARM, "this host belongs to another swarm")
        if wanted.manifest != self._offer.manifest:
            raise Refused(pb.REASON_WRONG_MODEL, f"this host serves {self._offer.manifest.hex()[:16]}")
        if not self.start <= wanted.span.start < wanted.span.end <= self.end:
            raise Refused(pb.REASON_WRONG_SPAN, f"this host serves blocks {self.start}:{self.end}")

    async def _pass(self, stream: Stream) -> None:
        message = await receive_within(stream, self.timing.reply_s)
        request = parse(pb.PassRequest, message.header)
        if not request.HasField("begin"):
            raise ProtocolViolation("a pass begins with Begin")
        try:
            await self._run_pass(request.begin, stream)
        except ProtocolViolation as error:
            await _refuse_pass(stream, Refused(pb.REASON_PROTOCOL, str(error)))
        except Refused as refusal:
            await _refuse_pass(stream, refusal)

    async def _run_pass(self, wanted: pb.Begin, stream: Stream) -> None:
        self._check_offered(wanted)
        theirs, all_passes = self._passes[stream.peer], self._passes.total()
        if all_passes >= self.limits.passes or theirs >= self.limits.passes_per_client:
            raise Refused(pb.REASON_OUT_OF_MEMORY, f"{theirs} of {all_passes} passes are yours")
        stage = self.engine.stage.part(wanted.span.start - self.start, wanted.span.end - self.start)
        with ExitStack() as adapters:
            adapter = self._use_adapter(wanted, stream.peer, adapters)
            hosted = HostedPass(wanted, stage, self.engine, stream, self.timing, adapter)
            self._passes[stream.peer] += 1
            try:
                await hosted.run()
            finally:
                self._passes[stream.peer] -= 1
                self._passes += Counter()  # forgets who has none
                await self._say_changed()

    async def _adapter(self, stream: Stream) -> None:
        message = await receive_within(stream, self.timing.reply_s)
        request = parse(pb.AdapterRequest, message.header)
        if not request.HasField("offer"):
            raise ProtocolViolation("an adapter begins with Offer")
        try:
            self._check_offered(request.offer)
            offer = HostedOffer(request.offer, self.adapters, self.engine, self.start, stream, self.timing)
            await offer.run()
        except ProtocolViolation as error:
            await _refuse_adapter(stream, Refused(pb.REASON_PROTOCOL, str(error)))
        except Refused as refusal:
            await _refuse_adapter(stream, refusal)

    async def _link(self, stream: Stream) -> None:
        message = await receive_within(stream, self.timing.reply_s)
        request = parse(pb.LinkRequest, message.header)
        if not request.HasField("link") or len(request.link.session) != SESSION_ID_BYTES:
            raise ProtocolViolation("a link begins with Link")
        try:
            await race(self._linked(stream, request.link), self._beats(stream))
        except Refused as refusal:
            await stream.send(Message(pb.LinkReply(refused=refused(refusal)).SerializeToString()))

    async def _linked(self, stream: Stream, link: pb.Link) -> None:
        session = await self._find(link.session)
        await session.accept(stream, link.epoch)

    async def _beats(self, stream: Stream) -> None:
        beat = Message(pb.LinkReply(beat=pb.Beat()).SerializeToString())
        while True:
            await stream.send(beat)
            await asyncio.sleep(self.timing.beat_s)

    async def _find(self, session_id: bytes) -> HostedSession:
        """The session of a link, which may be a little ahead of it."""
        session = self._sessions.get(session_id)
        if session is not None:
            return session
        if self._early_links >= self.limits.early_links:
            raise Refused(pb.REASON_UNKNOWN_SESSION, "too many links wait for their session")
        self._early_links += 1
        try:
            async with asyncio.timeout(self.timing.link_wait_s), self._changed:
                await self._changed.wait_for(lambda: session_id in self._sessions)
                return self._sessions[session_id]
        except TimeoutError:
            raise Refused(pb.REASON_UNKNOWN_SESSION, "no such session") from None
        finally:
            self._early_links -= 1

    async def _ping(self, stream: Stream) -> None:
        """Answer pings until the other side closes."""
        while True:
            try:
                message = await receive_within(stream, self.timing.client_silence_s)
            except StreamEnded:
                return
            ping = parse(pb.Ping, message.header)
            await stream.send(
                Message(pb.Pong(nonce=ping.nonce, queue_s=self.engine.queue_s).SerializeToString())
            )


async def _refuse_pass(stream: Stream, refusal: Refused) -> None:
    await stream.send(Message(pb.PassReply(refused=refused(refusal)).SerializeToString()))


async def _refuse_adapter(stream: Stream, refusal: Refused) -> None:
    await stream.send(Message(pb.AdapterReply(refused=refused(refusal)).SerializeToString()))


def refused(refusal: Refused) -> pb.Refused:
    return pb.Refused(reason=refusal.reason, detail=str(refusal)[:500])
