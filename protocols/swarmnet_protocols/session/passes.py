"""Passes: forwards and backwards of whole sequences through some blocks, without caches.

Here are their limits, and how to request them. Clients send passes for training and for audits.
Hosts send short ones to check whether another host has their blocks.

Shapes: P positions of all sequences of a pass together, D hidden size.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from swarmnet_protocols.arrays import Array, as_float32
from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation
from swarmnet_protocols.machine.aio import in_background, loop_time
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.protocol_ids import PASS
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.session.arrays import ElementType, are_finite, split, type_of
from swarmnet_protocols.session.wire_tensors import decode_tensor, encode_tensor, position_bytes, wire_type
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb

MAX_POSITIONS = 1024
"""Most positions of one pass, including the prefix of each sequence.

A step of another client's session may wait for the whole pass.
"""
MAX_SEQUENCES = 256
"""Most sequences of one pass."""

NextPart = Callable[[], Awaitable[tuple[pb.Part, Buffer]]]
"""Receives the next part of a tensor and its payload."""


def check_counts(counts: Sequence[int]) -> None:
    """Check that ``counts`` can be the lengths of a pass's sequences.

    Does not check ``MAX_POSITIONS``. Raises ``ProtocolViolation``.
    """
    if not 1 <= len(counts) <= MAX_SEQUENCES or min(counts) < 1:
        raise ProtocolViolation(f"a pass of {len(counts)} sequences, or one without positions")


def split_tensor(values: Array) -> Iterator[tuple[pb.Part, memoryview]]:
    """Yield the messages for activations [P, D], each as large as a message may be."""
    size = _positions_in_part(values.shape[1], type_of(values))
    for start in range(0, len(values), size):
        tensor, payload = encode_tensor(values[start : start + size])
        yield pb.Part(tensor=tensor), payload


def pack_tensors(tensors: Mapping[str, Array]) -> Array:
    """Return the values of all tensors, ordered by tensor name: float32 [values, 1]."""
    return np.concatenate([as_float32(tensors[name]).ravel() for name in sorted(tensors)])[:, None]


def unpack_tensors(packed: Array, like: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Invert ``pack_tensors``, for tensors with these names and shapes."""
    names = sorted(like)
    parts = split(packed[:, 0], [math.prod(like[name]) for name in names])
    return {name: part.reshape(like[name]) for name, part in zip(names, parts, strict=True)}


async def receive_tensor(next_part: NextPart, *, positions: int, hidden_size: int) -> Array:
    """Receive a finite tensor [positions, hidden_size] in the messages of ``split_tensor``.

    Memory grows with what has arrived, not with what was announced. Raises ``ProtocolViolation``
    for other messages, and what ``next_part`` raises.
    """
    pieces = []
    left = positions
    while left:
        part, payload = await next_part()
        count = min(left, _positions_in_part(hidden_size, wire_type(part.tensor.dtype)))
        piece = decode_tensor(part.tensor, payload, positions=count, hidden_size=hidden_size)
        if not are_finite(piece):
            raise ProtocolViolation("a tensor with values that are not finite")
        pieces.append(piece)
        left -= count
    return np.concatenate(pieces)


def _positions_in_part(hidden_size: int, wire: ElementType) -> int:
    return max(1, PASS.max_payload_bytes // position_bytes(wire, hidden_size))


PassStream = TypedStream[pb.PassRequest, pb.PassReply]


async def request_pass(
    stream: PassStream,
    begin: pb.Begin,
    tensors: Sequence[Array],
    shapes: Sequence[tuple[int, int]],
    timing: Timing,
) -> list[Array]:
    """Have the host at the other end of a PASS stream compute ``begin`` from ``tensors``.

    Returns tensors of ``shapes``. Closes the stream. Raises ``Refused``, ``DeadlineExceeded``,
    ``StreamEnded`` or ``ProtocolViolation``.
    """
    try:
        async with asyncio.timeout(timing.stall_s) as limit:
            request = _PassRequest.on(stream, timing, limit)
            # If sending fails, the receiving side sees the same error.
            async with in_background(request.send(begin, tensors)):
                return [
                    await receive_tensor(request.next_part, positions=rows, hidden_size=width)
                    for rows, width in shapes
                ]
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.peer} has not computed for {timing.stall_s:g} s") from error
    finally:
        stream.close()


@dataclass(frozen=True)
class _PassRequest:
    """The asking side of one pass.

    Each part moves the deadline ``limit``. Tensors are sent once the host has ``admitted`` the
    pass.
    """

    stream: PassStream
    timing: Timing
    limit: asyncio.Timeout
    admitted: asyncio.Event

    @classmethod
    def on(cls, stream: PassStream, timing: Timing, limit: asyncio.Timeout) -> Self:
        admitted = asyncio.Event()  # set by the first heartbeat
        stream.on_heartbeat = lambda _: admitted.set()
        return cls(stream, timing, limit, admitted)

    async def send(self, begin: pb.Begin, tensors: Sequence[Array]) -> None:
        await self.stream.send(pb.PassRequest(begin=begin))
        await self.admitted.wait()
        for tensor in tensors:
            for part, payload in split_tensor(tensor):
                await self.stream.send(pb.PassRequest(part=part), payload)
                self._moved()

    async def next_part(self) -> tuple[pb.Part, Buffer]:
        reply, payload = await self.stream.receive()
        if not reply.HasField("part"):
            raise ProtocolViolation("an unexpected message on a pass")
        self._moved()
        return reply.part, payload

    def _moved(self) -> None:
        self.limit.reschedule(loop_time() + self.timing.stall_s)
