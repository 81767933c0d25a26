"""The frame of one message: ``u32 header size, u32 payload size, header, payload``, big endian."""

import asyncio
import math
from typing import NoReturn, Protocol

from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation, StreamEnded
from swarmnet_protocols.net import Buffer, Message, ProtocolSpec, Refusal
from swarmnet_protocols.net.flow_control import CREDIT, LIMIT, NEEDS_CREDIT, ReceiveWindow, SendWindow
from swarmnet_protocols.net.meter import Meter
from swarmnet_protocols.net.refusal import (
    MAX_REFUSAL_BYTES,
    REFUSED,
    SIZES,
    decode_refusal,
    refused_by,
)

PIECE_BYTES = 1 << 20
"""So much of a message is read at a time."""


def check_sizes(header_bytes: int, payload_bytes: int, protocol: ProtocolSpec) -> None:
    """Raises ``ProtocolViolation`` for a message over the limits of ``protocol``."""
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
    """The bytes of ``message`` in two parts, so that a large payload is not copied; one over ``max_uncredited_bytes`` bytes waits for grants."""
    payload = message.payload
    if isinstance(payload, memoryview):
        payload = payload.cast("B")
    check_sizes(len(message.header), len(payload), protocol)
    waits = NEEDS_CREDIT if len(payload) > max_uncredited_bytes else 0
    return SIZES.pack(len(message.header) + waits, len(payload)) + message.header, payload


class ByteReader(Protocol):
    """What frames are read from."""

    async def readexactly(self, size_bytes: int, deadline: asyncio.Timeout | None = None) -> bytes:
        """As of ``asyncio.StreamReader``. ``deadline`` is for what the other side does, not for what holds us back."""

    @property
    def buffered_bytes(self) -> int:
        """How much is here that ``readexactly`` has not given yet."""


class FrameReader:
    """Reads messages from a byte stream. Nothing over the limits is ever buffered; a cancelled ``read`` loses nothing."""

    def __init__(
        self,
        reader: ByteReader,
        protocol: ProtocolSpec,
        meter: Meter,
        *,
        allowance: SendWindow | None = None,
        grants: ReceiveWindow | None = None,
    ) -> None:
        """``allowance`` hears the grants that come, ``grants`` of the messages that wait for some; without them, both are violations."""
        self._reader = reader
        self._protocol = protocol
        self._meter = meter
        self._allowance = allowance
        self._grants = grants
        self._sizes: tuple[int, int] | None = None
        self._is_expected = False
        self._refusal: Refusal | None = None
        self._body = bytearray()

    @property
    def is_over(self) -> bool:
        """Whether the other side has begun its last word."""
        return self._sizes is not None and self._sizes[0] == REFUSED

    async def read(self) -> Message:
        """The next message, whose bytes ``meter`` holds from before they are read.

        Raises ``StreamEnded`` at the end, ``ProtocolViolation``, now and ever after, for an oversized one, ``ResourceLimitReached`` when the peer may
        never have so much on its way, and ``DeadlineExceeded`` when room for it, or a MiB of it, is too long in coming. What the other
        side refuses the stream with is raised as ``StreamRefused``, now and ever after.
        """
        try:
            header_bytes, payload_bytes = await self._read_sizes()
            if header_bytes == REFUSED:
                await self._read_last_word(payload_bytes)
            waits = self._grants is not None and header_bytes >= NEEDS_CREDIT
            header_bytes -= NEEDS_CREDIT * waits
            check_sizes(header_bytes, payload_bytes, self._protocol)
            if self._grants is not None and not self._is_expected:
                received_bytes = self._reader.buffered_bytes
                self._grants.start(
                    header_bytes, payload_bytes, needs_credit=waits, received_bytes=received_bytes
                )
                self._is_expected = True
            body = await self._read_body(header_bytes + payload_bytes)
        except asyncio.IncompleteReadError as error:
            cut_short = self._sizes is not None or error.partial
            raise StreamEnded(
                "the stream ended within a message" if cut_short else "the stream ended"
            ) from error
        except TimeoutError as error:
            raise DeadlineExceeded("a message that was begun does not go on") from error
        except OSError as error:
            raise StreamEnded(f"the stream broke: {error.strerror}") from error
        self._sizes, self._is_expected = None, False
        return Message(bytes(body[:header_bytes]), body[header_bytes:])

    async def _read_sizes(self) -> tuple[int, int]:
        """Of the next message; grants that come before it are heard."""
        while True:
            if self._sizes is None:
                self._sizes = SIZES.unpack(await self._reader.readexactly(SIZES.size))
            if self._allowance is None or self._sizes[0] not in (LIMIT, CREDIT):
                return self._sizes
            self._allowance.on_control(*self._sizes)
            self._sizes = None

    async def _read_last_word(self, size_bytes: int) -> NoReturn:
        if not size_bytes:
            raise StreamEnded("the stream ended")
        if self._refusal is None:
            if size_bytes > MAX_REFUSAL_BYTES:
                raise ProtocolViolation(f"a refusal of {size_bytes} bytes: {MAX_REFUSAL_BYTES} are the most")
            self._refusal = decode_refusal(bytes(await self._read_body(size_bytes)))
        raise refused_by(self._meter.scope.name, self._refusal)

    async def _read_body(self, size_bytes: int) -> memoryview:
        """Piece by piece, each in time: whoever announces much and sends little does not keep its room for long."""
        await self._meter.reserve(size_bytes)
        while True:
            wanted = min(size_bytes - len(self._body), PIECE_BYTES)
            if wanted <= self._reader.buffered_bytes:  # a timer would cost more than the message
                piece = await self._reader.readexactly(wanted)
            else:
                async with asyncio.timeout(self._meter.piece_s) as deadline:
                    piece = await self._reader.readexactly(wanted, deadline)
            if wanted == size_bytes:
                return memoryview(piece)
            self._body += piece
            if len(self._body) == size_bytes:
                whole, self._body = self._body, bytearray()
                return memoryview(whole)
