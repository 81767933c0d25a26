"""Watches the hops of a chain, and repairs the chain when a hop fails while steps wait.

The client has a session stream to every hop, which reports failures, and a link to the first hop. A
hop is replaced when:

- its session ends with an error, or it is silent;
- it has its inputs and does not compute for ``stall_s``;
- it cannot reach the next hop;
- an audit finds its outputs wrong.

A hop whose host is about to stop hands over to a standby (``standby.py``), which is ready before
the hop is closed.

Code that finds a fault in a hop drops the hop (:meth:`ChainRepair.drop`), which sets ``_trouble``.
A single loop, :meth:`ChainSupervisor._repair_forever`, then has ``repair.py`` open, replace and
link hops.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import NoReturn

from swarmnet_client.chain.adapter_upload import AdapterUploader
from swarmnet_client.chain.failures import UnhandledMessage
from swarmnet_client.chain.hops import (
    ChainReport,
    ChainSpec,
    LiveHop,
    Sender,
    upstream,
)
from swarmnet_client.chain.links import ChainLinks
from swarmnet_client.chain.repair import ChainRepair, RepairDeadline
from swarmnet_client.chain.sessions import HopSessions
from swarmnet_client.chain.standby import Standbys
from swarmnet_client.chain.steps_in_flight import StepsInFlight
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import (
    ConfigError,
    ProtocolViolation,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.machine.aio import loop_time, race, within
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.session.hop_times import Moment
from swarmnet_protocols.session.link import LinkSender, NextHop, ignore_moment
from swarmnet_protocols.session.steps import Step
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)

NOTICE_S = 0.1
"""Seconds between a report of a lost link and its handling.

Usually the receiving hop died, and its session ends within this time.
"""
RESTS_S = 0.8
"""Seconds without a step in flight after which a leaving hop is let go, even before its standby is
ready.

They count from the last answer or from the host's request to leave, whichever is later. With fewer,
the next token of an answer would wait for a replay, and most standbys would not be ready. With
more, a host that is asked to stop would wait longer for its sessions.
"""


class ChainSupervisor:
    """The hops of one chain. Failovers and audits are counted in ``report``."""

    def __init__(
        self,
        hosts: ModelHosts,
        spec: ChainSpec,
        in_flight: StepsInFlight,
        report: ChainReport,
        embed: Callable[[Array], Array],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """``embed`` turns the values of logged steps into [P, D]. ``tasks`` runs a task for each
        session, each link of the client and each standby in preparation."""
        mark = ignore_moment if in_flight.timer is None else in_flight.timer.mark

        def render(step: Step) -> Step:
            rendered = step.with_values(embed(step.values))
            mark(step.seq, Moment.EMBEDDED)
            return rendered

        self._hosts = hosts
        self._spec = spec
        self._in_flight = in_flight
        self._report = report
        self._trouble = asyncio.Event()
        self._trouble.set()
        self._tasks = tasks
        self._client_fault: asyncio.Queue[SwarmnetError] = asyncio.Queue()
        self._is_resting = False
        """True if hops are missing while no step is in flight: they are opened before the next
        step."""
        deadline = RepairDeadline(hosts.timing.recover_s)
        uploader = AdapterUploader(hosts, spec.adapter, deadline.extend)
        sessions = HopSessions(
            hosts, spec, uploader, self._handle, self._on_heartbeat, self._session_ended, tasks
        )
        sender = LinkSender(
            hosts.transport, in_flight.outbox, spec.dtype, hosts.timing, render=render, mark=mark
        )
        self._links = ChainLinks(hosts, spec, sender, self._client_link_lost, tasks)
        self._standbys = Standbys(hosts, spec, sessions, self._links, self._trouble, tasks)
        self.repair = ChainRepair(
            hosts, spec, in_flight, report, sessions, self._links, self._standbys, self._trouble, deadline
        )

    async def run(self) -> NoReturn:
        """Repair the chain whenever a hop fails. Raise the error when that is not possible.

        The error is raised at once if the client is at fault.
        """
        try:
            raise await race(self._client_fault.get(), self._repair_forever())
        finally:
            self._standbys.discard_all()

    def wake(self) -> None:
        """Open the hops again if their sessions were ended because they were idle. Called when a
        step is about to be sent."""
        if self._is_resting:
            self._trouble.set()

    # ---- repair ---------------------------------------------------------------------------------

    async def _repair_forever(self) -> NoReturn:
        while True:
            leaves = any(math.isfinite(live.leaving_since) for live in self.repair.hops)
            await within(RESTS_S if leaves else self._hosts.timing.stall_s / 4, self._trouble.wait())
            # Clear the event before reading any state, so that later changes cause another turn.
            self._trouble.clear()
            self._drop_stuck_hop()
            await self._hand_over()
            if not (self._is_resting and self._in_flight.is_empty):
                self._is_resting = False
                await self._repair_or_rest()
            if not self._is_resting:
                positions = sum(self._in_flight.outbox.log.lengths.values())
                self._standbys.update(self.repair.hops, self.repair.precision, positions)

    async def _repair_or_rest(self) -> None:
        """Repair the chain, or let it rest: if no step waits, try again at the next step.

        Otherwise raises what ``ChainRepair.run`` raises.
        """
        may_rest = self.repair.continues and self._in_flight.is_empty
        try:
            await self.repair.run()
        except SwarmnetError as error:
            if not may_rest:
                raise
            _log.info("the chain rests until the next step: %s", error)
            self._is_resting = True
            if not self._in_flight.is_empty:  # a step has come meanwhile
                self._trouble.set()

    def _drop_stuck_hop(self) -> None:
        """Replace a hop that sends heartbeats, has its inputs, and has not computed for
        ``stall_s``."""
        sent = self._in_flight.outbox.log.last
        now = loop_time()
        stall_s = self._hosts.timing.stall_s
        for live in self.repair.hops:
            if live.applied < sent and now - live.progress_at > stall_s:
                self.repair.fail(live, Unreachable(f"{live.peer} has not computed for {stall_s:g} s"))
                return
            sent = live.applied

    async def _hand_over(self) -> None:
        """Have standbys take over from hops whose hosts are about to stop.

        1. The standby links to the next hop.
        2. The standby becomes the hop.

        If no step is in flight for ``RESTS_S``, the hop is dropped at once. Its standby, or a new
        hop, then gets the missing steps from the previous hop's log.
        """
        for live, after in zip(self.repair.hops, [*self.repair.hops[1:], None], strict=False):
            standby = self._standbys.of(live) if live.alive and live.leaving else None
            if standby is not None and standby.is_linked:
                self._report.handovers += 1
                self.repair.drop(live, Unreachable(f"{live.peer} leaves its blocks"))
            elif standby is not None and not standby.is_linking and standby.is_ready(self._in_flight.acked):
                await self._links.link(standby.hops[-1], after)
            elif (
                live.alive and live.leaving and (self._may_let_go(live) or self._standbys.has_given_up(live))
            ):
                self.repair.fail(live, Unreachable(f"{live.peer} leaves its blocks"))

    def _may_let_go(self, live: LiveHop) -> bool:
        """Return whether a leaving hop may go: no step waits for it, and none has waited for a
        while."""
        asked_s = loop_time() - live.leaving_since
        return asked_s >= RESTS_S and self._in_flight.rests(RESTS_S)

    # ---- failures -------------------------------------------------------------------------------

    def _session_ended(self, live: LiveHop, error: SwarmnetError) -> None:
        """Handle the end of the session on a hop, with ``error``. A refusal may be the fault of an
        earlier hop or of the client. An ``UnhandledMessage`` may be a bug of this client."""
        if (standby := self._standbys.with_hop(live)) is not None:
            self._standbys.session_ended(standby, live, error)
        elif isinstance(error, Refused | UnhandledMessage):
            self._blame(live, error)
        else:
            self.repair.fail(live, error)

    def _blame(self, live: LiveHop, error: Refused | UnhandledMessage) -> None:
        if not live.alive:
            return
        reason = error.reason if isinstance(error, Refused) else refusal_pb2.REASON_UNSPECIFIED
        if reason == refusal_pb2.REASON_IDLE and self._in_flight.is_empty:
            _log.debug("an idle session ended: the chain rests", extra=live.log_fields)
            self._is_resting = True
            live.alive = False
            return
        if reason == refusal_pb2.REASON_LOG_GONE:
            self.repair.drop(live, error)
            return
        # An honest hop may have received bad inputs, so the hops that computed these inputs are
        # suspects, too.
        before = upstream(self.repair.hops, live)
        made_by = [each.hop for each in before]
        try:
            sent_by = made_by[0] if made_by else None
            suspects = self.repair.blame.attribute(error, live.hop, made_by=made_by, sent_by=sent_by)
        except (ConfigError, UnhandledMessage) as fault:
            self._client_fault.put_nowait(fault)
            return
        for each in (live, *before):
            if each.hop in suspects:
                self.repair.drop(each, error)

    async def _client_link_lost(self, target: NextHop, error: SwarmnetError) -> None:
        known = [*self.repair.hops, *self._standbys.hops]
        receiver = next((live for live in known if live.session == target.session), None)
        if receiver is not None:
            await self._link_lost(self._links.client, receiver, error)

    async def _link_lost(self, sender: Sender, receiver: LiveHop, error: SwarmnetError) -> None:
        """Handle a link that cannot be made or kept.

        - If the receiving hop is silent too, it is replaced.
        - If both hops are alive, the path between them is broken or one of them lies. They are not
          made neighbours again for a while, and the sender is replaced. The receiver is replaced
          too if another sender has reported it before.
        - A standby that cannot be fed, or cannot feed, is replaced by another standby.
        """
        standby = self._standbys.with_hop(receiver)
        if standby is None and isinstance(sender, LiveHop):
            standby = self._standbys.with_hop(sender)
        if standby is not None:
            if isinstance(sender, LiveHop):
                self._hosts.separate(sender.peer, receiver.peer)
            else:
                self._hosts.failed(receiver.peer)
            self._standbys.discard(standby)
            return
        _log.debug(
            "a link is lost", extra=receiver.log_fields | {"sender": sender.peer, "reason": str(error)[:200]}
        )
        await asyncio.sleep(NOTICE_S)
        # The receiver's session may have ended meanwhile, or the sender may have another receiver.
        if sender.next is not receiver or not receiver.alive:
            return
        silent_s = loop_time() - receiver.heard_at
        if isinstance(sender, LiveHop) and silent_s < self._hosts.timing.silence_s / 2:
            # Both answer, so one of them lies or the path is broken. Only a second accuser costs
            # the receiver its place.
            is_repeated = self._hosts.separate(sender.peer, receiver.peer)
            self.repair.drop(sender, error)
            if is_repeated:
                self.repair.drop(receiver, error)
        else:
            self.repair.fail(receiver, error)

    # ---- messages of hops -----------------------------------------------------------------------

    def _complete_step(self, live: LiveHop, output: pb.Output, payload: Buffer) -> None:
        if live.stands_by:
            raise ProtocolViolation("an output of a standby")
        if live.hop.end == self._spec.blocks and self._in_flight.complete(output, payload):
            self.repair.answered(live)

    def _handle(self, live: LiveHop, reply: pb.SessionReply, payload: Buffer) -> None:
        """Handle a message of a hop. Raises ``ProtocolViolation`` for an unknown message."""
        match reply.WhichOneof("kind"):
            case "output":
                self._complete_step(live, reply.output, payload)
            case "timed":
                self._record_times(live, reply.timed)
            case "link_lost":
                if (receiver := self._receiver_lost(live, reply.link_lost.epoch)) is not None:
                    error = Unreachable("a host does not reach the next one")
                    self._tasks.create_task(self._link_lost(live, receiver, error))
            case "link_made":
                linked = self._standbys.with_hop(live)
                if linked is not None and linked.hops[-1] is live and reply.link_made.epoch == live.epoch:
                    linked.is_linked = linked.is_linking
                    self._trouble.set()
            case "leaving":
                _log.debug("a host leaves", extra=live.log_fields | {"moves": reply.leaving.moves})
                live.leaving = True
                if not reply.leaving.moves:
                    live.leaving_since = loop_time()
                self._trouble.set()
            case "shown":
                live.complete_show(reply.shown, payload)
            case _:
                raise ProtocolViolation("an unexpected message on a session")

    def _receiver_lost(self, live: LiveHop, epoch: int) -> LiveHop | None:
        """Return the receiver of the link that a hop has lost, or None if it does not matter."""
        # The hop may have lost its second link, which feeds the standby of the next hop.
        if (fed := self._standbys.fed_by(live, epoch)) is not None:
            return fed.hops[0]
        if epoch != live.epoch:
            return None
        if live.next is None:
            live.epoch = 0  # the next hop is still being opened: link to it again when it is open
        if (standby := self._standbys.of(live)) is not None and standby.is_linking:
            return None  # the next hop already takes its steps from the standby
        return live.next

    def _record_times(self, live: LiveHop, timed: pb.Timed) -> None:
        if self._in_flight.timer is None:
            raise ProtocolViolation("times that the client did not ask for")
        self._in_flight.timer.add_times(live.session, live.hop, timed)

    def _on_heartbeat(self, live: LiveHop, reply: pb.SessionReply) -> None:
        now = live.heard_at = loop_time()
        # While nothing is in flight, a hop has nothing to compute.
        if reply.heartbeat.applied != live.applied or self._in_flight.is_empty:
            live.applied, live.progress_at = reply.heartbeat.applied, now
        standby = self._standbys.with_hop(live)
        if standby is not None and standby.replaced.leaving and standby.is_ready(self._in_flight.acked):
            self._trouble.set()
