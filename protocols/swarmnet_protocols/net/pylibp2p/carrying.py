"""Joins a libp2p stream to a socket of this process, as p2pd does. Runs on trio."""

import contextlib
import logging
import socket

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.stream_muxer.yamux.yamux import YamuxStream

from swarmnet_protocols.net.pylibp2p.connection import PIECE_BYTES, STREAM_ERRORS, wait_window

_log = logging.getLogger(__name__)

PING_BYTES = 32
CLOSE_S = 10.0
"""Seconds that a closed stream waits for the other side to close it, too."""
MAX_CLOSING = 128
"""Most streams that wait this way. Further ones are reset: otherwise peers that never close would
keep the memory of each for ``CLOSE_S``."""
SOCKET_BYTES = 64 << 10
"""Bytes that the socket of a stream takes before this process reads them."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a socket that does not block."""
    ends = socket.socketpair()
    for each in ends:
        each.setblocking(False)
    return ends


class Carrier:
    """Carries the bytes of all streams of one host."""

    def __init__(self) -> None:
        self._closing = 0

    async def carry(self, stream: YamuxStream, theirs: socket.socket) -> None:
        """Carry bytes between a stream and a socket until both directions have ended. Then release
        both."""
        local = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        received = trio.Event()
        try:
            local.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            async with trio.open_nursery() as nursery:

                async def receive() -> None:
                    is_broken = await _receive(stream, local)
                    received.set()
                    if is_broken:
                        nursery.cancel_scope.cancel()

                nursery.start_soon(receive)
                await _send(local, stream)
                if self._closing < MAX_CLOSING:
                    self._closing += 1
                    try:
                        with trio.move_on_after(CLOSE_S):
                            await received.wait()
                    finally:
                        self._closing -= 1
                nursery.cancel_scope.cancel()
        except STREAM_ERRORS as error:
            _log.debug("a stream ended: %s", error)
        finally:
            local.socket.close()
            await reset(stream)


async def _send(local: trio.SocketStream, stream: YamuxStream) -> None:
    try:
        while window := await wait_window(stream):
            data = await local.receive_some(min(window, PIECE_BYTES))
            if not data:
                await stream.close()
                return
            await stream.write(data)
    except STREAM_ERRORS as error:
        _log.debug("a stream broke: %s", error)


async def _receive(stream: YamuxStream, local: trio.SocketStream) -> bool:
    """Copy the bytes of the stream to the socket. Returns whether the stream broke."""
    is_taken = True
    while True:
        try:
            data = await stream.read(2 * PIECE_BYTES)
        except MuxedStreamEOF:
            if stream.conn.event_shutting_down.is_set():
                return True
            with contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                await local.send_eof()
            return False
        except STREAM_ERRORS:
            return True
        if is_taken:
            try:
                await local.send_all(data)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                is_taken = False  # the process has closed: the rest is dropped


async def echo(stream: YamuxStream) -> None:
    """Answer the pings on a stream until it ends."""
    with contextlib.suppress(*STREAM_ERRORS):
        while data := await stream.read(PING_BYTES):
            await stream.write(data)


async def reset(stream: YamuxStream) -> None:
    """Release what yamux keeps for a stream."""
    with (
        trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0),
        contextlib.suppress(*STREAM_ERRORS),
    ):
        await stream.reset()
