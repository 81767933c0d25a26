"""Counts the bytes that a client sends and receives."""

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.net import (
    Message,
    PeerId,
    ProtocolSpec,
    Stream,
    StreamWrapper,
    Transport,
    TransportWrapper,
)


@dataclass
class Traffic:
    """Bytes of messages sent and received, without the network's own headers."""

    sent: int = 0
    received: int = 0


class CountingTransport(TransportWrapper):
    """A transport that adds the messages of streams opened through it to ``traffic``."""

    def __init__(self, transport: Transport, traffic: Traffic) -> None:
        super().__init__(transport)
        self._traffic = traffic

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        stream = await super().open(peer, protocol, addresses=addresses, deadline_s=deadline_s)
        return _CountingStream(stream, self._traffic)


class _CountingStream(StreamWrapper):
    def __init__(self, stream: Stream, traffic: Traffic) -> None:
        super().__init__(stream)
        self._traffic = traffic

    async def send(self, message: Message) -> None:
        await super().send(message)
        self._traffic.sent += len(message.header) + len(message.payload)

    async def receive(self) -> Message:
        message = await super().receive()
        self._traffic.received += len(message.header) + len(message.payload)
        return message
