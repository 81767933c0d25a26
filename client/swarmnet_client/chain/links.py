"""Makes the links of a chain: the client sends to the first hop, and each hop to the next one.

The client sends over a stream of its own. The requests ``relink`` and ``tee`` tell a hop where to
send. Outside of this module, client and hops are both a ``Sender``.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from swarmnet_client.chain.hops import ChainSpec, ClientLink, LiveHop, Sender
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session.link import LinkSender, NextHop

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ChainLinks:
    """The links of one chain: who sends to whom.

    - ``steps`` sends from the client's log.
    - ``lost`` is called when a link of the client cannot be made or breaks.
    - ``tasks`` runs a task for each link of the client.
    """

    hosts: ModelHosts
    spec: ChainSpec
    steps: LinkSender
    lost: Callable[[NextHop, SwarmnetError], Awaitable[None]]
    tasks: asyncio.TaskGroup
    client: ClientLink = field(default_factory=ClientLink)
    _epoch: int = 0

    def next_epoch(self) -> int:
        """Return the epoch of the next change of the chain."""
        self._epoch += 1
        return self._epoch

    async def make(self, hops: Sequence[LiveHop]) -> None:
        """Have each sender of a whole chain send to its next hop, and the last hop answer the
        client."""
        senders: list[Sender] = [self.client, *hops]
        for sender, successor in zip(senders, [*hops, None], strict=True):
            if sender.next is not successor or sender.needs_link:
                await self.link(sender, successor)

    async def link(self, sender: Sender, successor: LiveHop | None) -> None:
        """Have a sender send to ``successor``. With None, the sender is the last hop, and answers
        the client."""
        # After a promotion, the link that fed the standby goes on, so it keeps its epoch.
        is_fed = isinstance(sender, LiveHop) and sender.promoted_next and sender.next is successor
        epoch = sender.epoch if is_fed else self.next_epoch()
        if successor is not None:
            await self.send(sender, successor.hop, successor.target(epoch), successor)
        elif isinstance(sender, LiveHop):
            sender.linked_to(None, epoch)
            _log.debug("a hop answers the client", extra=sender.log_fields)
            await sender.relink(epoch, None, b"", self.steps.outbox.log.lengths)

    async def send(self, sender: Sender, hop: Hop, target: NextHop, opened: LiveHop | None) -> None:
        """Have a sender send to ``target``, a session on ``hop``. ``opened``: None while that
        session is being opened."""
        sender.linked_to(opened, target.epoch)
        _log_link("a hop is linked", target, sender)
        if isinstance(sender, LiveHop):
            record = self.hosts.record_of(target.peer)
            await sender.relink(target.epoch, target, record, self.steps.outbox.log.lengths)
        else:
            replaced = sender.sending
            sender.sending = self.tasks.create_task(self._send_steps(hop, target, is_standby=False))
            await cancel(replaced)

    async def feed(self, sender: Sender, standby: LiveHop, epoch: int) -> asyncio.Task[None] | None:
        """Have a sender also send to a standby of its next hop. Returns the task if the client
        sends.
        """
        target = standby.target(epoch)
        _log_link("a standby is fed", target, sender)
        if not isinstance(sender, LiveHop):
            return self.tasks.create_task(self._send_steps(standby.hop, target, is_standby=True))
        await sender.tee(target, self.hosts.record_of(target.peer))
        return None

    def promote(
        self, sender: Sender, standby: LiveHop, epoch: int, feeding: asyncio.Task[None] | None
    ) -> None:
        """Make the link that feeds a standby the only link of its sender. If the sender is a hop,
        the next ``make`` tells it."""
        _log_link("a standby takes over", standby.target(epoch), sender)
        sender.next, sender.epoch = standby, epoch
        if isinstance(sender, LiveHop):
            sender.promoted_next = True
        else:
            replaced, sender.sending = sender.sending, feeding
            if replaced is not None:
                replaced.cancel()

    async def _send_steps(self, hop: Hop, target: NextHop, *, is_standby: bool) -> None:
        """Send the client's steps. If the link is lost while the session is still being opened, it
        is made again once the session is open."""
        sender = replace(self.steps, wire=self.spec.wire_of(hop.precision))
        try:
            await sender.run(target, is_standby=is_standby)
        except SwarmnetError as error:
            await self.lost(target, error)


def _log_link(event: str, target: NextHop, sender: Sender) -> None:
    _log.debug(event, extra=target.log_fields | {"sender": sender.peer or "client"})
