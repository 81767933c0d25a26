"""The unix socket that p2pd makes of a libp2p stream, and how it ends with nothing lost.

p2pd knows no half of a stream: once we close our end it closes the libp2p stream for reading, for writing, and, as its own read then
fails, resets it. Over QUIC that takes along what is still on its way, mostly; over TCP, seldom. So whoever ends a stream says so in
a last word, and closes when the other side, which has read everything before it, has closed.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from swarmnet_protocols.net.refusal import ENDED

READER_BYTES = 32 << 10
"""How much of a stream is buffered before the sender is held back (twice this, in asyncio's reckoning, and what one read gives)."""
LINGER_BYTES = 128 << 10
"""How much of what the other side says meanwhile is thrown away: a stream with something unread in it breaks when it is closed."""


class Pipe(asyncio.StreamReaderProtocol):
    """One end of the socket."""

    writer: asyncio.StreamWriter
    heard: float = 0.0
    """When, on the clock of the loop, anything last came from the other side."""

    def __init__(self, accepted: "Callable[[Pipe], None] | None" = None) -> None:
        """``accepted`` is called with it when somebody else has connected it."""
        self._loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(READER_BYTES, self._loop)
        super().__init__(self.reader, loop=self._loop)
        self._accepted = accepted
        self._eof = False
        self._lingering: asyncio.TimerHandle | None = None
        self._left_bytes = LINGER_BYTES
        self._tail = b""

    def end(self, last_word: bytes, *, within_s: float) -> None:
        """Say a last word, and close once the other side has closed or ended the stream too; after ``within_s`` at the latest.

        Nothing more can be read, and whoever reads is told that the stream ended.
        """
        if self._eof or self.writer.is_closing():
            self.writer.close()
        elif self._lingering is None:
            self._lingering = self._loop.call_later(within_s, self.writer.close)
            self.writer.write(last_word)
            self.reader.feed_eof()
            self._both_ways.resume_reading()

    async def closed(self) -> None:
        """Return once it is closed on both sides, or broken."""
        try:
            await self.writer.wait_closed()
        except OSError:
            return

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._both_ways = cast(asyncio.Transport, transport)  # as any that a loop connects
        self.writer = asyncio.StreamWriter(self._both_ways, self, self.reader, self._loop)
        if self._accepted is not None:
            self._accepted(self)

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        if self._lingering is None:
            super().data_received(data)
            return
        self._tail = (self._tail + data)[-len(ENDED) :]
        self._left_bytes -= len(data)
        if self._tail == ENDED:
            self.writer.close()
        elif self._left_bytes <= 0:
            self._both_ways.pause_reading()

    def eof_received(self) -> bool | None:
        self._eof = True
        return super().eof_received() and self._lingering is None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
        super().connection_lost(exc)
