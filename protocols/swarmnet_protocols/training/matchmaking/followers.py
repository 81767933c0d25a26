"""The followers of one worker: they wait for a roster, and other workers ask for its position."""

import asyncio
import math
from dataclasses import replace
from functools import partial
from typing import NoReturn

from swarmnet_protocols.errors import NotAuthorised, ProtocolViolation, StreamEnded
from swarmnet_protocols.machine.aio import loop_time, race
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import MATCHMAKING
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.coordinates import OwnCoordinate
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training import MAX_MEMBERS, MAX_WORKERS
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.matchmaking.group_state import GroupState
from swarmnet_protocols.training.matchmaking.positions import OutOfSync
from swarmnet_protocols.training.matchmaking.rosters import (
    MAX_AHEAD_OF_LEADER,
    NO_ADDRESSES,
    JoinRequest,
    Roster,
    highest_exchange_number,
    member_to_wire,
    request_from_wire,
    roster_to_wire,
)
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.wire import workers_pb2 as pb

_ToFollower = TypedStream[pb.MatchmakingReply, pb.MatchmakingRequest]
_Follower = tuple[JoinRequest, asyncio.Future[Roster]]
"""The request of a follower, and the answer that it waits for on its stream."""


class Followers:
    """Accepts workers that ask to join, and answers probes.

    ``own`` is this worker's network coordinate.
    """

    def __init__(
        self, transport: Transport, job: bytes, state: GroupState, own: OwnCoordinate, timing: Timing
    ) -> None:
        self._transport = transport
        self._job = job
        self._state = state
        self._own = own
        self._timing = timing
        self.waiting: dict[PeerId, _Follower] = {}
        """The workers that wait here for a roster."""
        self.returning: dict[PeerId, RoundMember] = {}
        """Workers to expect in the next group.

        They learnt this worker's position, and may have to fetch its state first.
        """
        self.forwarded: frozenset[PeerId] = frozenset()
        """The followers whose requests this worker has forwarded. They stay with this worker."""
        self.averaging = False
        """True while this round has a roster, so that the present state will soon be replaced."""
        self._left_for_good = False

    async def serve(self) -> None:
        """Accept followers until the transport closes."""
        await MATCHMAKING.serve(self._transport, self._receive, self._timing)

    def leave(self) -> None:
        """Accept no further followers, and end the streams of waiting followers."""
        self._left_for_good = True
        for _, answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(StreamEnded("this worker leaves"))

    def ready(self, mine: JoinRequest) -> dict[PeerId, _Follower]:
        """Return the followers at this worker's position that wait for a roster."""
        newest = mine.member.last_exchange
        highest = highest_exchange_number(self._state.position.round, newest, MAX_AHEAD_OF_LEADER)
        return {
            peer: (request, answer)
            for peer, (request, answer) in self.waiting.items()
            if self._state.is_here(request.position)
            and not answer.done()
            and not self._state.is_excluded(peer)
            and request.member.last_exchange < highest
        }

    async def _receive(self, stream: _ToFollower) -> None:
        if self._state.is_excluded(stream.peer):
            raise NotAuthorised(f"{stream.peer} sent false results")
        request, _ = await stream.receive()
        if request.job != self._job:
            raise ProtocolViolation("another job")
        if self._left_for_good:
            return
        if request.HasField("member") and self._state.has_no_place(stream.peer):
            await stream.send(_full_reply(len(self._state.book.addresses)))
            return
        if not request.HasField("member"):
            await stream.send(await self._answer_to_probe(request, stream.peer))
            return
        if request.known and not self._state.book.matches(request.known, stream.peer):
            await stream.send(pb.MatchmakingReply(unknown=pb.UnknownAddresses()))
            request, _ = await stream.receive()
        join = replace(request_from_wire(request, stream.peer, self._state.book), arrived_s=loop_time())
        join = replace(join, followers=await self._forwarded_requests(stream, join, request.followers))
        stream.silence_s = math.inf  # a follower waits for the group without sending
        answer: asyncio.Future[Roster] = asyncio.get_running_loop().create_future()
        self.waiting[stream.peer] = join, answer
        try:
            await self.dismiss_out_of_sync()
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
            if self.waiting.get(stream.peer) == (join, answer):
                del self.waiting[stream.peer]
            await self._state.changed.tell()

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
        return tuple(each for each in forwarded if not self._state.is_excluded(each.member.peer))

    def _heartbeat(self, follower: JoinRequest) -> pb.MatchmakingReply:
        there, stays = self._state.redirect_to, follower.member.peer in self.forwarded
        leader = None
        if there is not None and not stays and self._state.is_here(follower.position):
            leader = member_to_wire(there)
        return pb.MatchmakingReply(heartbeat=pb.LeaderHeartbeat(leader=leader))

    async def _until_it_ends(self, stream: _ToFollower) -> NoReturn:
        await stream.receive()
        raise ProtocolViolation("a follower sends one request")

    async def _answer_to_probe(self, request: pb.MatchmakingRequest, peer: PeerId) -> pb.MatchmakingReply:
        """Return this worker's position, for a worker that does not ask to join.

        A request with a state comes from another leader.
        """
        reply, prober = _position_reply(self._state.position), RoundMember(peer)
        reply.position.coordinate.extend(self._own.coordinate.numbers())
        reply.position.full = self._state.has_no_place(peer)
        if request.state and self._state.is_here(WorkerPosition(request.round, request.state)):
            if (first := await self._state.hear_of(prober)) is not None:
                reply.position.leader.CopyFrom(member_to_wire(first))
        elif request.state and request.round <= self._state.position.round:
            self._expect(prober)
        return reply

    def _expect(self, member: RoundMember) -> None:
        """Expect a worker in the next group, because it learnt this worker's position."""
        if len(self.returning) < MAX_MEMBERS and not self._state.has_no_place(member.peer):
            self.returning[member.peer] = member

    def hand_on(self, roster: Roster) -> None:
        """Answer the followers that waited for this roster."""
        here = {member.peer for member in roster.members}
        for request, answer in self.waiting.values():
            is_here = not here.isdisjoint(each.member.peer for each in request.everybody())
            is_here = is_here and self._state.is_here(request.position)
            if not answer.done() and (is_here or request.member.peer in self.forwarded):
                answer.set_result(roster)
        self.forwarded = frozenset()

    async def dismiss_out_of_sync(self) -> None:
        """Send this worker's position to followers at other positions.

        A follower one round ahead keeps waiting, because this worker will soon reach its round.
        During averaging all followers keep waiting, because the state that they would fetch will
        soon be replaced.
        """
        if self.averaging:
            return
        for join, answer in self.waiting.values():
            is_next = join.position.round == self._state.position.round + 1
            if not (is_next or self._state.is_here(join.position) or answer.done()):
                answer.set_exception(OutOfSync(self._transport.peer_id, self._state.position))
        await self._state.changed.tell()


def _position_reply(position: WorkerPosition) -> pb.MatchmakingReply:
    return pb.MatchmakingReply(position=pb.Position(round=position.round, state=position.state))


def _full_reply(workers: int) -> pb.MatchmakingReply:
    return pb.MatchmakingReply(full=pb.Full(workers=workers))
