"""How a stream is refused: a last word in place of a message, which the other side's ``receive`` raises."""

import asyncio
import contextlib
import struct

from swarmnet_protocols.errors import StreamRefused
from swarmnet_protocols.resources import Exhausted
from swarmnet_protocols.transport import Refusal
from swarmnet_protocols.transport.talking import parse
from swarmnet_protocols.wire import door_pb2 as pb

SIZES = struct.Struct(">II")
REFUSED = 0xFFFF_FFFF
"""In place of the size of a header: a ``Refused`` of as many bytes as the second size says, and nothing after it."""
MAX_REFUSAL_BYTES = 2048
MAX_REASON_CHARS = 300
MAX_RETRY_S = 60.0
LINGER_S = 5.0
LINGER_BYTES = 128 << 10
"""How long the other side has to hear that it is refused, and how much of what it says meanwhile is thrown away."""


def printable(reason: str) -> str:
    """What somebody else says, so that it can be shown to a person."""
    return "".join(filter(str.isprintable, reason[:MAX_REASON_CHARS]))


def no_room(error: Exhausted) -> Refusal:
    """What a stream is refused with for ``error``. How much of what is taken is nobody's business."""
    return Refusal("it has no room for more at the moment", error.retry_after_s)


def encode_refusal(refusal: Refusal) -> bytes:
    """The frame of ``refusal``."""
    retry_ms = round(1000 * min(max(0.0, refusal.retry_after_s), MAX_RETRY_S))
    said = pb.Refused(reason=refusal.reason[:MAX_REASON_CHARS], retry_ms=retry_ms).SerializeToString()
    return SIZES.pack(REFUSED, len(said)) + said


def decode_refusal(said: bytes) -> Refusal:
    """What follows the sizes in a frame. Raises ``ProtocolViolation``."""
    refused = parse(pb.Refused, said)
    return Refusal(refused.reason, min(refused.retry_ms / 1000, MAX_RETRY_S))


def refused_by(peer: str, refusal: Refusal) -> StreamRefused:
    """The error of whoever was refused by ``peer``."""
    if refusal.retry_after_s:
        hint = f"try again in {refusal.retry_after_s:.0f} s"
    else:
        hint = "`swarmnet doctor --swarm SWARM` says whether we are a member, and in which roles; ask whoever runs the swarm"
    return StreamRefused(
        f"{peer} refuses us: {printable(refusal.reason)}", retry_after_s=refusal.retry_after_s, hint=hint
    )


async def linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close a stream whose opener was told that it is refused, once it has heard so and closes.

    What it says meanwhile is thrown away: a stream with something unread in it breaks, and takes the refusal along.
    """
    left_bytes = LINGER_BYTES
    try:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER_S):
                while left_bytes > 0 and (piece := await reader.read(left_bytes)):
                    left_bytes -= len(piece)
    finally:
        writer.close()
