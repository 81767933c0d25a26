"""The activation log: what one hop sent down the chain, kept so that a replacement can be rebuilt from it.

Steps the client has acknowledged are folded into one growing buffer per lane: every hop downstream has computed them,
so only a fresh hop will ever need them, and it is rebuilt faster by long prefills than by single tokens. Steps not yet
acknowledged stay as they were sent, because a surviving hop may lack any suffix of them.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import count

import torch

from swarmnet_protocols.errors import OutOfResources, ProtocolViolation, SwarmnetError
from swarmnet_protocols.net.resources import Reservation, ResourceLimitReached
from swarmnet_protocols.session.steps import Row, Step, check_rows

REPLAY_POSITIONS = 512
"""Positions in one part of a replay: long enough to be computed efficiently, short enough to be pipelined."""


class LogDropped(OutOfResources):
    """The log outgrew its bound and no longer reaches back to the start: it can feed survivors, not a fresh hop."""


class StepsCompacted(SwarmnetError):
    """The downstream hop lacks steps that are no longer kept singly: only a fresh one can be fed."""


class _Sequence:
    """The values of one lane, [length, ...], in a buffer that doubles."""

    def __init__(self) -> None:
        self.length = 0
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes if self._buffer is not None else 0

    def values(self, end: int) -> torch.Tensor:
        if self._buffer is None:
            raise ProtocolViolation("a lane without positions has no values")
        return self._buffer[:end]

    def append(self, values: torch.Tensor) -> None:
        end = self.length + len(values)
        if self._buffer is None or end > len(self._buffer):
            size = max(end, 2 * self.length, 16)
            grown = torch.empty((size, *values.shape[1:]), dtype=values.dtype)
            if self._buffer is not None:
                grown[: self.length] = self._buffer[: self.length]
            self._buffer = grown
        self._buffer[self.length : end] = values
        self.length = end

    def prefix(self, end: int) -> "_Sequence":
        copy = _Sequence()
        if end:
            copy.append(self.values(end))
        return copy


class Cursor:
    """How far one downstream hop has been fed. Made by ``ActivationLog.attach``, advanced by ``next``.

    ``applied`` is the last step that a survivor has or was sent; it stays 0 for a fresh hop.
    """

    def __init__(self, snapshot: Iterator[Step], index: int, applied: int) -> None:
        self.snapshot = snapshot
        self.index = index
        self.applied = applied


class ActivationLog:
    """Outputs of this hop, for at most one downstream hop at a time. No I/O.

    Its bytes are held in ``room``. Where that has no room for the folded part, or without ``keep_values``, the log forgets that part,
    and from then on raises ``LogDropped`` for a fresh hop.
    """

    def __init__(self, room: Reservation, *, keep_values: bool = True) -> None:
        self._room = room
        self._sequences: dict[int, _Sequence] | None = {} if keep_values else None
        self._folded_bytes = 0
        self._pending_bytes = 0
        self._folded = 0
        self._pending: deque[tuple[int, Step]] = deque()
        self._indices = count()
        self._lengths: dict[int, int] = {}
        self._acked = 0
        self._last = 0
        self._cursor: Cursor | None = None

    @property
    def last(self) -> int:
        """Sequence number of the newest step."""
        return self._last

    @property
    def lengths(self) -> Mapping[int, int]:
        """Positions each lane holds after the newest step."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        return self._folded_bytes + self._pending_bytes

    def append(self, step: Step) -> None:
        """Add the newest step, which ``check`` accepts. Raises ``OutOfResources`` where there is no room for it."""
        self.check(step)
        self._pending_bytes += step.values.nbytes
        try:
            self._hold()
        except ResourceLimitReached:
            self._pending_bytes -= step.values.nbytes
            raise
        self._lengths.update({row.sequence: row.end for row in step.rows})
        self._last = max(self._last, step.seq)
        self._pending.append((next(self._indices), step))
        self.acknowledge(step.acked)

    def check(self, step: Step) -> None:
        """Raise ``ProtocolViolation`` for a step that leaves a gap in the sequence or in positions, or overlaps."""
        if step.replay:
            if self._last:
                raise ProtocolViolation("a replay after steps were applied")
        elif step.seq != self._last + 1:
            raise ProtocolViolation(f"step {step.seq} after step {self._last}")
        check_rows(step.rows, self._lengths)

    def acknowledge(self, seq: int) -> None:
        """Note that the client holds the outputs of every step up to ``seq``, and fold what nobody will ask for singly."""
        self._acked = max(self._acked, seq)
        while self._pending:
            index, step = self._pending[0]
            unsent = (
                self._cursor is not None
                and index >= self._cursor.index
                and not self._skips(self._cursor, step)
            )
            if unsent or not (step.replay or step.seq <= self._acked):
                return
            self._pending.popleft()
            self._pending_bytes -= step.values.nbytes
            self._fold(step)

    def values(self, sequence: int, count: int) -> torch.Tensor | None:
        """The first ``count`` positions of a lane, as it is after the newest step. None where they are not here, or no longer."""
        if not 0 < count <= self._lengths.get(sequence, 0):
            return None
        pieces: list[torch.Tensor] = []
        for _, step in reversed(self._pending):
            row, values = next(
                (
                    (row, part)
                    for row, part in zip(step.rows, step.split(), strict=True)
                    if row.sequence == sequence
                ),
                (None, step.values),
            )
            if row is None:
                continue
            if row.start < count:
                pieces.append(values[: count - row.start])
                count = row.start
            sequence = row.source
            if not count:
                return torch.cat(pieces[::-1])
        folded = None if self._sequences is None else self._sequences.get(sequence)
        if folded is None or folded.length < count:
            return None
        return torch.cat([folded.values(count), *pieces[::-1]])

    def attach(self, applied: int) -> Cursor:
        """Start feeding a downstream hop that has computed steps up to ``applied`` (0: it is fresh).

        Takes the place of the previous cursor. Raises ``LogDropped`` when a fresh hop can no longer be fed, ``StepsCompacted``
        when that one cannot be, but a fresh one could.
        """
        if applied == 0:
            if self._sequences is None:
                raise LogDropped("the activation log was too long to keep")
            cursor = Cursor(
                self._snapshot(self._sequences), self._pending[0][0] if self._pending else 0, applied
            )
        else:
            if applied < self._folded:
                raise StepsCompacted(f"steps {applied + 1} to {self._folded} are folded")
            cursor = Cursor(iter(()), self._pending[0][0] if self._pending else 0, applied)
        self._cursor = cursor
        return cursor

    def detach(self) -> None:
        """Stop feeding: no downstream hop at present."""
        self._cursor = None

    def next(self, cursor: Cursor) -> Step | None:
        """The next step for the hop behind ``cursor``, or None when it has everything. May raise ``StepsCompacted``."""
        if cursor is not self._cursor:
            return None
        for part in cursor.snapshot:
            return part
        if 0 < cursor.applied < self._folded:
            raise StepsCompacted(f"steps {cursor.applied + 1} to {self._folded} came in a replay")
        for index, step in self._pending:
            if index >= cursor.index and not self._skips(cursor, step):
                cursor.index = index + 1
                if cursor.applied:
                    cursor.applied = step.seq
                self.acknowledge(self._acked)
                return step
        return None

    @staticmethod
    def _skips(cursor: Cursor, step: Step) -> bool:
        return cursor.applied > 0 and (step.replay or step.seq <= cursor.applied)

    def _fold(self, step: Step) -> None:
        self._folded = max(self._folded, step.seq)
        if self._sequences is None:
            self._hold()
            return
        before = dict(self._sequences)
        for row, values in zip(step.rows, step.split(), strict=True):
            sequence = before.get(row.source) or _Sequence()
            if row.rewrite:
                sequence = sequence.prefix(row.start)
            sequence.append(values)
            self._sequences[row.sequence] = sequence
        self._folded_bytes = sum(sequence.nbytes for sequence in self._sequences.values())
        self._hold()

    def _hold(self) -> None:
        """Hold as much as there is now. The folded part goes where there is no room for it."""
        try:
            self._room.resize(self.nbytes)
        except ResourceLimitReached:
            self._sequences, self._folded_bytes = None, 0
            self._room.resize(self.nbytes)

    def _snapshot(self, sequences: Mapping[int, _Sequence]) -> Iterator[Step]:
        """Replay steps that rebuild the folded part. They are views taken now: later folding does not move them."""
        parts = [
            (
                Row(number, start, min(REPLAY_POSITIONS, sequence.length - start), 0, number),
                sequence.values(sequence.length)[start:],
            )
            for number, sequence in sequences.items()
            for start in range(0, sequence.length, REPLAY_POSITIONS)
        ]
        seqs = [0] * (len(parts) - 1) + [self._folded]
        steps = [
            Step(seq=seq, rows=(row,), values=values[: row.count], acked=seq, replay=True)
            for seq, (row, values) in zip(seqs, parts, strict=False)
        ]
        return iter(steps)
