"""The door before the DHT: its calls do not go through ``Transport``, but through hivemind's ``P2P``."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.message import Message as Protobuf
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2

from swarmnet_protocols.dht_contacts import Contacts, contacts_in, with_contacts
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.membership.door import Door
from swarmnet_protocols.protocol_ids import DHT_FIND, DHT_PING, DHT_STORE, DIRECTORY
from swarmnet_protocols.resources import Flow, ResourceManager, Scope, Stock
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.transport.meter import MAX_OWED_S

_ENTER_S = 5.0
"""Longer than a call may take: whoever is met for the first time is there for the next one."""
MAX_REQUEST_BYTES = {DHT_PING.id: 4 << 10, DHT_FIND.id: 16 << 10, DHT_STORE.id: 512 << 10}
"""hivemind answers a call in one go: every key that is asked for and every signature that is checked keeps everybody waiting."""
BYTES_PER_FRAME = 1024
"""A call, and its answer, cost as many messages as they have of these."""


class GuardedP2P:
    """What the DHT uses of ``P2P``. Calls are made to members only, and parsed when they come from one."""

    def __init__(
        self,
        p2p: P2P,
        door: Door,
        resources: ResourceManager,
        contacts: Contacts,
        dial: Callable[[PeerId, Sequence[str]], Awaitable[None]],
    ) -> None:
        """``dial`` connects to a peer at addresses, unless it is connected."""
        self._contacts = contacts
        self._dial = dial
        self._is_called = False
        """Whether others call us, and so must know where we are."""
        self.peer_id: PeerID = p2p.peer_id
        self._resources = resources
        self._p2p = p2p
        self._door = door
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

        async def guarded(request: bytes, caller: PeerID) -> bytes:
            clock = asyncio.get_running_loop().time
            scope, peer = self.scope_of(caller), PeerId(caller.to_base58())
            scope.check(Flow.FRAMES, MAX_OWED_S, clock())
            scope.use(Flow.FRAMES, 1 + len(request) / BYTES_PER_FRAME, clock())
            if len(request) > MAX_REQUEST_BYTES[name]:
                raise ProtocolViolation(
                    f"{name}: {len(request)} bytes, {MAX_REQUEST_BYTES[name]} are the most"
                )
            with scope.hold(Stock.CALLS), scope.hold(Stock.MEMORY, len(request)):
                await self._door.settled(peer)
                self._door.check(peer, protocol)
                self._contacts.learn(contacts_in(request)[:1], only=peer)
                context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=caller)
                reply = await handler(input_type.FromString(request), context)
                contacts = [self._contacts.mine(), *self._contacts.of(_named_in(reply))]
                answer = with_contacts(reply.SerializeToString(), contacts)
            scope.use(Flow.FRAMES, len(answer) / BYTES_PER_FRAME, clock())
            return answer

        await self._p2p._client.add_unary_handler(name, guarded)

    def scope_of(self, peer: PeerID) -> Scope:
        """What a peer holds and uses here."""
        return self._resources.peer(peer.to_base58(), asyncio.get_running_loop().time())

    async def remove_protobuf_handler(self, name: str, **_options: object) -> None:
        await self._p2p.remove_protobuf_handler(name)

    async def call_protobuf_handler(
        self, peer: PeerID, name: str, request: Protobuf, output_type: type[Protobuf]
    ) -> Protobuf:
        peer_id = PeerId(peer.to_base58())
        if addresses := self._contacts.addresses_of(peer_id):
            await self._dial(peer_id, addresses)
        await self._door.enter(peer_id, self._protocols[name], deadline_s=_ENTER_S)
        mine = [self._contacts.mine()] if self._is_called else []
        call = with_contacts(request.SerializeToString(), mine)
        answer = await self._p2p._client.call_unary_handler(peer, name, call)
        self._contacts.learn(contacts_in(answer))
        return output_type.FromString(answer)


def _named_in(reply: Protobuf) -> list[PeerId]:
    """The peers that an answer sends its caller to."""
    if not isinstance(reply, dht_pb2.FindResponse):
        return []
    packed = dict.fromkeys(peer for result in reply.results for peer in result.nearest_peer_ids)
    return [PeerId(PeerID(peer).to_base58()) for peer in packed]
