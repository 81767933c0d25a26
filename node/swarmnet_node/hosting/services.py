"""What a node serves, for as long as it does: the transport below outlives it when its owner pauses the node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import Handler, ProtocolSpec, Stream, Transport, TransportWrapper


class Services(TransportWrapper):
    """A transport whose handlers end with the context: their streams are closed, and nothing below refers to them."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._handlers: dict[str, Handler] = {}
        self._serving: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def on(cls, transport: Transport) -> AsyncIterator["Services"]:
        """Serve on ``transport`` while the context is open. Afterwards streams are closed as they come."""
        services = cls(transport)
        try:
            yield services
        finally:
            services._handlers.clear()
            await cancel(*services._serving)

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        self._handlers[protocol.id] = handler

        async def serve(stream: Stream) -> None:
            handler = self._handlers.get(protocol.id)
            task = asyncio.current_task()
            if handler is None or task is None:
                return
            self._serving.add(task)
            try:
                await handler(stream)
            finally:
                self._serving.discard(task)

        await super().serve(protocol, serve)
