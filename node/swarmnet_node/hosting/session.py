"""One session on one host: KV caches, activation log, and the links from and to its neighbours.

The life of a session:

1. **Opened.** The client opens a stream and asks for blocks, and the host admits the session
   (``host.py``). The session links to the next hop.
2. **Linked.** The upstream hop, or the client, opens a link. The host answers with its last
   computed step, and the sender continues after that step. If the host has computed none, the
   sender replays from the beginning.
3. **Computing.** The session applies steps one at a time, each exactly once. The engine computes a
   step, the log stores it, and the next hop receives it. The last hop answers the client instead.
4. **Relinked.** When a neighbour fails, the client names another next hop, or another hop opens a
   link under a later epoch.
5. **Teed.** While the next hop has a standby, the standby gets the same steps over a second link.
   The standby's session computes like any other, and keeps its outputs until the client names a
   next hop.
6. **Resumed.** When there is a better path, the client opens another stream for the session, and
   gets later replies on it.
7. **Ended.** The client's stream ends, or the session fails: for a violation of the protocol, for
   lack of memory, without work while other clients wait, or when the host stops. The host sends the
   client the reason and frees all memory.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from swarmnet_node.engine.caches.kv_cache import SequenceCache
from swarmnet_node.hosting.counters import AnsweredTokens, HostCounters, Pair, TokenTimes
from swarmnet_node.hosting.downstream import Downstream
from swarmnet_node.hosting.passes import finite
from swarmnet_node.hosting.sequences import SessionSequences
from swarmnet_node.hosting.served_blocks import ServedBlocks
from swarmnet_node.hosting.slots import Slot, idle
from swarmnet_node.hosting.step_times import HopStepTimes
from swarmnet_protocols.arrays import Array, as_array
from swarmnet_protocols.directory.node_reports import is_peer_id
from swarmnet_protocols.errors import (
    DeadlineExceeded,
    OutOfResources,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
)
from swarmnet_protocols.machine.aio import loop_time, race
from swarmnet_protocols.net import Buffer, PeerId, Stream
from swarmnet_protocols.net.dialling import Introductions
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import Reservation, ResourceLimitReached, Scope
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.session.activation_log import ActivationLog
from swarmnet_protocols.session.arrays import ElementType, rounded
from swarmnet_protocols.session.hop_times import Moment, encode_times
from swarmnet_protocols.session.link import LinkSender, NextHop, Outbox, log_id
from swarmnet_protocols.session.received_digests import MAX_DIGEST_POSITIONS, ReceivedDigests
from swarmnet_protocols.session.steps import Step, decode_step
from swarmnet_protocols.session.wire_tensors import encode_tensor, is_slow, wire_type
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

if TYPE_CHECKING:
    from swarmnet_node.engine.torch_layers.adapters import StageAdapter

_log = logging.getLogger(__name__)

QUEUED_STEPS = 4
"""Most steps of a link in memory. Beyond this the sender waits. With more, each session could hold
more memory."""


class _ReceivedSteps(asyncio.Queue[tuple[Step, int]]):
    """The steps of one link, each with the bytes reserved for it."""

    def __init__(self) -> None:
        super().__init__(QUEUED_STEPS)
        self.positions = 0
        """Positions that were received but not computed yet."""


SessionStream = TypedStream[pb.SessionReply, pb.SessionRequest]
LinkStream = TypedStream[pb.LinkReply, pb.LinkRequest]


@dataclass(frozen=True)
class SessionParts:
    """The dependencies that all sessions of a host share."""

    log_bytes: int
    """Most bytes of one session's log."""
    timing: Timing
    counters: HostCounters
    introductions: Introductions
    next_hop: Callable[[pb.Peer, int], NextHop]
    """Turns the next hop that a client names, and the epoch of the link, into a ``NextHop``. Its
    addresses are signed by the next hop."""
    make_room: Callable[[Scope, int, bool], Awaitable[None]]
    """Ends idle sessions until a session, given by its scope, has room for this many more bytes of
    KV caches. The third argument says whether the session is a batch."""
    check_wait: Callable[[PeerId, "HostedSession"], None]
    """Raises ``Refusal`` if the first step of a client's session would wait too long."""


class HostedSession:
    """The state of one client's session on this host."""

    def __init__(
        self,
        parts: SessionParts,
        blocks: ServedBlocks,
        wanted: pb.Open,
        client: SessionStream,
        adapter: "StageAdapter | None",
    ) -> None:
        """Raises ``ProtocolViolation`` for an invalid ``wanted``. No slot is taken yet."""
        if wanted.standby and wanted.HasField("next"):
            raise ProtocolViolation("a standby has no next hop")
        if wanted.spare and not wanted.standby:
            raise ProtocolViolation("only a standby is spare")
        self.id = wanted.session
        self.stream = stream = client.stream
        self._client = client
        self.slot = Slot.of(stream)
        self.slot.stands_by, self.slot.is_spare = wanted.standby, wanted.spare
        self.slot.is_batch = wanted.batch
        self.freed = asyncio.Event()
        """Set when the session has freed its memory."""
        self._parts = parts
        self.engine = engine = blocks.engine
        self.span = wanted.span.start, wanted.span.end
        """The session's blocks [start, end)."""
        self._stage = blocks.stage(self.span)
        self._max_length = wanted.max_length
        self._is_last = not wanted.HasField("next") and not wanted.standby
        self._scope = stream.scope.child("this session", {Resource.LOG: parts.log_bytes})
        self._log_reservation = self._scope.reserve(Resource.LOG, 0)
        # Charged to the client's limit for logs. This session's limit is for outputs to the next
        # hop.
        self._received = ReceivedDigests(stream.scope.reserve(Resource.LOG, 0))
        self._sequences = SessionSequences(engine, self._stage, adapter, self._scope, self.freed)
        self._outbox = Outbox(self._new_log(), asyncio.Event())
        self._step_times = HopStepTimes(engine.stopwatch, are_wanted=wanted.timed)
        self.wire = wire_type(wanted.wire)
        sender = LinkSender(
            parts.introductions.by(stream.scope),
            self._outbox,
            self.wire,
            parts.timing,
            mark=self._step_times.mark,
        )
        self._downstream = Downstream(
            log_id(self.id), sender, self._tell, self.end, parts.counters, self.freed
        )
        if wanted.HasField("next"):
            self._downstream.target = parts.next_hop(wanted.next, wanted.epoch)
        self._link_epoch = 0
        self._link: Stream | None = None
        self._steps = _ReceivedSteps()
        self._applying = asyncio.Lock()
        self._times = TokenTimes(parts.counters)
        self._tokens = AnsweredTokens(parts.counters)
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _new_log(self) -> ActivationLog:
        # The last hop sends to the client, which never needs a replay. So its log keeps positions,
        # not values.
        self._log_reservation.release()
        return ActivationLog(self._log_reservation, keep_values=not self._is_last)

    @property
    def pair(self) -> Pair | None:
        """The peers before and after it. None until it is linked, or if the next hop is invalid."""
        target = self._downstream.target
        downstream = target.peer if target else ""
        if self._link is None or self.slot.stands_by or (downstream and not is_peer_id(downstream)):
            return None
        return Pair("" if self._link.peer == self.stream.peer else self._link.peer, downstream)

    @property
    def held_bytes(self) -> int:
        """Bytes of KV caches and log."""
        return self._scope.used[Resource.CACHE] + self._scope.used[Resource.LOG]

    @property
    def cache_bytes(self) -> int:
        return self._scope.used[Resource.CACHE]

    @property
    def queued_positions(self) -> int:
        """Positions that wait here to be computed."""
        return self._steps.positions

    @property
    def log_fields(self) -> dict[str, object]:
        """Fields that join this host's logs with the client's and other hops' logs."""
        return {"session": log_id(self.id), "client": self.stream.peer}

    def belongs_to(self, peer: PeerId) -> bool:
        """Return whether ``peer`` opened the session."""
        return peer == self.stream.peer

    def end(self, error: Exception) -> None:
        """End the session, and tell the client why."""
        if not self._failed.done():
            self._failed.set_exception(Refusal.of(error))

    # ---- the client's stream --------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the client's stream ends or the session fails, then free all memory."""
        reason = "cancelled"
        try:
            await self._client.send(pb.SessionReply(opened=pb.Opened()))
            _log.debug("a session is open", extra=self.log_fields | {"blocks": self.span})
            await self._downstream.send()
            telling = [self._on_present_stream(self._tell_times)] if self._step_times.are_wanted else []
            await race(
                *telling,
                self._on_present_stream(self._listen),
                self._on_present_stream(self._send_heartbeats),
                self._failure(),
                self._first_step(),
                self.slot.eviction(),
            )
        except Refusal as refusal:
            reason = str(refusal)
            self._free()  # first, because other clients wait for the memory
            self._parts.counters.refuse(refusal, self.stream.peer)
            self._client.refuse(refusal)
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            # Free before the first await: a second cancellation may end this task there.
            self._free()
            _log.debug("a session has ended", extra=self.log_fields | {"reason": reason[:200]})
            self._failed.cancel()
            if self._link is not None:
                self._link.close()
            self._client.close()
            await self._downstream.close()

    def _free(self) -> None:
        self._sequences.release()
        self._log_reservation.release()
        self._received.forget()
        self.freed.set()

    async def announce_leaving(self, *, moves: bool = False) -> None:
        """Ask the client to use another host. A client that is gone needs no message.

        ``moves``: this host continues with other blocks.
        """
        _log.debug("a session is asked to leave", extra=self.log_fields | {"moves": moves})
        with contextlib.suppress(StreamEnded, DeadlineExceeded):
            await self._client.send(pb.SessionReply(leaving=pb.Leaving(moves=moves)))

    async def resume(self, client: SessionStream) -> None:
        """Continue on a new stream of the same client. Return when the session has ended.

        Requests on the old stream are served until the client closes that stream.
        """
        await client.send(pb.SessionReply(opened=pb.Opened()))
        _log.debug("a session goes on over another stream", extra=self.log_fields)
        before, self._client = self._client, client
        with contextlib.suppress(StreamEnded, DeadlineExceeded):  # the client notices it, too
            await before.send(pb.SessionReply(moved=pb.Moved()))
        await self.freed.wait()

    async def _on_present_stream(self, serve: Callable[[SessionStream], Awaitable[None]]) -> None:
        """Call ``serve`` with the client's stream, and again with each stream that resumes the
        session."""
        while True:
            client = self._client
            try:
                await serve(client)
            except (StreamEnded, DeadlineExceeded):
                if client is self._client:
                    raise

    async def _listen(self, client: SessionStream) -> None:
        while True:
            request, _ = await client.receive()
            if request.HasField("relink"):
                await self._relink(request.relink)
            elif request.HasField("tee"):
                await self._send_to_standby(request.tee)
            elif request.HasField("show"):
                await self._show(request.show)
            else:
                raise ProtocolViolation("a session is opened once")

    async def _show(self, asked: pb.Show) -> None:
        """Answer an audit: what this hop received and sent for the first positions of a
        sequence."""
        if not 1 <= asked.count <= MAX_DIGEST_POSITIONS:
            raise ProtocolViolation(
                f"asked for {asked.count} positions, {MAX_DIGEST_POSITIONS} are shown at most"
            )
        received = self._received.digest(asked.sequence, asked.count)
        if self._is_last or not received:
            await self._client.send(pb.SessionReply(shown=pb.Shown(received=received)))
            return
        with self._scope.reserve(Resource.MEMORY, 0) as reservation:
            try:
                await reservation.grow(asked.count * self._stage.hidden_size * ElementType.FLOAT32.itemsize)
            except ResourceLimitReached as error:
                raise Refusal.of(error) from error
            sent = self._outbox.log.values(asked.sequence, asked.count)
            if sent is None:
                await self._client.send(pb.SessionReply(shown=pb.Shown()))
                return
            tensor, payload = encode_tensor(sent, self.wire)
            await self._client.send(pb.SessionReply(shown=pb.Shown(received=received, sent=tensor)), payload)

    async def _send_heartbeats(self, client: SessionStream) -> None:
        await client.send_heartbeats(
            self._parts.timing.heartbeat_s,
            lambda: pb.SessionReply(heartbeat=pb.Heartbeat(applied=self._outbox.log.last)),
        )

    async def _tell_times(self, client: SessionStream) -> None:
        while True:
            times = await self._step_times.complete.get()
            await client.send(pb.SessionReply(timed=encode_times(times)))

    async def _first_step(self) -> None:
        await asyncio.sleep(self._parts.timing.first_step_s)
        if not self.slot.has_worked:
            raise idle()
        await self._failure()

    async def _failure(self) -> None:
        await asyncio.shield(self._failed)

    # ---- downstream -----------------------------------------------------------------------------

    async def _relink(self, wanted: pb.Relink) -> None:
        if self._is_last:
            raise ProtocolViolation("the last hop has no next hop to replace")
        if not wanted.HasField("next"):
            await self._answer_from_now_on(wanted.epoch)
            return
        target = self._parts.next_hop(wanted.next, wanted.epoch)
        self._take_over()
        needed = frozenset(wanted.needed.numbers) if wanted.HasField("needed") else None
        await self._downstream.relink(target, needed)

    def _take_over(self) -> None:
        """Stop being a standby."""
        self.slot.stands_by = self.slot.is_spare = False

    async def _answer_from_now_on(self, epoch: int) -> None:
        """Become the last hop: send the client the outputs that it lacks, and all later ones."""
        if not self.slot.stands_by:
            raise ProtocolViolation("only a standby becomes the last hop")
        # Wait until no step is being applied. Otherwise a step could be answered twice, or not at
        # all.
        async with self._applying:
            self._take_over()
            self._is_last = True
            for step in self._outbox.log.unacknowledged:
                await self._answer(step)
        _log.debug("a standby answers", extra=self.log_fields | {"epoch": epoch})
        await self._client.send(pb.SessionReply(link_made=pb.LinkMade(epoch=epoch)))

    async def _send_to_standby(self, wanted: pb.Tee) -> None:
        """Send steps to a standby of the next hop, too. It replaces an earlier standby."""
        if self._downstream.target is None:
            raise ProtocolViolation("a hop without a next hop has no standby to feed")
        standby = self._parts.next_hop(wanted.standby, wanted.epoch) if wanted.HasField("standby") else None
        await self._downstream.feed(standby)

    async def _tell(self, reply: pb.SessionReply) -> None:
        """Send the client a message. Errors are ignored here, because the client's stream ends the
        session."""
        with contextlib.suppress(StreamEnded, DeadlineExceeded):
            await self._client.send(reply)

    # ---- upstream -------------------------------------------------------------------------------

    async def accept(self, link: LinkStream, epoch: int) -> None:
        """Apply the steps of this link until it ends or another link replaces it. Raises
        ``Refusal`` for a link that is older than the current one."""
        if epoch < self._link_epoch:
            raise Refusal(refusal_pb2.REASON_STALE_EPOCH, f"epoch {epoch} after {self._link_epoch}")
        self._link_epoch = epoch
        if self._link is not None:
            self._link.close()
        stream = self._link = link.stream
        async with self._applying:
            if self._outbox.log.last == 0:
                await self._reset()
            applied = self._outbox.log.last
        fields = self.log_fields | {"sender": link.peer, "epoch": epoch, "applied": applied}
        _log.debug("a session is linked", extra=fields)
        await link.send(pb.LinkReply(linked=pb.Linked(applied=applied)))
        steps = self._steps = _ReceivedSteps()
        with self._scope.reserve(Resource.MEMORY, 0) as reservation:
            try:
                await race(self._read(link, steps, reservation), self._work(stream, steps, reservation))
            except SwarmnetError as error:
                last = {"applied": self._outbox.log.last, "reason": str(error)[:200]}
                _log.debug("a link to a session has ended", extra=fields | last)
                raise
            finally:
                steps.positions = 0

    async def _reset(self) -> None:
        """Drop the positions of an interrupted replay, here and in hops that it reached."""
        if not self._sequences.caches:
            return
        self._sequences.release()
        self._received.forget()
        await self._downstream.feed(None)  # the standby is rebuilt together with the next hop
        await self._downstream.send(self._new_log())

    async def _read(self, link: LinkStream, steps: _ReceivedSteps, reservation: Reservation) -> None:
        while True:
            request, payload = await link.receive()
            if not request.HasField("step"):
                raise ProtocolViolation("a link carries steps")
            # A replay repeats steps whose times the client has.
            if not request.step.replay:
                self._step_times.received(request.step.seq)
            try:
                step = await self._decoded(request.step, payload)
            except ProtocolViolation as error:
                if link.peer == self.stream.peer:  # only the client itself can have made the step
                    self.end(error)
                raise
            if link.peer == self.stream.peer and not step.replay and not self.slot.stands_by:
                self._times.arrived(step.rows, loop_time())
            # Waiting here, not in ``_apply``, stops reading. Flow control then slows the sender.
            if wait_s := self._scope.charge(Rate.POSITIONS, step.positions, loop_time()):
                await asyncio.sleep(wait_s)
            # Count the step before it waits for room below, because it delays other sessions
            # already.
            steps.positions += step.positions
            size_bytes = step.values.nbytes
            try:
                reservation.resize(reservation.amount + size_bytes)
            except ResourceLimitReached:
                # No memory for another message: wait until all queued steps are applied. Until the
                # next receive, the stream's reservation covers this step.
                await steps.put((step, 0))
                await steps.join()
            else:
                await steps.put((step, size_bytes))

    async def _decoded(self, message: pb.Step, payload: Buffer) -> Step:
        """Decode a step from the upstream hop. Raises ``ProtocolViolation``."""
        hidden_size = self._stage.hidden_size
        if is_slow(wire_type(message.tensor.dtype), sum(row.count for row in message.rows), hidden_size):
            return await asyncio.to_thread(decode_step, message, payload, hidden_size=hidden_size)
        return decode_step(message, payload, hidden_size=hidden_size)

    async def _work(self, stream: Stream, steps: _ReceivedSteps, reservation: Reservation) -> None:
        while True:
            step, size_bytes = await steps.get()
            # Finish a step that has begun even if its link is replaced: a session is always between
            # two steps.
            await asyncio.shield(asyncio.ensure_future(self._apply(stream, step)))
            reservation.resize(reservation.amount - size_bytes)
            steps.positions -= step.positions
            steps.task_done()

    async def _apply(self, stream: Stream, step: Step) -> None:
        """Compute one step, log it, and send its outputs. A failure ends the session and tells the
        client why."""
        async with self._applying:
            if stream is not self._link or self._failed.done() or self.freed.is_set():
                return
            try:
                self._outbox.log.check(step)
                # Admission looked at the queue before the prompt was here. Refusing now is cheap;
                # later steps are never refused, because work would be lost.
                if step.seq == 1 and not step.replay:
                    self._parts.check_wait(self.stream.peer, self)
                is_rebuilt = step.replay and not self._sequences.caches
                computed = step.with_values(await self._compute(step))
                self._step_times.mark(step.seq, Moment.COMPUTED)
                # Log before sending. If the link fails meanwhile, the next one continues from the
                # log, so the step is neither lost nor computed twice.
                self._outbox.append(computed)
                if self._is_last and not step.replay:
                    await self._answer(computed)
                else:
                    # let the outputs leave before this step is digested and counted
                    await asyncio.sleep(0)
                self._received.add(step)
                self._count(step, is_rebuilt=is_rebuilt)
            except (StreamEnded, DeadlineExceeded):
                return  # the client is gone or does not read: its stream ends the session
            except (ProtocolViolation, OutOfResources, Refusal) as error:
                self.end(error)
            except Exception as error:  # noqa: BLE001 - an error inside the model ends this session only
                _log.exception("a step could not be computed")
                self.end(error)
            finally:
                if self.freed.is_set():
                    self._free()  # the session has ended meanwhile, so nobody else frees this step

    def _count(self, step: Step, *, is_rebuilt: bool) -> None:
        self._parts.counters.rebuilt += is_rebuilt
        pair = self.pair
        if pair is not None and not step.replay:
            self._parts.counters.passed(pair, sum(row.count for row in step.rows))
            if self._is_last:
                self._tokens.sent(step.rows)

    async def _compute(self, step: Step) -> Array:
        longest = self._sequences.prefix_positions + max(row.end for row in step.rows)
        if longest > self._max_length:
            raise Refusal(refusal_pb2.REASON_TOO_LONG, f"position {longest} of {self._max_length}")
        self.slot.worked()
        await self._parts.make_room(self._scope, self._sequences.new_bytes(step.rows), self.slot.is_batch)
        await self._sequences.place(step.rows)
        rows = [
            (self._sequences.caches[row.sequence], values)
            for row, values in zip(step.rows, step.split(), strict=True)
        ]
        now = loop_time()
        if wait_s := self._scope.charge(Rate.POSITIONS, self._behind(rows), now):
            await asyncio.sleep(wait_s)
        started = partial(self._step_times.mark, step.seq, Moment.STARTED)
        computed = await self.engine.compute(self._stage, rows, started, is_batch=self.slot.is_batch)
        outputs = np.concatenate([*map(as_array, computed)])
        return finite(rounded(outputs, self.wire))

    def _behind(self, rows: Sequence[tuple[SequenceCache, Array]]) -> int:
        """Return the positions that recurrent layers compute again because the client went back."""
        return sum(sequence.behind for sequence, _ in rows)

    async def _answer(self, step: Step) -> None:
        self._step_times.mark(step.seq, Moment.TAKEN)
        tensor, payload = encode_tensor(step.wanted_values())
        self._step_times.mark(step.seq, Moment.ENCODED)
        await self._client.send(pb.SessionReply(output=pb.Output(step=step.seq, tensor=tensor)), payload)
        self._step_times.mark(step.seq, Moment.SENT)


def leaving() -> Refusal:
    """Return the refusal of a host that is about to stop."""
    return Refusal(refusal_pb2.REASON_LEAVING, "this host is about to stop")
