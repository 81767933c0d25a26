"""A transport whose every stream is to or from an admitted peer."""

from collections.abc import Sequence

from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.net import (
    Handler,
    PeerId,
    ProtocolSpec,
    Stream,
    StreamWrapper,
    Transport,
    TransportWrapper,
)


class GuardedStream(StreamWrapper):
    """A stream that is tracked by ``handshakes`` until it is closed."""

    def __init__(self, stream: Stream, handshakes: Handshakes) -> None:
        super().__init__(stream)
        self._handshakes = handshakes
        handshakes.track(stream)

    def close(self) -> None:
        super().close()
        self._handshakes.untrack(self._stream)


class GuardedTransport(TransportWrapper):
    """``transport``, with a handshake before every stream that is opened and a check of every stream that comes in."""

    def __init__(self, transport: Transport, handshakes: Handshakes) -> None:
        super().__init__(transport)
        self._handshakes = handshakes

    async def died(self) -> None:
        """As promised by ``Transport``; raises ``NotAuthorised`` when the membership of this peer has ended."""
        if self._handshakes.membership.is_public:
            await self._transport.died()
        else:
            await race(self._transport.died(), self._handshakes.membership.ended())

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        """As promised by ``Transport``; a stream that its opener may not open is refused before a byte of it is read.

        Raises ``NotAuthorised`` when this peer has no role that may serve ``protocol``: every other peer would refuse it.
        """
        self._handshakes.check_serving(protocol)

        async def guarded(stream: Stream) -> None:
            async with self._handshakes.admitting(stream, protocol):
                await handler(stream)

        await self._transport.serve(protocol, guarded)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        """As promised by ``Transport``; also raises ``NotAuthorised`` when either side refuses the other, and ``StreamRefused``
        when ``peer`` has reached a resource limit.
        """
        await self._handshakes.ensure(peer, protocol, addresses=addresses, deadline_s=deadline_s)
        stream = await self._transport.open(peer, protocol, addresses=addresses, deadline_s=deadline_s)
        try:
            return GuardedStream(stream, self._handshakes)
        except NotAuthorised:
            stream.close()
            raise
