"""Steps: the unit that travels down a chain, its encoding, and the rules for its positions.

A step has one row for each sequence it extends. Shapes: P positions of all rows of a step together,
D hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.session.arrays import ElementType, are_finite, split
from swarmnet_protocols.session.wire_tensors import decode_tensor, encode_tensor
from swarmnet_protocols.wire import session_pb2 as pb

MAX_ROWS = 256
"""Most rows of one step."""
MAX_SEQUENCE = 1 << 16
"""Largest sequence number."""
MAX_POSITION = 1 << 24
"""Most positions of one sequence."""


@dataclass(frozen=True)
class Row:
    """New positions [start, start + count) of one sequence.

    The sequence first takes over the first ``start`` positions of ``source``, as they were before
    the step. ``source`` is the sequence itself, or another sequence that it forks from. ``rewrite``
    must be true if that drops positions or takes another sequence's positions. The client wants the
    outputs of the first ``first`` and the last ``outputs`` positions.
    """

    sequence: int
    start: int
    count: int
    outputs: int
    source: int
    rewrite: bool = False
    first: int = 0

    @property
    def wanted(self) -> int:
        """Number of outputs that the client wants."""
        return self.first + self.outputs

    @property
    def end(self) -> int:
        """Number of positions of the sequence after the step."""
        return self.start + self.count


@dataclass(frozen=True)
class Step:
    """Rows and their values [P, D], in the order of the rows.

    In the client's log the values are token ids [P]. ``seq`` counts the steps of a session from 1.
    ``acked`` is the last step whose outputs the client has. ``replay`` marks a step that rebuilds a
    fresh hop from the log.
    """

    seq: int
    rows: tuple[Row, ...]
    values: Array = field(compare=False)
    acked: int = 0
    replay: bool = False

    def with_values(self, values: Array) -> "Step":
        """Return the step with other values, for example its outputs."""
        return replace(self, values=values)

    @property
    def positions(self) -> int:
        return sum(row.count for row in self.rows)

    def split(self) -> tuple[Array, ...]:
        """Return the values of each row, [count, D]."""
        return split(self.values, [row.count for row in self.rows])

    def wanted_values(self) -> Array:
        """Return the values of the positions that the client wants, row after row."""
        parts = []
        for row, part in zip(self.rows, self.split(), strict=True):
            parts += [part[: row.first], part[row.count - row.outputs :]]
        return np.concatenate(parts)


def check_rows(rows: tuple[Row, ...], lengths: Mapping[int, int]) -> None:
    """Check the rows of a step against ``lengths``, the positions of each sequence before the step.

    Raises ``ProtocolViolation`` if the step leaves a gap, rewrites positions without ``rewrite``,
    or has two rows of one sequence.
    """
    if len({row.sequence for row in rows}) != len(rows):
        raise ProtocolViolation("a step names a sequence twice")
    for row in rows:
        held = lengths.get(row.source, 0)
        if row.start > held:
            raise ProtocolViolation(
                f"gap: sequence {row.source} has {held} positions, the step starts at {row.start}"
            )
        appends = row.source == row.sequence and row.start == held
        if not appends and not row.rewrite:
            raise ProtocolViolation(
                f"overlap: sequence {row.sequence} would be rewritten from {row.start}, but the row is not marked as a rewrite"
            )


def encode_step(step: Step, wire: ElementType) -> tuple[pb.Step, memoryview]:
    """Return the message and payload of a step with values [P, D], sent as ``wire``."""
    tensor, payload = encode_tensor(step.values, wire)
    rows = [
        pb.Row(
            sequence=row.sequence,
            start=row.start,
            count=row.count,
            outputs=row.outputs,
            source=row.source,
            rewrite=row.rewrite,
            first=row.first,
        )
        for row in step.rows
    ]
    return pb.Step(seq=step.seq, acked=step.acked, replay=step.replay, rows=rows, tensor=tensor), payload


def decode_step(message: pb.Step, payload: Buffer, *, hidden_size: int) -> Step:
    """Return a step from a peer. Its values are finite.

    Raises ``ProtocolViolation`` if a number is out of range, infinite or NaN. ``check_rows`` checks
    the positions.
    """
    if not 1 <= len(message.rows) <= MAX_ROWS:
        raise ProtocolViolation(f"a step of {len(message.rows)} rows")
    rows = tuple(
        Row(row.sequence, row.start, row.count, row.outputs, row.source, row.rewrite, row.first)
        for row in message.rows
    )
    for row in rows:
        if row.sequence > MAX_SEQUENCE or row.source > MAX_SEQUENCE:
            raise ProtocolViolation(f"sequence {max(row.sequence, row.source)} is out of range")
        if row.count < 1 or row.end > MAX_POSITION or row.wanted > row.count:
            raise ProtocolViolation(f"a row of {row.count} positions from {row.start}, {row.wanted} wanted")
    if message.replay and any(row.wanted for row in rows):
        raise ProtocolViolation("a replay wants no outputs")
    positions = sum(row.count for row in rows)
    values = decode_tensor(message.tensor, payload, positions=positions, hidden_size=hidden_size)
    # Every hop refuses such values, so the sender has not received them from another hop.
    if not are_finite(values):
        raise ProtocolViolation("a step with values that are not finite")
    return Step(seq=message.seq, rows=rows, values=values, acked=message.acked, replay=message.replay)
