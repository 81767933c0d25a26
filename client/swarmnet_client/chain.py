"""A session down a chain of hops, kept whole: hops that fail are replaced while steps wait.

The client is the first upstream and the last downstream. It has a session stream to every hop, on which it learns of
the hop's death, and one feeder that sends steps to the first. Building a chain and mending one are the same act: fill the gaps.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from swarmnet_client.adapters import Placement
from swarmnet_client.chunks import cut, cut_values
from swarmnet_client.hops import ChainSpec, Head, LiveHop, open_hop
from swarmnet_client.patience import PAUSE_S, Patience, verdict
from swarmnet_client.swarm import Swarm
from swarmnet_protocols.aio import cancel
from swarmnet_protocols.errors import (
    ConfigError,
    NoRoute,
    OutOfResources,
    ProtocolViolation,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.resources import Scope, Stock
from swarmnet_protocols.routing import Hop
from swarmnet_protocols.session.link import Feeder, Outbox, Refused, Target
from swarmnet_protocols.session.log import ActivationLog
from swarmnet_protocols.session.steps import Row, Step, decode_tensor
from swarmnet_protocols.transport import Message, PeerId
from swarmnet_protocols.transport.talking import parse, receive_within
from swarmnet_protocols.wire import session_pb2 as pb

NOTICE_S = 0.1
"""A lost link is news of a dead hop more often than of a broken path: its own death notice is given this long."""


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
        self._placement = Placement(swarm, spec.adapter, self._extend)
        self._mending: asyncio.Timeout | None = None
        room = Scope("this chain", {Stock.LOG: spec.log_bytes}, {}).hold(Stock.LOG, 0)
        self._outbox = Outbox(ActivationLog(room), asyncio.Event())
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
        self._watches: dict[asyncio.Task[None], None] = {}
        self._broken: SwarmnetError | None = None
        self._why: SwarmnetError | None = None
        self._patience = Patience(swarm.timing.recover_s)

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
        somebody hosts every block. Raises ``NoRoute`` when nobody does for ``recover_s``, ``OutOfResources`` when the
        hosts have no room or a lane would pass ``max_length``, ``Unreachable`` when every attempt to mend the chain
        fails, ``ConfigError`` for an adapter that lacks blocks, ``ProtocolViolation`` for rows against ``session.steps``.
        """
        longest = self._spec.prefix_positions + max(row.end for row in rows)
        if longest > self._spec.max_length:
            raise OutOfResources(
                f"{longest} positions in a session of {self._spec.max_length}",
                hint="open the session with a larger max_length",
            )
        parts = cut(rows)
        steps = [
            self._step(tuple(row for _, row in part), inputs)
            for part, inputs in zip(parts, cut_values(parts, rows, values), strict=True)
        ]
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
                self._leave_the_leaving()
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
        try:
            async with asyncio.timeout(self._swarm.timing.recover_s) as self._mending:
                if gaps := self._gaps():
                    self.report.failovers += bool(self.report.route)
                    if self._patience.lost(loop.time(), idle=not self._waiting):
                        raise self._verdict(gaps) from self._why
                    await asyncio.sleep(self._patience.pause_s(self._why))
                    await self._fill()
                    self._patience.mended(loop.time())
                await self._relink()
        except TimeoutError:
            raise self._verdict(self._gaps()) from self._why
        self.report.route = [(live.hop.peer, live.hop.start, live.hop.end) for live in self._hops]

    def _extend(self) -> None:
        """A host has taken some of our adapter: it is worth waiting for."""
        if self._mending is not None:
            self._mending.reschedule(asyncio.get_running_loop().time() + self._swarm.timing.recover_s)

    def _verdict(self, gaps: list[tuple[int, int]]) -> SwarmnetError:
        """Why the chain cannot be mended, as far as we know."""
        told = verdict(self._why or NoRoute(gaps))
        nobody = isinstance(self._why, Unreachable) or not self._swarm.hosts
        return NoRoute(gaps) if nobody and type(told) is Unreachable else told

    def _drop_stuck(self) -> None:
        """Give up on a hop that has had its input for long and beats, but does not compute."""
        fed = self._outbox.log.last
        now = asyncio.get_running_loop().time()
        stall_s = self._swarm.timing.stall_s
        for live in self._hops:
            if live.applied < fed and now - live.moved > stall_s:
                self._lost(live, Unreachable(f"{live.hop.peer} has not computed for {stall_s:g} s"))
                return
            fed = live.applied

    def _leave_the_leaving(self) -> None:
        """Move away from hosts that asked for it, as soon as others can take their place."""
        for live in self._hops:
            if live.leaving and self._swarm.can_replace(live.hop):
                self._lost(live, Unreachable(f"{live.hop.peer} is about to stop"))

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

    async def _fill(self) -> None:
        """Open sessions until there is no gap. Whoever fails is remembered, and leaves its gap to the next round."""
        rounds = 0
        while gaps := self._gaps():
            if rounds > 2:
                await asyncio.sleep(PAUSE_S)
            if rounds > 0:
                with contextlib.suppress(SwarmnetError):
                    await self._swarm.refresh()
            for gap in gaps:
                source = next((live.hop.peer for live in self._hops if live.hop.end == gap[0]), None)
                after = next((live for live in self._hops if live.hop.start == gap[1]), None)
                try:
                    route = self._swarm.route(gap, source=source, sink=after.hop.peer if after else None)
                except NoRoute as error:
                    self._why = error
                    continue
                await self._open_all(route, after)
            rounds += 1

    async def _open_all(self, route: list[Hop], after: LiveHop | None) -> None:
        self._epoch += 1
        planned = [(hop, self._swarm.new_session()) for hop in route]
        following: list[Target | None] = [
            Target(hop.peer, hop.addresses, session, self._epoch) for hop, session in planned[1:]
        ]
        following.append(after.target(self._epoch) if after else None)
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
                self._watches[watch] = None
                watch.add_done_callback(self._watches.pop)

    async def _open(self, hop: Hop, session: bytes, target: Target | None) -> LiveHop | None:
        """A session on one hop, which joins the chain; None when the hop failed us."""
        try:
            live = await open_hop(self._placement, self._spec, hop, (session, self._epoch), target)
        except ConfigError:
            raise  # the adapter's fault: no other host would do
        except SwarmnetError as error:
            self._why = error
            self._swarm.failed(hop.peer)
            return None
        self._hops = sorted([*self._hops, live], key=lambda live: live.hop.start)
        return live

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
            await live.relink(successor.target(self._epoch))

    async def _feed(self, live: LiveHop, epoch: int) -> None:
        try:
            await self._feeder.run(live.target(epoch))
        except SwarmnetError as error:
            await self._link_lost(self._head, live, error)

    async def _link_lost(self, upstream: "LiveHop | Head", downstream: LiveHop, error: SwarmnetError) -> None:
        """A link cannot be made or kept. A hop that fell silent is replaced; of two that live, both: the path is broken."""
        await asyncio.sleep(NOTICE_S)
        if upstream.link is not downstream or not downstream.alive:
            return
        silent_s = asyncio.get_running_loop().time() - downstream.heard
        if isinstance(upstream, LiveHop) and silent_s < self._swarm.timing.silence_s / 2:
            self._swarm.parted(upstream.hop.peer, downstream.hop.peer)
            self._drop(upstream, error)
            self._drop(downstream, error)
        else:
            self._lost(downstream, error)

    def _lost(self, live: LiveHop, error: SwarmnetError) -> None:
        """Replace a hop that failed us, by another if there is one."""
        if live.alive:
            self._swarm.failed(live.hop.peer)
            self._drop(live, error)

    def _drop(self, live: LiveHop, error: SwarmnetError) -> None:
        live.alive = False
        self._why = error
        self._trouble.set()

    # ---- what hops say ----------------------------------------------------------------------------------

    async def _watch(self, live: LiveHop) -> None:
        """Listen to one hop until it is gone."""
        beating = asyncio.create_task(live.beat(self._swarm.timing.client_silence_s / 4))
        try:
            while True:
                message = await receive_within(live.stream, self._swarm.timing.silence_s)
                live.heard = asyncio.get_running_loop().time()
                await self._hear(live, parse(pb.SessionReply, message.header), message)
        except Refused as refusal:
            self._refused(live, refusal)
        except SwarmnetError as error:
            self._lost(live, error)
        finally:
            await cancel(beating)

    def _refused(self, live: LiveHop, refusal: Refused) -> None:
        """A hop ended the session."""
        if refusal.reason == pb.REASON_LOG_GONE:
            self._drop(live, refusal)
            return
        self._lost(live, refusal)
        if refusal.reason == pb.REASON_PROTOCOL:  # it blames whoever feeds it, and one of the two is wrong
            for upstream in [other for other in self._hops if other.link is live]:
                self._lost(upstream, refusal)

    async def _hear(self, live: LiveHop, reply: pb.SessionReply, message: Message) -> None:
        match reply.WhichOneof("kind"):
            case "output":
                self._take(live, reply.output, message)
            case "link_lost":
                if live.link is not None and reply.link_lost.epoch == live.epoch:
                    await self._link_lost(live, live.link, Unreachable(reply.link_lost.reason[:500]))
            case "leaving":
                live.leaving = True
                self._trouble.set()
            case "refused":
                raise Refused.from_wire(reply.refused)
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
        waiting = self._waiting.get(output.step)
        if waiting is not None and not waiting[1].done():
            step, future = waiting
            wanted = sum(row.outputs for row in step.rows)
            values = decode_tensor(
                output.tensor, message.payload, positions=wanted, hidden_size=self._spec.hidden_size
            )
            if not torch.isfinite(values).all():
                raise ProtocolViolation("an output that is not finite")
            self._swarm.served(live.hop.peer)
            self._patience.answered()
            future.set_result(values)
        self._received.add(output.step)
        while self._acked + 1 in self._received:
            self._acked += 1
            self._received.discard(self._acked)

    async def _close(self) -> None:
        await cancel(self._head.feeding, *self._watches)
        for live in self._hops:
            live.stream.close()
