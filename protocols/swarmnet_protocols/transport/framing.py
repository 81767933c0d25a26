"""The frame of one message: ``u32 header size, u32 payload size, header, payload``, big endian."""

import asyncio
import struct

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.transport import Buffer, Message, ProtocolSpec

_SIZES = struct.Struct(">II")


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


def encode(message: Message, protocol: ProtocolSpec) -> tuple[bytes, Buffer]:
    """The bytes of ``message`` in two parts, so that a large payload is not copied."""
    payload = message.payload
    if isinstance(payload, memoryview):
        payload = payload.cast("B")
    check_sizes(len(message.header), len(payload), protocol)
    return _SIZES.pack(len(message.header), len(payload)) + message.header, payload


class FrameReader:
    """Reads messages from a byte stream. Nothing over the limits is ever buffered; a cancelled ``read`` loses nothing."""

    def __init__(self, reader: asyncio.StreamReader, protocol: ProtocolSpec) -> None:
        self._reader = reader
        self._protocol = protocol
        self._sizes: tuple[int, int] | None = None

    async def read(self) -> Message:
        """The next message. Raises ``StreamEnded`` at the end, ``ProtocolViolation``, now and ever after, for an oversized one."""
        try:
            if self._sizes is None:
                self._sizes = _SIZES.unpack(await self._reader.readexactly(_SIZES.size))
            header_bytes, payload_bytes = self._sizes
            check_sizes(header_bytes, payload_bytes, self._protocol)
            body = memoryview(await self._reader.readexactly(header_bytes + payload_bytes))
        except asyncio.IncompleteReadError as error:
            cut_short = self._sizes is not None or error.partial
            raise StreamEnded(
                "the stream ended within a message" if cut_short else "the stream ended"
            ) from error
        except OSError as error:
            raise StreamEnded(f"the stream broke: {error.strerror}") from error
        self._sizes = None
        return Message(bytes(body[:header_bytes]), body[header_bytes:])
