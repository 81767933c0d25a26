"""Chooses the path of every stream: direct where possible, otherwise through a relay."""

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from swarmnet_protocols.errors import (
    DeadlineExceeded,
    IncompatibleVersion,
    IntegrityError,
    PeerUnreachable,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
)
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Stream, Transport, TransportWrapper
from swarmnet_protocols.net.dialling import is_loopback, relay_of
from swarmnet_protocols.net.framed_stream import FramedStream
from swarmnet_protocols.net.identity import Identity, public_key_of
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.multiaddr import Multiaddr, parse_multiaddr
from swarmnet_protocols.net.p2pd.transport import P2pdTransport
from swarmnet_protocols.net.protocol_ids import ADAPTER, EXCHANGE, LINK, PASS, RELAY, SESSION, STATE
from swarmnet_protocols.net.typed_stream import parse, receive_within, send_within
from swarmnet_protocols.reachability.circuit import CircuitEnd, join
from swarmnet_protocols.reachability.relay import MAX_UNCONFIRMED
from swarmnet_protocols.reachability.reservations import RelayReservation, Reservations
from swarmnet_protocols.wire import relay_pb2 as pb
from swarmnet_protocols.wire.report_pb2 import Reach

_log = logging.getLogger(__name__)

HEAD_START_S = 0.3
"""Seconds that direct addresses are tried alone. After that, a relay is asked as well."""
PUNCH_WAIT_S = 1.5
"""Most seconds that a stream of ``_WORTH_A_PUNCH`` waits for a hole punch in progress."""
ACCEPT_S = 5.0
"""Timeout in seconds for each handshake message of an incoming circuit."""
MAX_OBSERVERS = 4
"""Most relays whose observed address of this peer is remembered; the latest stay."""
MAX_REMEMBERED = 256
"""Most peers whose circuit addresses are remembered, for streams opened without addresses."""
_WORTH_A_PUNCH = frozenset(each.id for each in (SESSION, LINK, PASS, ADAPTER, EXCHANGE, STATE))
"""Protocols whose streams are long-lived or carry many bytes."""


class RoutedTransport(TransportWrapper):
    """A transport that uses relays where no direct connection is possible, in both directions.

    The membership handshake runs above this transport, also over circuits. Circuits themselves are
    requested over the transport above that handshake (``guarded``). So only members use the relays
    of a private swarm.
    """

    def __init__(
        self,
        direct: P2pdTransport,
        identity: Identity,
        *,
        guarded: Callable[[], Transport] | None = None,
        punch: Callable[[PeerId], asyncio.Task[bool] | None] = lambda _: None,
        describe_reach: Callable[[], Reach] = Reach,
    ) -> None:
        """The layers above this one are made later, so they are looked up when they are needed.

        - ``guarded`` returns the transport over which circuits are requested and accepted; by
          default, this one.
        - ``punch`` starts hole punching to a peer, unless that failed lately. Returns the first try
          while it runs, else None.
        - ``describe_reach`` returns how others reach this peer.
        """
        super().__init__(direct)
        self.direct = direct
        self._identity = identity
        self._guarded = guarded or (lambda: self)
        self._punch = punch
        self._describe_reach = describe_reach
        self._accepting = Counter[PeerId]()
        """Incoming circuits with a handshake in progress, by relay.

        A relay that announces more than an honest one would gets no answer.
        """
        self.reservations: Reservations | None = None
        """The relay reservations of this peer; None if it can be dialled."""
        self._external_addresses: tuple[str, ...] = ()
        self._relays_of: Latest[PeerId, Sequence[tuple[PeerId, str]]] = Latest(MAX_REMEMBERED)
        """The relays of each peer, from the last circuits to it."""
        self.observed: Latest[PeerId, Multiaddr] = Latest(MAX_OBSERVERS)
        """The address of this peer as each relay last saw it."""
        self._circuits_to: defaultdict[PeerId, set[FramedStream]] = defaultdict(set)
        """Open streams through relays that this peer opened, by peer."""

    # ---- addresses ------------------------------------------------------------------------------

    def own_addresses(self) -> Sequence[str]:
        """Return the multiaddrs of the ports that this peer listens on or its router forwards."""
        return self.direct.addresses()

    def addresses(self) -> Sequence[str]:
        """Return the addresses that other peers can use, as ``Transport.addresses``.

        These are external and own addresses. If this peer cannot be dialled, they are own and
        circuit addresses. Loopback addresses are left out if there are others.
        """
        own = sorted(self.own_addresses(), key=_by_reach)
        others = [each for each in own if not is_loopback(each)]
        suffix = f"/p2p/{self.peer_id}"
        circuits = [
            f"{each.address}/p2p/{each.relay}/p2p-circuit{suffix}"
            for each in (self.reservations.held if self.reservations is not None else ())
        ]
        external = [each + suffix for each in self._external_addresses]
        return tuple(dict.fromkeys([*external, *circuits, *(others or own)]))

    def reach(self) -> Reach:
        return self._describe_reach()

    def reached_at(self, addresses: Iterable[str]) -> None:
        """Announce the addresses where other peers have reached this one, in addition to its
        own."""
        self._external_addresses = tuple(addresses)

    async def connect(self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        """Connect to ``peer`` directly. Raises ``PeerUnreachable``."""
        await self.direct.connect(peer, addresses, deadline_s=deadline_s)

    def observed_addresses(self) -> Sequence[Multiaddr]:
        """Return this peer's addresses, as its own relays and other peers' relays see them."""
        held = self.reservations.held if self.reservations is not None else ()
        return [
            each for each in (*(one.observed for one in held), *self.observed.values()) if each is not None
        ]

    # ---- streams of this peer -------------------------------------------------------------------

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        """Open a stream, as ``Transport.open``.

        Uses an existing connection if there is one. Otherwise dials direct addresses first, and
        asks relays after ``HEAD_START_S``.
        """
        circuits = self._circuits(peer, addresses)
        if not circuits:
            return await self.direct.open(peer, protocol, addresses=addresses, deadline_s=deadline_s)
        if await self.direct.is_connected(peer):
            return await self.direct.open(peer, protocol, deadline_s=deadline_s)
        self._relays_of[peer] = circuits
        if protocol.id in _WORTH_A_PUNCH and (punching := self._punch(peer)) is not None:
            await asyncio.wait([punching], timeout=min(PUNCH_WAIT_S, deadline_s / 2))
            if await self.direct.is_connected(peer):
                return await self.direct.open(peer, protocol, deadline_s=deadline_s)
        direct = self.direct.permitted(peer, [each for each in addresses if relay_of(each) is None])
        if not direct:
            return await self._open_circuit(peer, protocol, circuits, deadline_s)
        return await self._open_either(peer, protocol, direct, circuits, deadline_s)

    async def _open_either(
        self,
        peer: PeerId,
        protocol: ProtocolSpec,
        direct: Sequence[str],
        circuits: Sequence[tuple[PeerId, str]],
        deadline_s: float,
    ) -> Stream:
        dialling: asyncio.Task[Stream] = asyncio.create_task(
            self.direct.open(peer, protocol, addresses=direct, deadline_s=deadline_s)
        )
        attempts = [dialling]
        opened: asyncio.Task[Stream] | None = None
        try:
            await asyncio.wait(attempts, timeout=HEAD_START_S)
            if not _has_succeeded(dialling):
                attempts.append(asyncio.create_task(self._open_circuit(peer, protocol, circuits, deadline_s)))
                pending = {task for task in attempts if not task.done()}
                while pending and not any(map(_has_succeeded, attempts)):
                    _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            opened = next(filter(_has_succeeded, attempts), attempts[-1])
            return opened.result()
        finally:
            for task in attempts:
                if task is not opened:
                    await _discard(task)

    async def _open_circuit(
        self, peer: PeerId, protocol: ProtocolSpec, circuits: Sequence[tuple[PeerId, str]], deadline_s: float
    ) -> Stream:
        """Open a stream through the first relay that works. Raises ``PeerUnreachable``."""
        reasons = []
        try:
            async with asyncio.timeout(deadline_s):
                connected = await self.direct.connected_peers()
                for relay, address in sorted(circuits, key=lambda each: each[0] not in connected):
                    try:
                        share_s = deadline_s / len(circuits)
                        stream = await self._ask_relay(peer, protocol, relay, address, deadline_s=share_s)
                    except (
                        PeerUnreachable,
                        StreamEnded,
                        DeadlineExceeded,
                        IntegrityError,
                        ProtocolViolation,
                    ) as error:
                        reasons.append(str(error).partition("\n")[0])
                    else:
                        _log.info("%s with %s goes through the relay %s", protocol.id, peer, relay)
                        self._punch(peer)
                        return stream
        except TimeoutError:
            reasons.append(f"no answer within {deadline_s:g} s")
        raise PeerUnreachable(f"{peer} was not reached through its relays: {'; '.join(reasons)}")

    async def _ask_relay(
        self, peer: PeerId, protocol: ProtocolSpec, relay: PeerId, address: str, *, deadline_s: float
    ) -> Stream:
        end = CircuitEnd(self._identity, connects=True)
        stream = await self._guarded().open(relay, RELAY, addresses=[address], deadline_s=deadline_s)
        try:
            request = pb.RelayRequest(connect=pb.Connect(peer=peer))
            await send_within(
                stream, Message(request.SerializeToString(), end.hello(protocol.id)), deadline_s
            )
            message = await receive_within(stream, deadline_s)
            reply = parse(pb.RelayReply, message.header)
            if not end.read_reply(bytes(message.payload), peer):
                raise IncompatibleVersion(f"{peer} does not serve {protocol.id}")
            self._observe(relay, reply.accepted.observed_address)
            await send_within(stream, Message(b"", end.confirm()), deadline_s)
            pipe, carry = await join(stream, end)
        except BaseException:
            stream.close()
            raise
        # The stream with the relay already counts the bytes.
        opened = self.direct.endpoint.open(pipe, peer, protocol, link=LinkLimiter())
        self.direct.endpoint.start(self._carry(opened, carry))
        return opened

    async def _carry(self, stream: FramedStream, carry: Coroutine[Any, Any, None]) -> None:
        self._circuits_to[stream.peer].add(stream)
        try:
            await carry
        finally:
            self._circuits_to[stream.peer].discard(stream)
            if not self._circuits_to[stream.peer]:
                del self._circuits_to[stream.peer]

    @property
    def circuits(self) -> int:
        """Number of open streams through relays that this peer opened."""
        return sum(map(len, self._circuits_to.values()))

    def connected_directly(self, peer: PeerId) -> None:
        """Report a direct connection to ``peer`` to the users of its streams through relays.

        They open their streams again (``Stream.path_improved``).
        """
        for stream in self._circuits_to.get(peer, ()):
            stream.improved.set()

    def _observe(self, relay: PeerId, address: str) -> None:
        """Note this peer's address as ``relay`` sees it. Ignores an invalid multiaddr."""
        self.observed.pop(relay, None)
        if (parsed := parse_multiaddr(address)) is not None:
            self.observed[relay] = parsed

    def _circuits(self, peer: PeerId, addresses: Sequence[str]) -> Sequence[tuple[PeerId, str]]:
        """Return the relays of ``peer`` that may be asked, each with its address.

        They come from ``addresses``. Without addresses they come from memory.
        """
        if not addresses:
            return self._relays_of.get(peer, ())
        through_relays = [each for each in addresses if relay_of(each) is not None]
        relays = map(relay_of, self.direct.permitted(peer, through_relays))
        return [each for each in relays if each is not None and each[0] not in (self.peer_id, peer)]

    # ---- streams that come in through relays ----------------------------------------------------

    def reserve_at_relays(self, reservations: Reservations | None) -> None:
        """Announce the circuit addresses of ``reservations`` from now on."""
        self.reservations = reservations

    def accept_circuit(self, reservation: RelayReservation, incoming: pb.Incoming, hello: bytes) -> None:
        """Accept a circuit that another peer wants. ``hello``: the first message of its
        handshake."""
        # Twice the limit: the relay counts a circuit as confirmed before the confirmation arrives
        # here.
        if self._accepting[reservation.relay] < 2 * MAX_UNCONFIRMED:
            self.direct.endpoint.start(self._accept(reservation, incoming, hello))

    async def _accept(self, reservation: RelayReservation, incoming: pb.Incoming, hello: bytes) -> None:
        try:
            self._accepting[reservation.relay] += 1
            try:
                async with asyncio.timeout(ACCEPT_S):
                    stream, end, protocol_id = await self._answer(reservation, incoming, hello)
            finally:
                self._accepting[reservation.relay] -= 1
                self._accepting += Counter()  # drops relays with a count of zero
            with contextlib.closing(stream):
                if protocol_id:
                    source = PeerId(incoming.source)
                    await self._serve(reservation, stream, end, source, protocol_id)
        except (SwarmnetError, TimeoutError, ValueError) as error:
            _log.info("a circuit through %s was not made: %s", reservation.relay, error)

    async def _answer(
        self, reservation: RelayReservation, incoming: pb.Incoming, hello: bytes
    ) -> tuple[Stream, CircuitEnd, str]:
        """Return the stream of an accepted circuit after its handshake, and the protocol id.

        The id is empty if this peer does not serve the protocol. Raises ``ValueError`` if the
        source is not a peer id.
        """
        source = PeerId(incoming.source)
        public_key_of(source)
        end = CircuitEnd(self._identity, connects=False)
        protocol_id = end.read_hello(hello)
        is_supported = protocol_id != RELAY.id and self.direct.endpoint.serves(protocol_id)
        stream = await self._guarded().open(reservation.relay, RELAY, deadline_s=ACCEPT_S)
        try:
            accept = pb.RelayRequest(accept=pb.Accept(circuit=incoming.circuit))
            await stream.send(Message(accept.SerializeToString(), end.reply(is_supported=is_supported)))
            if is_supported:
                end.check_confirmation(bytes((await stream.receive()).payload), source)
        except BaseException:
            stream.close()
            raise
        return stream, end, protocol_id if is_supported else ""

    async def _serve(
        self, reservation: RelayReservation, stream: Stream, end: CircuitEnd, source: PeerId, protocol_id: str
    ) -> None:
        pipe, carry = await join(stream, end)
        carrying = asyncio.create_task(carry)
        try:
            address = f"{reservation.address}/p2p/{reservation.relay}/p2p-circuit"
            await self.direct.endpoint.handle(pipe, source, protocol_id, address, link=LinkLimiter())
            await carrying
        finally:
            await cancel(carrying)


def _by_reach(address: str) -> tuple[bool, bool]:
    """Return the key that sorts IPv4 before IPv6 and TCP before QUIC, because more networks carry
    the first of each."""
    return "/ip6/" in address, "/udp/" in address


def _has_succeeded(task: "asyncio.Task[Stream]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _discard(task: "asyncio.Task[Stream]") -> None:
    """Cancel an attempt. If it has succeeded, close its stream."""
    await cancel(task)
    if _has_succeeded(task):
        task.result().close()
