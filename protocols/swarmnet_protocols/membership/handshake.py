"""The membership handshake: two peers of a private swarm prove their membership to each other.

The handshake comes before any other protocol. For this peer, every other peer is in one of these
states:

1. **Unknown.** This peer refuses the other peer's streams and DHT calls before it reads a byte,
   except handshake and admission streams.
2. **Pending.** A handshake stream is open and one Hello is missing. Hello contains a certificate
   and the serials of the sender's revocation lists. The opener sends first. This peer's own
   handshakes are tasks that all callers of :meth:`Handshakes.ensure` share. A handshake that
   another peer opens takes a slot of ``Resource.PENDING_HANDSHAKES`` until its Hello arrives.
3. **Admitted.** The certificate was accepted. Streams may be opened in both directions, and
   :class:`AdmittedPeer` tracks them. The handshake stream stays open. A side sends Hello again when
   its certificate, rules or revocation lists change, and every ``revocation_refresh_s``. A side
   that lacks a list fetches it under ``REVOCATIONS``.
4. **Admitted without a handshake stream.** Each peer keeps ``MAX_STREAMS`` handshake streams. When
   one closes to make room, its peer stays admitted, because it may just have opened another stream.
   A stream in the other direction needs a new handshake.
5. **Expelled.** The certificate has ended or was revoked, or the peer sent an invalid revocation
   list. Each of its streams is refused with the reason, and a revoked peer gets the list that names
   it. Then it is unknown.

Hello also names the serial of the sender's swarm file. A peer with an older file asks for the newer
one in its own Hello, before it judges the sender. Only the newer file may name the key that signed
the sender's certificate. The file is signed by the authority, so it needs no trust in the sender.
Only members get it.

An admitted peer in state 3 without a stream is forgotten and becomes unknown. A public swarm has no
certificates and no handshakes.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from swarmnet_protocols.errors import (
    ConfigError,
    DeadlineExceeded,
    IncompatibleVersion,
    IntegrityError,
    NotAuthorised,
    PeerUnreachable,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
)
from swarmnet_protocols.machine.aio import cancel, in_background, loop_time, persist
from swarmnet_protocols.machine.clock import clock_advice
from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.membership.admitted_peers import AdmittedPeer, AdmittedPeers
from swarmnet_protocols.membership.membership import CLOCK_CHECK_S, Membership, Revoked, check_role
from swarmnet_protocols.membership.revocations import MAX_LISTS
from swarmnet_protocols.net import (
    PeerId,
    ProtocolSpec,
    Stream,
    Transport,
)
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.subnets import SubnetSlots
from swarmnet_protocols.net.protocol_ids import HANDSHAKE, REVOCATIONS
from swarmnet_protocols.net.refusal import Refusal, Refused, printable
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import handshake_pb2 as pb
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire.roles import name_roles

_log = logging.getLogger(__name__)

MAX_FILES_ASKED = 4096
"""Most peers remembered as asked for their swarm file."""
MAX_NAME_CHARS = 64
"""Most characters of a name that a peer gives itself."""
HELLO_PAUSE_S = 0.5
"""Seconds between two messages read from one handshake stream. With less, one peer can make this
one check more signatures."""

HandshakeStream = TypedStream[pb.HandshakeMessage, pb.HandshakeMessage]


class Handshakes:
    """The handshakes of one peer, and the check that every other stream passes.

    ``transport`` is the one below :class:`GuardedTransport`. ``name``: the name of this node that
    everybody sees; empty without one.
    """

    def __init__(self, transport: Transport, membership: Membership, timing: Timing, name: str = "") -> None:
        self._transport = transport
        self._name = name
        self.membership = membership
        self._timing = timing
        self.admitted = AdmittedPeers()
        self._pending = SubnetSlots(transport.resources.system, Resource.PENDING_HANDSHAKES)
        """Slots of incoming handshakes whose Hello has not arrived."""
        self._outgoing: dict[tuple[PeerId, tuple[str, ...]], asyncio.Task[None]] = {}
        """Handshakes of this peer that are running, by peer and addresses."""
        self._fetching: set[PeerId] = set()
        """Peers whose revocation lists are being fetched."""
        self._files_asked: Latest[PeerId, int] = Latest(MAX_FILES_ASKED)
        """Peer → serial of the newest swarm file it was asked for, the last peer at the end."""
        self._tasks: dict[asyncio.Task[None], None] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Handshakes"]:
        """Answer handshakes while the context is open."""
        await HANDSHAKE.serve(self._transport, self._answer, self._timing)
        await REVOCATIONS.serve(self._transport, self._serve_revocations, self._timing)
        self.membership.listeners.append(self._on_membership_change)
        try:
            async with in_background(persist("the renewal of handshakes", self._send_hellos_periodically)):
                yield self
        finally:
            self.membership.listeners.remove(self._on_membership_change)
            await cancel(*self._tasks)
            self.admitted.end()

    # ---- checks before a stream -----------------------------------------------------------------

    def check(self, peer: PeerId, protocol: ProtocolSpec) -> None:
        """Raise ``NotAuthorised`` unless ``peer`` is admitted with a role that may open
        ``protocol``.
        """
        if not self.membership.is_public:
            check_role(self.admitted.get(peer).member, protocol.roles, protocol)

    def check_serving(self, protocol: ProtocolSpec) -> None:
        """Raise ``NotAuthorised`` unless this peer has a role that may serve ``protocol``."""
        if not self.membership.is_public:
            check_role(self.membership.me, protocol.served_by, protocol)

    async def wait_outgoing(self, peer: PeerId) -> None:
        """Wait for a running handshake that this peer has opened to ``peer``.

        A stream of ``peer`` may arrive before its Hello is processed.
        """
        outgoing = [task for (other, _), task in self._outgoing.items() if other == peer]
        if outgoing and peer not in self.admitted.by_peer:
            await asyncio.wait(outgoing)

    @asynccontextmanager
    async def admitting(self, stream: Stream, protocol: ProtocolSpec) -> AsyncIterator[None]:
        """Check an incoming stream, and track it while the context is open.

        If its opener may not open ``protocol``, refuses the stream with the reason and raises
        ``NotAuthorised``.
        """
        await self.wait_outgoing(stream.peer)
        try:
            self.check(stream.peer, protocol)
            self.track(stream)
        except NotAuthorised as error:
            stream.refuse(self._refusal(error))
            raise
        try:
            yield
        finally:
            self.untrack(stream)

    def track(self, stream: Stream) -> None:
        """Refuse ``stream`` when the other side's membership ends, until :meth:`untrack`.

        Raises ``NotAuthorised`` when it has ended already.
        """
        if not self.membership.is_public:
            self.admitted.get(stream.peer).streams[stream] = None

    def untrack(self, stream: Stream) -> None:
        """Undo :meth:`track`; idempotent."""
        self.admitted.untrack(stream)

    async def ensure(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> None:
        """Complete a handshake with ``peer`` before a stream under ``protocol``, unless one is
        open.

        Raises ``NotAuthorised`` with the side that refused and the reason, ``Refused`` when
        ``peer`` has reached a resource limit, and ``PeerUnreachable`` within ``deadline_s``.
        """
        if self.membership.is_public:
            return
        check_role(self.membership.me, protocol.roles, protocol)
        if (admitted := self.admitted.by_peer.get(peer)) is None or not admitted.handshake_streams:
            try:
                async with asyncio.timeout(deadline_s):
                    await asyncio.shield(self._outgoing_handshake(peer, tuple(addresses)))
            except TimeoutError as error:
                raise PeerUnreachable(f"{peer} did not answer within {deadline_s:g} s") from error
        check_role(self.admitted.get(peer).member, protocol.served_by, protocol)

    async def wait_revocations_known(self, peer: PeerId) -> None:
        """Wait until the last Hello of ``peer``, an admitted peer, names all of this peer's
        revocation lists.
        """
        admitted = self.admitted.get(peer)
        while self.membership.revocations.newer_than(admitted.serials):
            admitted.hello_received.clear()
            await admitted.hello_received.wait()

    # ---- the handshake --------------------------------------------------------------------------

    def _outgoing_handshake(self, peer: PeerId, addresses: tuple[str, ...]) -> "asyncio.Task[None]":
        """Return the running handshake with ``peer``, or start one.

        It continues when its callers are cancelled.
        """
        key = (peer, addresses)
        if key not in self._outgoing:
            task = self._outgoing[key] = self._spawn(self._open(peer, addresses))
            task.add_done_callback(lambda _: self._outgoing.pop(key))
        return self._outgoing[key]

    async def _open(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        try:
            handshake = await HANDSHAKE.open(
                self._transport,
                peer,
                self._timing,
                addresses=addresses,
                deadline_s=self._timing.handshake_s,
            )
        except IncompatibleVersion as error:
            raise NotAuthorised(f"{peer} is in no private swarm: {error}") from error
        stream = handshake.stream
        try:
            await handshake.send(self._hello())
            hello = await self._with_newer_file(handshake, await self._receive(handshake))
            try:
                admitted = self._admit(peer, hello)
                if hello.wants_file:
                    await self._send_file(handshake)
                    admitted = self._admit(peer, await self._receive(handshake))
            except NotAuthorised as error:
                await self._refuse(stream, error)
                raise
        except BaseException as error:
            stream.close()
            if isinstance(error, StreamEnded | DeadlineExceeded) and not isinstance(error, Refused):
                raise PeerUnreachable(f"{peer} does not answer the handshake: {error}") from error
            raise
        self.admitted.add_stream(admitted, stream)
        self._spawn(self._receive_updates(admitted, handshake))

    async def _answer(self, handshake: HandshakeStream) -> None:
        stream = handshake.stream
        with self._pending.slot(stream):
            hello = await self._with_newer_file(handshake, await self._receive(handshake))
        try:
            admitted = self._admit(stream.peer, hello)
        except NotAuthorised as error:
            await self._refuse(stream, error)
            raise
        self.admitted.add_stream(admitted, stream)
        try:
            await handshake.send(self._hello())
        except BaseException:
            self.admitted.close_stream(admitted, stream)
            raise
        await self._receive_updates(admitted, handshake)

    async def _receive(self, handshake: HandshakeStream) -> pb.Hello:
        """Return the next Hello. Raises ``NotAuthorised`` when the other side does not admit this
        peer.
        """
        try:
            message, payload = await handshake.receive()
            if message.HasField("revoked"):
                with contextlib.suppress(IntegrityError, NotAuthorised):
                    self.membership.add_revocations([bytes(payload)])
                message, _ = await handshake.receive()  # raises the refusal that follows
            elif message.HasField("swarm_file") and handshake.stream.peer in self._files_asked:
                self.membership.adopt_swarm_file(bytes(payload))
                message, _ = await handshake.receive()  # the Hello that follows
        except Refused as refused:
            if refused.reason != refusal_pb2.REASON_NOT_AUTHORISED:
                raise
            raise not_admitted(refused, self.membership.clock()) from refused
        if not message.HasField("hello"):
            raise ProtocolViolation("a handshake message other than Hello")
        return message.hello

    async def _with_newer_file(self, handshake: HandshakeStream, hello: pb.Hello) -> pb.Hello:
        """Return ``hello``, or, if its sender has a newer swarm file, ask for it and return the
        next Hello.
        """
        peer = handshake.stream.peer
        if not self._is_file_wanted(peer, hello):
            return hello
        await handshake.send(self._hello(wants_file=True))
        return await self._receive(handshake)

    def _is_file_wanted(self, peer: PeerId, hello: pb.Hello) -> bool:
        """Tell whether to ask the sender of ``hello`` for its swarm file.

        It is asked once for each serial, since it may have no file.
        """
        has_newer = hello.file_serial > max(self.membership.rules.serial, self._files_asked.get(peer, 0))
        if hello.swarm != self.membership.rules.swarm or self.membership.adopt is None or not has_newer:
            return False
        self._files_asked[peer] = hello.file_serial
        return True

    async def _send_file(self, handshake: HandshakeStream) -> None:
        """Send the swarm file to a member that asked for it, then Hello again."""
        if (read := self.membership.swarm_file) is not None:
            with contextlib.suppress(ConfigError):
                await handshake.send(pb.HandshakeMessage(swarm_file=pb.SwarmFile()), read())
        await handshake.send(self._hello())

    def _admit(self, peer: PeerId, hello: pb.Hello) -> AdmittedPeer:
        """Admit ``peer``, or update what it has shown. Raises ``NotAuthorised`` if it is not a
        member.
        """
        if hello.swarm != self.membership.rules.swarm:
            raise NotAuthorised(f"{peer} belongs to another swarm")
        certificate = self.membership.open(hello.certificate)
        member = self.membership.admit(peer, certificate)
        admitted = self.admitted.by_peer.get(peer)
        if admitted is None:
            scope = self._transport.resources.peer(peer, loop_time())
            admitted = self.admitted.by_peer[peer] = AdmittedPeer(
                member, certificate, scope.reserve(Resource.ADMITTED_PEERS)
            )
        admitted.member, admitted.certificate = member, certificate
        admitted.name = printable(hello.name[:MAX_NAME_CHARS])
        admitted.serials = {each.signer: each.serial for each in hello.serials[:MAX_LISTS]}
        admitted.hello_received.set()
        self._schedule_check(peer, admitted)
        ours = self.membership.revocations.serials
        lacks_a_list = any(ours.get(signer, -1) < serial for signer, serial in admitted.serials.items())
        if lacks_a_list and peer not in self._fetching:
            self._fetching.add(peer)
            self._spawn(self._fetch_revocations(peer))
        return admitted

    # ---- while a handshake stream is open -------------------------------------------------------

    async def _receive_updates(self, admitted: AdmittedPeer, handshake: HandshakeStream) -> None:
        """Receive Hellos on an open handshake stream until it ends."""
        stream = handshake.stream
        handshake.silence_s = math.inf  # the next Hello is sent when something has changed
        try:
            while True:
                await asyncio.sleep(HELLO_PAUSE_S)
                hello = await self._receive(handshake)
                if stream not in admitted.handshake_streams:  # expelled meanwhile
                    return
                if self._is_file_wanted(stream.peer, hello):
                    await handshake.send(self._hello(wants_file=True))
                    continue
                self._admit(stream.peer, hello)
                if hello.wants_file:
                    await self._send_file(handshake)
        except NotAuthorised as error:
            self._expel(stream.peer, error)
        finally:
            self.admitted.close_stream(admitted, stream)

    def _on_membership_change(self) -> None:
        """Check every admitted peer again, after this peer's certificate, rules or revocation lists
        changed.

        Peers that stay admitted get a new Hello.
        """
        for peer, admitted in list(self.admitted.by_peer.items()):
            self._recheck(peer, admitted)
        self._send_hellos()

    async def _send_hellos_periodically(self) -> None:
        """Announce the revocation lists again and again.

        A peer may have missed an announcement, or failed to fetch a list.
        """
        while True:
            await asyncio.sleep(self.membership.rules.revocation_refresh_s)
            self._send_hellos()

    def _send_hellos(self) -> None:
        for stream in self.admitted.streams:
            self._spawn(self._send(stream, self._hello()))

    def _schedule_check(self, peer: PeerId, admitted: AdmittedPeer) -> None:
        if admitted.timer is not None:
            admitted.timer.cancel()
        left_s = admitted.member.until - self.membership.clock()
        admitted.timer = asyncio.get_running_loop().call_later(
            min(max(left_s, 1.0), CLOCK_CHECK_S), self._recheck, peer, admitted
        )

    def _recheck(self, peer: PeerId, admitted: AdmittedPeer) -> None:
        if self.admitted.by_peer.get(peer) is not admitted:
            return
        try:
            member = self.membership.admit(peer, admitted.certificate)
            # an open stream may need a role that was lost
            if not admitted.member.roles <= member.roles:
                raise NotAuthorised(f"its only remaining roles are {name_roles(member.roles)}")
            admitted.member = member
            self._schedule_check(peer, admitted)
        except NotAuthorised as error:
            self._expel(peer, error)

    def _expel(self, peer: PeerId, reason: NotAuthorised) -> None:
        """Refuse every open stream of ``peer`` with ``reason``, and forget it."""
        admitted = self.admitted.remove(peer)
        if admitted is None:
            return
        _log.info("%s is expelled: %s", peer, reason)
        streams, admitted.handshake_streams = admitted.handshake_streams, {}
        for stream in streams:
            self._spawn(self._refuse(stream, reason))
        admitted.end(self._refusal(reason))

    async def _refuse(self, stream: Stream, error: NotAuthorised) -> None:
        """Refuse a handshake stream. A revoked peer gets the list that names it."""
        try:
            if isinstance(error, Revoked):
                await self._send(stream, pb.HandshakeMessage(revoked=pb.Revoked()), error.revocation_list)
        finally:
            stream.refuse(self._refusal(error))

    def _refusal(self, error: NotAuthorised) -> Refusal:
        return Refusal(refusal_pb2.REASON_NOT_AUTHORISED, str(error), unix_time=self.membership.clock())

    async def _send(self, stream: Stream, message: pb.HandshakeMessage, payload: bytes = b"") -> None:
        """Send ``message``. If the other side does not read, the stream is closed.

        Otherwise messages would queue without bound.
        """
        try:
            await HANDSHAKE.accept(stream, self._timing).send(message, payload)
        except DeadlineExceeded:
            stream.close()
        except StreamEnded:
            pass

    def _hello(self, *, wants_file: bool = False) -> pb.HandshakeMessage:
        membership = self.membership
        return pb.HandshakeMessage(
            hello=pb.Hello(
                swarm=membership.rules.swarm,
                certificate=membership.certificate,
                serials=self._serials(),
                file_serial=membership.rules.serial if membership.swarm_file is not None else 0,
                wants_file=wants_file,
                name=self._name,
            )
        )

    def _serials(self) -> list[pb.Serial]:
        ours = self.membership.revocations.serials
        return [pb.Serial(signer=signer, serial=serial) for signer, serial in ours.items()]

    # ---- revocation lists -----------------------------------------------------------------------

    async def _serve_revocations(
        self, lists: TypedStream[pb.RevocationsReply, pb.RevocationsRequest]
    ) -> None:
        async with self.admitting(lists.stream, REVOCATIONS):
            request, _ = await lists.receive()
            theirs = {each.signer: each.serial for each in request.serials[:MAX_LISTS]}
            for sealed in self.membership.revocations.newer_than(theirs):
                await lists.send(pb.RevocationsReply(), sealed)

    async def _fetch_revocations(self, peer: PeerId) -> None:
        """Ask ``peer`` for the lists that this peer lacks. A peer that sends anything else is
        expelled.
        """
        try:
            deadline_s = self._timing.chunk_s
            lists = await REVOCATIONS.open(self._transport, peer, self._timing, deadline_s=deadline_s)
            with contextlib.closing(lists):
                await lists.send(pb.RevocationsRequest(serials=self._serials()))
                for _ in range(MAX_LISTS):
                    _, sealed = await lists.receive()
                    # The list may be of an issuer that only an older swarm file names.
                    with contextlib.suppress(NotAuthorised):
                        self.membership.add_revocations([bytes(sealed)])
        except (IntegrityError, ProtocolViolation) as error:
            self._expel(peer, NotAuthorised(f"it sent an invalid revocation list: {error}"))
        except SwarmnetError as error:  # the end of the stream is the end of the lists
            _log.debug("revocations of %s: %s", peer, error)
        finally:
            self._fetching.discard(peer)

    # ---- tasks ----------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        del self._tasks[task]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, SwarmnetError):  # the callers of the handshake get it, too
            _log.debug("handshake: %s", error)
        else:
            _log.error("handshake", exc_info=error)


def not_admitted(refused: Refused, now: float) -> NotAuthorised:
    """Return the error for a peer that does not admit this one.

    It hints at the clock if the two clocks differ.
    """
    advice = clock_advice(refused.unix_time - now) if refused.unix_time else ""
    return NotAuthorised(str(refused), hint=advice or "ask the owner of the swarm for an invite")
