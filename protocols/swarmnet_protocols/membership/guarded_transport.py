"""A transport and its streams behind the membership handshake."""

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
    """A stream that ``handshakes`` tracks until it is closed."""

    def __init__(self, stream: Stream, handshakes: Handshakes) -> None:
        super().__init__(stream)
        self._handshakes = handshakes
        handshakes.track(stream)

    def close(self) -> None:
        super().close()
        self._handshakes.untrack(self._stream)


class GuardedTransport(TransportWrapper):
    """A transport that makes a handshake before every outgoing stream and checks every incoming
    one.
    """

    def __init__(self, transport: Transport, handshakes: Handshakes) -> None:
        super().__init__(transport)
        self._handshakes = handshakes

    async def died(self) -> None:
        """Wait as ``Transport.died`` does.

        Raises ``NotAuthorised`` when the membership of this peer has ended.
        """
        if self._handshakes.membership.is_public:
            await self._transport.died()
        else:
            await race(self._transport.died(), self._handshakes.membership.ended())

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        """Serve as ``Transport.serve`` does, but refuse streams whose opener may not open them.

        Such a stream is refused before a byte is read. Raises ``NotAuthorised`` when this peer has
        no role that may serve ``protocol``, since every other peer would refuse it.
        """
        self._handshakes.check_serving(protocol)

        async def guarded(stream: Stream) -> None:
            async with self._handshakes.admitting(stream, protocol):
                await handler(stream)

        await self._transport.serve(protocol, guarded)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        """Open a stream as ``Transport.open`` does, after a handshake.

        Also raises ``NotAuthorised`` when either side refuses the other, and ``Refused`` when
        ``peer`` has reached a resource limit.
        """
        await self._handshakes.ensure(peer, protocol, addresses=addresses, deadline_s=deadline_s)
        stream = await self._transport.open(peer, protocol, addresses=addresses, deadline_s=deadline_s)
        try:
            return GuardedStream(stream, self._handshakes)
        except NotAuthorised:
            stream.close()
            raise
