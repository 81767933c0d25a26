"""The hops of a chain, kept whole: hops that fail are replaced while steps wait.

The client is the first upstream and the last downstream. It has a session stream to every hop, on which it learns of
the hop's death, and one feeder that sends steps to the first. Building a chain and mending one are the same act: fill the gaps.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch

from swarmnet_client.chain.adapter_upload import Placement
from swarmnet_client.chain.blame import Blame
from swarmnet_client.chain.hops import ChainReport, ChainSpec, Head, LiveHop, gaps, open_hop, upstream
from swarmnet_client.chain.inflight import Inflight
from swarmnet_client.chain.retry_policy import PAUSE_S, RetryPolicy, verdict
from swarmnet_client.swarm.swarm import CONVICTED_S, Swarm
from swarmnet_protocols.errors import (
    ConfigError,
    NoRoute,
    ProtocolViolation,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.machine.aio import all_of, cancel, race
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.routing.cost import Hop
from swarmnet_protocols.session.link import LinkSender, NextHop
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)

NOTICE_S = 0.1
"""A lost link is news of a dead hop more often than of a broken path: its own death notice is given this long."""


class ChainSupervisor:
    """Has the steps of ``flight`` computed by hops that it finds, feeds and replaces. ``report`` says what happened."""

    def __init__(
        self,
        swarm: Swarm,
        spec: ChainSpec,
        inflight: Inflight,
        report: ChainReport,
        embed: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """``embed`` turns the values of logged steps into [P, D]."""
        self._swarm = swarm
        self._spec = spec
        self._inflight = inflight
        self._report = report
        self._placement = Placement(swarm, spec.adapter, self._extend)
        self._mending: asyncio.Timeout | None = None
        self._link_sender = LinkSender(
            swarm.transport,
            inflight.outbox,
            spec.wire,
            swarm.timing,
            render=lambda step: step.with_values(embed(step.values)),
        )
        self._head = Head()
        self._hops: list[LiveHop] = []
        self._epoch = 0
        self._trouble = asyncio.Event()
        self._trouble.set()
        self._watches: dict[asyncio.Task[None], None] = {}
        self._why: SwarmnetError | None = None
        self._patience = RetryPolicy(swarm.timing.recover_s)
        self._blame = Blame(swarm)
        self._is_resting = False
        """A host has ended a session that brought no work: another one is opened when there is some."""
        self._fault: asyncio.Queue[ConfigError] = asyncio.Queue()

    async def run(self) -> NoReturn:
        """Mend the chain whenever there is trouble. Raises what stands in the way of that, at once where the fault is ours."""
        raise await race(self._fault.get(), self._stay_whole())

    async def close(self) -> None:
        """End all sessions. ``run`` has ended before."""
        await cancel(self._head.feeding, *self._watches)
        for live in self._hops:
            live.stream.close()

    # ---- keeping it whole -------------------------------------------------------------------------------

    async def _stay_whole(self) -> NoReturn:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._swarm.timing.stall_s / 4):
                    await self._trouble.wait()
            self._trouble.clear()
            self._drop_stuck()
            self._leave_the_leaving()
            if not (self._is_resting and self._inflight.is_idle):
                self._is_resting = False
                await self._mend()

    def wake(self) -> None:
        """There is a step to send."""
        if self._is_resting:
            self._trouble.set()

    async def _mend(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._swarm.timing.recover_s) as self._mending:
                if missing := self._gaps():
                    self._report.failovers += bool(self._report.route)
                    if self._patience.lost(loop.time(), idle=self._inflight.is_idle):
                        raise self._verdict(missing) from self._why
                    await asyncio.sleep(self._patience.pause_s(self._why))
                    await self._fill()
                    self._patience.mended(loop.time())
                await self._relink()
        except TimeoutError:
            raise self._verdict(self._gaps()) from self._why
        self._report.route = [(live.hop.peer, live.hop.start, live.hop.end) for live in self._hops]
        self._swarm.built(self._hops[0].hop.peer, self._hops[-1].hop.peer)

    def _extend(self) -> None:
        """A host has taken some of our adapter: it is worth waiting for."""
        if self._mending is not None:
            self._mending.reschedule(asyncio.get_running_loop().time() + self._swarm.timing.recover_s)

    def _verdict(self, missing: list[tuple[int, int]]) -> SwarmnetError:
        """Why the chain cannot be mended, as far as we know."""
        told = verdict(self._why or self._swarm.no_route(missing))
        nobody = isinstance(self._why, Unreachable) or not self._swarm.hosts
        return self._swarm.no_route(missing) if nobody and type(told) is Unreachable else told

    def _drop_stuck(self) -> None:
        """Give up on a hop that has had its input for long and beats, but does not compute."""
        fed = self._inflight.outbox.log.last
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
        return gaps(self._hops, self._spec.blocks)

    async def _fill(self) -> None:
        """Open sessions until there is no gap. Whoever fails is remembered, and leaves its gap to the next round."""
        rounds = 0
        while missing := self._gaps():
            if rounds > 2:
                await asyncio.sleep(PAUSE_S)
            if rounds > 0:
                with contextlib.suppress(SwarmnetError):
                    await self._swarm.refresh()
            for gap in missing:
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
        following: list[NextHop | None] = [
            NextHop(hop.peer, hop.addresses, session, self._epoch) for hop, session in planned[1:]
        ]
        following.append(after.target(self._epoch) if after else None)
        opened = await all_of(
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

    async def _open(self, hop: Hop, session: bytes, target: NextHop | None) -> LiveHop | None:
        """A session on one hop, which joins the chain; None when the hop failed us."""
        try:
            live = await open_hop(self._placement, self._spec, hop, (session, self._epoch), target)
        except ConfigError:
            raise  # the adapter's fault: no other host would do
        except SwarmnetError as error:
            self._blame.settle(error, hop)
            self._why = error
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
            await live.relink(successor.target(self._epoch), self._swarm.record_of(successor.hop.peer))

    async def _feed(self, live: LiveHop, epoch: int) -> None:
        try:
            await self._link_sender.run(live.target(epoch))
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
        if live.showing is not None and not live.showing.done():
            live.showing.set_exception(error)
        self._why = error
        self._trouble.set()

    # ---- what audits find -------------------------------------------------------------------------------

    @property
    def hops(self) -> tuple[LiveHop, ...]:
        """The chain as it is now, if it is whole; else nothing."""
        whole = not gaps(self._hops, self._spec.blocks) and all(live.alive for live in self._hops)
        return tuple(self._hops) if whole else ()

    def give_up(self, live: LiveHop, error: SwarmnetError) -> None:
        """Replace a hop that does not do what it must, without saying that its outputs are wrong."""
        self._lost(live, error)

    def part(self, one: LiveHop, other: LiveHop, error: SwarmnetError) -> None:
        """Replace two neighbours one of which lies about what went between them, nobody knows which."""
        self._swarm.parted(one.hop.peer, other.hop.peer)
        self._lost(one, error)
        self._lost(other, error)

    def convict(self, live: LiveHop) -> None:
        """Replace a hop whose outputs are wrong for good, and what the hops behind it made of them."""
        error = Unreachable(f"{live.hop.peer} gave wrong outputs")
        self._swarm.convict(live.hop.peer)
        self._report.wrong.append(live.hop.peer)
        _log.warning(
            "host %s gave wrong outputs for blocks %d:%d, as two other hosts say: it is replaced and not used again for %g hours. "
            "What was answered so far may be wrong: ask again",
            live.hop.peer,
            live.hop.start,
            live.hop.end,
            CONVICTED_S / 3600,
        )
        for each in self._hops:
            if each.hop.start >= live.hop.start:
                self._drop(each, error)

    # ---- what hops say ----------------------------------------------------------------------------------

    async def _watch(self, live: LiveHop) -> None:
        """Listen to one hop until it is gone."""
        live.stream.on_heartbeat = partial(self._heartbeat, live)
        heartbeating = asyncio.create_task(live.heartbeat(self._swarm.timing.client_silence_s / 4))
        try:
            while True:
                reply, payload = await live.stream.receive()
                live.heard = asyncio.get_running_loop().time()
                await self._hear(live, reply, payload)
        except Refused as refusal:
            self._refused(live, refusal)
        except SwarmnetError as error:
            self._lost(live, error)
        finally:
            await cancel(heartbeating)

    def _refused(self, live: LiveHop, refusal: Refused) -> None:
        """A hop ended the session: for a reason of its own, or for what came to it from the hops before it, or from us."""
        if not live.alive:
            return
        if refusal.reason == pb.REASON_IDLE and self._inflight.is_idle:
            self._is_resting = True
            live.alive = False
            return
        if refusal.reason == pb.REASON_LOG_GONE:
            self._drop(live, refusal)
            return
        before = upstream(self._hops, live)
        made_by = [each.hop for each in before]
        try:
            fed_by = made_by[0] if made_by else None
            suspects = self._blame.settle(refusal, live.hop, made_by=made_by, fed_by=fed_by)
        except ConfigError as fault:
            self._fault.put_nowait(fault)
            return
        for each in (live, *before):
            if each.hop in suspects:
                self._drop(each, refusal)

    def _heartbeat(self, live: LiveHop, reply: pb.SessionReply) -> None:
        now = live.heard = asyncio.get_running_loop().time()
        # Until there is something to compute, a hop that stands still is where it should be.
        if reply.heartbeat.applied != live.applied or self._inflight.is_idle:
            live.applied, live.moved = reply.heartbeat.applied, now

    async def _hear(self, live: LiveHop, reply: pb.SessionReply, payload: Buffer) -> None:
        match reply.WhichOneof("kind"):
            case "output":
                self._take(live, reply.output, payload)
            case "link_lost":
                if live.link is not None and reply.link_lost.epoch == live.epoch:
                    await self._link_lost(live, live.link, Unreachable("a host does not reach the next one"))
            case "leaving":
                live.leaving = True
                self._trouble.set()
            case "shown":
                live.shows(reply.shown, payload)
            case _:
                raise ProtocolViolation("an unexpected message on a session")

    def _take(self, live: LiveHop, output: pb.Output, payload: Buffer) -> None:
        if live.hop.end == self._spec.blocks and self._inflight.take(output, payload):
            self._swarm.served(live.hop.peer)
            self._patience.answered()
            self._blame = Blame(self._swarm)
