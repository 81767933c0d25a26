"""The relay: keeps reservations of peers that cannot be dialled, and forwards between them and those that connect to them.

Limits: ``Resource.RELAY_RESERVATIONS`` and ``Resource.CIRCUITS``, in total and for each peer, and the rate in bytes that the owner sets. A
single circuit has no limit of time or bytes, because it may carry a session.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import Message, PeerId, Stream, Transport
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.limits.resources import Resource
from swarmnet_protocols.net.limits.subnets import SubnetSlots
from swarmnet_protocols.net.protocol_ids import RELAY
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream, parse, receive_within, send_within
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import relay_pb2 as pb

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Period of the heartbeats on a reservation, in both directions."""
SILENCE_S = 4.0
"""A side of a reservation that sent nothing for this long counts as gone."""
CIRCUIT_ID_BYTES = 16
OPEN_S = 3.0
"""Timeout for the reserved peer to accept a circuit."""


@dataclass(frozen=True)
class _Waiting:
    """A circuit to ``target``. ``accepted`` is the stream and the payload with which it accepts."""

    target: PeerId
    accepted: "asyncio.Future[tuple[Stream, bytes]]"
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Relay:
    """Serves RELAY on a transport, as long as ``is_open`` says that this peer can be dialled."""

    def __init__(self, transport: Transport, is_open: Callable[[], bool], link: LinkLimiter) -> None:
        self._transport = transport
        self._is_open = is_open
        self._link = link
        self._reserved: dict[PeerId, TypedStream[pb.RelayReply, pb.RelayRequest]] = {}
        self._waiting: dict[bytes, _Waiting] = {}
        """Circuits that are made or open, by id."""
        self._slots = SubnetSlots(transport.resources.system, Resource.RELAY_RESERVATIONS)
        self.circuits = 0
        """Circuits open now."""
        self.forwarded_bytes = 0

    @property
    def relays(self) -> bool:
        """Whether the owner lets this peer relay, and other peers can dial it."""
        return self._link.may_relay and self._is_open()

    @property
    def reservations(self) -> int:
        return len(self._reserved)

    async def serve(self) -> None:
        await self._transport.serve(RELAY, self._handle)

    async def _handle(self, stream: Stream) -> None:
        if not self.relays:
            raise Refusal(refusal_pb2.REASON_NO_RELAY, "this peer does not relay")
        message = await receive_within(stream, SILENCE_S)
        request, payload = parse(pb.RelayRequest, message.header), bytes(message.payload)
        match request.WhichOneof("kind"):
            case "reserve":
                await self._keep(stream)
            case "connect":
                await self._connect(stream, PeerId(request.connect.peer), payload)
            case "accept":
                await self._accept(stream, request.accept.circuit, payload)
            case _:
                raise ProtocolViolation("a stream with a relay begins with a request")

    async def _keep(self, stream: Stream) -> None:
        """A reservation, until either side ends it."""
        typed = TypedStream(stream, pb.RelayReply, pb.RelayRequest, silence_s=SILENCE_S, send_s=SILENCE_S)
        with self._slots.slot(stream):
            if (earlier := self._reserved.get(stream.peer)) is not None:
                earlier.close()  # its owner has reserved again: the path of the earlier stream is gone
            self._reserved[stream.peer] = typed
            try:
                await typed.send(pb.RelayReply(accepted=pb.Accepted(observed_address=stream.address)))
                heartbeats = asyncio.create_task(
                    typed.send_heartbeats(HEARTBEAT_S, lambda: pb.RelayReply(heartbeat=pb.Heartbeat()))
                )
                try:
                    await (
                        typed.receive()
                    )  # heartbeats are not returned: any other message ends the reservation
                finally:
                    await cancel(heartbeats)
            finally:
                if self._reserved.get(stream.peer) is typed:
                    del self._reserved[stream.peer]

    async def _connect(self, stream: Stream, target: PeerId, hello: bytes) -> None:
        """A circuit from the opener of ``stream`` to ``target``, until one of them ends it."""
        reserved = self._reserved.get(target)
        if reserved is None or target == stream.peer:
            raise Refusal(refusal_pb2.REASON_NOT_RESERVED, "this peer has no reservation here")
        with stream.scope.reserve(Resource.CIRCUITS), reserved.stream.scope.reserve(Resource.CIRCUITS):
            circuit = os.urandom(CIRCUIT_ID_BYTES)
            waiting = self._waiting[circuit] = _Waiting(target, asyncio.get_running_loop().create_future())
            incoming = pb.RelayReply(incoming=pb.Incoming(circuit=circuit, source=stream.peer))
            try:
                async with asyncio.timeout(OPEN_S):
                    await reserved.send(incoming, hello)
                    outgoing, reply = await waiting.accepted
                accepted = pb.RelayReply(accepted=pb.Accepted(observed_address=stream.address))
                await send_within(stream, Message(accepted.SerializeToString(), reply), OPEN_S)
                await self._forward_both(stream, outgoing)
            except TimeoutError as error:
                reason = "this peer does not answer here"
                raise Refusal(refusal_pb2.REASON_NOT_RESERVED, reason) from error
            finally:
                del self._waiting[circuit]
                waiting.over.set()

    async def _accept(self, stream: Stream, circuit: bytes, reply: bytes) -> None:
        """Join the stream of a reserved peer to the circuit that it accepts, until the circuit ends."""
        waiting = self._waiting.get(circuit)
        if waiting is None or waiting.target != stream.peer or waiting.accepted.done():
            raise Refusal(refusal_pb2.REASON_NOT_RESERVED, "there is no such circuit")
        waiting.accepted.set_result((stream, reply))
        await waiting.over.wait()

    async def _forward_both(self, stream: Stream, outgoing: Stream) -> None:
        self.circuits += 1
        forwarding = [
            asyncio.create_task(self._forward(stream, outgoing)),
            asyncio.create_task(self._forward(outgoing, stream)),
        ]
        try:
            await asyncio.wait(forwarding, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.circuits -= 1
            await cancel(*forwarding)

    async def _forward(self, source: Stream, target: Stream) -> None:
        with contextlib.suppress(SwarmnetError):
            while True:
                payload = (await source.receive()).payload
                await self._link.relay.acquire(len(payload), message_bytes=len(payload))
                self.forwarded_bytes += len(payload)
                await target.send(Message(b"", payload))
