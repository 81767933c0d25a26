"""Links: how a hop, or the client, sends its steps to the next hop.

1. The sender opens a link stream. It names the client's session there and the epoch of the chain.
2. The next hop answers with the last step that it has computed.
3. :class:`LinkSender` sends every later step from the activation log: first the steps that the hop
   lacks, then each new step.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import LINK
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.session.activation_log import ActivationLog, Cursor
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.hop_times import Moment
from swarmnet_protocols.session.steps import Step, encode_step
from swarmnet_protocols.session.wire_tensors import is_slow
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)
_Link = TypedStream[pb.LinkRequest, pb.LinkReply]


@dataclass(frozen=True)
class NextHop:
    """The target of a link: the next hop, the client's session there, the chain's epoch."""

    peer: PeerId
    addresses: tuple[str, ...]
    session: bytes
    epoch: int

    @property
    def log_fields(self) -> dict[str, object]:
        """Return the fields that join the logs of the client and of both ends of the link."""
        return {"peer": self.peer, "session": log_id(self.session), "epoch": self.epoch}

    def to_wire(self, record: bytes) -> pb.Peer:
        """Return what the previous hop needs to link there. ``record``: the peer's announcement."""
        return pb.Peer(id=self.peer, record=record, session=self.session)


def log_id(session: bytes) -> str:
    """Return eight digits that stand for a session in the logs of all its peers.

    The session id itself is a secret.
    """
    return hashlib.blake2s(session, digest_size=4).hexdigest()


async def ignore_link() -> None:
    """Do nothing when a link is made."""


def ignore_moment(_seq: int, _moment: Moment) -> None:
    """Record no time."""


@dataclass
class Outbox:
    """An activation log, and an event that is set when the log grows."""

    log: ActivationLog
    appended: asyncio.Event

    def append(self, step: Step) -> None:
        self.log.append(step)
        self.appended.set()


@dataclass(frozen=True)
class LinkSender:
    """Sends the steps of an outbox to the next hop, and to its standby if there is one.

    Each of the two needs one call of ``run``.

    - ``render`` turns a logged step into a step with values [P, D]: the client logs token ids.
    - ``wire`` is the element type that is sent.
    - ``mark`` is called with a step's number when the step is taken from the log, encoded and sent.
    """

    transport: Transport
    outbox: Outbox
    wire: ElementType
    timing: Timing
    render: Callable[[Step], Step] = lambda step: step
    mark: Callable[[int, Moment], None] = ignore_moment

    async def run(
        self,
        target: NextHop,
        is_linked: Callable[[], Awaitable[None]] = ignore_link,
        *,
        is_standby: bool = False,
    ) -> NoReturn:
        """Link to ``target`` and send the steps that it lacks, then new steps, until cancelled.

        Opens a new stream whenever the path improves. Calls ``is_linked`` whenever ``target`` has
        accepted a link.

        Raises ``Refused``, ``DeadlineExceeded`` if the next hop falls silent, and ``StreamEnded``
        if the link ends twice; and the errors of ``LINK.open``, ``ActivationLog.attach`` and
        ``ActivationLog.next``.
        """
        may_end = True
        while True:
            try:
                await self._feed(target, is_linked, is_standby=is_standby)
            except StreamEnded as error:  # a connection can be reset although both peers are alive
                if isinstance(error, Refused) or not may_end:
                    raise
                _log.debug("a link is made again", extra=target.log_fields | {"reason": str(error)[:200]})
                may_end = False

    async def _feed(
        self, target: NextHop, is_linked: Callable[[], Awaitable[None]], *, is_standby: bool
    ) -> None:
        """Send over one stream until there is a better path."""
        link = await LINK.open(self.transport, target.peer, self.timing, addresses=target.addresses)
        try:
            await link.send(pb.LinkRequest(link=pb.Link(session=target.session, epoch=target.epoch)))
            applied = await self._linked(link)
            log = self.outbox.log
            cursor = log.attach(applied, is_standby=is_standby)
            try:
                await is_linked()
                await race(self._listen(link), self._send(link, log, cursor), link.stream.path_improved())
            finally:
                log.detach(cursor)
        finally:
            link.close()

    async def _linked(self, link: _Link) -> int:
        """Wait until the next hop accepts the link. Returns the last step that it has computed."""
        while True:
            reply, _ = await link.receive()
            if reply.HasField("linked"):
                return reply.linked.applied

    async def _listen(self, link: _Link) -> NoReturn:
        while True:
            await link.receive()

    async def _send(self, link: _Link, log: ActivationLog, cursor: Cursor) -> NoReturn:
        while True:
            step = log.next(cursor)
            if step is None:
                self.outbox.appended.clear()
                await self.outbox.appended.wait()
                continue
            self.mark(step.seq, Moment.TAKEN)
            rendered = self.render(step)
            if is_slow(self.wire, *rendered.values.shape):
                message, payload = await asyncio.to_thread(encode_step, rendered, self.wire)
            else:
                message, payload = encode_step(rendered, self.wire)
            self.mark(step.seq, Moment.ENCODED)
            await link.send(pb.LinkRequest(step=message), payload)
            self.mark(step.seq, Moment.SENT)
