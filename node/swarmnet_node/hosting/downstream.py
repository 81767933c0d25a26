"""The downstream link of a session: sends its steps to the next hop, and to a standby of that hop.

1. **Sending.** The log's steps go to the next hop until the client names another next hop.
2. **Feeding.** While the next hop has a standby, the same steps go to the standby over a second
   link.
3. **Switched.** When the client names the standby as next hop, only the second link stays.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmnet_node.hosting.counters import HostCounters
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.session.activation_log import ActivationLog, LogDropped
from swarmnet_protocols.session.link import LinkSender, NextHop
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Downstream:
    """The target of the steps of one session: the next hop, if any.

    Without a target they go nowhere: the session answers the client, or stands by.

    - ``tell`` tells the client which links are made and lost.
    - ``end`` ends the session if its log can no longer rebuild a next hop.
    - ``freed`` is set when the session has ended. No link is made any more then.
    - ``session``: stands for the session in logs (``log_id``).
    """

    session: str
    sender: LinkSender
    tell: Callable[[pb.SessionReply], Awaitable[None]]
    end: Callable[[Refusal], None]
    counters: HostCounters
    freed: asyncio.Event
    target: NextHop | None = None
    standby: NextHop | None = None
    """The standby of the next hop, while it is fed."""
    _sending: asyncio.Task[None] | None = None
    _feeding: asyncio.Task[None] | None = None
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def send(self, log: ActivationLog | None = None, needed: frozenset[int] | None = None) -> None:
        """Send steps to the target, instead of an earlier one.

        ``log`` replaces the log, if given. ``needed``: the sequences that a fresh next hop gets, or
        None for all.
        """
        async with self._changing:
            await cancel(self._sending)
            if log is not None:
                self.sender.outbox.log = log
            if needed is not None:
                self.sender.outbox.log.retain(needed)
            if self.target is not None and not self.freed.is_set():
                self._sending = asyncio.create_task(self._send_steps(self.target))

    async def feed(self, standby: NextHop | None) -> None:
        """Send steps to this standby too, instead of an earlier standby. None: to no standby."""
        async with self._changing:
            await cancel(self._feeding)
            self.standby, self._feeding = standby, None
            if standby is not None and not self.freed.is_set():
                self._feeding = asyncio.create_task(self._send_steps(standby))

    async def relink(self, target: NextHop, needed: frozenset[int] | None) -> None:
        """Send steps to ``target`` from now on. If it is the standby, its link stays."""
        standby = self.standby
        if standby is None or (standby.session, standby.epoch) != (target.session, target.epoch):
            self.target = target
            await self.send(needed=needed)
            return
        async with self._changing:
            # Its log position moves along: no step is sent twice or left out.
            replaced, self._sending = self._sending, self._feeding
            self.target, self.standby, self._feeding = standby, None, None
            _log.debug("a standby is the next hop", extra=self._log_fields(target))
            await cancel(replaced)

    async def close(self) -> None:
        """End both links."""
        await cancel(self._sending, self._feeding)

    async def _send_steps(self, target: NextHop) -> None:
        """Send steps to the next hop or its standby until that fails.

        Then tell the client, which names another hop.
        """

        async def tell() -> None:
            _log.debug("a link is made", extra=self._log_fields(target))
            await self.tell(pb.SessionReply(link_made=pb.LinkMade(epoch=target.epoch)))

        try:
            await self.sender.run(target, tell, is_standby=target is self.standby)
        except SwarmnetError as error:
            if isinstance(error, LogDropped) and target is self.target:
                self.end(Refusal(refusal_pb2.REASON_LOG_GONE, str(error)))
                return
            self.counters.links_lost += 1
            _log.info("a link is lost", extra=self._log_fields(target) | {"reason": str(error)[:200]})
            await self.tell(pb.SessionReply(link_lost=pb.LinkLost(epoch=target.epoch, peer=target.peer)))

    def _log_fields(self, target: NextHop) -> dict[str, object]:
        """Return the fields of a link: its end, and the session that sends."""
        return target.log_fields | {"sender_session": self.session}
