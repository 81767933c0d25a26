"""Handing over what is owed: a worker that leaves gives the error of its contributions to one that stays.

Of a worker i owe e_i what its codec lost (``codecs.feedback``), and w_i the weight of its contributions. Averages weigh by w_i, so what
they have yet to deliver is sum_i w_i e_i. That stays as it is when l leaves and h goes on with e_h + (w_l / w_h) e_l.

The heir fetches what it is offered as a state is fetched, checks it, and is ready; the leaver then owes nothing, for good, and says
so; only then does the heir owe it. So nothing is delivered twice: what fails before is still the leaver's, and what
fails after is lost, as with a worker that dies.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from torch import Tensor

from swarmnet_protocols.errors import (
    DeadlineExceeded,
    NotAuthorised,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.net import Message, PeerId, Stream, Transport
from swarmnet_protocols.net.messages import parse, receive_within, send_within
from swarmnet_protocols.net.protocol_ids import HANDOVER
from swarmnet_protocols.net.refusal import printable
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.rosters import Candidate
from swarmnet_protocols.training.state_transfer import Source, StateDownload
from swarmnet_protocols.wire import workers_pb2 as pb

ROSTERS = 2
"""Who was in one of so many, the last ones, may bequeath: the others may be in the next round when a worker leaves."""
_REASON_CHARS = 200


class Heir(Protocol):
    """What a worker does with an error that it is to owe from now on."""

    max_bytes: int
    """The largest that this can be, packed; nothing larger is allocated."""

    async def examine(self, data: bytearray, factor: float) -> Tensor:
        """The error that was packed, times ``factor``. Raises ``IntegrityError`` for one that this worker does not want to owe."""

    async def inherit(self, peer: PeerId, error: Tensor) -> None:
        """Owe what ``examine`` gave, which was what ``peer`` owed."""

    def refuse(self, peer: PeerId, reason: str) -> None:
        """A member of a roster offered what cannot be inherited."""


class Handover:
    """One worker's side of it, in one job: as an heir until it leaves itself."""

    def __init__(
        self, transport: Transport, job: bytes, heir: Heir, *, timing: Timing, deadline_s: float
    ) -> None:
        """``deadline_s``: how long a worker that leaves waits until its heir is ready, and how long that waits for the leaver."""
        self._transport = transport
        self._job = job
        self._heir = heir
        self._timing = timing
        self._deadline_s = deadline_s
        self._rosters: deque[dict[PeerId, Candidate]] = deque(maxlen=ROSTERS)
        self._offered = False
        """Somebody has bequeathed since the last roster, or tried to."""
        self._leaving = False
        self._busy = asyncio.Lock()

    async def serve(self) -> None:
        """Be an heir until the transport closes."""
        await self._transport.serve(HANDOVER, self._receive)

    def stand(self, members: Sequence[Candidate]) -> None:
        """These are in a roster with us now."""
        self._rosters.append({member.peer: member for member in members})
        self._offered = False

    def heirs(self) -> list[Candidate]:
        """Who contributed to the last roster beside us, whoever comes after us in the order of peer ids first."""
        me = self._transport.peer_id
        members = self._rosters[-1].values() if self._rosters else ()
        others = [member for member in members if member.peer != me and member.weight]
        return sorted(others, key=lambda member: (member.peer < me, member.peer))

    # ---- as the one that leaves -------------------------------------------------------------------------

    async def leave(self) -> None:
        """Inherit nothing any more. What somebody is giving us is ours to hand on when this returns, within two deadlines."""
        self._leaving = True
        async with self._busy:
            pass

    async def give(self, state: bytes, forget: Callable[[], Awaitable[None]]) -> PeerId:
        """Give what we owe, offered as ``state``, to the first of ``heirs()`` that takes it, after ``leave``.

        ``forget`` is awaited when an heir is ready: after it we owe nothing, even if this process ends and starts again. Raises
        what it raises, ``Unreachable`` if nobody was ready within ``deadline_s``, and ``StreamEnded`` if an heir was ready and
        it is not known whether it got what we forgot.
        """
        reasons = []
        try:
            async with asyncio.timeout(self._deadline_s):
                for heir in self.heirs():
                    try:
                        stream = await self._make_ready(heir, state)
                        break
                    except SwarmnetError as error:
                        reasons.append(f"{heir.peer}: {error}")
                else:
                    raise Unreachable(f"no heir ({'; '.join(reasons) or 'nobody else contributes'})")
        except TimeoutError as error:
            raise Unreachable(f"no heir was ready within {self._deadline_s} s") from error
        try:
            await forget()
            await self._say_yours(stream)
        finally:
            stream.close()
        return stream.peer

    async def _make_ready(self, heir: Candidate, state: bytes) -> Stream:
        stream = await self._transport.open(
            heir.peer, HANDOVER, addresses=heir.addresses, deadline_s=self._timing.open_s
        )
        try:
            await self._send(stream, pb.HandOverRequest(offer=pb.Offer(job=self._job, state=state)))
            await self._answered(stream, "ready")
        except BaseException:
            stream.close()
            raise
        return stream

    async def _say_yours(self, stream: Stream) -> None:
        try:
            await self._send(stream, pb.HandOverRequest(yours=pb.Yours()))
            await self._answered(stream, "taken")
        except SwarmnetError as error:
            raise StreamEnded(f"{stream.peer} was ready and may not have taken it: {error}") from error

    async def _answered(self, stream: Stream, expected: str) -> None:
        message = await receive_within(stream, self._deadline_s)
        reply = parse(pb.HandOverReply, message.header)
        if reply.HasField("refused"):
            raise NotAuthorised(printable(reply.refused.reason[:_REASON_CHARS]))
        if reply.WhichOneof("kind") != expected:
            raise ProtocolViolation("not an answer of an heir")

    # ---- as the heir ------------------------------------------------------------------------------------

    async def _receive(self, stream: Stream) -> None:
        message = await stream.receive()
        request = parse(pb.HandOverRequest, message.header)
        if request.offer.job != self._job:
            raise ProtocolViolation("not an offer in this job")
        try:
            factor = self._admit(stream.peer)
        except NotAuthorised as error:
            await self._refuse(stream, str(error))
            return
        async with self._busy:
            try:
                owed = await self._fetch(stream, request.offer.state, factor)
            except SwarmnetError as error:
                self._heir.refuse(stream.peer, str(error))
                await self._refuse(stream, str(error))
                return
            await self._take(stream, owed)

    def _admit(self, peer: PeerId) -> float:
        """By what to multiply the error of ``peer``. Raises ``NotAuthorised`` if it may not bequeath to us now."""
        me = self._transport.peer_id
        if self._leaving:
            raise NotAuthorised("this worker leaves too")
        common = [roster for roster in reversed(self._rosters) if peer in roster and peer != me]
        if not common or not (common[0][peer].weight and common[0][me].weight):
            raise NotAuthorised("who bequeaths has contributed to one of the last rounds, as has its heir")
        if self._offered or self._busy.locked():
            raise NotAuthorised("this worker was offered something in this round already")
        self._offered = True
        return common[0][peer].weight / common[0][me].weight

    async def _fetch(self, stream: Stream, state: bytes, factor: float) -> Tensor:
        download = StateDownload(self._job, state, max_bytes=self._heir.max_bytes)
        try:
            async with asyncio.timeout(self._deadline_s):
                data = await download.run(self._transport, [Source(stream.peer)], self._timing)
        except TimeoutError as error:
            raise DeadlineExceeded(f"not fetched within {self._deadline_s} s") from error
        return await self._heir.examine(data, factor)

    async def _take(self, stream: Stream, owed: Tensor) -> None:
        await self._send(stream, pb.HandOverReply(ready=pb.Ready()))
        message = await receive_within(stream, self._deadline_s)
        if not parse(pb.HandOverRequest, message.header).HasField("yours"):
            raise ProtocolViolation("an heir that is ready is told that it is one")
        await self._heir.inherit(stream.peer, owed)
        await self._send(stream, pb.HandOverReply(taken=pb.Taken()))

    # ---- what either says ---------------------------------------------------------------------------------

    async def _send(self, stream: Stream, message: pb.HandOverRequest | pb.HandOverReply) -> None:
        await send_within(stream, Message(message.SerializeToString()), self._timing.chunk_s)

    async def _refuse(self, stream: Stream, reason: str) -> None:
        refused = pb.HandOverRefused(reason=reason[:_REASON_CHARS])
        await self._send(stream, pb.HandOverReply(refused=refused))
