"""The streams of one peer, over any transport: limits on inbound streams, their handlers, and their
last messages when they close."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from typing import Any

from swarmnet_protocols.net import Handler, PeerId, ProtocolSpec
from swarmnet_protocols.net.framed_stream import FramedStream
from swarmnet_protocols.net.framing import LINGER_S, encode_refusal
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.limits.resources import ResourceLimitReached, ResourceManager
from swarmnet_protocols.net.limits.stream_scope import StreamScope, supervise
from swarmnet_protocols.net.limits.subnets import SubnetLimits
from swarmnet_protocols.net.pipe import Pipe
from swarmnet_protocols.net.refusal import OUT_OF_RESOURCES, Refusal
from swarmnet_protocols.timing import Timing

_log = logging.getLogger(__name__)

_FLUSH_S = 2.0
"""Seconds that closing waits for streams to deliver what was sent."""
MAX_LINGERING = 64
"""Most refused streams that stay open for the other side to read the refusal. Further ones are
closed at once."""


class Endpoint:
    """The streams and handlers of this peer. Transports give it pipes, and it makes streams from
    them.
    """

    def __init__(self, link: LinkLimiter, timing: Timing) -> None:
        self.resources = ResourceManager()
        self.link = link
        self.streams: set[FramedStream] = set()
        self._timing = timing
        self._handlers: dict[str, tuple[ProtocolSpec, Handler]] = {}
        self._subnet_limits = SubnetLimits(self.resources, timing)
        self._tasks: set[asyncio.Task[None]] = set()
        self.flushes: set[asyncio.Task[None]] = set()
        """Closed streams whose last messages are being delivered."""
        self._refused: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.forwarded: dict[str, str] = {}
        """For connections that this process forwards: the loopback address that the transport sees
        → the multiaddr of the peer itself."""

    @property
    def protocols(self) -> list[ProtocolSpec]:
        """The protocols that are served."""
        return [protocol for protocol, _ in self._handlers.values()]

    def serve(self, protocol: ProtocolSpec, handler: Handler) -> bool:
        """Serve ``protocol`` with ``handler``. Returns whether the protocol is new here."""
        is_new = protocol.id not in self._handlers
        self._handlers[protocol.id] = (protocol, handler)
        return is_new

    def serves(self, protocol_id: str) -> bool:
        return protocol_id in self._handlers

    def start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a task that ends with this endpoint."""
        return self._start(coroutine, self._tasks)

    def accept(self, serve: Callable[[], Awaitable[None]], close: Callable[[], object]) -> None:
        """Run ``serve`` as a task for a new connection. ``serve`` closes the connection.

        If the task never runs, because the endpoint is closed or closes before the first step of
        the task, ``close`` is called instead.
        """
        unserved = ExitStack()
        unserved.callback(close)

        async def run() -> None:
            unserved.pop_all()
            await serve()

        if self._is_closed:
            unserved.close()
        else:
            self.start(run()).add_done_callback(lambda _: unserved.close())

    def open(
        self, pipe: Pipe, peer: PeerId, protocol: ProtocolSpec, link: LinkLimiter | None = None
    ) -> FramedStream:
        """Return the stream that this peer opened to ``peer``.

        Its bytes count on ``link`` if given, otherwise on the endpoint's link.
        """
        scope = StreamScope.outbound(self.resources, peer, self._timing)
        return self._stream(pipe, peer, protocol, scope, link)

    async def handle(
        self, pipe: Pipe, peer: PeerId, protocol_id: str, address: str, link: LinkLimiter | None = None
    ) -> None:
        """Serve the stream that ``peer`` opened from the multiaddr ``address``, or refuse it at a
        limit."""
        address = self.real_address(address)
        protocol, handler = self._handlers[protocol_id]
        try:
            scope = self._subnet_limits.accept(peer, address)
        except ResourceLimitReached as error:
            _log.debug("refused a stream of %s: %s", peer, error)
            self._refuse(pipe, Refusal.out_of_resources(error, OUT_OF_RESOURCES))
            return
        stream = self._stream(pipe, peer, protocol, scope, link)
        stream.address = address
        await supervise(handler, stream, protocol)

    def real_address(self, address: str) -> str:
        """Return the multiaddr of the peer that the transport sees at ``address``.

        The transport sees a loopback address if this process forwards the connection.
        """
        return self.forwarded.get(address, address)

    def streams_with(self, peer: PeerId) -> list[FramedStream]:
        return [stream for stream in self.streams if stream.peer == peer]

    async def close(self) -> None:
        """End every task and stream, once the last messages are delivered or ``_FLUSH_S`` is
        over."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self.streams):
            stream.close()
        if flushes := self.flushes | self._refused:
            _, late = await asyncio.wait(flushes, timeout=_FLUSH_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _stream(
        self,
        pipe: Pipe,
        peer: PeerId,
        protocol: ProtocolSpec,
        scope: StreamScope,
        link: LinkLimiter | None,
    ) -> FramedStream:
        stream = FramedStream(peer, protocol, pipe, scope, self._stream_closed, link or self.link)
        self.streams.add(stream)
        return stream

    def _stream_closed(self, stream: FramedStream) -> None:
        self.streams.discard(stream)
        self._start(stream.flush(), self.flushes)

    def _refuse(self, pipe: Pipe, refusal: Refusal) -> None:
        last_frame = encode_refusal(refusal)
        pipe.drop()
        if len(self._refused) < MAX_LINGERING:
            pipe.end(last_frame, within_s=LINGER_S)
            self._start(pipe.closed(), self._refused)
        else:
            pipe.writer.write(last_frame)
            pipe.writer.close()

    def _start(
        self, coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]
    ) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_log_error)
        return task


def _log_error(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a task of the network failed", exc_info=error)
