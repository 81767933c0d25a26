"""Sessions on the hosts of a chain: opens them, and receives from each until it ends.

When the path to a host improves, its session goes on over another stream.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from swarmnet_client.chain.adapter_upload import AdapterUploader
from swarmnet_client.chain.hops import ChainSpec, LiveHop, SessionRole, SessionStream, open_hop, resume
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import ConfigError, ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import all_of, cancel
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session.link import NextHop
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class HopSessions:
    """The open sessions of one chain.

    - ``receive`` receives from a hop until its session ends. It returns whether the session went on
      with another stream.
    - ``heartbeat`` takes a hop's heartbeats.
    - ``ended`` is called when a session ends with an error.
    - ``tasks`` runs a task for each session.
    """

    hosts: ModelHosts
    spec: ChainSpec
    uploader: AdapterUploader
    receive: Callable[[LiveHop, SessionStream], Awaitable[bool]]
    heartbeat: Callable[[LiveHop, pb.SessionReply], None]
    ended: Callable[[LiveHop, SwarmnetError], None]
    tasks: asyncio.TaskGroup

    async def open(
        self,
        route: Sequence[Hop],
        after: LiveHop | None,
        epoch: int,
        failed: Callable[[Hop, SwarmnetError], None],
        *,
        role: SessionRole = SessionRole.HOP,
        begun: Callable[[NextHop], Awaitable[None]] | None = None,
    ) -> list[LiveHop]:
        """Open sessions on all hosts of ``route`` at the same time. Return the sessions that
        opened.

        - ``after``, ``epoch``: in this epoch each session links to the next, and the last to
          ``after``.
        - ``begun`` is called with the first session while it opens. Links that arrive there wait
          for it.
        - ``failed`` is called for each session that did not open.
        - ``role``: the role of the last session; the others are of role ``HOP``. With
          ``SUCCESSOR``, all sessions have this role.

        Raises ``ConfigError`` if no host would take the chain's adapter.
        """
        planned = [(hop, self.hosts.new_session()) for hop in route]
        following: list[NextHop | None] = [
            NextHop(hop.peer, hop.addresses, session, epoch) for hop, session in planned[1:]
        ]
        following.append(after.target(epoch) if after else None)
        last = planned[-1][0]

        async def tell() -> None:
            if begun is not None:
                await begun(NextHop(route[0].peer, route[0].addresses, planned[0][1], epoch))

        async def try_to_open(hop: Hop, session: bytes, target: NextHop | None) -> LiveHop | None:
            try:
                live = await open_hop(
                    self.uploader,
                    self.spec,
                    hop,
                    (session, epoch),
                    target,
                    role=role if hop is last or role is SessionRole.SUCCESSOR else SessionRole.HOP,
                )
            except ConfigError:
                raise  # the adapter is at fault: no other host would take it
            except SwarmnetError as error:
                failed(hop, error)
                return None
            live.announced = self.hosts.span_of(hop.peer)
            answered.append(live)
            _log.debug("a session is open", extra=live.target(epoch).log_fields | {"role": role.name})
            self.tasks.create_task(self._attend(live))
            return live

        answered: list[LiveHop] = []
        try:
            _, *opened = await all_of(
                tell(),
                *(
                    try_to_open(hop, session, target)
                    for (hop, session), target in zip(planned, following, strict=True)
                ),
            )
        except BaseException:
            for each in answered:
                each.alive = False
                each.stream.close()
            raise
        for live, successor in zip(opened, [*opened[1:], after], strict=True):
            if live is not None:
                live.next, live.epoch = successor, epoch
        return [live for live in opened if live is not None]

    async def _attend(self, live: LiveHop) -> None:
        """Receive from one hop until its session ends. When the path improves, a new stream
        replaces the old one."""
        async with asyncio.TaskGroup() as streams:
            receiving = streams.create_task(self._attend_stream(live))
            while await self._resume(live, receiving):
                # Outputs may still be on their way over the old stream. Its last message is Moved.
                receiving = streams.create_task(self._attend_stream(live))
        if receiving.result():
            self.ended(live, ProtocolViolation("a host ended a session that did not move"))

    async def _resume(self, live: LiveHop, receiving: asyncio.Task[bool]) -> bool:
        """Wait for a better path to the hop, and go on with its session there.

        Returns False if the session ends first or stays where it is.
        """
        improved = asyncio.create_task(live.stream.stream.path_improved())
        try:
            await asyncio.wait([improved, receiving], return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                return False
            live.stream = await resume(self.hosts, live)
        except SwarmnetError as error:
            _log.info("the session on %s stays on its path: %s", live.peer, error)
            return False
        finally:
            await cancel(improved)
        _log.info("the session on %s moved to a better path", live.peer)
        return True

    async def _attend_stream(self, live: LiveHop) -> bool:
        """Receive from a hop over its present stream, and send heartbeats there.

        Returns whether the session went on with another stream.
        """
        stream = live.stream
        stream.on_heartbeat = partial(self.heartbeat, live)
        beating = asyncio.create_task(live.send_heartbeats(stream, self.hosts.timing.client_silence_s / 4))
        try:
            return await self.receive(live, stream)
        finally:
            await cancel(beating)
            stream.close()
