"""The door before the DHT: hivemind's calls, over streams of ours, to members only and from members only."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message as Protobuf
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2

from swarmnet_protocols.dht_contacts import Contacts, contacts_in, with_contacts
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.membership.door import Door
from swarmnet_protocols.protocol_ids import DHT_FIND, DHT_PING, DHT_STORE, DIRECTORY
from swarmnet_protocols.resources import Flow, ResourceManager, Scope, Stock
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.transport.calls import Calls
from swarmnet_protocols.transport.meter import MAX_OWED_S
from swarmnet_protocols.transport.talking import parse

_ENTER_S = 5.0
"""Longer than a call may take: whoever is met for the first time is there for the next one."""
MAX_REQUEST_BYTES = {DHT_PING.id: 4 << 10, DHT_FIND.id: 16 << 10, DHT_STORE.id: 512 << 10}
"""hivemind answers a call in one go: every key that is asked for and every signature that is checked keeps everybody waiting."""
BYTES_PER_FRAME = 1024
"""A call, and its answer, cost as many messages as they have of these."""


class GuardedP2P:
    """What the DHT uses of ``P2P``. Calls are made to members only, and parsed when they come from one.

    They go over streams of ours: p2pd's own calls allocate what a caller says they have, before any of it comes.
    """

    def __init__(
        self, peer_id: PeerID, calls: Calls, door: Door, resources: ResourceManager, contacts: Contacts
    ) -> None:
        self.peer_id = peer_id
        self._calls = calls
        self._door = door
        self._resources = resources
        self._contacts = contacts
        self._is_called = False
        """Whether others call us, and so must know where we are."""
        self._protocols = {protocol.id: protocol for protocol in DIRECTORY}

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Callable[[Any, P2PContext], Awaitable[Protobuf]],
        input_type: type[Protobuf],
        **_options: object,
    ) -> None:
        """Answer calls of ``name``: bytes from somebody who may not make them are not looked at."""
        protocol = self._protocols[name]
        self._is_called = True

        async def guarded(request: bytes, peer: PeerId) -> bytes:
            clock = asyncio.get_running_loop().time
            scope = self._resources.peer(peer, clock())
            scope.check(Flow.FRAMES, MAX_OWED_S, clock())
            scope.use(Flow.FRAMES, 1 + len(request) / BYTES_PER_FRAME, clock())
            if len(request) > MAX_REQUEST_BYTES[name]:
                raise ProtocolViolation(
                    f"{name}: {len(request)} bytes, {MAX_REQUEST_BYTES[name]} are the most"
                )
            with scope.hold(Stock.CALLS), scope.hold(Stock.MEMORY, len(request)):
                await self._door.settled(peer)
                self._door.check(peer, protocol)
                call = parse(input_type, request)
                self._contacts.learn(contacts_in(request)[:1], only=peer)
                context = P2PContext(
                    handle_name=name, local_id=self.peer_id, remote_id=PeerID.from_base58(peer)
                )
                try:
                    reply = await handler(call, context)
                except Exception as error:  # hivemind finds out as it goes along that a call makes no sense
                    raise ProtocolViolation(f"{name}: {error!r}") from error
                contacts = [self._contacts.mine(), *self._contacts.of(_named_in(reply))]
                answer = with_contacts(reply.SerializeToString(), contacts)
            scope.use(Flow.FRAMES, len(answer) / BYTES_PER_FRAME, clock())
            return answer

        await self._calls.serve(protocol, guarded)

    def scope_of(self, peer: PeerID) -> Scope:
        """What a peer holds and uses here."""
        return self._resources.peer(peer.to_base58(), asyncio.get_running_loop().time())

    async def remove_protobuf_handler(self, _name: str, **_options: object) -> None:
        """Nothing to do: what is served ends with the transport."""

    async def call_protobuf_handler(
        self, peer: PeerID, name: str, request: Protobuf, output_type: type[Protobuf]
    ) -> Protobuf:
        peer_id, protocol = PeerId(peer.to_base58()), self._protocols[name]
        addresses = self._contacts.addresses_of(peer_id)
        await self._door.enter(peer_id, protocol, addresses=addresses, deadline_s=_ENTER_S)
        mine = [self._contacts.mine()] if self._is_called else []
        call = with_contacts(request.SerializeToString(), mine)
        answer = await self._calls.call(peer_id, protocol, call, addresses=addresses)
        reply = parse(output_type, answer)
        self._contacts.learn(contacts_in(answer))
        return reply


def _named_in(reply: Protobuf) -> list[PeerId]:
    """The peers that an answer sends its caller to."""
    if not isinstance(reply, dht_pb2.FindResponse):
        return []
    packed = dict.fromkeys(peer for result in reply.results for peer in result.nearest_peer_ids)
    return [PeerId(PeerID(peer).to_base58()) for peer in packed]
