"""Keeps the hops of a chain whole: opens them, links them, and replaces those that fail while steps wait.

The client has a session stream to every hop, which tells it when a hop fails, and a link to the first hop. One method opens and repairs
a chain, :meth:`ChainSupervisor._repair`:

1. Blocks that no live hop covers are a gap. A route of hosts is chosen for each gap, and a session opened on each of them.
2. Each hop is linked to the next one. The hop before a new one replays its log there.

A hop is replaced when its session ends with an error, when it is silent, when it has its inputs and does not compute for ``stall_s``, when
it cannot reach the next hop, or when an audit finds its outputs wrong. A hop whose host is about to stop hands over to a standby
(``standby.py``), which is ready before the hop is closed.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from swarmnet_client.chain.adapter_upload import AdapterUploads
from swarmnet_client.chain.failures import (
    PAUSE_S,
    Blame,
    RetryPolicy,
    WaitBudget,
    explain,
    is_full,
    is_missing_experts,
)
from swarmnet_client.chain.hops import (
    ChainReport,
    ChainSpec,
    ClientLink,
    LiveHop,
    SessionRole,
    SessionStream,
    displaced,
    gaps,
    runs,
    upstream,
)
from swarmnet_client.chain.sessions import HopSessions
from swarmnet_client.chain.standby import Standby, Standbys
from swarmnet_client.chain.steps_in_flight import StepsInFlight
from swarmnet_client.swarm.swarm import CONVICTED_S, Swarm
from swarmnet_protocols.errors import (
    ConfigError,
    HostsBusy,
    NoRoom,
    NoRoute,
    OutOfResources,
    ProtocolViolation,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.machine.aio import all_of, cancel, race
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.routing.chain_search import Hop
from swarmnet_protocols.session.activation_log import ActivationLog
from swarmnet_protocols.session.hop_times import Moment
from swarmnet_protocols.session.link import LinkSender, NextHop, ignore_moment
from swarmnet_protocols.session.steps import Step
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)

NOTICE_S = 0.1
"""Seconds between a report of a lost link and its handling. Most often the receiving hop died, and its session ends within this time."""
DIRECTORY_S = 0.3
"""Longest wait for the directory before a host that failed is tried again. Most answers take a round
trip, but a replica that is gone too takes seconds: it may have failed with the host."""
RESTS_S = 0.8
"""Seconds without a step in flight, and since a hop's host asked to leave, after which it is let go
before its standby is ready. Longer than between two tokens of an answer, which would wait for a
replay, and than most standbys need; and short, because a host that is asked to stop waits for its
sessions."""


class ChainSupervisor:
    """The hops of one chain. Failovers and audits are counted in ``report``."""

    def __init__(
        self,
        swarm: Swarm,
        spec: ChainSpec,
        in_flight: StepsInFlight,
        report: ChainReport,
        embed: Callable[[torch.Tensor], torch.Tensor],
        receive: Callable[[LiveHop, SessionStream], Awaitable[bool]],
    ) -> None:
        """``embed`` turns the values of logged steps into [P, D]; ``receive`` receives from a hop until its session ends."""
        self._swarm = swarm
        self._spec = spec
        self._in_flight = in_flight
        self._report = report
        uploads = AdapterUploads(swarm, spec.adapter, self._extend_deadline)
        self._sessions = HopSessions(swarm, spec, uploads, receive, self._take_heartbeat, self.session_ended)
        self._deadline: asyncio.Timeout | None = None
        """Deadline of the repair that is under way."""
        note = ignore_moment if spec.trace is None else spec.trace.note

        def render(step: Step) -> Step:
            rendered = step.with_values(embed(step.values))
            note(step.seq, Moment.EMBEDDED)
            return rendered

        self._link_sender = LinkSender(
            swarm.transport, in_flight.outbox, spec.dtype, swarm.timing, render=render, note=note
        )
        self._client_link = ClientLink()
        self._hops: list[LiveHop] = []
        self._trouble = asyncio.Event()
        self._trouble.set()
        self._standbys = Standbys(swarm, spec, self._sessions, self._feed_standby, self._trouble)
        self._last_error: SwarmnetError | None = None
        self._retries = RetryPolicy(swarm.timing.recover_s)
        self._blame = Blame(swarm)
        self._wait_budget = WaitBudget()
        self._positions = 0
        """Positions of all sequences, including positions about to be sent."""
        self._is_resting = False
        """Whether hops are missing while no step is in flight: they are opened before the next
        step."""
        self._client_fault: asyncio.Queue[ConfigError] = asyncio.Queue()

    async def run(self) -> NoReturn:
        """Repair the chain whenever a hop fails. Raises the error when that is not possible, at once if the client is at fault."""
        raise await race(self._client_fault.get(), self._keep_whole())

    async def close(self) -> None:
        """End all sessions. ``run`` has ended before."""
        await cancel(self._client_link.sending)
        await self._standbys.close()
        await self._sessions.close()
        for live in self._hops:
            live.stream.close()

    def need(self, positions: int) -> None:
        """The sequences of the chain are about to have this many positions together: hops whose
        hosts lack the room are replaced."""
        is_more, self._positions = positions > self._positions, positions
        if not is_more:
            return
        lacking = self._swarm.without_room(positions)
        for live in self._hops:
            if live.hop.peer in lacking:
                self._drop(live, OutOfResources(f"{live.hop.peer} has no room for {positions} positions"))

    def wake(self) -> None:
        """A step is about to be sent: open again the hops whose idle sessions were ended."""
        if self._is_resting:
            self._trouble.set()

    # ---- repair -----------------------------------------------------------------------------------------

    async def _keep_whole(self) -> NoReturn:
        while True:
            leaves = any(math.isfinite(live.leaving_since) for live in self._hops)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTS_S if leaves else self._swarm.timing.stall_s / 4):
                    await self._trouble.wait()
            self._trouble.clear()
            self._drop_stuck_hop()
            await self._hand_over()
            if not (self._is_resting and self._in_flight.is_empty):
                self._is_resting = False
                await self._repair_or_rest()
            if not self._is_resting:
                positions = sum(self._steps.lengths.values())
                self._standbys.keep(self._hops, self._client_link, self._precision(), positions)

    async def _repair_or_rest(self) -> None:
        """Repair the chain. Where that is not possible and no step waits for it, try again at the
        next step. Otherwise raises what ``_repair`` raises."""
        may_rest = self._continues and self._in_flight.is_empty
        try:
            await self._repair()
        except SwarmnetError as error:
            if not may_rest:
                raise
            _log.info("the chain rests until the next step: %s", error)
            self._is_resting = True
            if not self._in_flight.is_empty:  # a step has come meanwhile
                self._trouble.set()

    async def _repair(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._swarm.timing.recover_s) as self._deadline:
                if missing := self._gaps():
                    self._report.failovers += bool(self._report.route)
                    is_idle = self._in_flight.is_empty
                    if self._retries.is_given_up(loop.time(), self._last_error, idle=is_idle):
                        raise self._explain(missing) from self._last_error
                    pause_s = self._retries.pause_s(self._last_error)
                    if not is_full(self._last_error):  # else other hosts may have room at once
                        await asyncio.sleep(pause_s)
                    self._in_flight.forget_idle()
                    await self._fill(pause_s)
                    self._retries.repaired(loop.time())
                await self._relink()
        except TimeoutError:
            raise self._explain(self._gaps()) from self._last_error
        self._report.take([live.hop for live in self._hops])
        self._swarm.chain_opened(self._hops[0].hop.peer, self._hops[-1].hop.peer)

    def _extend_deadline(self) -> None:
        """A host has received some of the adapter: start the repair's deadline again."""
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._swarm.timing.recover_s)

    def _explain(self, missing: list[tuple[int, int]]) -> SwarmnetError:
        """The error for a chain that cannot be repaired."""
        no_route = partial(self._swarm.no_route, missing, continues=self._continues)
        error = explain(self._last_error or no_route())
        is_unhosted = isinstance(self._last_error, Unreachable) or not self._swarm.hosts
        return no_route() if is_unhosted and type(error) is Unreachable else error

    def _drop_stuck_hop(self) -> None:
        """Replace a hop that sends heartbeats, has its inputs, and has not computed for ``stall_s``."""
        sent = self._steps.last
        now = asyncio.get_running_loop().time()
        stall_s = self._swarm.timing.stall_s
        for live in self._hops:
            if live.applied < sent and now - live.progress_at > stall_s:
                self._fail(live, Unreachable(f"{live.hop.peer} has not computed for {stall_s:g} s"))
                return
            sent = live.applied

    async def _hand_over(self) -> None:
        """Have standbys take over from hops whose hosts are about to stop: first link to the hop
        behind, then become the hop.

        A chain without a step in flight soon lets go of such a hop: its standby, or a new hop, is
        rebuilt from the log of the hop before.
        """
        for live, after in zip(self._hops, [*self._hops[1:], None], strict=False):
            standby = self._standbys.of(live) if live.alive and live.leaving else None
            if standby is not None and standby.is_linked:
                self._report.handovers += 1
                self._drop(live, Unreachable(f"{live.hop.peer} is about to stop"))
            elif standby is not None and not standby.is_linking and standby.is_ready(self._in_flight.acked):
                await self._link(standby.hops[-1], after)
            elif (
                live.alive and live.leaving and (self._may_let_go(live) or self._standbys.has_given_up(live))
            ):
                self._fail(live, Unreachable(f"{live.hop.peer} is about to stop"))

    def _may_let_go(self, live: LiveHop) -> bool:
        """Whether no step waits for a hop that leaves, nor has for a while."""
        asked_s = asyncio.get_running_loop().time() - live.leaving_since
        return asked_s >= RESTS_S and self._in_flight.rests(RESTS_S)

    def _gaps(self) -> list[tuple[int, int]]:
        """The blocks that no live hop covers, nor a standby. Closes the sessions of hops that are not alive, and installs their standbys."""
        gone = [live for live in self._hops if not live.alive]
        self._hops = [live for live in self._hops if live.alive]
        for live in gone:
            live.stream.close()
            if (standby := self._standbys.take(live)) is not None:
                self._install(standby)
        return gaps(self._hops, self._spec.blocks)

    def _add(self, new: Sequence[LiveHop]) -> None:
        """Make new hops part of the chain, and close the hops that give way to them."""
        for live in displaced(self._hops, new):
            live.end(Unreachable(f"{live.hop.peer} gave way to other hops"))
            live.stream.close()
        self._hops = sorted(
            [*(live for live in self._hops if live.alive), *new], key=lambda live: live.hop.start
        )

    def _install(self, standby: Standby) -> None:
        """Make the hops of a standby hops of the chain. ``_relink`` tells the sender, and the last of them if it does not know the next hop."""
        self._report.failovers += 1
        first, sender = standby.hops[0], standby.sender
        self._add(standby.hops)
        sender.next = first
        if isinstance(sender, LiveHop):
            sender.epoch, sender.is_switching = standby.epoch, True
        else:
            replaced, sender.sending = sender.sending, standby.feeding
            if replaced is not None:
                replaced.cancel()

    async def _fill(self, pause_s: float) -> None:
        """Open sessions until all hops of a route are open. A host that fails is banned for a
        while, and another route chosen: the open hops may cover all blocks already, but include two
        that do not reach each other."""
        rounds, blocks, is_open, has_route = 0, (0, self._spec.blocks), False, False
        while self._gaps() or not is_open:
            if rounds > 2:
                await asyncio.sleep(PAUSE_S)
            if rounds > 0:
                with contextlib.suppress(SwarmnetError, TimeoutError):
                    async with asyncio.timeout(DIRECTORY_S if has_route else None):
                        await self._swarm.refresh()
            rounds += 1
            try:
                self._swarm.check_room(self._positions, blocks)
                route = self._swarm.route(
                    blocks,
                    precision=self._precision(),
                    avoid=self._swarm.without_room(self._positions),
                    continues=self._continues,
                    hops=[live.hop for live in self._hops],
                )
            except NoRoom as error:
                # The directory is read first: a host with more room may have come.
                if not self._continues or rounds > 2:
                    raise
                self._last_error = error
            except HostsBusy as error:
                await self._wait_for_hosts(error)
            except NoRoute as error:
                if not is_missing_experts(self._last_error):  # which is why the host is not there
                    self._last_error = error
            else:
                has_route = True
                # The directory may know others. A dial may take a timeout.
                if rounds > 1 or not self._swarm.is_doubtful(route, [live.hop for live in self._hops]):
                    is_open = await self._open(route)
                elif is_full(self._last_error):
                    await asyncio.sleep(pause_s)

    async def _open(self, route: Sequence[Hop]) -> bool:
        """Open the hops of ``route`` that are not open yet: neighbours linked one to the next, and
        the last of them to the open hop behind. Returns whether all are open."""
        role = SessionRole.SUCCESSOR if self._continues else SessionRole.HOP

        async def open_run(new: Sequence[Hop], after: LiveHop | None) -> None:
            sender = self._sender_to(new[0])

            async def link(target: NextHop) -> None:
                """Link to the hop while it is being opened, which saves two round trips: the link
                waits there for the session."""
                if sender is not None:
                    await self._send_to(sender, new[0], target, None)

            opened = await self._sessions.open(new, after, self._open_failed, role=role, begun=link)
            self._add(opened)
            if sender is None or not opened or opened[0].hop != new[0]:
                return
            # A hop that has reported meanwhile that it lost the link makes another one.
            if isinstance(sender, ClientLink) or sender.epoch == opened[0].epoch:
                sender.next = opened[0]

        await all_of(*(open_run(new, after) for new, after in runs(route, self._hops)))
        return {live.hop for live in self._hops}.issuperset(route)

    def _sender_to(self, new: Hop) -> LiveHop | ClientLink | None:
        """The client or the open hop that will send to a new one; None if a new one will, or a hop
        that gives way."""
        if new.start == 0:
            return self._client_link
        senders = (live for live in self._hops if live.hop.end == new.start and live.hop.peer != new.peer)
        return next(senders, None)

    async def _wait_for_hosts(self, busy: HostsBusy) -> None:
        """Wait until hosts may have room. Raises ``busy`` if that is longer than this chain may wait.

        A chain that has answered is worth the time of a repair.
        """
        recover_s = self._swarm.timing.recover_s
        most_s = max(self._spec.wait_s, recover_s if self._continues else 0.0)
        now = asyncio.get_running_loop().time()
        if not self._wait_budget.may_wait(busy.retry_after_s, most_s, now):
            raise busy
        self._last_error = busy
        if self._deadline is not None:
            self._deadline.reschedule(now + busy.retry_after_s + recover_s)
        await asyncio.sleep(busy.retry_after_s)

    def _open_failed(self, hop: Hop, error: SwarmnetError) -> None:
        self._blame.attribute(error, hop, continues=self._continues)
        self._last_error = error

    @property
    def _steps(self) -> ActivationLog:
        return self._in_flight.outbox.log

    @property
    def _continues(self) -> bool:
        """Whether the chain has answered, so that hosts which are added now continue an answer."""
        return bool(self._in_flight.acked)

    def _precision(self) -> str | None:
        """The precision that new hops should have: that of the chain, or of its first hops; None before there are any."""
        known = self._report.precisions or [live.hop.precision for live in self._hops]
        return known[0] if known else None

    async def _relink(self) -> None:
        """Have every hop send to the one after it, and the client to the first."""
        first = self._hops[0]
        sending = self._client_link.sending
        if self._client_link.next is not first or sending is None or sending.done():
            await self._send_to(
                self._client_link, first.hop, first.target(self._sessions.next_epoch()), first
            )
        for live, successor in zip(self._hops, [*self._hops[1:], None], strict=True):
            if live.next is not successor or live.stands_by or live.is_switching:
                await self._link(live, successor)

    async def _link(self, live: LiveHop, successor: LiveHop | None) -> None:
        """Have a hop send to ``successor``; None: to the client."""
        if not live.is_switching or live.next is not successor:
            live.epoch = self._sessions.next_epoch()
        if successor is not None:
            await self._send_to(live, successor.hop, successor.target(live.epoch), successor)
            return
        live.next, live.stands_by, live.is_switching = None, False, False
        await live.relink(live.epoch, None, b"", self._steps.lengths)

    async def _send_to(
        self, sender: LiveHop | ClientLink, hop: Hop, target: NextHop, opened: LiveHop | None
    ) -> None:
        """Have a hop or the client send to ``target``, a session on ``hop``; ``opened``: None while
        that is being opened."""
        sender.next = opened
        if isinstance(sender, ClientLink):
            replaced = sender.sending
            sender.sending = asyncio.create_task(self._send_steps(hop, target, opened, is_standby=False))
            await cancel(replaced)
            return
        sender.epoch, sender.stands_by, sender.is_switching = target.epoch, False, False
        await sender.relink(target.epoch, target, self._swarm.record_of(target.peer), self._steps.lengths)

    def _feed_standby(self, first: LiveHop, epoch: int) -> asyncio.Task[None]:
        """The client's own link to the standby of a first hop."""
        return asyncio.create_task(self._send_steps(first.hop, first.target(epoch), first, is_standby=True))

    async def _send_steps(
        self, hop: Hop, target: NextHop, first: LiveHop | None, *, is_standby: bool
    ) -> None:
        """Send to ``first``, or to a hop that is being opened. A link that is lost before the hop
        is open is made again then."""
        sender = replace(self._link_sender, wire=self._spec.wire_of(hop.precision))
        try:
            await sender.run(target, is_standby=is_standby)
        except SwarmnetError as error:
            opened = next((live for live in self._hops if live.session == target.session), first)
            if opened is not None:
                await self._link_lost(self._client_link, opened, error)

    # ---- failures ---------------------------------------------------------------------------------------

    def session_ended(self, live: LiveHop, error: SwarmnetError) -> None:
        """The session on a hop ended with ``error``. A refusal may be the fault of a hop before it, or of the client."""
        if (standby := self._standbys.with_hop(live)) is not None:
            self._standbys.session_ended(standby, live, error)
        elif isinstance(error, Refused):
            self._refused(live, error)
        else:
            self._fail(live, error)

    def _refused(self, live: LiveHop, refusal: Refused) -> None:
        if not live.alive:
            return
        if refusal.reason == refusal_pb2.REASON_IDLE and self._in_flight.is_empty:
            self._is_resting = True
            live.alive = False
            return
        if refusal.reason == refusal_pb2.REASON_LOG_GONE:
            self._drop(live, refusal)
            return
        before = upstream(self._hops, live)
        made_by = [each.hop for each in before]
        try:
            sent_by = made_by[0] if made_by else None
            suspects = self._blame.attribute(refusal, live.hop, made_by=made_by, sent_by=sent_by)
        except ConfigError as fault:
            self._client_fault.put_nowait(fault)
            return
        for each in (live, *before):
            if each.hop in suspects:
                self._drop(each, refusal)

    async def _link_lost(self, sender: LiveHop | ClientLink, receiver: LiveHop, error: SwarmnetError) -> None:
        """A link cannot be made or kept.

        If the receiving hop is silent too, it is replaced. If both hops are alive, the path between them is broken, or one of them lies. They
        are not made neighbours again for a while, and the sender is replaced; the receiver too if another sender has reported it before. A
        standby that cannot be fed, or cannot feed, is replaced by another one.
        """
        standby = self._standbys.with_hop(receiver)
        if standby is None and isinstance(sender, LiveHop):
            standby = self._standbys.with_hop(sender)
        if standby is not None:
            if isinstance(sender, LiveHop):
                self._swarm.separate(sender.hop.peer, receiver.hop.peer)
            else:
                self._swarm.failed(receiver.hop.peer)
            self._standbys.discard(standby)
            return
        await asyncio.sleep(NOTICE_S)
        if sender.next is not receiver or not receiver.alive:
            return
        silent_s = asyncio.get_running_loop().time() - receiver.heard_at
        if isinstance(sender, LiveHop) and silent_s < self._swarm.timing.silence_s / 2:
            is_repeated = self._swarm.separate(sender.hop.peer, receiver.hop.peer)
            self._drop(sender, error)
            if is_repeated:
                self._drop(receiver, error)
        else:
            self._fail(receiver, error)

    def _fail(self, live: LiveHop, error: SwarmnetError) -> None:
        """Replace a hop and ban its host for a while."""
        if live.alive:
            self._swarm.failed(live.hop.peer)
            self._drop(live, error)

    def _drop(self, live: LiveHop, error: SwarmnetError) -> None:
        """Replace a hop."""
        if live.alive:
            _log.info("host replaced", extra={"peer": live.hop.peer, "reason": str(error)[:200]})
        live.end(error)
        self._last_error = error
        self._trouble.set()

    # ---- messages of hops other than outputs --------------------------------------------------------------

    async def handle(self, live: LiveHop, reply: pb.SessionReply, payload: Buffer) -> None:
        """Handle a message of a hop. Raises ``ProtocolViolation`` for an unknown message."""
        match reply.WhichOneof("kind"):
            case "link_lost":
                receiver = live.next if reply.link_lost.epoch == live.epoch else None
                if receiver is None and reply.link_lost.epoch == live.epoch:
                    # The link to a hop that is being opened: it is made again when that hop is open.
                    live.epoch = 0
                if (fed := self._standbys.fed_by(live, reply.link_lost.epoch)) is not None:
                    receiver = fed.hops[0]
                elif (standby := self._standbys.of(live)) is not None and standby.is_linking:
                    receiver = None  # the hop behind takes its steps from the standby already
                if receiver is not None:
                    await self._link_lost(live, receiver, Unreachable("a host does not reach the next one"))
            case "link_made":
                linked = self._standbys.with_hop(live)
                if linked is not None and linked.hops[-1] is live and reply.link_made.epoch == live.epoch:
                    linked.is_linked = linked.is_linking
                    self._trouble.set()
            case "leaving":
                live.leaving = True
                if not reply.leaving.moves:
                    live.leaving_since = asyncio.get_running_loop().time()
                self._trouble.set()
            case "shown":
                live.take_shown(reply.shown, payload)
            case _:
                raise ProtocolViolation("an unexpected message on a session")

    def answered(self, last: LiveHop) -> None:
        """The chain answered a step: forget earlier failures."""
        self._swarm.answered(last.hop.peer)
        self._retries.answered()
        self._wait_budget.answered()
        self._blame = Blame(self._swarm)

    def _take_heartbeat(self, live: LiveHop, reply: pb.SessionReply) -> None:
        now = live.heard_at = asyncio.get_running_loop().time()
        # While nothing is in flight, a hop has nothing to compute.
        if reply.heartbeat.applied != live.applied or self._in_flight.is_empty:
            live.applied, live.progress_at = reply.heartbeat.applied, now
        standby = self._standbys.with_hop(live)
        if standby is not None and standby.replaced.leaving and standby.is_ready(self._in_flight.acked):
            self._trouble.set()

    # ---- findings of audits -----------------------------------------------------------------------------

    @property
    def hops(self) -> tuple[LiveHop, ...]:
        """The hops, if the chain is whole; else empty."""
        whole = not gaps(self._hops, self._spec.blocks) and all(live.alive for live in self._hops)
        return tuple(self._hops) if whole else ()

    def give_up(self, live: LiveHop, error: SwarmnetError) -> None:
        """Replace a hop that does not answer an audit. Its outputs do not count as wrong."""
        self._fail(live, error)

    def separate(self, one: LiveHop, other: LiveHop, error: SwarmnetError) -> None:
        """Replace two neighbours of which one lies about the data between them; which one is unknown."""
        self._swarm.separate(one.hop.peer, other.hop.peer)
        self._fail(one, error)
        self._fail(other, error)

    def convict(self, live: LiveHop) -> None:
        """Replace a hop whose outputs are wrong, and every hop behind it, whose KV caches come from those outputs."""
        error = Unreachable(f"{live.hop.peer} gave wrong outputs")
        self._swarm.convict(live.hop.peer)
        self._report.wrong.append(live.hop.peer)
        _log.warning(
            "host %s gave wrong outputs for blocks %d:%d, according to two other hosts. "
            "It was replaced, and this client avoids it for %g hours. The answer so far may be wrong: ask again",
            live.hop.peer,
            live.hop.start,
            live.hop.end,
            CONVICTED_S / 3600,
        )
        self._standbys.discard_all()
        for each in self._hops:
            if each.hop.start >= live.hop.start:
                self._drop(each, error)
