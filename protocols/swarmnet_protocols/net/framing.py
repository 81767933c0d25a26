"""Frames: one message is ``u32 header size, u32 payload size, header, payload``, big endian.

Impossible sizes mark three other frames: a refusal, the end of the stream (``Refusal``), and flow
control (``flow_control.py``). Sizes are checked before anything is allocated.
"""

import asyncio
import math
import struct
from typing import NoReturn, Protocol

from google.protobuf.message import DecodeError

from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation, StreamEnded
from swarmnet_protocols.net import Buffer, Message, ProtocolSpec
from swarmnet_protocols.net.limits.flow_control import (
    CREDIT,
    LIMIT,
    NEEDS_CREDIT,
    ReceiveWindow,
    SendWindow,
    seconds_left,
)
from swarmnet_protocols.net.limits.stream_scope import StreamScope
from swarmnet_protocols.net.refusal import Refusal, Refused
from swarmnet_protocols.wire import refusal_pb2 as pb

SIZES = struct.Struct(">II")
REFUSED = 0xFFFF_FFFF
"""Stands in for the header size and marks a refusal and the end of the stream. The second size is
the refusal's length in bytes."""
ENDED = SIZES.pack(REFUSED, 0)
"""Last frame of a stream that ends without a refusal. A side that has read it may close."""
MAX_REFUSAL_BYTES = 2048
LINGER_S = 5.0
"""Seconds until a refused stream is closed even if the other side has not read the refusal."""
MIB = 1 << 20
PIECE_BYTES = 64 << 10
"""Bytes of one piece of a message. Memory for the whole message is reserved once the first piece
has come.

With larger pieces, streams buffer more bytes before a limit counts them. With smaller pieces, a
sender that stops after the first one has made this peer reserve much memory for few bytes."""
CHECK_S = 1.0
"""Seconds of waiting between two checks of a sender's rate."""
STALL_S = 4.0
"""Most seconds that a sender has for each piece while other messages wait for memory.

With more, slow senders hold up others for longer. With less, a link that falters loses its stream
at a busy host."""


def check_sizes(header_bytes: int, payload_bytes: int, protocol: ProtocolSpec) -> None:
    """Raise ``ProtocolViolation`` for a message over the limits of ``protocol``."""
    if header_bytes > protocol.max_header_bytes:
        raise ProtocolViolation(
            f"{protocol.id}: a header of {header_bytes} bytes is over the limit of {protocol.max_header_bytes}"
        )
    if payload_bytes > protocol.max_payload_bytes:
        raise ProtocolViolation(
            f"{protocol.id}: a payload of {payload_bytes} bytes is over the limit of {protocol.max_payload_bytes}"
        )


def encode(
    message: Message, protocol: ProtocolSpec, *, max_uncredited_bytes: float = math.inf
) -> tuple[bytes, Buffer]:
    """Return the frame of ``message`` in two parts, so that a large payload is not copied.

    A payload over ``max_uncredited_bytes`` is marked as needing credit. Raises
    ``ProtocolViolation`` for a message over the limits.
    """
    payload = message.payload
    if isinstance(payload, memoryview):
        payload = payload.cast("B")
    check_sizes(len(message.header), len(payload), protocol)
    flag = NEEDS_CREDIT if len(payload) > max_uncredited_bytes else 0
    return SIZES.pack(len(message.header) + flag, len(payload)) + message.header, payload


def encode_refusal(refusal: Refusal) -> bytes:
    """Return the frame of ``refusal``.

    A refusal always has a detail, so its size is never 0, which would mean ``ENDED``.
    """
    encoded = refusal.to_wire().SerializeToString()
    return SIZES.pack(REFUSED, len(encoded)) + encoded


def decode_refusal(encoded: bytes, peer: str) -> Refused:
    """Return the error for a refusal by ``peer``; ``encoded`` are the bytes after the sizes.

    Raises ``ProtocolViolation`` if they are not a refusal.
    """
    try:
        return Refused(peer, pb.Refusal.FromString(encoded))
    except DecodeError as error:
        raise ProtocolViolation("not a Refusal") from error


class ByteReader(Protocol):
    """A source of bytes for a :class:`FrameReader`."""

    async def readexactly(self, size_bytes: int, deadline: asyncio.Timeout | None = None) -> bytes:
        """Read as ``asyncio.StreamReader.readexactly``.

        ``deadline`` is the time that the sender has left. It stands still while this side delays
        reading.
        """

    @property
    def buffered_bytes(self) -> int:
        """Bytes that ``readexactly`` returns without waiting."""

    def drop(self) -> None:
        """Free what was read and not returned."""


class FrameReader:
    """Reads messages from a byte stream.

    Nothing over the limits is buffered, and a cancelled ``read`` loses nothing.
    """

    def __init__(
        self,
        reader: ByteReader,
        protocol: ProtocolSpec,
        scope: StreamScope,
        *,
        send_window: SendWindow | None = None,
        receive_window: ReceiveWindow | None = None,
    ) -> None:
        """Create the reader.

        ``send_window`` handles the flow control frames of the other side. ``receive_window`` gives
        credit for payloads that need it. Without a window, its frames are violations.
        """
        self._reader = reader
        self._protocol = protocol
        self._scope = scope
        self._send_window = send_window
        self._receive_window = receive_window
        self._sizes: tuple[int, int] | None = None
        self._is_started = False
        """True if the receive window knows of the current message."""
        self._refusal = b""
        self._body: bytes | bytearray = b""
        self._waited_s = 0.0
        """Seconds of waiting for the sender since the last whole MiB of the message."""

    @property
    def is_ending(self) -> bool:
        """True if a refusal or the end of the stream has begun to arrive."""
        return self._sizes is not None and self._sizes[0] == REFUSED

    def drop(self) -> None:
        """Free what has come of a message. Reference cycles may keep this object long after the
        stream.
        """
        self._body = b""
        self._reader.drop()

    async def read(self) -> Message:
        """Return the next message. Its memory is reserved in ``scope`` once its first piece has
        come.

        Raises, also at every later call:

        - ``StreamEnded`` at the end
        - ``Refused`` for a refusal
        - ``ProtocolViolation`` for an oversized message

        Raises, for this message:

        - ``ResourceLimitReached`` if the limits never allow the peer a message of this size
        - ``DeadlineExceeded`` if memory does not become free in time, or the message comes too
          slowly
        """
        try:
            header_bytes, payload_bytes = await self._read_sizes()
            if header_bytes == REFUSED:
                await self._raise_end(payload_bytes)
            needs_credit = self._receive_window is not None and header_bytes >= NEEDS_CREDIT
            header_bytes -= NEEDS_CREDIT * needs_credit
            check_sizes(header_bytes, payload_bytes, self._protocol)
            if self._receive_window is not None and not self._is_started:
                self._receive_window.start(
                    header_bytes,
                    payload_bytes,
                    needs_credit=needs_credit,
                    received_bytes=self._reader.buffered_bytes,
                )
                self._is_started = True
            body = await self._read_body(header_bytes + payload_bytes)
        except asyncio.IncompleteReadError as error:
            is_cut_short = self._sizes is not None or error.partial
            raise StreamEnded(
                "the stream ended within a message" if is_cut_short else "the stream ended"
            ) from error
        except OSError as error:
            raise StreamEnded(f"the stream broke: {error.strerror}") from error
        self._sizes, self._is_started = None, False
        return Message(bytes(body[:header_bytes]), body[header_bytes:])

    async def _read_sizes(self) -> tuple[int, int]:
        """Return the sizes of the next message, and handle the flow control frames before it."""
        while True:
            if self._sizes is None:
                self._sizes = SIZES.unpack(await self._reader.readexactly(SIZES.size))
            if self._send_window is None or self._sizes[0] not in (LIMIT, CREDIT):
                return self._sizes
            self._send_window.on_control(*self._sizes)
            self._sizes = None

    async def _raise_end(self, size_bytes: int) -> NoReturn:
        if not size_bytes:
            raise StreamEnded("the stream ended")
        if not self._refusal:
            if size_bytes > MAX_REFUSAL_BYTES:
                raise ProtocolViolation(
                    f"a refusal of {size_bytes} bytes is over the limit of {MAX_REFUSAL_BYTES}"
                )
            self._refusal = bytes(await self._read_body(size_bytes))
        raise decode_refusal(self._refusal, self._scope.peer_scope.name)

    async def _read_body(self, size_bytes: int) -> memoryview:
        """Read the body of a message. Memory for the whole body is reserved once its first piece
        has come.

        If each piece were reserved alone, two messages that do not fit together could each hold a
        part of the memory and wait for the rest.
        """
        if size_bytes > PIECE_BYTES:
            self._scope.check_size(size_bytes)
        if not self._body and size_bytes:
            self._body = await self._read_piece(min(size_bytes, PIECE_BYTES))
        await self._scope.reserve(size_bytes)
        while (missing := size_bytes - len(self._body)) > 0:
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += await self._read_piece(min(missing, PIECE_BYTES))
        body, self._body, self._waited_s = self._body, b"", 0.0
        return memoryview(body)

    async def _read_piece(self, size_bytes: int) -> bytes:
        """Read the next piece of a message.

        A sender has ``mib_s`` seconds for each MiB. While others wait for memory, it has
        ``STALL_S`` for each piece, so that no peer holds memory for bytes that do not come. Raises
        ``DeadlineExceeded`` for a slower sender, and ``ResourceLimitReached``.
        """
        if size_bytes <= self._reader.buffered_bytes:  # a timer would cost more than the message
            return await self._reader.readexactly(size_bytes)
        mib_s = self._scope.mib_s
        piece_waited_s = 0.0
        if len(self._body) % MIB == 0:
            self._waited_s = 0.0
        while True:
            check_s = min(CHECK_S, mib_s)
            try:
                async with asyncio.timeout(check_s) as deadline:
                    piece = await self._reader.readexactly(size_bytes, deadline)
                    self._waited_s += check_s - seconds_left(deadline)
                    return piece
            except TimeoutError:
                self._waited_s += check_s
                piece_waited_s += check_s
            if not self._body:  # if the first piece comes slowly, reserve what has come of it
                self._scope.reserve_now(self._reader.buffered_bytes)
            if self._waited_s >= mib_s:
                raise DeadlineExceeded("the rest of a message did not come in time")
            if piece_waited_s >= STALL_S and self._scope.holds_memory and self._scope.is_memory_awaited:
                raise DeadlineExceeded("a message came too slowly while others waited for memory")
