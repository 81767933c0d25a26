"""Base classes for wrappers of a transport or a stream: they delegate everything, and a subclass overrides what it changes."""

from collections.abc import Sequence

from swarmnet_protocols.net import Handler, Message, PeerId, ProtocolSpec, Refusal, Stream, Transport
from swarmnet_protocols.net.resources import ResourceManager, Scope


class StreamWrapper:
    """Delegates to ``stream``."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def peer(self) -> PeerId:
        return self._stream.peer

    @property
    def address(self) -> str:
        return self._stream.address

    @property
    def scope(self) -> Scope:
        return self._stream.scope

    async def send(self, message: Message) -> None:
        await self._stream.send(message)

    async def receive(self) -> Message:
        return await self._stream.receive()

    def close(self) -> None:
        self._stream.close()

    def refuse(self, refusal: Refusal) -> None:
        self._stream.refuse(refusal)
        self.close()


class TransportWrapper:
    """Delegates to ``transport``, which it does not close."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def peer_id(self) -> PeerId:
        return self._transport.peer_id

    @property
    def resources(self) -> ResourceManager:
        return self._transport.resources

    def addresses(self) -> Sequence[str]:
        return self._transport.addresses()

    async def died(self) -> None:
        await self._transport.died()

    async def is_connected(self, peer: PeerId) -> bool:
        return await self._transport.is_connected(peer)

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        await self._transport.serve(protocol, handler)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        return await self._transport.open(peer, protocol, addresses=addresses, deadline_s=deadline_s)
