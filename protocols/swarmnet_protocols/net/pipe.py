"""One end of a unix socket that carries a stream, closed without losing the last messages.

The other end is p2pd, or the encryption of a relayed stream. p2pd cannot close half a stream. When
this side closes the socket, p2pd resets the libp2p stream in both directions and drops the bytes in
flight: nearly always over QUIC, rarely over TCP. So a side that ends a stream takes three steps:

1. It sends a last frame.
2. It waits until the other side has read everything and closed.
3. It closes its socket.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any, cast

from swarmnet_protocols.net.framing import ENDED

READER_BYTES = 32 << 10
"""Buffer limit of the reader. asyncio pauses the sender at twice this size, plus one read."""
LINGER_BYTES = 128 << 10
"""Most bytes that are received and dropped while a stream ends. Closing a socket with unread bytes
would reset the stream."""


class Pipe(asyncio.StreamReaderProtocol):
    """This process's end of the socket."""

    writer: asyncio.StreamWriter
    received_at: float = 0.0
    """Loop time of the last received bytes."""

    def __init__(self, on_accept: "Callable[[Pipe], None] | None" = None) -> None:
        """``on_accept`` is called with the pipe when p2pd has connected it."""
        self._loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(READER_BYTES, self._loop)
        super().__init__(self.reader, loop=self._loop)
        self._on_accept = on_accept
        self._eof = False
        self._linger_timer: asyncio.TimerHandle | None = None
        self._drop_bytes = LINGER_BYTES
        self._tail = b""

    def end(self, last_frame: bytes, *, within_s: float) -> None:
        """Send a last frame, and close once the other side has ended the stream, too.

        The socket closes after ``within_s`` at the latest. Readers get the end of the stream.
        """
        if self._eof or self.writer.is_closing():
            self.writer.close()
        elif self._linger_timer is None:
            self._linger_timer = self._loop.call_later(within_s, self.writer.close)
            self.writer.write(last_frame)
            self.reader.feed_eof()
            self._duplex.resume_reading()

    def drop(self) -> None:
        """Free what was received and not read, since nobody will read it.

        Reference cycles may keep this object long after the stream.
        """
        cast(Any, self.reader)._buffer.clear()

    async def closed(self) -> None:
        """Return once the socket is closed or broken. If cancelled, close it at once."""
        try:
            await self.writer.wait_closed()
        except OSError:
            return
        except asyncio.CancelledError:
            self.writer.transport.abort()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # For a socket, event loops make transports that read and write.
        self._duplex = cast(asyncio.Transport, transport)
        self.writer = asyncio.StreamWriter(self._duplex, self, self.reader, self._loop)
        if self._on_accept is not None:
            self._on_accept(self)

    def data_received(self, data: bytes) -> None:
        self.received_at = self._loop.time()
        if self._linger_timer is None:
            super().data_received(data)
            return
        self._tail = (self._tail + data)[-len(ENDED) :]
        self._drop_bytes -= len(data)
        if self._tail == ENDED:
            self.writer.close()
        elif self._drop_bytes <= 0:
            self._duplex.pause_reading()

    def eof_received(self) -> bool | None:
        self._eof = True
        return super().eof_received() and self._linger_timer is None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)


async def adopt(ours: socket.socket) -> Pipe:
    """Return a pipe over this process's end of a socket pair. Closes the socket if this fails."""
    try:
        return await connected(asyncio.get_running_loop().create_connection(Pipe, sock=ours))
    except BaseException:
        ours.close()
        raise


async def connected(connecting: Coroutine[Any, Any, tuple[asyncio.BaseTransport, Pipe]]) -> Pipe:
    """Return the pipe that an event loop connects. If cancelled, close it.

    The event loop itself would leave a cancelled connection open.
    """
    task = asyncio.get_running_loop().create_task(connecting)
    try:
        _, pipe = await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            _, pipe = await task  # takes no time
            pipe.writer.close()
        raise
    return pipe
