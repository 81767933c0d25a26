"""Feeding one downstream hop from an activation log: the same code in a host and in the client."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from swarmnet_protocols.errors import OutOfResources, ProtocolViolation, StreamEnded, SwarmnetError
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.net import Message, PeerId, Stream, Transport
from swarmnet_protocols.net.messages import parse, receive_within
from swarmnet_protocols.net.protocol_ids import LINK
from swarmnet_protocols.net.refusal import printable
from swarmnet_protocols.net.resources import Exhausted
from swarmnet_protocols.session.activation_log import ActivationLog, Cursor
from swarmnet_protocols.session.steps import Step, encode_step
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb

MAX_RETRY_AFTER_S = 60.0
MAX_DETAIL_CHARS = 500


class Refused(SwarmnetError):
    """The other side said no, and why; after ``retry_after_s``, if that is not 0, it is worth asking again."""

    def __init__(self, reason: "pb.Reason", detail: str, retry_after_s: float = 0.0) -> None:
        self.detail = detail[:MAX_DETAIL_CHARS]
        super().__init__(f"{pb.Reason.Name(reason)}: {self.detail}")
        self.reason = reason
        self.retry_after_s = retry_after_s

    @classmethod
    def out_of_memory(cls, error: OutOfResources) -> "Refused":
        """What a host that has no room says."""
        retry_after_s = error.retry_after_s if isinstance(error, Exhausted) else 0.0
        return cls(pb.REASON_OUT_OF_MEMORY, str(error), retry_after_s)

    @classmethod
    def from_wire(cls, refused: pb.Refused) -> "Refused":
        """What came from a peer, which may say anything."""
        reason = refused.reason if refused.reason in pb.Reason.values() else pb.REASON_UNSPECIFIED
        wait_s = refused.retry_after_s
        return cls(reason, printable(refused.detail), wait_s if 0 <= wait_s <= MAX_RETRY_AFTER_S else 0.0)

    def to_wire(self) -> pb.Refused:
        return pb.Refused(reason=self.reason, detail=self.detail, retry_after_s=self.retry_after_s)


@dataclass(frozen=True)
class NextHop:
    """The next hop: the client's session there, and the epoch under which the link to it is made."""

    peer: PeerId
    addresses: tuple[str, ...]
    session: bytes
    epoch: int


@dataclass
class Outbox:
    """A log with the news that it grew. One feeder at a time waits for it."""

    log: ActivationLog
    news: asyncio.Event

    def append(self, step: Step) -> None:
        self.log.append(step)
        self.news.set()


@dataclass(frozen=True)
class LinkSender:
    """How a hop sends on: ``render`` turns a logged step into one whose values are [P, D]."""

    transport: Transport
    outbox: Outbox
    wire: torch.dtype
    timing: Timing
    render: Callable[[Step], Step] = lambda step: step

    async def run(self, target: NextHop) -> NoReturn:
        """Link to ``target``, send it whatever it lacks, then every new step as it comes.

        Ends only with an error: the link could not be made, ended twice, fell silent, or was refused; or it is cancelled.
        """
        with contextlib.suppress(StreamEnded):  # a connection may be reset while both ends are well
            await self._feed(target)
        await self._feed(target)
        raise ProtocolViolation("a link ended without a reason")

    async def _feed(self, target: NextHop) -> None:
        stream = await self.transport.open(
            target.peer, LINK, addresses=target.addresses, deadline_s=self.timing.open_s
        )
        try:
            link = pb.Link(session=target.session, epoch=target.epoch)
            await stream.send(Message(pb.LinkRequest(link=link).SerializeToString()))
            applied = await self._linked(stream)
            cursor = self.outbox.log.attach(applied)
            await race(self._listen(stream), self._send(stream, cursor))
        finally:
            self.outbox.log.detach()
            stream.close()

    async def _linked(self, stream: Stream) -> int:
        while True:
            reply = await self._reply(stream)
            if reply.HasField("linked"):
                return reply.linked.applied

    async def _listen(self, stream: Stream) -> None:
        while True:
            await self._reply(stream)

    async def _reply(self, stream: Stream) -> pb.LinkReply:
        message = await receive_within(stream, self.timing.silence_s)
        reply = parse(pb.LinkReply, message.header)
        if reply.HasField("refused"):
            raise Refused.from_wire(reply.refused)
        return reply

    async def _send(self, stream: Stream, cursor: Cursor) -> None:
        while True:
            step = self.outbox.log.next(cursor)
            if step is None:
                self.outbox.news.clear()
                await self.outbox.news.wait()
                continue
            message, payload = encode_step(self.render(step), self.wire)
            await stream.send(Message(pb.LinkRequest(step=message).SerializeToString(), payload))
