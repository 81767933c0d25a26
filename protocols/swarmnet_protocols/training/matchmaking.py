"""Agreeing on who averages in a round.

One worker gathers: the first, in the order of peer ids, of those its peers think alive. Everybody else opens a stream to it
and waits; when all it expects have come, or its patience ends, each gets the same roster. A worker that meets a gatherer
of another round or another state learns which, and heals.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarmnet_protocols.errors import NotAuthorised, ProtocolViolation, StreamEnded, SwarmnetError
from swarmnet_protocols.machine.aio import cancel, race
from swarmnet_protocols.net import Message, PeerId, Stream, Transport
from swarmnet_protocols.net.messages import parse, receive_within, send_within
from swarmnet_protocols.net.protocol_ids import GATHER
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.bandwidth import Measured
from swarmnet_protocols.training.catching_up import Place
from swarmnet_protocols.training.rosters import (
    MAX_AHEAD,
    NOWHERE,
    Candidate,
    Guest,
    Places,
    Roster,
    latest_exchange,
    measured_from_wire,
    measured_to_wire,
    member_from_wire,
    member_to_wire,
    roster_from_wire,
    roster_to_wire,
)
from swarmnet_protocols.training.rounds.terms import MAX_MEMBERS
from swarmnet_protocols.wire import workers_pb2 as pb


@dataclass(frozen=True)
class _Waiting(Guest):
    """A guest of ours."""

    answer: asyncio.Future[Roster]


class _Guesting(SwarmnetError):
    """Whoever we asked is a guest itself, of ``gatherer``."""

    def __init__(self, leader: Candidate) -> None:
        super().__init__(f"{leader.peer} gathers")
        self.leader = leader


class Elsewhere(SwarmnetError):
    """Others are at another round, or start this one from another state."""

    def __init__(self, peer: PeerId, round: int, state: bytes) -> None:
        super().__init__(f"{peer} is at round {round} with state {state.hex()[:16]}")
        self.peer = peer
        self.round = round
        self.state = state


class Matchmaking:
    """One worker's side of gathering the rounds of one job, as guest or as gatherer.

    Without ``same_state`` workers may start a round from states of their own, as replicas that gossip do.
    """

    def __init__(
        self, transport: Transport, job: bytes, *, max_members: int, timing: Timing, same_state: bool = True
    ) -> None:
        self._transport = transport
        self._job = job
        self._same_state = same_state
        self._max_members = min(max_members, MAX_MEMBERS)
        self._timing = timing
        self._round = 0
        self._exchanges = 0
        self._state = b""
        self._left_for_good = False
        self._averaging = False
        """The roster of this round is made: its state is about to be the last one."""
        self._host: PeerId | None = None
        """Who sent us to the state of the others, and expects us back."""
        self._places = NOWHERE
        """Where the members of our newest roster are."""
        self._leader: Candidate | None = None
        """Whose guest we are: our own guests do better to go there."""
        self._guests: dict[PeerId, _Waiting] = {}
        self._coming: dict[PeerId, Candidate] = {}
        """Whom we have told where we are since the last roster: they fetch that state now, and are expected."""
        self._excluded: set[PeerId] = set()
        self._changed = asyncio.Condition()

    async def serve(self) -> None:
        """Receive guests until the transport closes."""
        await self._transport.serve(GATHER, self._receive)

    async def stand(self, round: int, state: bytes) -> None:
        """From now on we are at ``round``, which starts from ``state``: newcomers hear it before we gather."""
        self._round, self._state, self._averaging = round, state, False
        await self._send_away()

    def exclude(self, peers: Iterable[PeerId]) -> None:
        """Neither follow nor lead ``peers`` again: they sent results that were false."""
        self._excluded.update(peers)

    async def leave(self) -> None:
        """Answer nobody any more, so that nobody waits for us."""
        self._left_for_good = True
        for guest in self._guests.values():
            if not guest.answer.done():
                guest.answer.set_exception(StreamEnded("this worker leaves"))

    async def gather(
        self, me: Candidate, others: Sequence[Candidate], *, measured: Measured, patience_s: float
    ) -> Roster:
        """The roster of the round where we stand.

        ``others`` are the workers thought to be alive, ``measured`` is what we know of their links. Whoever gathers waits for them
        ``patience_s`` at most. Raises ``Elsewhere`` when the others are somewhere else than we are.
        """
        self._averaging = False
        self._exchanges = me.exchanges
        await self._send_away()
        roster = await self._gather(me, others, measured, patience_s)
        self._averaging = True
        self._places = Places.of(roster.members)
        return roster

    async def _gather(
        self, me: Candidate, others: Sequence[Candidate], measured: Measured, patience_s: float
    ) -> Roster:
        others = sorted(
            (member for member in others if member.peer not in self._excluded), key=lambda member: member.peer
        )
        hosts = [member for member in others if member.peer == self._host]
        before = [member for member in others if member.peer < me.peer and member.peer not in self._guests]
        after = [member for member in others if member.peer > me.peer]
        self._host = None
        roster = await self._ask_each([*hosts, *before], me, measured, patience_s)
        if roster is None:
            try:
                return await self._lead(me, {member.peer: member for member in after}, measured, patience_s)
            except Elsewhere:
                # Whoever gathers the others is to know that we come: then it waits for us with the state it sends us to.
                roster = await self._ask_each(after, me, measured, patience_s)
                if roster is None:
                    raise
        return roster

    async def _ask_each(
        self, others: Sequence[Candidate], me: Candidate, measured: Measured, patience_s: float
    ) -> Roster | None:
        """What the first of ``others`` says who answers and does not lag; who lags learns of us when it looks."""
        for member in others:
            try:
                return await self._ask_on(member, me, measured, patience_s)
            except Elsewhere as elsewhere:
                if elsewhere.round >= self._round:
                    self._host = member.peer
                    raise
            except SwarmnetError:
                continue
        return None

    async def places(self, members: Sequence[Candidate]) -> dict[PeerId, Place]:
        """Where each of ``members`` says it is; those that do not answer are left out."""
        said = await asyncio.gather(*(self._place_of(member) for member in members[:MAX_MEMBERS]))
        return {each.peer: Place(each.round, each.state) for each in said if each is not None}

    # ---- as a guest -------------------------------------------------------------------------------------

    async def _ask_on(
        self, member: Candidate, me: Candidate, measured: Measured, patience_s: float
    ) -> Roster:
        """Ask ``member``, or whom it asks itself: its gatherer does not wait for a guest of a guest."""
        try:
            return await self._ask(member, me, measured, patience_s)
        except _Guesting as guesting:
            try:
                return await self._ask(guesting.leader, me, measured, patience_s, follow=False)
            except Elsewhere:
                raise
            except SwarmnetError:
                # Not for us to reach: with a guest we learn at least what became of the round.
                return await self._ask(member, me, measured, patience_s, follow=False)

    async def _ask(
        self,
        leader: Candidate,
        me: Candidate,
        measured: Measured,
        patience_s: float,
        *,
        follow: bool = True,
    ) -> Roster:
        stream = await self._transport.open(
            leader.peer, GATHER, addresses=leader.addresses, deadline_s=self._timing.open_s
        )
        try:
            await self._introduce(stream, me, measured, self._places)
            # The gatherer may still be at its inner steps: it is as patient as we are, counted from its own end of them.
            async with asyncio.timeout(2 * patience_s):
                return await self._answered(stream, leader, me, measured, follow=follow)
        except TimeoutError as error:
            raise StreamEnded(f"{leader.peer} gathers for ever") from error
        finally:
            self._leader = None
            stream.close()

    async def _introduce(self, stream: Stream, me: Candidate, measured: Measured, places: Places) -> None:
        """Say who comes; to somebody who has ``places``, not where that is."""
        request = pb.GatherRequest(
            job=self._job,
            round=self._round,
            state=self._state,
            member=member_to_wire(me, places),
            measured=measured_to_wire(measured),
            known=places.hash if places.has(me) else b"",
        )
        await send_within(stream, Message(request.SerializeToString()), self._timing.chunk_s)

    async def _answered(
        self, stream: Stream, leader: Candidate, me: Candidate, measured: Measured, *, follow: bool
    ) -> Roster:
        places = self._places
        while True:
            message = await receive_within(stream, self._timing.matchmaking_silence_s)
            reply = parse(pb.GatherReply, message.header)
            match reply.WhichOneof("kind"):
                case "heartbeat" if me.peer < stream.peer in self._guests:
                    raise StreamEnded(f"{stream.peer} asks us as we ask it, and we come first")
                case "heartbeat" if follow and reply.heartbeat.HasField("leader"):
                    there = member_from_wire(reply.heartbeat.leader)
                    if there.peer != me.peer:
                        raise _Guesting(there)
                case "heartbeat":
                    self._leader = leader
                case "refused":
                    raise Elsewhere(stream.peer, reply.refused.round, reply.refused.state)
                case "roster":
                    return roster_from_wire(reply.roster, round=self._round, me=me, places=places)
                case "unknown" if places is not NOWHERE:
                    places = NOWHERE
                    await self._introduce(stream, me, measured, places)
                case _:
                    raise ProtocolViolation("not an answer of a gatherer")

    # ---- as the gatherer --------------------------------------------------------------------------------

    async def _lead(
        self, me: Candidate, expected: dict[PeerId, Candidate], measured: Measured, patience_s: float
    ) -> Roster:
        expected |= self._coming
        self._coming.clear()

        def complete() -> bool:
            here = {guest.member.peer for guest in self._ready()}
            return {*expected} <= here or len(here) + 1 >= self._max_members

        async def enough() -> None:
            async with self._changed:
                await self._changed.wait_for(complete)

        try:
            async with asyncio.timeout(patience_s):
                await race(enough(), self._look_after(expected))
        except TimeoutError:
            pass  # whoever has not come is not in this round
        guests = self._ready()
        roster = Roster.of(self._round, me, measured, guests, self._max_members)
        members = {member.peer for member in roster.members}
        for guest in guests:
            if guest.member.peer in members:
                guest.answer.set_result(roster)
        return roster

    async def _look_after(self, expected: dict[PeerId, Candidate]) -> None:
        """Expect nobody who does not answer: a round shall not wait for the dead. Raises ``Elsewhere`` if we are the stray."""
        pause_s = self._timing.heartbeat_s  # who comes when we do is not worth a question
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._timing.matchmaking_poll_s)
            here = {guest.member.peer for guest in self._ready()}
            missing = [member for peer, member in expected.items() if peer not in here]
            places = await asyncio.gather(*(self._place_of(member) for member in missing))
            for member, place in zip(missing, places, strict=True):
                if place is None:
                    expected.pop(member.peer, None)
            strangers = [place for place in places if place is not None and self._is_stranger(place)]
            if strangers and (strangers[0].round > self._round or len(strangers) > len(here)):
                raise strangers[0]
            async with self._changed:
                self._changed.notify_all()

    def _is_stranger(self, place: Elsewhere) -> bool:
        """Whether that place is later than ours, or ours with another state."""
        same_round = place.round == self._round and place.state != b""
        return place.round > self._round or (same_round and self._is_other(place.state))

    def _is_other(self, state: bytes) -> bool:
        return self._same_state and state != self._state

    async def _place_of(self, member: Candidate) -> Elsewhere | None:
        """Where a worker is; None if it does not answer."""
        try:
            stream = await self._transport.open(
                member.peer, GATHER, addresses=member.addresses, deadline_s=self._timing.open_s
            )
        except SwarmnetError:
            return None
        try:
            await stream.send(Message(pb.GatherRequest(job=self._job).SerializeToString()))
            reply = parse(pb.GatherReply, (await receive_within(stream, self._timing.silence_s)).header)
        except SwarmnetError:
            return None
        finally:
            stream.close()
        return Elsewhere(member.peer, reply.refused.round, reply.refused.state)

    def _ready(self) -> list[_Waiting]:
        latest = latest_exchange(self._round, self._exchanges, MAX_AHEAD)
        return [
            guest
            for guest in self._guests.values()
            if guest.round == self._round
            and not self._is_other(guest.state)
            and not guest.answer.done()
            and guest.member.exchanges < latest
        ]

    async def _receive(self, stream: Stream) -> None:
        if stream.peer in self._excluded:
            raise NotAuthorised(f"{stream.peer} sent false results")
        message = await stream.receive()
        request = parse(pb.GatherRequest, message.header)
        if request.job != self._job:
            raise ProtocolViolation("another job")
        if self._left_for_good:
            return
        if not request.HasField("member"):  # it only wants to know where we are
            refused = pb.GatherRefused(round=self._round, state=self._state)
            await self._say(stream, pb.GatherReply(refused=refused))
            return
        if request.known and not self._places.are(request.known, stream.peer):
            await self._say(stream, pb.GatherReply(unknown=pb.Unknown()))
            message = await receive_within(stream, self._timing.matchmaking_silence_s)
            request = parse(pb.GatherRequest, message.header)
        if request.known:
            if not self._places.are(request.known, stream.peer):
                raise ProtocolViolation("a guest that does not say who it is")
            request.member.id = stream.peer
            request.member.addresses[:] = self._places.addresses[stream.peer]
        member = member_from_wire(request.member)
        if member.peer != stream.peer:
            raise ProtocolViolation("a guest comes for itself")
        answer: asyncio.Future[Roster] = asyncio.get_running_loop().create_future()
        measured = measured_from_wire(request.measured)
        guest = _Waiting(member, request.round, request.state, measured, answer)
        self._guests[member.peer] = guest
        await self._send_away()
        try:
            roster = await race(self._heartbeats(stream), self._left(stream), _value(answer))
            await self._say(stream, pb.GatherReply(roster=roster_to_wire(roster, request.known)))
        except Elsewhere as elsewhere:
            if len(self._coming) < MAX_MEMBERS:
                self._coming[member.peer] = member
            refused = pb.GatherRefused(round=elsewhere.round, state=elsewhere.state, reason=str(elsewhere))
            await self._say(stream, pb.GatherReply(refused=refused))
        finally:
            await cancel(answer)
            if self._guests.get(member.peer) is guest:
                del self._guests[member.peer]
            async with self._changed:
                self._changed.notify_all()

    async def _send_away(self) -> None:
        """Tell guests of another round or state where we are. Who is one round ahead may wait: we are about to follow.

        While a round is averaged all may wait: what they would fetch now is old before they have it.
        """
        if self._averaging:
            return
        here = Elsewhere(self._transport.peer_id, self._round, self._state)
        for guest in self._guests.values():
            other_state = guest.round == self._round and self._is_other(guest.state)
            elsewhere = guest.round < self._round or other_state or guest.round > self._round + 1
            if elsewhere and not guest.answer.done():
                guest.answer.set_exception(here)
        async with self._changed:
            self._changed.notify_all()

    async def _heartbeats(self, stream: Stream) -> Roster:
        while True:
            there = self._leader
            heartbeat = pb.GatherHeartbeat(leader=None if there is None else member_to_wire(there))
            await self._say(stream, pb.GatherReply(heartbeat=heartbeat))
            await asyncio.sleep(self._timing.matchmaking_heartbeat_s)

    async def _say(self, stream: Stream, reply: pb.GatherReply) -> None:
        await send_within(stream, Message(reply.SerializeToString()), self._timing.chunk_s)

    async def _left(self, stream: Stream) -> Roster:
        """A guest says nothing more: its stream only ends."""
        await stream.receive()
        raise ProtocolViolation("a guest asks once")


async def _value(answer: "asyncio.Future[Roster]") -> Roster:
    return await answer
