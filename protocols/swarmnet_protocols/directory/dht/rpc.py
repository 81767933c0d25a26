"""hivemind's DHT calls over guarded streams: only between admitted peers."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.message import Message as Protobuf
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2

from swarmnet_protocols.directory.dht.contacts import Contacts, contacts_in, with_contacts
from swarmnet_protocols.errors import NotAuthorised, ProtocolViolation
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Stream, Transport
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.net.limits.stream_scope import MAX_WAIT_S
from swarmnet_protocols.net.limits.subnets import subnet_of
from swarmnet_protocols.net.protocol_ids import DHT_FIND, DHT_PING, DHT_SAMPLE, DHT_STORE, DIRECTORY
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import parse, receive_within, send_within
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import refusal_pb2

_ENTER_S = 5.0
"""Timeout in seconds of the handshake before a call.

It is longer than the timeout of a call, because a late handshake still serves the next call.
"""
MAX_REQUEST_BYTES = {
    DHT_PING.id: 4 << 10,
    DHT_FIND.id: 16 << 10,
    DHT_STORE.id: 512 << 10,
    DHT_SAMPLE.id: 4 << 10,
}
"""Most bytes of a request, by protocol.

hivemind answers a call without yielding, so a larger request would delay every other task.
"""
MAX_KEYS = 16
"""Most keys in one find call: hivemind asks one peer for as many at once."""
BUCKET_SIZE = 20
"""Most peers in a bucket of the routing table, and most peers in an answer for one key."""
BYTES_PER_FRAME = 1024
"""Bytes of a call or an answer that are charged as one frame."""


class GuardedP2P:
    """The part of hivemind's ``P2P`` that its DHT uses. Parses calls only from admitted peers.

    Calls do not use p2pd's unary handlers. Those handlers allocate the size that a caller announces
    before any bytes have arrived.
    """

    def __init__(self, transport: Transport, handshakes: Handshakes, contacts: Contacts) -> None:
        self.peer_id = PeerID.from_base58(transport.peer_id)
        self._transport = transport
        self._timing = Timing()
        self._handshakes = handshakes
        self._contacts = contacts
        self._origin = ""
        self._is_called = False
        """True if this peer serves calls. Then it tells the peers it calls how to call it back."""
        self._protocols = {protocol.id: protocol for protocol in DIRECTORY}

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Callable[[Any, P2PContext], Awaitable[Protobuf]],
        input_type: type[Protobuf],
        **_options: object,
    ) -> None:
        """Serve calls of ``name``. A call is parsed only if the caller may make it."""
        protocol = self._protocols[name]
        self._is_called = True

        async def serve(stream: Stream) -> None:
            request = (await stream.receive()).header
            try:
                reply = await answer(request, stream)
            except NotAuthorised as error:
                stream.refuse(Refusal(refusal_pb2.REASON_NOT_AUTHORISED, str(error)))
                raise
            with stream.scope.reserve(Resource.MEMORY, len(reply)):
                await send_within(stream, Message(reply), self._timing.reply_s)

        async def answer(request: bytes, stream: Stream) -> bytes:
            peer = stream.peer
            scope = self._transport.resources.peer(peer, loop_time())
            scope.check_rate(Rate.FRAMES, MAX_WAIT_S, loop_time())
            scope.charge(Rate.FRAMES, 1 + len(request) / BYTES_PER_FRAME, loop_time())
            if len(request) > MAX_REQUEST_BYTES[name]:
                raise ProtocolViolation(
                    f"{name}: {len(request)} bytes, at most {MAX_REQUEST_BYTES[name]} are allowed"
                )
            with scope.reserve(Resource.CALLS), scope.reserve(Resource.MEMORY, len(request)):
                await self._handshakes.wait_outgoing(peer)
                self._handshakes.check(peer, protocol)
                call = parse(input_type, request)
                self._contacts.learn(contacts_in(request)[:1], only=peer)
                context = P2PContext(
                    handle_name=name, local_id=self.peer_id, remote_id=PeerID.from_base58(peer)
                )
                self._origin = subnet_of(stream.address) or peer
                try:
                    reply = await handler(call, context)
                except Exception as error:  # hivemind validates a call while it handles it
                    raise ProtocolViolation(f"{name}: {error!r}") from error
                contacts = [self._contacts.mine(), *self._contacts.of(_named_in(reply))]
                encoded = with_contacts(reply.SerializeToString(), contacts)
            # ``rpc_find`` charges for its reply itself, before it collects the records.
            if not isinstance(reply, dht_pb2.FindResponse):
                scope.charge(Rate.FRAMES, len(encoded) / BYTES_PER_FRAME, loop_time())
            return encoded

        await self._transport.serve(protocol, serve)

    def scope_of(self, peer: PeerID) -> Scope:
        """Return the resource scope of a peer."""
        return self._transport.resources.peer(peer.to_base58(), loop_time())

    @property
    def origin(self) -> str:
        """The subnet of the current caller. A handler may use it until its first await."""
        return self._origin

    async def remove_protobuf_handler(self, _name: str, **_options: object) -> None:
        """Do nothing: protocols are served until the transport ends."""

    async def call_protobuf_handler(
        self, peer: PeerID, name: str, request: Protobuf, output_type: type[Protobuf]
    ) -> Protobuf:
        peer_id, protocol = PeerId(peer.to_base58()), self._protocols[name]
        addresses = self._contacts.addresses_of(peer_id)
        await self._handshakes.ensure(peer_id, protocol, addresses=addresses, deadline_s=_ENTER_S)
        mine = [self._contacts.mine()] if self._is_called else []
        call = with_contacts(request.SerializeToString(), mine)
        answer = await self._call(peer_id, protocol, call, addresses)
        reply = parse(output_type, answer)
        if isinstance(reply, dht_pb2.FindResponse):
            _check_found(reply)
        self._contacts.learn(contacts_in(answer))
        return reply

    async def _call(
        self, peer: PeerId, protocol: ProtocolSpec, request: bytes, addresses: Sequence[str]
    ) -> bytes:
        stream = await self._transport.open(
            peer, protocol, addresses=addresses, deadline_s=self._timing.open_s
        )
        with contextlib.closing(stream):
            await stream.send(Message(request))
            return (await receive_within(stream, self._timing.reply_s)).header


def _check_found(reply: dht_pb2.FindResponse) -> None:
    """Check that an answer has no more keys, or peers for a key, than an honest peer sends.

    Each of them costs time to process. Raises ``ProtocolViolation``.
    """
    if len(reply.results) > MAX_KEYS:
        raise ProtocolViolation(f"an answer about {len(reply.results)} keys")
    for result in reply.results:
        if len(result.nearest_peer_ids) > BUCKET_SIZE or len(result.nearest_node_ids) > BUCKET_SIZE:
            raise ProtocolViolation(f"an answer that names {len(result.nearest_peer_ids)} peers for a key")


def _named_in(reply: Protobuf) -> list[PeerId]:
    """Return the peers that an answer refers its caller to."""
    if not isinstance(reply, dht_pb2.FindResponse):
        return []
    packed = dict.fromkeys(peer for result in reply.results for peer in result.nearest_peer_ids)
    return [PeerId(PeerID(peer).to_base58()) for peer in packed]
