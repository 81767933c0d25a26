"""Protobufs on a stream, and timeouts for sending and receiving. ``typed_stream.py`` is built on it."""

import asyncio
from typing import TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation
from swarmnet_protocols.machine.aio import until
from swarmnet_protocols.net import Message, Stream

P = TypeVar("P", bound=Protobuf)


def parse(kind: type[P], header: bytes) -> P:
    """Decode a protobuf. Raises ``ProtocolViolation`` for bytes that are none."""
    try:
        return kind.FromString(header)
    except DecodeError as error:
        raise ProtocolViolation(f"not a {kind.DESCRIPTOR.name}") from error


async def receive_within(stream: Stream, silence_s: float) -> Message:
    """The next message. Raises ``DeadlineExceeded`` if none comes within ``silence_s``."""
    try:
        return await until(asyncio.get_running_loop().time() + silence_s, stream.receive)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.peer} has been silent for {silence_s} s") from error


async def send_within(stream: Stream, message: Message, timeout_s: float) -> None:
    """Send a message. Raises ``DeadlineExceeded`` if the other side has not read enough within ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            await stream.send(message)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.peer} has not read for {timeout_s:g} s") from error
