"""The door of a peer: whom it has met, and who may open which streams.

Two peers meet once: they show each other their certificates on a stream of its own, which libp2p has bound to their peer
ids, so that a certificate is worth nothing to anybody else. That stream stays open. Over it they tell each other of a
renewed certificate and of newer revocations; when it has ended, they meet anew before the next stream.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from swarmnet_protocols.errors import (
    DeadlineExceeded,
    IncompatibleVersion,
    IntegrityError,
    NotAuthorised,
    PeerUnreachable,
    ProtocolViolation,
    StreamEnded,
    StreamRefused,
    SwarmnetError,
)
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.membership.admitted import AdmittedPeer, check_role
from swarmnet_protocols.membership.handshake_messages import explain, hear, hello, refusal, serials
from swarmnet_protocols.membership.membership import LOOK_S, Membership
from swarmnet_protocols.membership.pending_handshakes import PendingHandshakes
from swarmnet_protocols.membership.revocations import MAX_LISTS
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Refusal, Stream, Transport
from swarmnet_protocols.net.messages import parse, receive_within, send_within
from swarmnet_protocols.net.protocol_ids import DOOR, REVOCATIONS
from swarmnet_protocols.net.resources import Resource
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import door_pb2 as pb
from swarmnet_protocols.wire.roles import name_roles

_log = logging.getLogger(__name__)

MAX_DOORS = 256
"""Streams kept open with those we have met. Beyond these one ends, and its two peers meet anew when need be."""
MAX_DOORS_EACH = 4
"""Of them with one guest."""
MAX_REMEMBERED = 4096
"""Guests we have no such stream with any more, for want of room. They are let in all the same: what they open may be on its way."""
HELLO_PAUSE_S = 0.5
"""Between two things one peer says at the door; who says more is made to wait."""


class Handshakes:
    """Made by :meth:`run`."""

    def __init__(self, transport: Transport, membership: Membership, timing: Timing) -> None:
        self._transport = transport
        self.membership = membership
        self._timing = timing
        self._guests: dict[PeerId, AdmittedPeer] = {}
        self._doors: dict[Stream, AdmittedPeer] = {}
        self._remembered: dict[PeerId, None] = {}
        self._strangers = PendingHandshakes(transport.resources.system, Resource.PENDING_HANDSHAKES)
        self._meetings: dict[tuple[PeerId, tuple[str, ...]], asyncio.Task[None]] = {}
        self._fetching: set[PeerId] = set()
        self._tasks: dict[asyncio.Task[None], None] = {}

    @classmethod
    @asynccontextmanager
    async def run(
        cls, transport: Transport, membership: Membership, timing: Timing
    ) -> AsyncIterator["Handshakes"]:
        """A door that is watched while the context is open. ``transport`` is the one below: the door guards it."""
        door = cls(transport, membership, timing)
        await transport.serve(DOOR, door._answer)
        await transport.serve(REVOCATIONS, door._tell_revocations)
        membership.listeners.append(door._review)
        comparing = asyncio.create_task(door._keep_comparing(), name="door")
        try:
            yield door
        finally:
            membership.listeners.remove(door._review)
            await cancel(comparing, *door._tasks)
            for guest in door._guests.values():
                guest.end()

    # ---- who may do what ---------------------------------------------------------------------------------

    def check(self, peer: PeerId, protocol: ProtocolSpec) -> None:
        """Raises ``NotAuthorised`` unless ``peer`` may open streams under ``protocol`` here."""
        if not self.membership.is_public:
            check_role(self._guest(peer).member, protocol.roles, protocol)

    async def settled(self, peer: PeerId) -> None:
        """Wait for the end of a meeting with ``peer`` that is under way: its word to us and its first stream may cross."""
        meetings = [task for (other, _), task in self._meetings.items() if other == peer]
        if meetings and peer not in self._guests:
            await asyncio.wait(meetings)

    def check_serving(self, protocol: ProtocolSpec) -> None:
        """Raises ``NotAuthorised`` unless others may open streams under ``protocol`` to us."""
        if not self.membership.is_public:
            check_role(self.membership.me, protocol.served_by, protocol)

    @asynccontextmanager
    async def admitting(self, stream: Stream, protocol: ProtocolSpec) -> AsyncIterator[None]:
        """``check`` an incoming stream, and have it end with the membership of its opener for as long as the context.

        One that is not let in learns why.
        """
        await self.settled(stream.peer)
        try:
            self.check(stream.peer, protocol)
            self.hold(stream)
        except NotAuthorised as error:
            stream.refuse(Refusal(str(error)))
            raise
        try:
            yield
        finally:
            self.release(stream)

    def hold(self, stream: Stream) -> None:
        """Have ``stream`` closed when the membership of its other side ends, until it is released.

        Raises ``NotAuthorised`` when it has ended already.
        """
        if not self.membership.is_public:
            self._guest(stream.peer).streams[stream] = None

    def release(self, stream: Stream) -> None:
        """Undo ``hold``; idempotent."""
        if guest := self._guests.get(stream.peer):
            guest.streams.pop(stream, None)
            self._forget_if_gone(stream.peer, guest)

    async def enter(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> None:
        """Meet ``peer``, unless we have, before a stream under ``protocol``.

        Raises ``NotAuthorised``, with who refused whom and why, ``StreamRefused`` when there is no room at its door, or
        ``PeerUnreachable`` within ``deadline_s``.
        """
        if self.membership.is_public:
            return
        check_role(self.membership.me, protocol.roles, protocol)
        if (guest := self._guests.get(peer)) is None or not guest.doors:
            try:
                async with asyncio.timeout(deadline_s):
                    await asyncio.shield(self._meeting(peer, tuple(addresses)))
            except TimeoutError as error:
                raise PeerUnreachable(f"{peer} did not answer within {deadline_s:g} s") from error
        check_role(self._guest(peer).member, protocol.served_by, protocol)

    async def told(self, peer: PeerId) -> None:
        """Wait until ``peer``, whom we have met, has all the revocations that we have."""
        guest = self._guest(peer)
        while self.membership.revocations.newer_than(guest.serials):
            guest.spoke.clear()
            await guest.spoke.wait()

    def _guest(self, peer: PeerId) -> AdmittedPeer:
        try:
            return self._guests[peer]
        except KeyError:
            raise NotAuthorised(f"{peer} has not shown that it is a member") from None

    # ---- meeting -----------------------------------------------------------------------------------------

    def _meeting(self, peer: PeerId, addresses: tuple[str, ...]) -> "asyncio.Task[None]":
        """The meeting that is under way, or a new one. It goes on when whoever waits for it gives up."""
        key = (peer, addresses)
        if key not in self._meetings:
            meeting = self._meetings[key] = self._own(self._meet(peer, addresses))
            meeting.add_done_callback(lambda _: self._meetings.pop(key))
        return self._meetings[key]

    async def _meet(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        try:
            stream = await self._transport.open(
                peer, DOOR, addresses=addresses, deadline_s=self._timing.handshake_s
            )
        except IncompatibleVersion as error:
            raise NotAuthorised(f"{peer} is in no private swarm: {error}") from error
        try:
            await stream.send(hello(self.membership))
            said, shown = await hear(stream, self._timing.handshake_s)
            try:
                guest = self._take(peer, said, shown)
            except NotAuthorised as error:
                await self._refuse(stream, error)
                raise
        except BaseException as error:
            stream.close()
            if isinstance(error, StreamEnded | DeadlineExceeded) and not isinstance(error, StreamRefused):
                raise PeerUnreachable(f"{peer} does not answer at the door: {error}") from error
            raise
        self._open_door(guest, stream)
        self._own(self._listen(guest, stream))

    async def _answer(self, stream: Stream) -> None:
        """Somebody is at the door."""
        peer = stream.peer
        with self._strangers.enter(stream):
            said, shown = await hear(stream, self._timing.handshake_s)
        try:
            guest = self._take(peer, said, shown)
        except NotAuthorised as error:
            await self._refuse(stream, error)
            raise
        self._open_door(guest, stream)
        try:
            await send_within(stream, hello(self.membership), self._timing.handshake_s)
        except BaseException:
            self._close_door(guest, stream)
            raise
        await self._listen(guest, stream)

    def _take(self, peer: PeerId, said: pb.DoorMessage, shown: bytes) -> AdmittedPeer:
        """The guest who said this. Raises ``NotAuthorised``."""
        if said.HasField("refused"):
            with contextlib.suppress(IntegrityError, NotAuthorised):
                self.membership.take_revocations([shown] if shown else [])
            raise explain(peer, said.refused, self.membership.clock())
        if said.hello.swarm != self.membership.rules.swarm:
            raise NotAuthorised(f"{peer} belongs to another swarm")
        certificate = self.membership.open(said.hello.certificate)
        member = self.membership.admit(peer, certificate)
        guest = self._guests.get(peer)
        if guest is None:
            scope = self._transport.resources.peer(peer, asyncio.get_running_loop().time())
            guest = self._guests[peer] = AdmittedPeer(
                member, certificate, scope.reserve(Resource.ADMITTED_PEERS)
            )
        guest.member, guest.certificate = member, certificate
        guest.serials = {each.signer: each.serial for each in said.hello.serials[:MAX_LISTS]}
        guest.spoke.set()
        self._arm(peer, guest)
        ours = self.membership.revocations.serials
        news = [signer for signer, serial in guest.serials.items() if ours.get(signer, -1) < serial]
        if news and peer not in self._fetching:
            self._fetching.add(peer)
            self._own(self._fetch_revocations(peer))
        return guest

    # ---- while the door is open --------------------------------------------------------------------------

    def _open_door(self, guest: AdmittedPeer, stream: Stream) -> None:
        guest.doors[stream] = None
        self._doors[stream] = guest
        self._remembered.pop(stream.peer, None)
        if len(guest.doors) > MAX_DOORS_EACH:
            self._close_door(guest, next(iter(guest.doors)))
        if len(self._doors) > MAX_DOORS:
            self._shut_one_of(list(self._doors)[:-1])

    def _shut_one_of(self, doors: Sequence[Stream]) -> None:
        """The oldest of those whose guests have nothing else open, or of all; and remember its guest."""
        stream = next((each for each in doors if not self._doors[each].streams), doors[0])
        self._remembered[stream.peer] = None
        self._close_door(self._doors[stream], stream)
        if len(self._remembered) > MAX_REMEMBERED:
            first = next(iter(self._remembered))
            del self._remembered[first]
            if first in self._guests:
                self._forget_if_gone(first, self._guests[first])

    def _close_door(self, guest: AdmittedPeer, stream: Stream) -> None:
        stream.close()
        self._doors.pop(stream, None)
        guest.doors.pop(stream, None)
        self._forget_if_gone(stream.peer, guest)

    async def _listen(self, guest: AdmittedPeer, stream: Stream) -> None:
        """Hear what a guest has to say until it is gone."""
        try:
            while True:
                await asyncio.sleep(HELLO_PAUSE_S)
                said, shown = await hear(stream, None)
                if stream not in guest.doors:
                    return
                self._take(stream.peer, said, shown)
        except NotAuthorised as error:
            self._expel(stream.peer, error)
        finally:
            self._close_door(guest, stream)

    def _forget_if_gone(self, peer: PeerId, guest: AdmittedPeer) -> None:
        is_gone = not guest.doors and not guest.streams and peer not in self._remembered
        if is_gone and self._guests.get(peer) is guest:
            del self._guests[peer]
            guest.end()

    def _review(self) -> None:
        """Our own certificate or the list of revocations has changed: tell everybody who is still to be told."""
        for peer, guest in list(self._guests.items()):
            self._check_again(peer, guest)
        for stream in self._doors:
            self._own(self._say(stream, hello(self.membership)))

    async def _keep_comparing(self) -> None:
        """Say every so often which revocations we have: what did not get through is fetched then."""
        while True:
            await asyncio.sleep(self.membership.rules.revocation_refresh_s)
            for stream in self._doors:
                self._own(self._say(stream, hello(self.membership)))

    def _arm(self, peer: PeerId, guest: AdmittedPeer) -> None:
        if guest.timer is not None:
            guest.timer.cancel()
        left_s = guest.member.until - self.membership.clock()
        guest.timer = asyncio.get_running_loop().call_later(
            min(max(left_s, 1.0), LOOK_S), self._check_again, peer, guest
        )

    def _check_again(self, peer: PeerId, guest: AdmittedPeer) -> None:
        if self._guests.get(peer) is not guest:
            return
        try:
            member = self.membership.admit(peer, guest.certificate)
            if not guest.member.roles <= member.roles:  # what is open may need those that it has lost
                raise NotAuthorised(f"it is in the swarm as {name_roles(member.roles)} only from now on")
            guest.member = member
            self._arm(peer, guest)
        except NotAuthorised as error:
            self._expel(peer, error)

    def _expel(self, peer: PeerId, reason: NotAuthorised) -> None:
        """End everything that is open with a peer, and tell it why."""
        self._remembered.pop(peer, None)
        guest = self._guests.pop(peer, None)
        if guest is None:
            return
        _log.info("%s has to go: %s", peer, reason)
        doors, guest.doors = guest.doors, {}
        for stream in doors:
            self._doors.pop(stream, None)
            self._own(self._refuse(stream, reason))
        guest.end(Refusal(str(reason)))

    async def _refuse(self, stream: Stream, reason: NotAuthorised) -> None:
        try:
            await self._say(stream, refusal(reason, self.membership.clock()))
        finally:
            stream.close()

    async def _say(self, stream: Stream, message: Message) -> None:
        """Say something to somebody who may be gone. The stream of one who does not listen ends: what is said would pile up."""
        try:
            async with asyncio.timeout(self._timing.handshake_s):
                with contextlib.suppress(StreamEnded):
                    await stream.send(message)
        except TimeoutError:
            stream.close()

    # ---- revocations -------------------------------------------------------------------------------------

    async def _tell_revocations(self, stream: Stream) -> None:
        async with self.admitting(stream, REVOCATIONS):
            message = await receive_within(stream, self._timing.handshake_s)
            request = parse(pb.RevocationsRequest, message.header)
            theirs = {each.signer: each.serial for each in request.serials[:MAX_LISTS]}
            for sealed in self.membership.revocations.newer_than(theirs):
                reply = Message(pb.RevocationsReply().SerializeToString(), sealed)
                await send_within(stream, reply, self._timing.chunk_s)

    async def _fetch_revocations(self, peer: PeerId) -> None:
        """Ask ``peer`` for the lists we lack. One who sends what is no list has to go."""
        try:
            stream = await self._transport.open(peer, REVOCATIONS, deadline_s=self._timing.chunk_s)
            with contextlib.closing(stream):
                request = pb.RevocationsRequest(serials=serials(self.membership))
                await stream.send(Message(request.SerializeToString()))
                for _ in range(MAX_LISTS):
                    message = await receive_within(stream, self._timing.chunk_s)
                    with contextlib.suppress(NotAuthorised):  # of a signer whom an older swarm file named
                        self.membership.take_revocations([bytes(message.payload)])
        except (IntegrityError, ProtocolViolation) as error:
            self._expel(peer, NotAuthorised(f"what it sends are no revocations: {error}"))
        except SwarmnetError as error:  # the end of the stream is the end of the lists
            _log.debug("revocations of %s: %s", peer, error)
        finally:
            self._fetching.discard(peer)

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        del self._tasks[task]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, SwarmnetError):  # of a meeting: whoever waits for it has it too
            _log.debug("at the door: %s", error)
        else:
            _log.error("at the door", exc_info=error)
