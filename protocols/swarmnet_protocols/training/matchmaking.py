"""Matchmaking: forms the group of workers that average in a round.

The state at a round's start draws an order of the workers (``rosters.place_as_leader``). The
*leader* is the first of those believed alive, the others are its *followers*. A worker follows only
workers before itself, and is redirected only to earlier ones. So workers never wait for each other
in a circle.

1. A follower opens a stream to the leader, sends its position (round and state) and waits. The
   leader sends heartbeats.
2. The leader waits until all expected workers have come, but at most ``timeout_s``. Meanwhile it
   probes the missing workers, and stops expecting workers that do not answer. A probe shows the
   leader's position.
3. Two workers at the same position may both lead. A worker that hears of both tells the later one.
   That leader then follows the other, together with its followers.
4. Every follower gets the same roster and closes its stream.

With more than ``MAX_MEMBERS`` workers, one leader would have too many streams. Workers whose peer
ids have hashes with the same first bits are *neighbours*, and follow a leader among them. When this
leader has its followers, it follows the first leader of all, and forwards their requests. It sends
them the roster that it gets. The first bits of a hash do not change when others come or go, so
workers whose directories differ agree on most neighbours.

If a job has more workers than it may have, the roster leaves some out. They are *spare*, and ask
again.

A worker that asks a follower at its own position is redirected to the follower's leader. A worker
at another position than the leader gets the leader's position instead of a roster, and catches up
(``catch_up.py``). The leader then expects that worker in its next group.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

from swarmnet_protocols.errors import NotAuthorised, ProtocolViolation, StreamEnded, SwarmnetError
from swarmnet_protocols.machine.aio import News, all_of, in_background, race
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import MATCHMAKING
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.coordinates import OwnCoordinate, read_coordinate
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training import MAX_MEMBERS, MAX_WORKERS
from swarmnet_protocols.training.bandwidth import Measured
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.pacing import NOTHING, Spent
from swarmnet_protocols.training.rosters import (
    MAX_AHEAD_OF_LEADER,
    NO_ADDRESSES,
    AddressBook,
    JoinRequest,
    Roster,
    highest_exchange_number,
    member_from_wire,
    member_to_wire,
    place_as_leader,
    request_from_wire,
    request_to_wire,
    roster_from_wire,
    roster_to_wire,
)
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.wire import workers_pb2 as pb

_log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
_ToLeader = TypedStream[pb.MatchmakingRequest, pb.MatchmakingReply]
_ToFollower = TypedStream[pb.MatchmakingReply, pb.MatchmakingRequest]
_Follower = tuple[JoinRequest, asyncio.Future[Roster]]
"""The request of a follower, and the answer that it waits for on its stream."""


class _Redirected(SwarmnetError):
    """The worker that was asked follows ``leader`` itself."""

    def __init__(self, leader: RoundMember) -> None:
        super().__init__(f"{leader.peer} is the leader")
        self.leader = leader


class NoPlace(SwarmnetError):
    """The job has all the workers that it may have, and this worker is none of them."""

    def __init__(self, workers: int) -> None:
        super().__init__(f"the job has {workers} workers, and takes no more")
        self.workers = workers


class OutOfSync(SwarmnetError):
    """``peer`` is at another position than this worker."""

    def __init__(self, peer: PeerId, position: WorkerPosition) -> None:
        super().__init__(f"{peer} is at round {position.round} with state {position.state.hex()[:16]}")
        self.peer = peer
        self.position = position


ELSEWHERE_S = 8.0
"""Seconds that a leader waits for workers at other positions.

A shorter wait leaves out workers that would fetch the state and return. A longer one lets workers
that cannot catch up delay every round.
"""

PROBES = 8
"""Workers whose delay a worker measures in each round of several groups. With fewer, its coordinate
takes more rounds to settle. With more, it opens more streams."""

MAX_REDIRECTS = 8
"""Most redirects that a follower accepts in a row."""


class Matchmaking:
    """Matchmaking of one worker in one job, as leader or as follower.

    - ``timeout_s``: most seconds that a leader waits for its followers.
    - ``same_state``: all workers start a round from one state. False for gossip methods, whose
      replicas differ.
    - ``is_excluded``: whether a peer sent false results. This worker neither follows nor leads it.
    """

    def __init__(  # noqa: PLR0913 - a worker's network, and the settings of its job
        self,
        transport: Transport,
        job: bytes,
        *,
        max_members: int,
        timeout_s: float,
        timing: Timing,
        same_state: bool = True,
        is_excluded: Callable[[PeerId], bool] = lambda _: False,
    ) -> None:
        self._transport = transport
        self._job = job
        self._timeout_s = timeout_s
        self._same_state = same_state
        self._is_excluded = is_excluded
        self._max_members = max_members
        self._timing = timing
        self.position = WorkerPosition(0, b"")
        """This worker's position, as others learn it."""
        self._left_for_good = False
        self._averaging = False
        """Whether this round has a roster, so that the present state will soon be replaced."""
        self._book = NO_ADDRESSES
        """The addresses in the last roster."""
        self._leader: RoundMember | None = None
        """The leader of this worker's group: the worker that it follows, or itself.

        None while it is in no group.
        """
        self._redirect_to: RoundMember | None = None
        """The worker to which this worker redirects its own followers; None while it leads.

        It is the leader, or the worker that the leader follows in turn.
        """
        self._followers: dict[PeerId, _Follower] = {}
        """The workers that wait here for a roster."""
        self._rival: RoundMember | None = None
        """Another leader at this worker's position, which comes before its own leader."""
        self._returning: dict[PeerId, RoundMember] = {}
        """Workers to expect in the next group.

        They learnt this worker's position, and may have to fetch its state first.
        """
        self._others: Sequence[RoundMember] = ()
        """The workers believed to be alive in this round."""
        self._forwarded: frozenset[PeerId] = frozenset()
        """The followers whose requests this worker has forwarded. They stay with this worker."""
        self._bits = 0
        """Number of bits in which the hashes of neighbours agree."""
        self._waits_for_far = False
        """Whether this worker leads its neighbours, has all of them, and waits for others."""
        self._rng = random.Random(transport.peer_id)
        self._own = OwnCoordinate(self._rng)
        self._changed = News()

    async def serve(self) -> None:
        """Accept followers until the transport closes."""
        await MATCHMAKING.serve(self._transport, self._receive, self._timing)

    async def set_position(self, position: WorkerPosition) -> None:
        """Set this worker's position. Followers at other positions get it at once."""
        self.position, self._averaging = position, False
        await self._dismiss_out_of_sync()

    async def leave(self) -> None:
        """Accept no further followers, and end the streams of waiting followers."""
        self._left_for_good = True
        for _, answer in self._followers.values():
            if not answer.done():
                answer.set_exception(StreamEnded("this worker leaves"))

    async def form_group(
        self, me: RoundMember, others: Sequence[RoundMember], measured: Measured, spent: Spent = NOTHING
    ) -> Roster:
        """Return the roster of the round at this worker's position.

        - ``others``: workers believed to be alive.
        - ``measured``: bandwidths that this worker measured.
        - ``spent``: what this worker spent on the round.

        Raises ``OutOfSync`` if the others are at another position, and ``NoPlace`` if the job has
        enough workers.
        """
        self._averaging = False
        await self._dismiss_out_of_sync()
        now = asyncio.get_running_loop().time()
        mine = JoinRequest(me, self.position, measured, spent, now, self._own.coordinate)
        full = len(self._book.addresses) >= self._max_members
        others = [each for each in others if not full or each.peer in self._book.addresses]
        others.sort(key=lambda member: self._place(member.peer))
        self._others = others
        self._bits = max(0, math.ceil(math.log2((len(others) + 1) / MAX_MEMBERS)))
        near = [each for each in others if self._is_near(each.peer)]
        far = [each for each in others if not self._is_near(each.peer)]
        earlier = [each for each in near if self._precedes(each.peer, me.peer)]
        leaders = [each for each in earlier if each.peer not in self._followers]
        expected = {each.peer: [each] for each in near if each not in earlier}
        expected |= {each.peer: [each] for each in self._returning.values()}
        self._returning, self._rival = {}, None
        round = self.position.round
        _log.debug("round %d: looks for a group among %d workers", round, len(others))
        try:
            async with in_background(self._measure(others if far else ())):
                roster = await self._follow_first(leaders, mine)
                while roster is None:
                    try:
                        roster = await self._lead(mine, expected, far)
                    except _Redirected as rival:
                        roster = await self._follow_first([rival.leader], mine)
            self._hand_on(roster)
        except OutOfSync as elsewhere:
            _log.debug("round %d: %s", round, elsewhere)
            raise
        members = [member.peer for member in roster.members]
        if me.peer not in members:
            raise NoPlace(len(members))
        fields = {"exchange": roster.exchange_number, "members": members}
        _log.debug("round %d: a group is formed", round, extra=fields)
        self._averaging = True
        self._book = AddressBook.of(roster.members)
        return roster

    def _hand_on(self, roster: Roster) -> None:
        """Answer the followers that waited for this roster."""
        here = {member.peer for member in roster.members}
        for request, answer in self._followers.values():
            is_here = not here.isdisjoint(each.member.peer for each in request.everybody())
            is_here = is_here and self._is_here(request.position)
            if not answer.done() and (is_here or request.member.peer in self._forwarded):
                answer.set_result(roster)
        self._forwarded = frozenset()

    def _place(self, peer: PeerId) -> bytes:
        """Return the place of ``peer`` in the order of leaders at this worker's position."""
        return place_as_leader(peer, self.position.round, self.position.state if self._same_state else b"")

    def _precedes(self, peer: PeerId, other: PeerId) -> bool:
        """Return whether ``peer`` comes before ``other`` in the order of leaders."""
        return self._place(peer) < self._place(other)

    def _is_near(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is a neighbour."""
        return self._prefix(peer) == self._prefix(self._transport.peer_id)

    def _prefix(self, peer: PeerId) -> int:
        """Return the first bits of the hash of ``peer``."""
        number = int.from_bytes(hashlib.sha256(peer.encode()).digest()[:4], "big")
        return number >> (32 - self._bits)

    async def _measure(self, others: Sequence[RoundMember]) -> None:
        """Measure the delay to a few workers."""
        await self.positions(self._rng.sample(others, min(PROBES, len(others))))

    async def positions(
        self,
        members: Sequence[RoundMember],
        *,
        leading: bool = False,
        full: set[PeerId] | None = None,
    ) -> dict[PeerId, WorkerPosition]:
        """Return the positions of the ``members`` that answer.

        ``leading``: tell them that this worker leads, and at which position. Raises ``NoPlace`` if
        most of them say that the job has enough workers. ``full``: gets the members that say so.
        """
        request = pb.MatchmakingRequest(job=self._job)
        full = set() if full is None else full
        if leading:
            request.round, request.state = self.position.round, self.position.state

        async def probe(member: RoundMember) -> WorkerPosition | None:
            with contextlib.suppress(SwarmnetError):
                stream = await MATCHMAKING.open(
                    self._transport, member.peer, self._timing, addresses=member.addresses
                )
                stream.silence_s = self._timing.silence_s
                sent_s = asyncio.get_running_loop().time()
                reply, _ = await stream.ask(request)
                if (place := read_coordinate(reply.position.coordinate)) is not None:
                    round_trip_s = asyncio.get_running_loop().time() - sent_s
                    self._own.measured(member.peer, place, round_trip_s / 2)
                if reply.position.full:
                    full.add(member.peer)
                if reply.position.HasField("leader"):
                    await self._hear_of(member_from_wire(reply.position.leader))
                return WorkerPosition(reply.position.round, reply.position.state)
            return None

        answers = zip(members, await all_of(*map(probe, members)), strict=True)
        found = {member.peer: position for member, position in answers if position is not None}
        if leading and 2 * len(full) > len(found) + len(self._followers):
            raise NoPlace(self._max_members)
        return found

    # ---- as follower ----------------------------------------------------------------------------

    async def _follow_first(self, others: Sequence[RoundMember], mine: JoinRequest) -> Roster | None:
        """Return the roster from the first of ``others`` that answers and is not behind.

        None if no worker answers, or all are behind.
        """
        for member in others:
            try:
                return await self._follow(member, mine)
            except OutOfSync as elsewhere:
                if elsewhere.position.round >= self.position.round:
                    raise
            except NoPlace:
                if await self._is_full(member.peer):
                    raise
                _log.debug("round %d: only %s says that the job is full", self.position.round, member.peer)
            except SwarmnetError as error:
                _log.debug("round %d: does not follow %s: %s", self.position.round, member.peer, error)
        return None

    async def _is_full(self, peer: PeerId) -> bool:
        """Return whether most workers say that the job has enough, after ``peer`` has said so.

        Only a few of many are asked.
        """
        others = [each for each in self._others if each.peer != peer]
        asked = self._rng.sample(others, min(PROBES, len(others)))
        full: set[PeerId] = set()
        found = await self.positions(asked, full=full)
        return 2 * (len(full) + 1) > len(found) + 1

    async def _follow(self, member: RoundMember, mine: JoinRequest) -> Roster:
        """Follow ``member``, or the leader that it follows itself."""
        leader = member
        for _ in range(MAX_REDIRECTS):
            try:
                return await self._ask(leader, mine, redirect=True)
            except _Redirected as redirected:
                leader = redirected.leader
            except (OutOfSync, NoPlace):
                raise
            except SwarmnetError:
                if leader is member:
                    raise
                break
        # The leader cannot be reached from here. Wait at its follower: after the round, the
        # follower sends its new position, and this worker fetches that state.
        return await self._ask(member, mine, redirect=False)

    async def _ask(self, leader: RoundMember, mine: JoinRequest, *, redirect: bool) -> Roster:
        def on_heartbeat(reply: pb.MatchmakingReply) -> None:
            self._leader = self._redirect_to = leader
            if reply.heartbeat.HasField("leader"):
                there = member_from_wire(reply.heartbeat.leader)
                if self._precedes(there.peer, leader.peer):
                    self._redirect_to = there
                    if redirect:
                        raise _Redirected(there)

        if self._is_excluded(leader.peer):
            raise NotAuthorised(f"{leader.peer} sent false results")
        _log.debug("round %d: follows %s", mine.position.round, leader.peer)
        stream = await MATCHMAKING.open(
            self._transport,
            leader.peer,
            self._timing,
            addresses=leader.addresses,
            on_heartbeat=on_heartbeat,
        )
        # Twice the timeout: the leader may still take inner steps, and its own timeout begins after
        # them.
        within_s = 2 * self._timeout_s
        try:
            async with asyncio.timeout(within_s):
                return await race(self._request_roster(stream, mine), self._until_rival_of(leader.peer))
        except TimeoutError as error:
            raise StreamEnded(f"{leader.peer} gave no roster within {within_s:g} s") from error
        finally:
            self._leader = self._redirect_to = None
            stream.close()

    async def _until_rival_of(self, leader: PeerId) -> NoReturn:
        """Raise ``_Redirected`` once a leader that comes before ``leader`` is known."""
        async with self._changed:
            while self._rival is None or not self._outranks(self._rival.peer, leader):
                await self._changed.wait()
            rival, self._rival = self._rival, None
        raise _Redirected(rival)

    def _outranks(self, rival: PeerId, leader: PeerId) -> bool:
        """Return whether this worker leaves ``leader`` for ``rival``.

        A worker that follows a neighbour, or waits for neighbours, stays with them.
        """
        return self._precedes(rival, leader) and (
            self._is_near(rival) or not self._is_near(leader) or self._waits_for_far
        )

    async def _request_roster(self, stream: _ToLeader, mine: JoinRequest) -> Roster:
        book = self._book
        if not self._is_near(stream.peer):  # neighbours are redirected instead
            followers = tuple(request for request, _ in self._ready(mine).values())
            mine, book = replace(mine, followers=followers), NO_ADDRESSES
        self._forwarded = frozenset(each.member.peer for each in mine.followers)
        await stream.send(request_to_wire(self._job, mine, book))
        for each in mine.everybody()[1:]:
            await stream.send(request_to_wire(self._job, replace(each, followers=()), NO_ADDRESSES))
        while True:
            reply, _ = await stream.receive()
            match reply.WhichOneof("kind"):
                case "position":
                    position = WorkerPosition(reply.position.round, reply.position.state)
                    raise OutOfSync(stream.peer, position)
                case "roster":
                    round = mine.position.round
                    return roster_from_wire(reply.roster, round=round, me=mine.member, book=book)
                case "full":
                    raise NoPlace(reply.full.workers)
                case "unknown" if book is not NO_ADDRESSES:
                    book = NO_ADDRESSES
                    await stream.send(request_to_wire(self._job, mine, book))
                case _:
                    raise ProtocolViolation("not a reply of a leader")

    # ---- as leader ------------------------------------------------------------------------------

    async def _lead(
        self, mine: JoinRequest, near: dict[PeerId, list[RoundMember]], far: Sequence[RoundMember]
    ) -> Roster:
        """Return the roster of this worker and its followers, or of more workers that they join.

        ``near``: the workers to wait for first. ``far``: workers that are no neighbours.
        """
        _log.debug("round %d: leads", mine.position.round)
        await self._gather(mine, near, self._timeout_s / 2 if far else self._timeout_s)
        self._waits_for_far = True
        try:
            if first := [each for each in far if self._precedes(each.peer, mine.member.peer)]:
                roster = await self._follow_first(first, mine)
                if roster is not None:
                    return roster
            heads: dict[int, list[RoundMember]] = {}
            for each in far:
                if self._precedes(mine.member.peer, each.peer):
                    heads.setdefault(self._prefix(each.peer), []).append(each)
            await self._gather(mine, heads, self._timeout_s)
        finally:
            self._waits_for_far = False
        followers = self._ready(mine)
        self._forwarded = frozenset(followers)
        return Roster.of(mine, [request for request, _ in followers.values()], self._max_members)

    async def _gather(
        self, mine: JoinRequest, expected: Mapping[K, list[RoundMember]], timeout_s: float
    ) -> None:
        """Wait for followers, for at most ``timeout_s``.

        ``expected``: lists of workers. This worker waits for the first live worker of each list. A
        neighbour comes itself. Other workers come with their leader.
        """
        waiting = {
            key: [each for each in workers if not self._is_excluded(each.peer)]
            for key, workers in expected.items()
        }
        self._leader = mine.member

        def missing() -> dict[K, list[RoundMember]]:
            here = {
                each.member.peer for request, _ in self._ready(mine).values() for each in request.everybody()
            }
            if len(here) + 1 >= self._max_members:
                return {}
            return {
                key: workers
                for key, workers in waiting.items()
                if workers and here.isdisjoint(each.peer for each in workers)
            }

        try:
            async with asyncio.timeout(timeout_s):
                rival = self._until_rival_of(mine.member.peer)
                enough = self._changed.until(lambda: not missing())
                await race(rival, enough, self._probe_missing(mine, missing))
        except TimeoutError:
            pass  # workers that have not come in time are not in this round
        finally:
            self._leader = None

    async def _probe_missing(
        self, mine: JoinRequest, missing: Callable[[], dict[K, list[RoundMember]]]
    ) -> NoReturn:
        """Probe the first worker of every missing list, and remove it if it does not answer.

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
            here, lists = self._ready(mine), list(missing().values())
            found = await self.positions([workers[0] for workers in lists], leading=True)
            for workers in lists:
                is_late, peer = clock() >= elsewhere_until, workers[0].peer
                if peer not in found or (is_late and not self._is_coming(peer, found[peer])):
                    workers.pop(0)
            others = {peer: each for peer, each in found.items() if self._is_elsewhere(each)}
            for peer, position in others.items():
                if position.round > self.position.round or len(others) > len(here):
                    raise OutOfSync(peer, position)
            await self._changed.tell()

    def _is_elsewhere(self, position: WorkerPosition) -> bool:
        """Return whether the position is at a later round, or at this round with another state."""
        if position.round == self.position.round:
            return position.state != b"" and self._is_other(position.state)
        return position.round > self.position.round

    def _is_coming(self, peer: PeerId, position: WorkerPosition) -> bool:
        """Return whether a worker is at this worker's position or will reach it.

        A member of the last roster that has not finished that round will reach it. In gossip there
        is no roster, so any worker that is a round behind will.
        """
        is_one_behind = position.round == self.position.round - 1
        is_known = peer in self._book.addresses or not self._same_state
        return self._is_here(position) or (is_one_behind and is_known)

    def _is_here(self, position: WorkerPosition) -> bool:
        return position.round == self.position.round and not self._is_other(position.state)

    def _is_other(self, state: bytes) -> bool:
        return self._same_state and state != self.position.state

    def _ready(self, mine: JoinRequest) -> dict[PeerId, _Follower]:
        """Return the followers at this worker's position that wait for a roster."""
        newest = mine.member.last_exchange
        highest = highest_exchange_number(self.position.round, newest, MAX_AHEAD_OF_LEADER)
        return {
            peer: (request, answer)
            for peer, (request, answer) in self._followers.items()
            if self._is_here(request.position)
            and not answer.done()
            and not self._is_excluded(peer)
            and request.member.last_exchange < highest
        }

    async def _receive(self, stream: _ToFollower) -> None:
        if self._is_excluded(stream.peer):
            raise NotAuthorised(f"{stream.peer} sent false results")
        request, _ = await stream.receive()
        if request.job != self._job:
            raise ProtocolViolation("another job")
        if self._left_for_good:
            return
        if request.HasField("member") and self._has_no_place(stream.peer):
            await stream.send(_full_reply(len(self._book.addresses)))
            return
        if not request.HasField("member"):
            await stream.send(await self._answer_to_probe(request, stream.peer))
            return
        if request.known and not self._book.matches(request.known, stream.peer):
            await stream.send(pb.MatchmakingReply(unknown=pb.UnknownAddresses()))
            request, _ = await stream.receive()
        arrived_s = asyncio.get_running_loop().time()
        join = replace(request_from_wire(request, stream.peer, self._book), arrived_s=arrived_s)
        join = replace(join, followers=await self._forwarded_requests(stream, join, request.followers))
        stream.silence_s = math.inf  # a follower waits for the group without sending
        answer: asyncio.Future[Roster] = asyncio.get_running_loop().create_future()
        self._followers[stream.peer] = join, answer
        try:
            await self._dismiss_out_of_sync()
            roster = await race(
                stream.send_heartbeats(self._timing.matchmaking_heartbeat_s, partial(self._heartbeat, join)),
                self._until_it_ends(stream),
                answer,
            )
            if {member.peer for member in roster.members}.isdisjoint(
                each.member.peer for each in join.everybody()
            ):
                await stream.send(_full_reply(len(roster.members)))
                return
            await stream.send(pb.MatchmakingReply(roster=roster_to_wire(roster, request.known)))
        except OutOfSync as elsewhere:
            self._expect(join.member)
            await stream.send(_position_reply(elsewhere.position))
        finally:
            if self._followers.get(stream.peer) == (join, answer):
                del self._followers[stream.peer]
            await self._changed.tell()

    async def _forwarded_requests(
        self, stream: _ToFollower, join: JoinRequest, count: int
    ) -> tuple[JoinRequest, ...]:
        """Receive the requests that a follower forwards."""
        if count >= MAX_WORKERS:
            raise ProtocolViolation(f"a follower forwards {count} requests")
        forwarded = []
        for _ in range(count):
            request, _ = await stream.receive()
            each = request_from_wire(request, PeerId(request.member.id), NO_ADDRESSES)
            if request.job != self._job or each.position.round != join.position.round:
                raise ProtocolViolation("a forwarded request of another round")
            forwarded.append(replace(each, arrived_s=join.arrived_s))
        return tuple(each for each in forwarded if not self._is_excluded(each.member.peer))

    def _has_no_place(self, peer: PeerId) -> bool:
        """Return whether the last roster was full, and did not have ``peer``."""
        book = self._book.addresses
        return len(book) >= self._max_members and peer not in book

    def _heartbeat(self, follower: JoinRequest) -> pb.MatchmakingReply:
        there, stays = self._redirect_to, follower.member.peer in self._forwarded
        leader = None
        if there is not None and not stays and self._is_here(follower.position):
            leader = member_to_wire(there)
        return pb.MatchmakingReply(heartbeat=pb.LeaderHeartbeat(leader=leader))

    async def _until_it_ends(self, stream: _ToFollower) -> NoReturn:
        await stream.receive()
        raise ProtocolViolation("a follower sends one request")

    async def _answer_to_probe(self, request: pb.MatchmakingRequest, peer: PeerId) -> pb.MatchmakingReply:
        """Return this worker's position, for a worker that does not ask to join.

        A request with a state comes from another leader.
        """
        reply, prober = _position_reply(self.position), RoundMember(peer)
        reply.position.coordinate.extend(self._own.coordinate.numbers())
        reply.position.full = self._has_no_place(peer)
        if request.state and self._is_here(WorkerPosition(request.round, request.state)):
            if (first := await self._hear_of(prober)) is not None:
                reply.position.leader.CopyFrom(member_to_wire(first))
        elif request.state and request.round <= self.position.round:
            self._expect(prober)
        return reply

    def _expect(self, member: RoundMember) -> None:
        """Expect a worker in the next group, because it learnt this worker's position."""
        if len(self._returning) < MAX_MEMBERS and not self._has_no_place(member.peer):
            self._returning[member.peer] = member

    async def _hear_of(self, leader: RoundMember) -> RoundMember | None:
        """Follow ``leader``, which is at this worker's position, if it comes before the present
        leader. Otherwise return the present leader.
        """
        present = self._leader
        if present is None:
            return None
        if self._precedes(leader.peer, present.peer):
            self._rival = leader
            await self._changed.tell()
        return present if self._precedes(present.peer, leader.peer) else None

    async def _dismiss_out_of_sync(self) -> None:
        """Send this worker's position to followers at other positions.

        A follower one round ahead keeps waiting, because this worker will soon reach its round.
        During averaging all followers keep waiting, because the state that they would fetch will
        soon be replaced.
        """
        if self._averaging:
            return
        for join, answer in self._followers.values():
            is_next = join.position.round == self.position.round + 1
            if not (is_next or self._is_here(join.position) or answer.done()):
                answer.set_exception(OutOfSync(self._transport.peer_id, self.position))
        await self._changed.tell()


async def ask_positions(
    transport: Transport, job: bytes, members: Sequence[RoundMember], timing: Timing
) -> dict[PeerId, WorkerPosition]:
    """Return the positions of the workers of ``job`` that answer. The asker may be no worker."""
    asking = Matchmaking(transport, job, max_members=MAX_MEMBERS, timeout_s=timing.silence_s, timing=timing)
    return await asking.positions(members)


def _position_reply(position: WorkerPosition) -> pb.MatchmakingReply:
    return pb.MatchmakingReply(position=pb.Position(round=position.round, state=position.state))


def _full_reply(workers: int) -> pb.MatchmakingReply:
    return pb.MatchmakingReply(full=pb.Full(workers=workers))
