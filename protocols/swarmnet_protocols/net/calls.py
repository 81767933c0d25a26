"""Calls: streams with one request and one reply, in raw bytes."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence

from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Refusal, Stream, Transport
from swarmnet_protocols.net.messages import receive_within, send_within
from swarmnet_protocols.net.resources import Resource
from swarmnet_protocols.timing import Timing

Answer = Callable[[bytes, Stream], Awaitable[bytes]]
"""Makes the reply to a request from a stream. May raise ``NotAuthorised``, ``ResourceLimitReached`` and ``ProtocolViolation``."""


class Calls:
    """Makes and serves calls over a transport."""

    def __init__(self, transport: Transport, timing: Timing) -> None:
        self._transport = transport
        self._timing = timing

    async def serve(self, protocol: ProtocolSpec, answer: Answer) -> None:
        """Serve calls under ``protocol``. A caller without permission gets the reason."""

        async def handle(stream: Stream) -> None:
            request = (await stream.receive()).header
            try:
                reply = await answer(request, stream)
            except NotAuthorised as error:
                stream.refuse(Refusal(str(error)))
                raise
            with stream.scope.reserve(Resource.MEMORY, len(reply)):
                await send_within(stream, Message(reply), self._timing.reply_s)

        await self._transport.serve(protocol, handle)

    async def call(
        self, peer: PeerId, protocol: ProtocolSpec, request: bytes, *, addresses: Sequence[str] = ()
    ) -> bytes:
        """The reply of ``peer``. Raises what ``Transport.open`` and ``Stream.receive`` do, and ``DeadlineExceeded``."""
        stream = await self._transport.open(
            peer, protocol, addresses=addresses, deadline_s=self._timing.open_s
        )
        with contextlib.closing(stream):
            await stream.send(Message(request))
            return (await receive_within(stream, self._timing.reply_s)).header
