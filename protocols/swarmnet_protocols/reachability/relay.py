"""The relay: keeps reservations of peers that cannot be dialled, and forwards streams to them.

The life of a circuit:

1. A peer asks for a circuit. The relay announces it on the target's reservation.
2. The target accepts.
3. The first peer confirms with its first payload. From then on the relay forwards.

The limits are ``Resource.RELAY_RESERVATIONS`` and ``Resource.CIRCUITS``, in total and for each
peer, and the byte rate that the owner sets. A confirmed circuit may carry a session, so neither its
time nor its bytes are limited. An unconfirmed circuit costs its opener nothing, so a target has few
of them, for seconds. When a target has no room for another circuit, the relay ends one: it picks
the subnet with the most circuits, and in it the peer with the most.
"""

import asyncio
import contextlib
import logging
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import in_background, loop_time, race
from swarmnet_protocols.net import Message, PeerId, Stream, Transport
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import Reservation
from swarmnet_protocols.net.limits.stream_scope import VIOLATION_FRAMES
from swarmnet_protocols.net.limits.subnets import Occupancy, Place, SubnetSlots, subnet_of
from swarmnet_protocols.net.protocol_ids import RELAY
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream, receive_within, send_within
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import relay_pb2 as pb

_log = logging.getLogger(__name__)

RelayStream = TypedStream[pb.RelayReply, pb.RelayRequest]

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats on a reservation, in both directions."""
CIRCUIT_ID_BYTES = 16
OPEN_S = 3.0
"""Timeout in seconds for the reserved peer to accept a circuit, and for the other to confirm it."""
MAX_UNCONFIRMED = 32
"""Most unconfirmed circuits to one peer.

Each costs that peer a Noise handshake, and lasts a round trip or two.
"""


@dataclass(eq=False)
class _Circuit:
    """A circuit from the opener of ``source`` to ``target``.

    ``accepted`` resolves to the stream and the payload with which the target accepts.
    """

    source: Stream
    target: PeerId
    reservations: tuple[Reservation, ...]
    accepted: "asyncio.Future[tuple[Stream, bytes]]"
    over: asyncio.Event = field(default_factory=asyncio.Event)
    is_confirmed: bool = False

    @property
    def subnet(self) -> str:
        return subnet_of(self.source.address) or self.source.peer

    def end(self) -> None:
        """Free the circuit's place at once, and end the circuit."""
        for each in self.reservations:
            each.release()
        if not self.accepted.done():
            self.accepted.set_exception(
                Refusal(refusal_pb2.REASON_OUT_OF_RESOURCES, "too many circuits to this peer")
            )
        self.source.close()


def circuit_to_end(circuits: Sequence[_Circuit]) -> _Circuit | None:
    """Return the circuit that should end to make room for another.

    It belongs to the subnet with the most circuits, and there to the peer with the most. The oldest
    unconfirmed circuit goes first, then the newest confirmed one. Honest peers confirm within a
    round trip or two, so the oldest unconfirmed circuit is the least likely to be theirs.
    """
    places = (
        Place(each.subnet, each.source.peer, 1, (1.0, -number) if each.is_confirmed else (0.0, number), each)
        for number, each in enumerate(circuits)
    )
    return Occupancy(places).victim(lambda _: True)


def has_larger_share(holder: _Circuit, other: Stream, circuits: Sequence[_Circuit]) -> bool:
    """Return whether the subnet of ``holder`` has more circuits than the subnet of ``other``.

    Within one subnet, compares the two peers instead.
    """
    subnets = Counter(each.subnet for each in circuits)
    peers = Counter(each.source.peer for each in circuits)
    subnet = subnet_of(other.address) or other.peer
    if subnet != holder.subnet:
        return subnets[holder.subnet] > subnets[subnet] + 1
    return peers[holder.source.peer] > peers[other.peer] + 1


class Relay:
    """Serves RELAY on a transport while ``is_open`` says that this peer can be dialled."""

    def __init__(self, transport: Transport, is_open: Callable[[], bool], link: LinkLimiter) -> None:
        self._transport = transport
        self._is_open = is_open
        self._link = link
        self._reserved: dict[PeerId, RelayStream] = {}
        self._circuits: dict[bytes, _Circuit] = {}
        """Circuits that are being made or are open, by id, oldest first."""
        self._waiting: defaultdict[PeerId, deque[asyncio.Future[None]]] = defaultdict(deque)
        """Peers that wait for a circuit, by its target."""
        self._slots = SubnetSlots(transport.resources.system, Resource.RELAY_RESERVATIONS)
        self.circuits = 0
        """Number of open circuits."""
        self.forwarded_bytes = 0

    @property
    def relays(self) -> bool:
        """True if the owner lets this peer relay, and other peers can dial it."""
        return self._link.may_relay and self._is_open()

    @property
    def reservations(self) -> int:
        return len(self._reserved)

    async def serve(self) -> None:
        await RELAY.serve(self._transport, self._handle)

    async def _handle(self, stream: RelayStream) -> None:
        if not self.relays:
            raise Refusal(refusal_pb2.REASON_NO_RELAY, "this peer does not relay")
        request, payload = await stream.receive()
        match request.WhichOneof("kind"):
            case "reserve":
                await self._hold(stream)
            case "connect":
                await self._connect(stream.stream, PeerId(request.connect.peer), bytes(payload))
            case "accept":
                await self._accept(stream.stream, request.accept.circuit, bytes(payload))
            case _:
                raise ProtocolViolation("a stream with a relay begins with a request")

    async def _hold(self, stream: RelayStream) -> None:
        """Hold a reservation until either side ends it."""
        with self._slots.slot(stream.stream):
            if (earlier := self._reserved.get(stream.peer)) is not None:
                # The owner has reserved again, so the path of the earlier stream is gone.
                earlier.close()
            self._reserved[stream.peer] = stream
            try:
                observed = pb.Accepted(observed_address=stream.stream.address)
                await stream.send(pb.RelayReply(accepted=observed))
                beat = pb.RelayReply(heartbeat=pb.Heartbeat())
                async with in_background(stream.send_heartbeats(HEARTBEAT_S, lambda: beat)):
                    # ``receive`` skips heartbeats. Any other message ends the reservation.
                    await stream.receive()
            finally:
                if self._reserved.get(stream.peer) is stream:
                    del self._reserved[stream.peer]

    async def _connect(self, stream: Stream, target: PeerId, hello: bytes) -> None:
        """Carry a circuit from the opener of ``stream`` to ``target`` until one of them ends it."""
        reserved = self._reserved.get(target)
        if reserved is None or target == stream.peer:
            raise Refusal(refusal_pb2.REASON_NOT_RESERVED, "this peer has no reservation here")
        await self._wait_for_room(target, reserved.stream, stream)
        with (
            stream.scope.reserve(Resource.CIRCUITS) as mine,
            reserved.stream.scope.reserve(Resource.CIRCUITS) as theirs,
        ):
            circuit_id = os.urandom(CIRCUIT_ID_BYTES)
            circuit = _Circuit(stream, target, (mine, theirs), asyncio.get_running_loop().create_future())
            self._circuits[circuit_id] = circuit
            incoming = pb.RelayReply(incoming=pb.Incoming(circuit=circuit_id, source=stream.peer))
            try:
                async with asyncio.timeout(OPEN_S):
                    await reserved.send(incoming, hello)
                    outgoing, reply = await circuit.accepted
                accepted = pb.RelayReply(accepted=pb.Accepted(observed_address=stream.address))
                await send_within(stream, Message(accepted.SerializeToString(), reply), OPEN_S)
                confirmation = await receive_within(stream, OPEN_S)
                circuit.is_confirmed = True
                self._has_room(target)
                await send_within(outgoing, Message(b"", confirmation.payload), OPEN_S)
                await self._forward_both(stream, outgoing)
            except TimeoutError as error:
                reason = "this peer does not answer here"
                raise Refusal(refusal_pb2.REASON_NOT_RESERVED, reason) from error
            finally:
                if circuit.accepted.done() and not circuit.is_confirmed:
                    now = loop_time()
                    stream.scope.charge(Rate.FRAMES, VIOLATION_FRAMES, now)
                del self._circuits[circuit_id]
                self._has_room(target)
                circuit.over.set()

    async def _wait_for_room(self, target: PeerId, reserved: Stream, newcomer: Stream) -> None:
        """Wait until ``target`` has room for one more circuit.

        Raises ``Refusal`` when that takes longer than ``OPEN_S``.
        """
        try:
            async with asyncio.timeout(OPEN_S):
                while not self._make_room(target, reserved, newcomer):
                    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting[target].append(turn)
                    await turn
        except TimeoutError as error:
            raise Refusal(refusal_pb2.REASON_OUT_OF_RESOURCES, "too many circuits to this peer") from error

    def _make_room(self, target: PeerId, reserved: Stream, newcomer: Stream) -> bool:
        """Return whether ``target`` has room for one more circuit.

        If it is full, ends a circuit of a peer with a larger share.
        """
        circuits = [each for each in self._circuits.values() if each.target == target]
        unconfirmed = [each for each in circuits if not each.is_confirmed]
        if newcomer.scope.available(Resource.CIRCUITS) < 1:
            return True  # the newcomer is at its own limit, so the reservation refuses it
        if len(unconfirmed) >= MAX_UNCONFIRMED:
            counted = unconfirmed
        elif reserved.scope.available(Resource.CIRCUITS) < 1:
            counted = circuits
        else:
            return True
        largest = circuit_to_end(counted)
        if largest is None or not has_larger_share(largest, newcomer, counted):
            return False
        largest.end()
        return True

    def _has_room(self, target: PeerId) -> None:
        """Wake the next peer that waits for a circuit to ``target``."""
        waiting = self._waiting[target]
        while waiting:
            if not (turn := waiting.popleft()).done():
                turn.set_result(None)
                return
        del self._waiting[target]

    async def _accept(self, stream: Stream, circuit_id: bytes, reply: bytes) -> None:
        """Join a reserved peer's stream to the circuit it accepts, until the circuit ends."""
        circuit = self._circuits.get(circuit_id)
        if circuit is None or circuit.target != stream.peer or circuit.accepted.done():
            raise Refusal(refusal_pb2.REASON_NOT_RESERVED, "there is no such circuit")
        circuit.accepted.set_result((stream, reply))
        await circuit.over.wait()

    async def _forward_both(self, stream: Stream, outgoing: Stream) -> None:
        self.circuits += 1
        try:
            await race(self._forward(stream, outgoing), self._forward(outgoing, stream))
        finally:
            self.circuits -= 1

    async def _forward(self, source: Stream, target: Stream) -> None:
        with contextlib.suppress(SwarmnetError):
            while True:
                payload = (await source.receive()).payload
                await self._link.relay.acquire(len(payload), message_bytes=len(payload))
                self.forwarded_bytes += len(payload)
                await target.send(Message(b"", payload))
