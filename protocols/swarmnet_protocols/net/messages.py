"""What every conversation does with what comes on a stream."""

import asyncio
from typing import TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation
from swarmnet_protocols.machine.aio import until
from swarmnet_protocols.net import Message, Stream

P = TypeVar("P", bound=Protobuf)


def parse(kind: type[P], header: bytes) -> P:
    """A protobuf from the wire, or ``ProtocolViolation``."""
    try:
        return kind.FromString(header)
    except DecodeError as error:
        raise ProtocolViolation(f"not a {kind.DESCRIPTOR.name}") from error


async def receive_within(stream: Stream, silence_s: float) -> Message:
    """The next message of a stream on which something, if only a beat, must come every so often."""
    try:
        return await until(asyncio.get_running_loop().time() + silence_s, stream.receive)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.peer} has been silent for {silence_s} s") from error


async def send_within(stream: Stream, message: Message, patience_s: float) -> None:
    """Send to somebody who has to read it in time: what is not read takes room here."""
    try:
        async with asyncio.timeout(patience_s):
            await stream.send(message)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.peer} has not read for {patience_s:g} s") from error
