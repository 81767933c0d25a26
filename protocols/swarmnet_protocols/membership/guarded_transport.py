"""A transport with a door: nobody is heard, and nobody spoken to, who does not belong to the swarm."""

from collections.abc import Sequence

from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.net import Handler, PeerId, ProtocolSpec, Stream, Transport
from swarmnet_protocols.net.wrappers import StreamWrapper, TransportWrapper


class GuardedStream(StreamWrapper):
    """A stream to somebody, which the door ends with their membership."""

    def __init__(self, stream: Stream, door: Handshakes) -> None:
        super().__init__(stream)
        self._door = door
        door.hold(stream)

    def close(self) -> None:
        super().close()
        self._door.release(self._stream)


class GuardedTransport(TransportWrapper):
    """Passes on what ``door`` lets through."""

    def __init__(self, transport: Transport, door: Handshakes) -> None:
        super().__init__(transport)
        self._door = door

    async def died(self) -> None:
        """As promised by ``Transport``; raises ``NotAuthorised`` when nobody lets us in any more."""
        if self._door.membership.is_public:
            await self._transport.died()
        else:
            await race(self._transport.died(), self._door.membership.ended())

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        """As promised by ``Transport``; the stream of somebody who may not open it is refused before a byte of it is read.

        Raises ``NotAuthorised`` when we have no role to serve it in: nobody would come.
        """
        self._door.check_serving(protocol)

        async def guarded(stream: Stream) -> None:
            async with self._door.admitting(stream, protocol):
                await handler(stream)

        await self._transport.serve(protocol, guarded)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        """As promised by ``Transport``; also raises ``NotAuthorised`` when either side does not let the other in, and
        ``StreamRefused`` when it has no room for somebody new.
        """
        await self._door.enter(peer, protocol, addresses=addresses, deadline_s=deadline_s)
        stream = await self._transport.open(peer, protocol, addresses=addresses, deadline_s=deadline_s)
        try:
            return GuardedStream(stream, self._door)
        except NotAuthorised:
            stream.close()
            raise
