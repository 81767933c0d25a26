"""Sessions on the hosts of a chain: opens them, and receives from each until it ends.

When the path to a host improves, its session goes on over another stream.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from swarmnet_client.chain.adapter_upload import AdapterUploader
from swarmnet_client.chain.failures import UnhandledMessage
from swarmnet_client.chain.hops import ChainSpec, LiveHop, SessionRole, SessionStream
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import ConfigError, ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import all_of, cancel, in_background, loop_time
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.protocol_ids import SESSION
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session.link import NextHop
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class HopSessions:
    """The open sessions of one chain.

    - ``handle`` takes every message of a hop, and ``heartbeat`` its heartbeats.
    - ``ended`` is called when a session ends with an error.
    - ``tasks`` runs a task for each session.
    """

    hosts: ModelHosts
    spec: ChainSpec
    uploader: AdapterUploader
    handle: Callable[[LiveHop, pb.SessionReply, Buffer], None]
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
        - ``begun`` is called with the first session while it opens. A link that reaches its host
          early waits until the session is open.
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
                is_hop = hop is not last and role is not SessionRole.SUCCESSOR
                live = await self._open(hop, session, epoch, target, SessionRole.HOP if is_hop else role)
            except ConfigError:
                raise  # the adapter is at fault: no other host would take it
            except SwarmnetError as error:
                failed(hop, error)
                return None
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

    async def _open(
        self, hop: Hop, session: bytes, epoch: int, target: NextHop | None, role: SessionRole
    ) -> LiveHop:
        """Open a session on a host, after the chain's adapter was uploaded there.

        ``target``: the hop after it. None if outputs go to the client, or if a standby sends to no
        peer yet. Raises what ``upload_adapter`` raises, ``ProtocolViolation``, or ``Refused``.
        """
        request = pb.Open(
            session=session,
            epoch=epoch,
            swarm=self.hosts.swarm_id,
            manifest=self.hosts.manifest,
            span=pb.Span(start=hop.start, end=hop.end),
            next=target.to_wire(self.hosts.record_of(target.peer)) if target else None,
            wire=self.spec.wire_of(hop.precision).value,
            max_length=self.spec.max_length,
            standby=role in (SessionRole.STANDBY, SessionRole.SPARE),
            spare=role is SessionRole.SPARE,
            timed=self.spec.trace is not None,
            continues=role is SessionRole.SUCCESSOR,
            batch=self.spec.is_batch,
        )

        async def ask(adapter: bytes) -> SessionStream:
            request.adapter = adapter
            return await self._ask(hop, pb.SessionRequest(open=request))

        stream = await self.uploader.with_adapter(hop, ask)
        now = loop_time()
        announced = self.hosts.span_of(hop.peer)
        return LiveHop(hop, session, stream, now, now, announced, stands_by=request.standby)

    async def _ask(self, hop: Hop, request: pb.SessionRequest) -> SessionStream:
        """Return a session stream on which the host answered ``request`` with ``Opened``."""
        stream = await SESSION.open(
            self.hosts.transport, hop.peer, self.hosts.timing, addresses=hop.addresses
        )
        try:
            await stream.send(request)
            reply, _ = await stream.receive()
            if not reply.HasField("opened"):
                raise ProtocolViolation("the host did not answer with Opened")
        except BaseException:
            stream.close()
            raise
        return stream

    async def _attend(self, live: LiveHop) -> None:
        """Receive from one hop until its session ends. When the path improves, a new stream
        replaces the old one."""
        async with asyncio.TaskGroup() as streams:
            receiving = streams.create_task(self._receive(live))
            while await self._resume(live, receiving):
                # Outputs may still be on their way over the old stream. Its last message is Moved.
                receiving = streams.create_task(self._receive(live))
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
            # The host then ends the old stream with Moved.
            request = pb.SessionRequest(resume=pb.Resume(session=live.session))
            live.stream = await self._ask(live.hop, request)
        except SwarmnetError as error:
            _log.info("the session on %s stays on its path: %s", live.peer, error)
            return False
        finally:
            await cancel(improved)
        _log.info("the session on %s moved to a better path", live.peer)
        return True

    async def _receive(self, live: LiveHop) -> bool:
        """Receive from a hop over its present stream, and send heartbeats there.

        Returns whether the session went on with another stream.
        """
        stream = live.stream
        stream.on_heartbeat = partial(self.heartbeat, live)
        beats_s = self.hosts.timing.client_silence_s / 4
        async with in_background(live.send_heartbeats(stream, beats_s)):
            try:
                while True:
                    reply, payload = await live.receive(stream)
                    if reply.HasField("moved"):
                        return True
                    self.handle(live, reply, payload)
            except SwarmnetError as error:
                self.ended(live, error)
            except Exception as error:  # noqa: BLE001 - a bad message, or a bug
                _log.exception("a message of %s cannot be handled", live.peer)
                self.ended(live, UnhandledMessage(live.peer, error))
            finally:
                stream.close()
        return False
