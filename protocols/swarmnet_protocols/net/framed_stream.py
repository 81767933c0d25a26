"""A stream of framed messages over a unix socket.

The other end of the socket is p2pd, or the encryption of a relayed stream.
"""

import asyncio
import math
from collections.abc import Callable

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import Buffer, Message, PeerId, ProtocolSpec
from swarmnet_protocols.net.framing import ENDED, LINGER_S, SIZES, FrameReader, encode, encode_refusal
from swarmnet_protocols.net.limits.flow_control import LimitedReader, ReceiveWindow, SendWindow
from swarmnet_protocols.net.limits.rate_limit import PIECE_BYTES, LinkLimiter
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.net.limits.stream_scope import StreamScope
from swarmnet_protocols.net.pipe import Pipe
from swarmnet_protocols.net.refusal import Refusal

MAX_IN_FLIGHT_MIB = 16.0
"""MiB that libp2p takes on a stream before the other side has received any of it."""


class FramedStream:
    """A message stream over one :class:`Pipe`."""

    def __init__(
        self,
        peer: PeerId,
        protocol: ProtocolSpec,
        pipe: Pipe,
        scope: StreamScope,
        on_close: Callable[["FramedStream"], None],
        link: LinkLimiter,
    ) -> None:
        self.address = ""
        """The other side's multiaddr on this connection; empty if unknown."""
        self.improved = asyncio.Event()
        """Set when a stream opened now would take a better path."""
        self._up = link.up
        self._on_close = on_close
        self._peer = peer
        self._protocol = protocol
        self._pipe = pipe
        self._scope = scope
        scope.evict = self.evict
        pipe.received_at = 0.0  # what came so far is p2pd's reply, not the peer's
        # With a limit of 0, ``send`` returns when the kernel has the whole message. Then the caller
        # may reuse its buffers.
        pipe.writer.transport.set_write_buffer_limits(high=0)
        self._send_lock = asyncio.Lock()
        self._sent_bytes = 0
        self.arrives_by = 0.0
        """Loop time when all sent bytes have arrived, over the slowest link worth using."""
        self._is_mid_message = False
        """True if part of a message has been sent. The other side would take any other frame for
        the rest."""
        self._closed = False
        self._control = bytearray()
        """Flow control frames that wait for the end of a message."""
        has_flow_control = protocol.has_flow_control
        self._send_window = SendWindow() if has_flow_control and scope.is_outbound else None
        self._receive_window = (
            ReceiveWindow(link.down, self._send_control)
            if has_flow_control and not scope.is_outbound
            else None
        )
        self._frames = FrameReader(
            LimitedReader(pipe.reader, link.down, self._receive_window),
            protocol,
            scope,
            send_window=self._send_window,
            receive_window=self._receive_window,
        )

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def scope(self) -> Scope:
        return self._scope.peer_scope

    @property
    def received_at(self) -> float:
        """Loop time of the last received bytes; 0 before any."""
        return self._pipe.received_at

    async def send(self, message: Message) -> None:
        try:
            async with self._send_lock:
                await self._send(message)
        except OSError as error:
            raise StreamEnded(f"the stream broke: {error}") from error
        finally:
            self._flush_control()

    async def _send(self, message: Message) -> None:
        window = self._send_window
        max_uncredited_bytes = math.inf if window is None else window.max_uncredited_bytes
        head, payload = encode(message, self._protocol, max_uncredited_bytes=max_uncredited_bytes)
        message_bytes = len(head) + len(payload)
        await self._scope.wait_send(message_bytes)
        self._check_open()
        if self._pipe.writer.is_closing() or self._pipe.reader.at_eof() or self._frames.is_ending:
            raise StreamEnded("the stream ended")
        needs_credit = len(payload) > max_uncredited_bytes
        if needs_credit or (self._up.is_limited and message_bytes > PIECE_BYTES):
            await self._write_in_pieces(head, memoryview(payload), window if needs_credit else None)
            return
        await self._acquire(message_bytes, message_bytes=message_bytes)
        # In one call: p2pd would otherwise send the head as a packet of its own.
        self._pipe.writer.writelines((head, payload) if payload else (head,))
        await self._pipe.writer.drain()

    async def _write_in_pieces(self, head: bytes, payload: memoryview, window: SendWindow | None) -> None:
        if window is not None:
            window.start(len(payload))
        piece: Buffer = head
        sent_bytes = 0
        try:
            while piece:
                await self._acquire(len(piece), message_bytes=len(head) + len(payload))
                self._is_mid_message = True
                self._pipe.writer.write(piece)
                await self._pipe.writer.drain()
                next_bytes = min(PIECE_BYTES, len(payload) - sent_bytes)
                if window is not None and next_bytes:
                    next_bytes = await window.acquire(next_bytes)
                piece = payload[sent_bytes : sent_bytes + next_bytes]
                sent_bytes += next_bytes
        except BaseException:
            self.close()
            raise
        self._is_mid_message = False

    async def _acquire(self, size_bytes: int, *, message_bytes: int) -> None:
        await self._up.acquire(size_bytes, message_bytes=message_bytes)
        self._check_open()
        self._sent_bytes += size_bytes
        begins = max(self.arrives_by, loop_time())
        self.arrives_by = begins + self._scope.mib_s * size_bytes / (1 << 20)

    def _send_control(self, kind: int, size_bytes: int) -> None:
        """Send a flow control frame, after the message that is under way."""
        self._control += SIZES.pack(kind, size_bytes)
        if not self._send_lock.locked():
            self._flush_control()

    def _flush_control(self) -> None:
        if self._control and not self._closed and not self._pipe.writer.is_closing():
            self._up.count(len(self._control))
            self._pipe.writer.write(self._control)
            self._control = bytearray()

    async def path_improved(self) -> None:
        await self.improved.wait()

    async def receive(self) -> Message:
        self._check_open()
        message = await self._scope.receive(self._frames.read)
        self._check_open()
        return message

    def _check_open(self) -> None:
        if self._closed:
            raise StreamEnded("the stream was closed")

    def close(self) -> None:
        if self._sent_bytes and not self._frames.is_ending:
            self._end(ENDED, within_s=self._arrival_s())
        else:
            self._end(b"", within_s=0.0)

    def evict(self) -> None:
        """Close the stream without waiting until the other side has received everything."""
        self.close()
        self._scope.close()
        self._pipe.writer.close()

    def refuse(self, refusal: Refusal) -> None:
        self._end(
            encode_refusal(refusal),
            within_s=max(LINGER_S, self._arrival_s()) if self._sent_bytes else LINGER_S,
        )

    def _arrival_s(self) -> float:
        """Return in how many seconds the sent bytes arrive over the slowest link worth using."""
        return self._scope.mib_s * (1 + min(self._sent_bytes / (1 << 20), MAX_IN_FLIGHT_MIB))

    def _end(self, last_frame: bytes, *, within_s: float) -> None:
        """End the stream with ``last_frame``.

        Without a last frame, or in the middle of a message, the stream ends at once.
        """
        if self._closed:
            return
        self._closed = True
        self._scope.stop_reading()
        self._frames.drop()
        self._pipe.drop()
        for window in (self._send_window, self._receive_window):
            if window is not None:
                window.close()
        if last_frame and not self._is_mid_message:
            self._pipe.end(last_frame, within_s=within_s)
        else:
            self._pipe.writer.close()
        self._on_close(self)

    async def flush(self) -> None:
        """Wait until the other side has received everything sent before ``close``.

        The wait ends after the time that ``close`` allowed. If cancelled, close at once.
        """
        try:
            await self._pipe.closed()
        finally:
            self._scope.close()
