"""A session down a chain of hops, kept whole: hops that fail are replaced while steps wait.

The client is the first upstream and the last downstream. It has a session stream to every hop, on which it learns of
the hop's death, and one feeder that sends steps to the first. Building a chain and mending one are the same act: fill the gaps.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch
from swarmnet_protocols.aio import cancel
from swarmnet_protocols.errors import NoRoute, ProtocolViolation, SwarmnetError
from swarmnet_protocols.protocol_ids import SESSION
from swarmnet_protocols.routing import Hop
from swarmnet_protocols.session.link import Feeder, Outbox, Refused, Target, parse, receive_within
from swarmnet_protocols.session.log import ActivationLog
from swarmnet_protocols.session.steps import MAX_ROWS, Row, Step, decode_tensor, wire_code
from swarmnet_protocols.transport import Message, PeerId, Stream
from swarmnet_protocols.wire import session_pb2 as pb

from swarmnet_client.swarm import Swarm

CHUNK = 256
"""Positions in one step: a hop works on one while the next hop works on the one before."""
RELINK_PAUSE_S = 0.1
"""A lost link is news of a dead hop more often than of a broken path: its own death notice is given this long."""
ROUTE_PAUSE_S = 0.25
"""Between two looks at the directory while nobody hosts some blocks."""


@dataclass(eq=False)
class LiveHop:
    """A hop of the chain with an open session. ``link`` is whom it feeds, ``lost`` how often a link to it broke,
    ``applied`` the last step it computed and ``moved`` when it last said so."""

    hop: Hop
    session: bytes
    stream: Stream
    link: "LiveHop | None" = None
    epoch: int = 0
    lost: int = 0
    alive: bool = True
    applied: int = 0
    moved: float = 0.0


@dataclass(frozen=True)
class ChainSpec:
    """What a chain is for: blocks [0, blocks), lanes of at most ``max_length`` positions of ``hidden_size`` numbers."""

    blocks: int
    hidden_size: int
    max_length: int
    wire: torch.dtype
    log_bytes: int = 1 << 30


@dataclass
class ChainReport:
    """What happened to a chain so far."""

    failovers: int = 0
    longest_stall_s: float = 0.0
    route: list[tuple[PeerId, int, int]] = field(default_factory=list)


class Chain:
    """Steps go in, outputs come out; in between, peers may die.

    ``embed`` turns logged inputs ([P] token ids, or whatever ``step`` was given) into [P, D].
    """

    def __init__(self, swarm: Swarm, spec: ChainSpec, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.report = ChainReport()
        self._swarm = swarm
        self._spec = spec
        self._outbox = Outbox(ActivationLog(max_bytes=spec.log_bytes), asyncio.Event())
        self._feeder = Feeder(
            swarm.transport,
            self._outbox,
            spec.wire,
            swarm.timing,
            render=lambda step: step.with_values(embed(step.values)),
        )
        self._head = Head()
        self._hops: list[LiveHop] = []
        self._epoch = 0
        self._trouble = asyncio.Event()
        self._trouble.set()
        self._waiting: dict[int, tuple[Step, asyncio.Future[torch.Tensor]]] = {}
        self._received: set[int] = set()
        self._acked = 0
        self._watches: set[asyncio.Task[None]] = set()
        self._broken: SwarmnetError | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls, swarm: Swarm, spec: ChainSpec, embed: Callable[[torch.Tensor], torch.Tensor]
    ) -> AsyncIterator["Chain"]:
        """A chain that is built at once and mended for as long as the context."""
        chain = cls(swarm, spec, embed)
        keeper = asyncio.create_task(chain._keep(), name="chain")
        try:
            yield chain
        finally:
            await cancel(keeper)
            await chain._close()

    @property
    def lengths(self) -> dict[int, int]:
        """Positions each lane holds."""
        return dict(self._outbox.log.lengths)

    async def forward(self, rows: tuple[Row, ...], values: torch.Tensor) -> torch.Tensor:
        """Send new positions ([P] or [P, D]) through all blocks; the outputs the rows want, [wanted, D], row after row.

        Long rows travel in chunks, so that every hop of the chain has one to work on. Waits through failures as long as
        somebody hosts every block. Raises ``NoRoute`` when nobody does for ``recover_s``, ``Refused`` for what no
        replacement can mend, ``ProtocolViolation`` for rows that break the rules of ``session.steps``.
        """
        parts = cut(rows)
        inputs = torch.split(values, [row.count for row in rows])
        taken = [0] * len(rows)
        steps = []
        for part in parts:
            pieces = []
            for index, row in part:
                pieces.append(inputs[index][taken[index] : taken[index] + row.count])
                taken[index] += row.count
            steps.append(self._step(tuple(row for _, row in part), torch.cat(pieces)))
        outputs: list[list[torch.Tensor]] = [[] for _ in rows]
        for part, output in zip(parts, await asyncio.gather(*steps), strict=True):
            for (index, _), piece in zip(
                part, torch.split(output, [row.outputs for _, row in part]), strict=True
            ):
                outputs[index].append(piece)
        return torch.cat([piece for pieces in outputs for piece in pieces])

    async def _step(self, rows: tuple[Row, ...], values: torch.Tensor) -> torch.Tensor:
        if self._broken is not None:
            raise self._broken
        loop = asyncio.get_running_loop()
        step = Step(seq=self._outbox.log.last + 1, rows=rows, values=values, acked=self._acked)
        self._outbox.append(step)
        future: asyncio.Future[torch.Tensor] = loop.create_future()
        self._waiting[step.seq] = (step, future)
        before, started = self.report.failovers, loop.time()
        try:
            output = await future
        finally:
            del self._waiting[step.seq]
        if step.positions == len(rows) or self.report.failovers > before:
            self.report.longest_stall_s = max(self.report.longest_stall_s, loop.time() - started)
        return output

    # ---- keeping it whole -------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Mend the chain whenever there is trouble. What cannot be mended fails every step that waits, now and later."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._swarm.timing.stall_s / 4):
                        await self._trouble.wait()
                self._trouble.clear()
                self._drop_stuck()
                await self._mend()
        except SwarmnetError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the supervisor: a step must end, whatever broke
            self._fail(SwarmnetError(f"the chain broke: {type(error).__name__}: {error}"))

    def _fail(self, error: SwarmnetError) -> None:
        self._broken = error
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def _mend(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._swarm.timing.recover_s
        rounds = 0
        while gaps := self._gaps():
            if rounds == 0 and self.report.route:
                self.report.failovers += 1
            if rounds > 1:
                await asyncio.sleep(ROUTE_PAUSE_S)
            if loop.time() > deadline:
                raise NoRoute(gaps)
            await self._fill(gaps, deadline)
            rounds += 1
        await self._relink()
        self.report.route = [(live.hop.peer, live.hop.start, live.hop.end) for live in self._hops]

    def _drop_stuck(self) -> None:
        """Give up on a hop that has had its input for long and beats, but does not compute."""
        fed = self._outbox.log.last
        now = asyncio.get_running_loop().time()
        for live in self._hops:
            if live.applied < fed and now - live.moved > self._swarm.timing.stall_s:
                self._lost(live)
                return
            fed = live.applied

    def _gaps(self) -> list[tuple[int, int]]:
        """Blocks no live hop covers. Dead hops are dropped."""
        for live in self._hops:
            if not live.alive:
                live.stream.close()
        self._hops = [live for live in self._hops if live.alive]
        reached, gaps = 0, []
        for live in self._hops:
            if live.hop.start > reached:
                gaps.append((reached, live.hop.start))
            reached = live.hop.end
        if reached < self._spec.blocks:
            gaps.append((reached, self._spec.blocks))
        return gaps

    async def _fill(self, gaps: list[tuple[int, int]], deadline: float) -> None:
        """Open sessions for the gaps. Whoever fails is remembered, and leaves its gap to the next round."""
        for gap in gaps:
            source = next((live.hop.peer for live in self._hops if live.hop.end == gap[0]), None)
            after = next((live for live in self._hops if live.hop.start == gap[1]), None)
            route = await self._route(gap, source, after.hop.peer if after else None, deadline)
            await self._open_all(route, after)

    async def _route(
        self, gap: tuple[int, int], source: PeerId | None, sink: PeerId | None, deadline: float
    ) -> list[Hop]:
        loop = asyncio.get_running_loop()
        while True:
            try:
                return self._swarm.route(gap, source=source, sink=sink)
            except NoRoute:
                if loop.time() > deadline:
                    raise
            with contextlib.suppress(SwarmnetError, TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._swarm.refresh()
            await asyncio.sleep(ROUTE_PAUSE_S)

    async def _open_all(self, route: list[Hop], after: LiveHop | None) -> None:
        self._epoch += 1
        planned = [(hop, secrets.token_bytes(16)) for hop in route]
        following: list[Target | None] = [
            Target(hop.peer, hop.addresses, session, self._epoch) for hop, session in planned[1:]
        ]
        following.append(self._target(after) if after else None)
        opened = await asyncio.gather(
            *(
                self._open(hop, session, target)
                for (hop, session), target in zip(planned, following, strict=True)
            )
        )
        for live, successor in zip(opened, [*opened[1:], after], strict=True):
            if live is not None:
                live.link, live.epoch = successor, self._epoch
                watch = asyncio.create_task(self._watch(live))
                self._watches.add(watch)
                watch.add_done_callback(self._watches.discard)
        fresh = [live for live in opened if live is not None]
        self._hops = sorted([*self._hops, *fresh], key=lambda live: live.hop.start)

    async def _open(self, hop: Hop, session: bytes, target: Target | None) -> LiveHop | None:
        """A session on one hop, or None when the hop failed us."""
        timing = self._swarm.timing
        request = pb.Open(
            session=session,
            epoch=self._epoch,
            manifest=self._swarm.manifest,
            span=pb.Span(start=hop.start, end=hop.end),
            next=_peer(target) if target else None,
            wire=wire_code(self._spec.wire),
            max_length=self._spec.max_length,
        )
        stream: Stream | None = None
        try:
            stream = await self._swarm.transport.open(
                hop.peer, SESSION, addresses=hop.addresses, deadline_s=timing.open_s
            )
            await stream.send(Message(pb.SessionRequest(open=request).SerializeToString()))
            reply = parse(pb.SessionReply, (await receive_within(stream, timing.silence_s)).header)
            if reply.HasField("refused"):
                raise Refused(reply.refused.reason, reply.refused.detail)
            if not reply.HasField("opened"):
                raise ProtocolViolation("a session is answered with Opened or Refused")
        except SwarmnetError:
            self._swarm.failed(hop.peer)
            if stream is not None:
                stream.close()
            return None
        except asyncio.CancelledError:
            if stream is not None:
                stream.close()
            raise
        return LiveHop(hop, session, stream, moved=asyncio.get_running_loop().time())

    async def _relink(self) -> None:
        """See to it that every hop feeds the one after it."""
        if self._head.link is not self._hops[0] or self._head.feeding is None or self._head.feeding.done():
            self._epoch += 1
            await cancel(self._head.feeding)
            self._head.link = self._hops[0]
            self._head.feeding = asyncio.create_task(self._feed(self._hops[0], self._epoch))
        for live, successor in zip(self._hops, self._hops[1:], strict=False):
            if live.link is successor:
                continue
            self._epoch += 1
            live.link, live.epoch = successor, self._epoch
            relink = pb.Relink(epoch=self._epoch, next=_peer(self._target(successor)))
            with contextlib.suppress(SwarmnetError):  # a dead hop's watch says so
                await live.stream.send(Message(pb.SessionRequest(relink=relink).SerializeToString()))

    def _target(self, live: LiveHop) -> Target:
        return Target(live.hop.peer, live.hop.addresses, live.session, self._epoch)

    async def _feed(self, live: LiveHop, epoch: int) -> None:
        try:
            await self._feeder.run(Target(live.hop.peer, live.hop.addresses, live.session, epoch))
        except SwarmnetError:
            await self._link_lost(self._head, live)

    async def _link_lost(self, upstream: "LiveHop | Head", downstream: LiveHop) -> None:
        """A link ended. Once may be the path: it is made again. Twice is the hop: it is replaced."""
        await asyncio.sleep(RELINK_PAUSE_S)
        if upstream.link is not downstream:
            return
        upstream.link = None
        downstream.lost += 1
        if downstream.lost > 1:
            self._lost(downstream)
        self._trouble.set()

    def _lost(self, live: LiveHop) -> None:
        if not live.alive:
            return
        live.alive = False
        self._swarm.failed(live.hop.peer)
        self._trouble.set()

    # ---- what hops say ----------------------------------------------------------------------------------

    async def _watch(self, live: LiveHop) -> None:
        """Listen to one hop until it is gone."""
        beating = asyncio.create_task(self._beat(live))
        try:
            while True:
                message = await receive_within(live.stream, self._swarm.timing.silence_s)
                await self._hear(live, parse(pb.SessionReply, message.header), message)
        except Refused as refusal:
            if refusal.reason in (pb.REASON_TOO_LONG, pb.REASON_PROTOCOL):
                self._fail(refusal)
            self._lost(live)
        except SwarmnetError:
            self._lost(live)
        finally:
            await cancel(beating)

    async def _beat(self, live: LiveHop) -> None:
        beat = Message(pb.SessionRequest(beat=pb.Beat()).SerializeToString())
        with contextlib.suppress(SwarmnetError):  # the watch sees the same end
            while True:
                await asyncio.sleep(self._swarm.timing.client_silence_s / 4)
                await live.stream.send(beat)

    async def _hear(self, live: LiveHop, reply: pb.SessionReply, message: Message) -> None:
        match reply.WhichOneof("kind"):
            case "output":
                self._take(live, reply.output, message)
            case "link_lost":
                if live.link is not None and reply.link_lost.epoch == live.epoch:
                    await self._link_lost(live, live.link)
            case "leaving":
                self._lost(live)
            case "refused":
                raise Refused(reply.refused.reason, reply.refused.detail)
            case "beat":
                # Until there is something to compute, a hop that stands still is where it should be.
                if reply.beat.applied != live.applied or not self._waiting:
                    live.applied, live.moved = reply.beat.applied, asyncio.get_running_loop().time()
            case _:
                raise ProtocolViolation("an unexpected message on a session")

    def _take(self, live: LiveHop, output: pb.Output, message: Message) -> None:
        """Give a step's output to whoever waits for it; what comes twice, after a replay, is dropped."""
        if live.hop.end != self._spec.blocks or not self._acked < output.step <= self._outbox.log.last:
            return
        self._received.add(output.step)
        while self._acked + 1 in self._received:
            self._acked += 1
            self._received.discard(self._acked)
        waiting = self._waiting.get(output.step)
        if waiting is None or waiting[1].done():
            return
        step, future = waiting
        wanted = sum(row.outputs for row in step.rows)
        values = decode_tensor(
            output.tensor, message.payload, positions=wanted, hidden_size=self._spec.hidden_size
        )
        if not torch.isfinite(values).all():
            raise ProtocolViolation("an output that is not finite")
        self._swarm.served(live.hop.peer)
        future.set_result(values)

    async def _close(self) -> None:
        await cancel(self._head.feeding, *self._watches)
        for live in self._hops:
            live.stream.close()


@dataclass(eq=False)
class Head:
    """The client's own end of the chain: it feeds the first hop."""

    link: LiveHop | None = None
    feeding: asyncio.Task[None] | None = None


def cut(rows: tuple[Row, ...]) -> list[list[tuple[int, Row]]]:
    """Rows cut to steps of at most ``CHUNK`` positions: per step, (index of the row it is a piece of, the piece).

    Rows that start from another lane mean the lanes as they are now, so those stay together in one step.
    """
    if any(row.source != row.lane for row in rows):
        return [list(enumerate(rows))]
    parts: list[list[tuple[int, Row]]] = [[]]
    room = CHUNK
    for index, row in enumerate(rows):
        done = 0
        while done < row.count:
            if room == 0 or len(parts[-1]) == MAX_ROWS:
                parts.append([])
                room = CHUNK
            count = min(room, row.count - done)
            left = row.count - done - count
            piece = Row(
                row.lane,
                row.start + done,
                count,
                max(0, min(count, row.outputs - left)),
                row.source,
                row.rewrite and not done,
            )
            parts[-1].append((index, piece))
            done += count
            room -= count
    return parts


def _peer(target: Target) -> pb.Peer:
    return pb.Peer(id=target.peer, addresses=target.addresses, session=target.session)
