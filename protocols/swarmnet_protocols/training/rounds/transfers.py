"""Contributions and results on the wire: the sender splits them, the receiver assembles them.

A part is one message. Its header (``pb.Contribution`` or ``pb.Result``) has the slice, offset and
hash. The bytes are the payload. Parts have at most 256 KiB, so that control messages wait for at
most one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.training.rounds.deadlines import MIN_WAIT_S, Pace
from swarmnet_protocols.training.rounds.reduction import Contribution, Result
from swarmnet_protocols.wire import training_pb2 as pb

MAX_SUMMARY_BYTES = 32 << 10

Outgoing = tuple[pb.ExchangeRequest, Buffer]
"""A message and its payload."""


@dataclass(frozen=True)
class Part:
    """``data`` of a payload at ``offset``.

    ``paced``: the sender delayed the part, so its arrival time does not measure the link.
    """

    offset: int
    data: memoryview
    paced: bool


def parts(payload: Buffer, pace: Pace, clock: Callable[[], float]) -> Iterator[Part | float]:
    """Yield the parts of ``payload``, at least one even if it is empty.

    While the next part is not due, yields the loop time when it will be.
    """
    view = memoryview(payload)
    for offset in range(0, max(len(view), 1), pace.part_bytes):
        paced = False
        while (due_s := pace.due_s(offset)) > clock() + MIN_WAIT_S:
            paced = True
            yield due_s
        yield Part(offset, view[offset : offset + pace.part_bytes], paced)


def contribution_messages(
    index: int, contribution: Contribution, parts: Iterator[Part | float], wanted: Callable[[], bool]
) -> Iterator[Outgoing | float]:
    """Yield the messages of a contribution to slice ``index`` while it is ``wanted``.

    Floats as in ``parts``.
    """
    for part in parts:
        if not wanted():
            return
        if isinstance(part, float):
            yield part
            continue
        header = pb.Contribution(
            slice=index,
            weight=contribution.weight,
            size_bytes=len(contribution.data),
            offset=part.offset,
            hash=contribution.hash,
            paced=part.paced,
            signature=contribution.signature,
        )
        yield pb.ExchangeRequest(contribution=header), part.data


def result_messages(index: int, result: Result, parts: Iterator[Part | float]) -> Iterator[Outgoing | float]:
    """Yield the messages of the result of slice ``index``. Floats as in ``parts``."""
    for part in parts:
        if isinstance(part, float):
            yield part
            continue
        header = pb.Result(
            slice=index,
            size_bytes=len(result.payload),
            offset=part.offset,
            hash=result.hash,
            summary=b"" if part.offset else result.summary,
            paced=part.paced,
        )
        yield pb.ExchangeRequest(result=header), part.data


class PartialPayload:
    """A payload of announced size that arrives in parts.

    Its memory grows with the bytes that arrived, not with the announced size. ``timed_bytes``
    arrived in ``timed_s`` seconds. The first part and paced parts are not timed: only a part that
    was sent right after another one measures the link.
    """

    def __init__(self, size_bytes: int, hash: bytes, summary: bytes = b"") -> None:
        self.size_bytes = size_bytes
        self.hash = hash
        self.summary = summary
        self.data = bytearray()
        self.timed_bytes = 0
        self.timed_s = 0.0
        self._last_s = 0.0

    def add(self, offset: int, part: Buffer, now: float, *, paced: bool) -> bool:
        """Append a part and return whether the payload is complete.

        Raises ``ProtocolViolation`` for a part out of order or too long.
        """
        if offset != len(self.data) or offset + len(part) > self.size_bytes:
            raise ProtocolViolation(
                f"a part of {len(part)} bytes at {offset}, but {len(self.data)} of {self.size_bytes} bytes arrived"
            )
        if offset and not paced:
            self.timed_bytes += len(part)
            self.timed_s += now - self._last_s
        self._last_s = now
        self.data += part
        return len(self.data) == self.size_bytes
