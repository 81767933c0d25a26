"""The door before the DHT: its calls do not go through ``Transport``, but through hivemind's ``P2P``."""

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message as Protobuf
from hivemind.p2p import P2P, P2PContext, PeerID

from swarmnet_protocols.membership.door import Door
from swarmnet_protocols.protocol_ids import DIRECTORY
from swarmnet_protocols.transport import PeerId

_ENTER_S = 5.0
"""Longer than a call may take: whoever is met for the first time is there for the next one."""


class GuardedP2P:
    """What the DHT uses of ``P2P``. Calls are made to members only, and parsed when they come from one."""

    def __init__(self, p2p: P2P, door: Door) -> None:
        self.peer_id: PeerID = p2p.peer_id
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

        async def guarded(request: bytes, caller: PeerID) -> bytes:
            peer = PeerId(caller.to_base58())
            await self._door.settled(peer)
            self._door.check(peer, protocol)
            context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=caller)
            answer = await handler(input_type.FromString(request), context)
            return answer.SerializeToString()

        await self._p2p._client.add_unary_handler(name, guarded)

    async def remove_protobuf_handler(self, name: str, **_options: object) -> None:
        await self._p2p.remove_protobuf_handler(name)

    async def call_protobuf_handler(
        self, peer: PeerID, name: str, request: Protobuf, output_type: type[Protobuf]
    ) -> Protobuf:
        await self._door.enter(PeerId(peer.to_base58()), self._protocols[name], deadline_s=_ENTER_S)
        answer: Protobuf = await self._p2p.call_protobuf_handler(peer, name, request, output_type)
        return answer
