"""Matchmaking: forms the group of workers that average in a round.

The *leader* is the worker with the lowest peer id among those believed alive. The others are its
*followers*. A worker follows only lower peer ids than its own, and is redirected only to lower
ones. So workers never wait for each other in a circle.

1. A follower opens a stream to the leader, sends its position (round and state) and waits. The
   leader sends heartbeats.
2. The leader waits until all expected workers have come, but at most ``timeout_s``. Meanwhile it
   probes the missing workers, and stops expecting workers that do not answer. A probe shows the
   leader's position.
3. Two workers at the same position may both lead. A worker that hears of both tells the leader with
   the higher peer id. That leader then follows the other, together with its followers.
4. Every follower gets the same roster and closes its stream.

A worker that asks a follower is redirected to the follower's leader. A worker at another position
than the leader gets the leader's position instead of a roster, and catches up (``catch_up.py``).
The leader then expects that worker in its next group.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmnet_protocols.errors import NotAuthorised, ProtocolViolation, StreamEnded, SwarmnetError
from swarmnet_protocols.machine.aio import cancel, race
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import MATCHMAKING
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training import MAX_MEMBERS
from swarmnet_protocols.training.bandwidth import Measured
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.rosters import (
    MAX_AHEAD_OF_LEADER,
    NO_ADDRESSES,
    AddressBook,
    Candidate,
    JoinRequest,
    Roster,
    highest_exchange_number,
    measured_from_wire,
    measured_to_wire,
    member_from_wire,
    member_to_wire,
    roster_from_wire,
    roster_to_wire,
)
from swarmnet_protocols.wire import workers_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Follower(JoinRequest):
    """A follower that waits on its stream for ``answer``."""

    answer: asyncio.Future[Roster]


class _Redirected(SwarmnetError):
    """The worker that was asked follows ``leader`` itself."""

    def __init__(self, leader: Candidate) -> None:
        super().__init__(f"{leader.peer} is the leader")
        self.leader = leader


class OutOfSync(SwarmnetError):
    """``peer`` is at another round than this worker, or starts the round from another state."""

    def __init__(self, peer: PeerId, round: int, state: bytes) -> None:
        super().__init__(f"{peer} is at round {round} with state {state.hex()[:16]}")
        self.peer = peer
        self.round = round
        self.state = state


ELSEWHERE_S = 8.0
"""Seconds that a leader waits for workers at other positions.

A shorter wait leaves out workers that would fetch the state and return. A longer one lets workers
that cannot catch up delay every round.
"""

MAX_REDIRECTS = 8
"""Most redirects that a follower accepts in a row."""


class Matchmaking:
    """Matchmaking of one worker in one job, as leader or as follower.

    - ``same_state``: all workers start a round from one state. False for gossip methods, whose
      replicas differ.
    - ``is_excluded``: whether a peer sent false results. This worker neither follows nor leads it.
    """

    def __init__(
        self,
        transport: Transport,
        job: bytes,
        *,
        max_members: int,
        timing: Timing,
        same_state: bool = True,
        is_excluded: Callable[[PeerId], bool] = lambda _: False,
    ) -> None:
        self._transport = transport
        self._job = job
        self._same_state = same_state
        self._is_excluded = is_excluded
        self._max_members = max_members
        self._timing = timing
        self._round = 0
        self._last_exchange = 0
        self._state = b""
        self._left_for_good = False
        self._averaging = False
        """Whether this round has a roster, so that the present state will soon be replaced."""
        self._book = NO_ADDRESSES
        """The addresses in the last roster."""
        self._leader: Candidate | None = None
        """The leader that this worker follows; None while it follows nobody."""
        self._last_leader: Candidate | None = None
        """The worker to which this worker redirects its own followers.

        It is the leader, or the worker that the leader follows in turn.
        """
        self._followers: dict[PeerId, _Follower] = {}
        self._leads = False
        self._rival: Candidate | None = None
        """Another leader at this worker's position.

        Its peer id is lower than the id of this worker's leader, or of this worker if it leads.
        """
        self._returning: dict[PeerId, Candidate] = {}
        """Workers to expect in the next group.

        They learnt this worker's position, and may have to fetch its state first.
        """
        self._changed = asyncio.Condition()

    async def serve(self) -> None:
        """Accept followers until the transport closes."""
        await MATCHMAKING.serve(self._transport, self._receive, self._timing)

    async def set_position(self, round: int, state: bytes) -> None:
        """Set this worker's position to ``round``, which starts from ``state``.

        Followers at other positions get the new position at once.
        """
        self._round, self._state, self._averaging = round, state, False
        await self._dismiss_out_of_sync()

    async def leave(self) -> None:
        """Accept no further followers, and end the streams of waiting followers."""
        self._left_for_good = True
        for follower in self._followers.values():
            if not follower.answer.done():
                follower.answer.set_exception(StreamEnded("this worker leaves"))

    async def form_group(
        self, me: Candidate, others: Sequence[Candidate], *, measured: Measured, timeout_s: float
    ) -> Roster:
        """Return the roster of the round at this worker's position.

        - ``others``: workers believed to be alive.
        - ``measured``: bandwidths that this worker measured.
        - ``timeout_s``: most seconds that a leader waits for its followers.

        Raises ``OutOfSync`` if the others are at another position.
        """
        self._averaging = False
        self._last_exchange = me.last_exchange
        await self._dismiss_out_of_sync()
        _log.debug("round %d: looks for a group among %d workers", self._round, len(others))
        try:
            roster = await self._form_group(me, others, measured, timeout_s)
        except OutOfSync as elsewhere:
            _log.debug("round %d: %s", self._round, elsewhere)
            raise
        members = [member.peer for member in roster.members]
        fields = {"exchange": roster.exchange_number, "members": members}
        _log.debug("round %d: a group is formed", self._round, extra=fields)
        self._averaging = True
        self._book = AddressBook.of(roster.members)
        return roster

    async def _form_group(
        self, me: Candidate, others: Sequence[Candidate], measured: Measured, timeout_s: float
    ) -> Roster:
        others = sorted(others, key=lambda member: member.peer)
        leaders = [
            member for member in others if member.peer < me.peer and member.peer not in self._followers
        ]
        expected = {member.peer: member for member in others if member.peer > me.peer} | self._returning
        self._returning = {}
        self._rival = None
        roster = await self._follow_first(leaders, me, measured, timeout_s)
        while roster is None:
            try:
                return await self._lead(me, expected, measured, timeout_s)
            except _Redirected as rival:
                roster = await self._follow_first([rival.leader], me, measured, timeout_s)
        return roster

    async def _follow_first(
        self, others: Sequence[Candidate], me: Candidate, measured: Measured, timeout_s: float
    ) -> Roster | None:
        """Return the roster from the first of ``others`` that answers and is not behind.

        None if no worker answers, or all are behind.
        """
        for member in others:
            try:
                return await self._follow(member, me, measured, timeout_s)
            except OutOfSync as elsewhere:
                if elsewhere.round >= self._round:
                    raise
            except SwarmnetError as error:
                _log.debug("round %d: does not follow %s: %s", self._round, member.peer, error)
        return None

    async def positions(self, members: Sequence[Candidate]) -> dict[PeerId, WorkerPosition]:
        """Return the positions of the ``members`` that answer."""
        found = await asyncio.gather(*(self._position_of(member) for member in members[:MAX_MEMBERS]))
        return {each.peer: WorkerPosition(each.round, each.state) for each in found if each is not None}

    # ---- as follower ----------------------------------------------------------------------------

    async def _follow(self, member: Candidate, me: Candidate, measured: Measured, timeout_s: float) -> Roster:
        """Follow ``member``, or the leader that it follows itself."""
        leader = member
        for _ in range(MAX_REDIRECTS):
            try:
                return await self._ask(leader, me, measured, timeout_s, redirect=True)
            except _Redirected as redirected:
                leader = redirected.leader
            except OutOfSync:
                raise
            except SwarmnetError:
                if leader is member:
                    raise
                break
        # The leader cannot be reached from here. Wait at its follower: after the round, the
        # follower sends its new position, and this worker fetches that state.
        return await self._ask(member, me, measured, timeout_s, redirect=False)

    async def _ask(
        self,
        leader: Candidate,
        me: Candidate,
        measured: Measured,
        timeout_s: float,
        *,
        redirect: bool,
    ) -> Roster:
        def on_heartbeat(reply: pb.MatchmakingReply) -> None:
            self._leader = self._last_leader = leader
            if reply.heartbeat.HasField("leader"):
                there = member_from_wire(reply.heartbeat.leader)
                if there.peer < leader.peer:
                    self._last_leader = there
                    if redirect:
                        raise _Redirected(there)

        if self._is_excluded(leader.peer):
            raise NotAuthorised(f"{leader.peer} sent false results")
        _log.debug("round %d: follows %s", self._round, leader.peer)
        stream = await MATCHMAKING.open(
            self._transport,
            leader.peer,
            self._timing,
            addresses=leader.addresses,
            on_heartbeat=on_heartbeat,
        )
        try:
            # Twice the timeout: the leader may still take inner steps, and its own timeout begins
            # after them.
            async with asyncio.timeout(2 * timeout_s):
                return await race(
                    self._request_roster(stream, me, measured), self._until_rival_of(leader.peer)
                )
        except TimeoutError as error:
            raise StreamEnded(f"{leader.peer} gave no roster within {2 * timeout_s:g} s") from error
        finally:
            self._leader = self._last_leader = None
            stream.close()

    async def _until_rival_of(self, leader: PeerId) -> Roster:
        async with self._changed:
            await self._changed.wait_for(lambda: self._rival is not None and self._rival.peer < leader)
        raise self._redirected()

    def _redirected(self) -> "_Redirected":
        rival, self._rival = self._rival, None
        if rival is None:
            raise StreamEnded("no other leader is known")
        return _Redirected(rival)

    async def _request_roster(
        self,
        stream: "TypedStream[pb.MatchmakingRequest, pb.MatchmakingReply]",
        me: Candidate,
        measured: Measured,
    ) -> Roster:
        book = self._book
        await stream.send(self._request(me, measured, book))
        while True:
            reply, _ = await stream.receive()
            match reply.WhichOneof("kind"):
                case "position":
                    raise OutOfSync(stream.peer, reply.position.round, reply.position.state)
                case "roster":
                    return roster_from_wire(reply.roster, round=self._round, me=me, book=book)
                case "unknown" if book is not NO_ADDRESSES:
                    book = NO_ADDRESSES
                    await stream.send(self._request(me, measured, book))
                case _:
                    raise ProtocolViolation("not a reply of a leader")

    def _request(self, me: Candidate, measured: Measured, book: AddressBook) -> pb.MatchmakingRequest:
        return pb.MatchmakingRequest(
            job=self._job,
            round=self._round,
            state=self._state,
            member=member_to_wire(me, book),
            measured=measured_to_wire(measured),
            known=book.hash if book.has(me) else b"",
        )

    async def _position_of(self, member: Candidate, *, leading: bool = False) -> OutOfSync | None:
        """Ask a worker for its position; None if it does not answer.

        ``leading``: tell the other worker that this worker leads, and at which position.
        """
        with contextlib.suppress(SwarmnetError):
            stream = await MATCHMAKING.open(
                self._transport, member.peer, self._timing, addresses=member.addresses
            )
            stream.silence_s = self._timing.silence_s
            request = pb.MatchmakingRequest(job=self._job)
            if leading:
                request.round, request.state = self._round, self._state
            reply, _ = await stream.ask(request)
            if reply.position.HasField("leader"):
                await self._hear_of(member_from_wire(reply.position.leader))
            return OutOfSync(member.peer, reply.position.round, reply.position.state)
        return None

    # ---- as leader ------------------------------------------------------------------------------

    async def _lead(
        self, me: Candidate, expected: dict[PeerId, Candidate], measured: Measured, timeout_s: float
    ) -> Roster:
        expected = {peer: member for peer, member in expected.items() if not self._is_excluded(peer)}
        self._leads = True
        _log.debug("round %d: leads", self._round)

        def complete() -> bool:
            here = {follower.member.peer for follower in self._ready()}
            is_full = len(here) + 1 >= self._max_members
            return {*expected} <= here or is_full or self._rival is not None

        async def enough() -> None:
            async with self._changed:
                await self._changed.wait_for(complete)

        try:
            async with asyncio.timeout(timeout_s):
                await race(enough(), self._probe_missing(expected))
        except TimeoutError:
            pass  # workers that have not come in time are not in this round
        finally:
            self._leads = False
        if self._rival is not None:
            raise self._redirected()
        followers = self._ready()
        roster = Roster.of(self._round, me, measured, followers, self._max_members)
        members = {member.peer for member in roster.members}
        for follower in followers:
            if follower.member.peer in members:
                follower.answer.set_result(roster)
        return roster

    async def _probe_missing(self, expected: dict[PeerId, Candidate]) -> None:
        """Remove workers from ``expected`` that do not answer.

        Workers at other positions are removed after ``ELSEWHERE_S``. Raises ``OutOfSync`` if this
        worker is behind, or if more workers have another state than its own.
        """
        clock = asyncio.get_running_loop().time
        elsewhere_until = clock() + ELSEWHERE_S
        # workers that arrive at about the same time need no probe
        pause_s = self._timing.heartbeat_s
        while True:
            left_s = elsewhere_until - clock()
            await asyncio.sleep(min(pause_s, left_s) if left_s > 0 else pause_s)
            pause_s = min(2 * pause_s, self._timing.matchmaking_poll_s)
            here = {follower.member.peer for follower in self._ready()}
            missing = [member for peer, member in expected.items() if peer not in here]
            positions = await asyncio.gather(*(self._position_of(member, leading=True) for member in missing))
            for member, position in zip(missing, positions, strict=True):
                is_late = clock() >= elsewhere_until
                if position is None or (is_late and not self._is_coming(position)):
                    expected.pop(member.peer, None)
            others = [each for each in positions if each is not None and self._is_elsewhere(each)]
            if others and (others[0].round > self._round or len(others) > len(here)):
                raise others[0]
            async with self._changed:
                self._changed.notify_all()

    def _is_elsewhere(self, position: OutOfSync) -> bool:
        """Return whether the position is at a later round, or at this round with another state."""
        same_round = position.round == self._round and position.state != b""
        return position.round > self._round or (same_round and self._is_other(position.state))

    def _is_coming(self, position: OutOfSync) -> bool:
        """Return whether a worker is at this worker's position or will reach it.

        A member of the last roster that has not finished that round will reach it.
        """
        if position.round == self._round:
            return not self._is_other(position.state)
        return position.round == self._round - 1 and position.peer in self._book.addresses

    def _is_other(self, state: bytes) -> bool:
        return self._same_state and state != self._state

    def _ready(self) -> list[_Follower]:
        """Return the followers at this worker's position that wait for a roster."""
        highest = highest_exchange_number(self._round, self._last_exchange, MAX_AHEAD_OF_LEADER)
        return [
            follower
            for follower in self._followers.values()
            if follower.round == self._round
            and not self._is_other(follower.state)
            and not follower.answer.done()
            and not self._is_excluded(follower.member.peer)
            and follower.member.last_exchange < highest
        ]

    async def _receive(self, stream: "TypedStream[pb.MatchmakingReply, pb.MatchmakingRequest]") -> None:
        if self._is_excluded(stream.peer):
            raise NotAuthorised(f"{stream.peer} sent false results")
        request, _ = await stream.receive()
        if request.job != self._job:
            raise ProtocolViolation("another job")
        if self._left_for_good:
            return
        if not request.HasField("member"):
            await stream.send(await self._answer_to_probe(request, stream.peer))
            return
        if request.known and not self._book.matches(request.known, stream.peer):
            await stream.send(pb.MatchmakingReply(unknown=pb.UnknownAddresses()))
            request, _ = await stream.receive()
        stream.silence_s = math.inf  # a follower waits for the group without sending
        follower = self._follower_of(request, stream.peer)
        self._followers[stream.peer] = follower
        await self._dismiss_out_of_sync()
        try:
            roster = await race(self._send_heartbeats(stream), self._until_it_ends(stream), _result(follower))
            await stream.send(pb.MatchmakingReply(roster=roster_to_wire(roster, request.known)))
        except OutOfSync as elsewhere:
            self._expect(follower.member)
            await stream.send(self._position_reply(elsewhere.round, elsewhere.state))
        finally:
            await cancel(follower.answer)
            if self._followers.get(stream.peer) is follower:
                del self._followers[stream.peer]
            async with self._changed:
                self._changed.notify_all()

    async def _answer_to_probe(self, request: pb.MatchmakingRequest, peer: PeerId) -> pb.MatchmakingReply:
        """Return this worker's position, for a worker that does not ask to join.

        A request with a state comes from another leader.
        """
        reply = self._position_reply(self._round, self._state)
        prober = Candidate(peer, ())
        if request.state and request.round == self._round and not self._is_other(request.state):
            if (lower := await self._hear_of(prober)) is not None:
                reply.position.leader.CopyFrom(member_to_wire(lower))
        elif request.state and request.round <= self._round:
            self._expect(prober)
        return reply

    def _expect(self, member: Candidate) -> None:
        """Expect a worker in the next group, because it learnt this worker's position."""
        if len(self._returning) < MAX_MEMBERS:
            self._returning[member.peer] = member

    async def _hear_of(self, leader: Candidate) -> Candidate | None:
        """Follow ``leader`` if its peer id is lower than the present leader's.

        ``leader`` is at this worker's position. If the present leader's peer id is lower, returns
        the present leader.
        """
        present = self._leader
        if self._leads:
            present = Candidate(self._transport.peer_id, tuple(self._transport.addresses()))
        if present is None:
            return None
        if leader.peer < present.peer:
            self._rival = leader
            async with self._changed:
                self._changed.notify_all()
        return present if present.peer < leader.peer else None

    def _follower_of(self, request: pb.MatchmakingRequest, peer: PeerId) -> _Follower:
        if request.known:
            if not self._book.matches(request.known, peer):
                raise ProtocolViolation("a follower must send its id and addresses")
            request.member.id = peer
            request.member.addresses[:] = self._book.addresses[peer]
        member = member_from_wire(request.member)
        if member.peer != peer:
            raise ProtocolViolation("a follower may join only under its own peer id")
        answer: asyncio.Future[Roster] = asyncio.get_running_loop().create_future()
        measured = measured_from_wire(request.measured)
        return _Follower(member, request.round, request.state, measured, answer)

    def _position_reply(self, round: int, state: bytes) -> pb.MatchmakingReply:
        return pb.MatchmakingReply(position=pb.Position(round=round, state=state))

    async def _dismiss_out_of_sync(self) -> None:
        """Send this worker's position to followers at other positions.

        A follower one round ahead keeps waiting, because this worker will soon reach its round.
        During averaging all followers keep waiting, because the state that they would fetch will
        soon be replaced.
        """
        if self._averaging:
            return
        here = OutOfSync(self._transport.peer_id, self._round, self._state)
        for follower in self._followers.values():
            other_state = follower.round == self._round and self._is_other(follower.state)
            elsewhere = follower.round < self._round or other_state or follower.round > self._round + 1
            if elsewhere and not follower.answer.done():
                follower.answer.set_exception(here)
        async with self._changed:
            self._changed.notify_all()

    async def _send_heartbeats(
        self, stream: "TypedStream[pb.MatchmakingReply, pb.MatchmakingRequest]"
    ) -> Roster:
        def heartbeat() -> pb.MatchmakingReply:
            leader = None if self._last_leader is None else member_to_wire(self._last_leader)
            return pb.MatchmakingReply(heartbeat=pb.LeaderHeartbeat(leader=leader))

        await stream.send_heartbeats(self._timing.matchmaking_heartbeat_s, heartbeat)

    async def _until_it_ends(
        self, stream: "TypedStream[pb.MatchmakingReply, pb.MatchmakingRequest]"
    ) -> Roster:
        await stream.receive()
        raise ProtocolViolation("a follower sends one request")


async def _result(follower: _Follower) -> Roster:
    return await follower.answer
