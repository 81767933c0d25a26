"""Feeding one downstream hop from an activation log: the same code in a host and in the client."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import LINK
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.session.activation_log import ActivationLog, Cursor
from swarmnet_protocols.session.steps import Step, encode_step
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb

_Link = TypedStream[pb.LinkRequest, pb.LinkReply]


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
        link = _Link(stream, pb.LinkRequest, pb.LinkReply, silence_s=self.timing.silence_s)
        try:
            await link.send(pb.LinkRequest(link=pb.Link(session=target.session, epoch=target.epoch)))
            applied = await self._linked(link)
            cursor = self.outbox.log.attach(applied)
            await race(self._listen(link), self._send(link, cursor))
        finally:
            self.outbox.log.detach()
            stream.close()

    async def _linked(self, link: _Link) -> int:
        """The last step that the next hop has computed."""
        while True:
            reply, _ = await link.receive()
            if reply.HasField("linked"):
                return reply.linked.applied

    async def _listen(self, link: _Link) -> NoReturn:
        while True:
            await link.receive()

    async def _send(self, link: _Link, cursor: Cursor) -> NoReturn:
        while True:
            step = self.outbox.log.next(cursor)
            if step is None:
                self.outbox.news.clear()
                await self.outbox.news.wait()
                continue
            message, payload = encode_step(self.render(step), self.wire)
            await link.send(pb.LinkRequest(step=message), payload)
