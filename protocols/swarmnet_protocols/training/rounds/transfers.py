"""Contributions and results on the wire: the sender splits them, the receiver assembles them.

A part is one message. Its header (``pb.Contribution`` or ``pb.Result``) has the slice, offset and
hash. The bytes are the payload. Parts have at most 256 KiB, so that control messages wait for at
most one.
"""

from collections.abc import Callable, Iterator

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.training.codecs.values import DifferenceBytes, Payload
from swarmnet_protocols.training.rounds.deadlines import MIN_WAIT_S, Pace
from swarmnet_protocols.training.rounds.messages import HASH_BYTES, sized_hash
from swarmnet_protocols.training.rounds.reduction import CONTRIBUTION_HASH_BYTES, Contribution, Result
from swarmnet_protocols.wire import training_pb2 as pb

MAX_SUMMARY_BYTES = 32 << 10

Outgoing = tuple[pb.ExchangeRequest, Buffer]
"""A message and its payload."""


def parts(
    payload: Payload,
    header: Callable[[int, bool], pb.ExchangeRequest],
    pace: Pace,
    clock: Callable[[], float],
    wanted: Callable[[], bool] = lambda: True,
) -> Iterator[Outgoing | float]:
    """Yield ``payload`` in parts while it is ``wanted``, at least one even if it is empty.

    While the next part is not due, yields the loop time when it will be. ``header`` gets the offset
    of the part, and whether the part was delayed: its arrival time then does not measure the link.
    """
    view = payload if isinstance(payload, DifferenceBytes) else memoryview(payload)
    for offset in range(0, max(len(view), 1), pace.part_bytes):
        paced = False
        while wanted() and (due_s := pace.due_s(offset)) > clock() + MIN_WAIT_S:
            paced = True
            yield due_s
        if not wanted():
            return
        yield header(offset, paced), view[offset : offset + pace.part_bytes]


def contribution_header(
    index: int, contribution: Contribution, offset: int, paced: bool
) -> pb.ExchangeRequest:
    """Return the header of a part of a contribution to slice ``index``."""
    return pb.ExchangeRequest(
        contribution=pb.Contribution(
            slice=index,
            weight=contribution.weight,
            size_bytes=len(contribution.data),
            offset=offset,
            hash=contribution.hash,
            paced=paced,
            signature=contribution.signature,
            inside=contribution.inside,
        )
    )


def result_header(index: int, result: Result, offset: int, paced: bool) -> pb.ExchangeRequest:
    """Return the header of a part of the result of slice ``index``. The first has the summary."""
    return pb.ExchangeRequest(
        result=pb.Result(
            slice=index,
            size_bytes=len(result.payload),
            offset=offset,
            hash=result.hash,
            summary=b"" if offset else result.summary,
            paced=paced,
        )
    )


class PartialPayload:
    """A payload of announced size that arrives in parts.

    It arrives in the memory ``into`` if that is given and has its size. Otherwise its memory grows
    with the bytes that arrived, not with the announced size. ``timed_bytes`` arrived in
    ``timed_s`` seconds. The first part and paced parts are not timed: only a part that
    was sent right after another one measures the link.
    """

    def __init__(
        self, size_bytes: int, hash: bytes, summary: bytes = b"", into: memoryview | None = None
    ) -> None:
        self.size_bytes = size_bytes
        self.hash = hash
        self.summary = summary
        self.data: bytearray | memoryview = bytearray()
        if into is not None and len(into) == size_bytes:
            self.data = into
        self._arrived = 0
        self.timed_bytes = 0
        self.timed_s = 0.0
        self._last_s = 0.0

    def add(self, offset: int, part: Buffer, now: float, *, paced: bool) -> bool:
        """Append a part and return whether the payload is complete.

        Raises ``ProtocolViolation`` for a part out of order or too long.
        """
        if offset != self._arrived or offset + len(part) > self.size_bytes:
            raise ProtocolViolation(
                f"a part of {len(part)} bytes at {offset}, but {self._arrived} of {self.size_bytes} bytes arrived"
            )
        if offset and not paced:
            self.timed_bytes += len(part)
            self.timed_s += now - self._last_s
        self._last_s = now
        self._arrived += len(part)
        if isinstance(self.data, memoryview):
            self.data[offset : self._arrived] = part
        else:
            self.data += part
        return self._arrived == self.size_bytes


class Assembly:
    """The payloads that arrive from other members: one of each kind from each member at a time."""

    def __init__(self) -> None:
        self.timed: dict[tuple[int, str], tuple[int, float]] = {}
        """(member, kind) → timed bytes and seconds of the last whole payload."""
        self._partial: dict[tuple[int, str], PartialPayload] = {}

    def add(
        self,
        member: int,
        header: pb.Contribution | pb.Result,
        part: Buffer,
        limit: int,
        now: float,
        into: memoryview | None = None,
    ) -> PartialPayload | None:
        """Add a part of a payload. Returns the payload with its last part, otherwise None.

        ``into``: the memory for a payload that begins, if it has the payload's size.

        Raises ``ProtocolViolation`` for a payload of more than ``limit`` bytes.
        """
        key = member, header.DESCRIPTOR.name
        if header.offset == 0:
            summary, hash_bytes = b"", CONTRIBUTION_HASH_BYTES
            if isinstance(header, pb.Result):
                summary, hash_bytes = header.summary, HASH_BYTES
            if header.size_bytes > limit or len(summary) > MAX_SUMMARY_BYTES:
                raise ProtocolViolation(f"{header.size_bytes} bytes for a slice of at most {limit}")
            hash = sized_hash(header.hash, hash_bytes)
            self._partial[key] = PartialPayload(header.size_bytes, hash, summary, into)
        partial = self._partial.get(key)
        if partial is None or partial.hash != header.hash:
            return None  # its first part was not wanted
        if not partial.add(header.offset, part, now, paced=header.paced):
            return None
        self.timed[key] = partial.timed_bytes, partial.timed_s
        return self._partial.pop(key)

    def drop_result(self, member: int) -> None:
        """Forget the result that arrives from a member. Its later parts are not wanted."""
        self._partial.pop((member, pb.Result.DESCRIPTOR.name), None)

    def clear(self) -> None:
        """Free the payloads that have not arrived whole."""
        self._partial.clear()
