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
import hashlib
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

from swarmnet_protocols.errors import NotAuthorised, ProtocolViolation, StreamEnded, SwarmnetError
from swarmnet_protocols.machine.aio import in_background, loop_time, race, within
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import MATCHMAKING
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training import MAX_MEMBERS
from swarmnet_protocols.training.bandwidth import Measured
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.matchmaking.followers import Followers
from swarmnet_protocols.training.matchmaking.group_state import GroupState
from swarmnet_protocols.training.matchmaking.positions import OutOfSync, PositionAsker, position_from_wire
from swarmnet_protocols.training.matchmaking.rosters import (
    NO_ADDRESSES,
    AddressBook,
    JoinRequest,
    Roster,
    member_from_wire,
    request_to_wire,
    roster_from_wire,
)
from swarmnet_protocols.training.pacing import NOTHING, Spent
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.wire import workers_pb2 as pb

_log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
_ToLeader = TypedStream[pb.MatchmakingRequest, pb.MatchmakingReply]


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


ELSEWHERE_S = 8.0
"""Seconds that a leader waits for workers at other positions.

A shorter wait leaves out workers that would fetch the state and return. A longer one lets workers
that cannot catch up delay every round.
"""

MAX_REDIRECTS = 8
"""Most redirects that a follower accepts in a row."""


class Matchmaking:
    """Matchmaking of one worker in one job, as leader or as follower.

    - ``timeout_s``: most seconds that a leader waits for its followers.
    - ``same_state``: all workers start a round from one state. False for gossip methods, whose
      replicas differ.
    - ``is_excluded``: returns True for a peer that sent false results. This worker neither follows
      nor leads it.
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
        self._state = GroupState(max_members, same_state, is_excluded)
        self._timing = timing
        self._others: Sequence[RoundMember] = ()
        """The workers believed to be alive in this round."""
        self._bits = 0
        """Number of bits in which the hashes of neighbours agree."""
        self._waits_for_far = False
        """True while this worker leads its neighbours, has all of them, and waits for others."""
        self._asker = PositionAsker(transport, job, timing)
        self._followers = Followers(transport, job, self._state, self._asker.own, timing)

    async def serve(self) -> None:
        """Accept followers until the transport closes."""
        await self._followers.serve()

    @property
    def position(self) -> WorkerPosition:
        """This worker's position, as others learn it."""
        return self._state.position

    async def set_position(self, position: WorkerPosition) -> None:
        """Set this worker's position. Followers at other positions get it at once."""
        self._state.position, self._followers.averaging = position, False
        await self._followers.dismiss_out_of_sync()

    async def leave(self) -> None:
        """Accept no further followers, and end the streams of waiting followers."""
        self._followers.leave()

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
        self._followers.averaging = False
        await self._followers.dismiss_out_of_sync()
        own = self._asker.own.coordinate
        mine = JoinRequest(me, self._state.position, measured, spent, loop_time(), own)
        full = len(self._state.book.addresses) >= self._state.max_members
        others = [each for each in others if not full or each.peer in self._state.book.addresses]
        others.sort(key=lambda member: self._state.place(member.peer))
        self._others = others
        self._bits = max(0, math.ceil(math.log2((len(others) + 1) / MAX_MEMBERS)))
        near = [each for each in others if self._is_near(each.peer)]
        far = [each for each in others if not self._is_near(each.peer)]
        earlier = [each for each in near if self._state.precedes(each.peer, me.peer)]
        leaders = [each for each in earlier if each.peer not in self._followers.waiting]
        expected = {each.peer: [each] for each in near if each not in earlier}
        expected |= {each.peer: [each] for each in self._followers.returning.values()}
        self._followers.returning, self._state.rival = {}, None
        round = self._state.position.round
        _log.debug("round %d: looks for a group among %d workers", round, len(others))
        try:
            async with in_background(self._asker.ask_few(others if far else ())):
                roster = await self._follow_first(leaders, mine)
                while roster is None:
                    try:
                        roster = await self._lead(mine, expected, far)
                    except _Redirected as rival:
                        roster = await self._follow_first([rival.leader], mine)
            self._followers.hand_on(roster)
        except OutOfSync as elsewhere:
            _log.debug("round %d: %s", round, elsewhere)
            raise
        members = [member.peer for member in roster.members]
        if me.peer not in members:
            raise NoPlace(len(members))
        fields = {"exchange": roster.exchange_number, "members": members}
        _log.debug("round %d: a group is formed", round, extra=fields)
        self._followers.averaging = True
        self._state.book = AddressBook.of(roster.members)
        return roster

    def _is_near(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is a neighbour."""
        return self._prefix(peer) == self._prefix(self._transport.peer_id)

    def _prefix(self, peer: PeerId) -> int:
        """Return the first bits of the hash of ``peer``."""
        number = int.from_bytes(hashlib.sha256(peer.encode()).digest()[:4], "big")
        return number >> (32 - self._bits)

    async def positions(self, members: Sequence[RoundMember]) -> dict[PeerId, WorkerPosition]:
        """Return the positions of the ``members`` that answer."""
        found = await self._asker.ask(members)
        return {peer: position_from_wire(each) for peer, each in found.items()}

    # ---- as follower ----------------------------------------------------------------------------

    async def _follow_first(self, others: Sequence[RoundMember], mine: JoinRequest) -> Roster | None:
        """Return the roster from the first of ``others`` that answers and is not behind.

        None if no worker answers, or all are behind.
        """
        for member in others:
            try:
                return await self._follow(member, mine)
            except OutOfSync as elsewhere:
                if elsewhere.position.round >= self._state.position.round:
                    raise
            except NoPlace:
                if await self._is_full(member.peer):
                    raise
                _log.debug(
                    "round %d: only %s says that the job is full", self._state.position.round, member.peer
                )
            except SwarmnetError as error:
                _log.debug("round %d: does not follow %s: %s", self._state.position.round, member.peer, error)
        return None

    async def _is_full(self, peer: PeerId) -> bool:
        """Return whether most workers say that the job has enough, after ``peer`` has said so.

        Only a few of many are asked.
        """
        found = await self._asker.ask_few([each for each in self._others if each.peer != peer])
        return 2 * (sum(each.full for each in found.values()) + 1) > len(found) + 1

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
            self._state.leader = self._state.redirect_to = leader
            if reply.heartbeat.HasField("leader"):
                there = member_from_wire(reply.heartbeat.leader)
                if self._state.precedes(there.peer, leader.peer):
                    self._state.redirect_to = there
                    if redirect:
                        raise _Redirected(there)

        if self._state.is_excluded(leader.peer):
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
                return await race(
                    self._request_roster(stream, mine),
                    self._until_rival_of(leader.peer),
                    self._until_passed(leader.peer),
                )
        except TimeoutError as error:
            raise StreamEnded(f"{leader.peer} gave no roster within {within_s:g} s") from error
        finally:
            self._state.leader = self._state.redirect_to = None
            stream.close()

    async def _until_rival_of(self, leader: PeerId) -> NoReturn:
        """Raise ``_Redirected`` once a leader that comes before ``leader`` is known."""
        async with self._state.changed:
            while self._state.rival is None or not self._outranks(self._state.rival.peer, leader):
                await self._state.changed.wait()
            rival, self._state.rival = self._state.rival, None
        raise _Redirected(rival)

    async def _until_passed(self, leader: PeerId) -> NoReturn:
        """Raise ``OutOfSync`` once another worker is past this round: ``leader`` formed a group
        and keeps this worker waiting."""
        others = [each for each in self._others if each.peer != leader]
        while True:
            await asyncio.sleep(self._timing.matchmaking_poll_s)
            for peer, answer in (await self._asker.ask_few(others)).items():
                if answer.round > self._state.position.round:
                    raise OutOfSync(peer, position_from_wire(answer))

    def _outranks(self, rival: PeerId, leader: PeerId) -> bool:
        """Return whether this worker leaves ``leader`` for ``rival``.

        A worker that follows a neighbour, or waits for neighbours, stays with them.
        """
        return self._state.precedes(rival, leader) and (
            self._is_near(rival) or not self._is_near(leader) or self._waits_for_far
        )

    async def _request_roster(self, stream: _ToLeader, mine: JoinRequest) -> Roster:
        book = self._state.book
        if not self._is_near(stream.peer):  # neighbours are redirected instead
            followers = tuple(request for request, _ in self._followers.ready(mine).values())
            mine, book = replace(mine, followers=followers), NO_ADDRESSES
        self._followers.forwarded = frozenset(each.member.peer for each in mine.followers)
        await stream.send(request_to_wire(self._job, mine, book))
        for each in mine.everybody()[1:]:
            await stream.send(request_to_wire(self._job, replace(each, followers=()), NO_ADDRESSES))
        while True:
            reply, _ = await stream.receive()
            match reply.WhichOneof("kind"):
                case "position":
                    raise OutOfSync(stream.peer, position_from_wire(reply.position))
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
            if first := [each for each in far if self._state.precedes(each.peer, mine.member.peer)]:
                roster = await self._follow_first(first, mine)
                if roster is not None:
                    return roster
            heads: dict[int, list[RoundMember]] = {}
            for each in far:
                if self._state.precedes(mine.member.peer, each.peer):
                    heads.setdefault(self._prefix(each.peer), []).append(each)
            await self._gather(mine, heads, self._timeout_s)
        finally:
            self._waits_for_far = False
        followers = self._followers.ready(mine)
        self._followers.forwarded = frozenset(followers)
        return Roster.of(mine, [request for request, _ in followers.values()], self._state.max_members)

    async def _gather(
        self, mine: JoinRequest, expected: Mapping[K, list[RoundMember]], timeout_s: float
    ) -> None:
        """Wait for followers, for at most ``timeout_s``.

        ``expected``: lists of workers. This worker waits for the first live worker of each list. A
        neighbour comes itself. Other workers come with their leader.
        """
        waiting = {
            key: [each for each in workers if not self._state.is_excluded(each.peer)]
            for key, workers in expected.items()
        }
        self._state.leader = mine.member

        def missing() -> dict[K, list[RoundMember]]:
            here = {
                each.member.peer
                for request, _ in self._followers.ready(mine).values()
                for each in request.everybody()
            }
            if len(here) + 1 >= self._state.max_members:
                return {}
            return {
                key: workers
                for key, workers in waiting.items()
                if workers and here.isdisjoint(each.peer for each in workers)
            }

        rival = self._until_rival_of(mine.member.peer)
        enough = self._state.changed.until(lambda: not missing())
        try:  # workers that have not come in time are not in this round
            await within(timeout_s, race(rival, enough, self._probe_missing(mine, missing)))
        finally:
            self._state.leader = None

    async def _probe_missing(
        self, mine: JoinRequest, missing: Callable[[], dict[K, list[RoundMember]]]
    ) -> NoReturn:
        """Probe the first worker of every missing list, and remove it if it does not answer.

        Workers at other positions are removed after ``ELSEWHERE_S``. Raises ``OutOfSync`` if this
        worker is behind, or if more workers have another state than its own. Raises ``NoPlace`` if
        most workers say that the job has enough.
        """
        elsewhere_until = loop_time() + ELSEWHERE_S
        # workers that arrive at about the same time need no probe
        pause_s = self._timing.heartbeat_s
        while True:
            left_s = elsewhere_until - loop_time()
            await asyncio.sleep(min(pause_s, left_s) if left_s > 0 else pause_s)
            pause_s = min(2 * pause_s, self._timing.matchmaking_poll_s)
            here, lists = self._followers.ready(mine), list(missing().values())
            answers = await self._asker.ask([workers[0] for workers in lists], leading=self._state.position)
            for answer in answers.values():
                if answer.HasField("leader"):
                    await self._state.hear_of(member_from_wire(answer.leader))
            if 2 * sum(each.full for each in answers.values()) > len(answers) + len(self._followers.waiting):
                raise NoPlace(self._state.max_members)
            found = {peer: position_from_wire(each) for peer, each in answers.items()}
            for workers in lists:
                is_late, peer = loop_time() >= elsewhere_until, workers[0].peer
                if peer not in found or (is_late and not self._state.is_coming(peer, found[peer])):
                    workers.pop(0)
            others = {peer: each for peer, each in found.items() if self._state.is_elsewhere(each)}
            for peer, position in others.items():
                if position.round > self._state.position.round or len(others) > len(here):
                    raise OutOfSync(peer, position)
            await self._state.changed.tell()
