"""What a client sends and receives, counted where all its streams are opened."""

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.transport import Handler, Message, PeerId, ProtocolSpec, Stream, Transport


@dataclass
class Traffic:
    """Bytes of messages so far, without what the network adds."""

    sent: int = 0
    received: int = 0


class CountingTransport:
    """``transport``, with what goes through streams that are opened here added to ``traffic``."""

    def __init__(self, transport: Transport, traffic: Traffic) -> None:
        self._transport = transport
        self._traffic = traffic

    @property
    def peer_id(self) -> PeerId:
        return self._transport.peer_id

    def addresses(self) -> Sequence[str]:
        return self._transport.addresses()

    async def died(self) -> None:
        await self._transport.died()

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        await self._transport.serve(protocol, handler)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        stream = await self._transport.open(peer, protocol, addresses=addresses, deadline_s=deadline_s)
        return _CountingStream(stream, self._traffic)


class _CountingStream:
    def __init__(self, stream: Stream, traffic: Traffic) -> None:
        self._stream = stream
        self._traffic = traffic

    @property
    def peer(self) -> PeerId:
        return self._stream.peer

    async def send(self, message: Message) -> None:
        await self._stream.send(message)
        self._traffic.sent += len(message.header) + len(message.payload)

    async def receive(self) -> Message:
        message = await self._stream.receive()
        self._traffic.received += len(message.header) + len(message.payload)
        return message

    def close(self) -> None:
        self._stream.close()
