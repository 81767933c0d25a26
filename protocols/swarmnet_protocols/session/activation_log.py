"""The activation log: what one hop has sent, kept so that a failed hop behind it can be replaced.

Each hop has a log. The client has one of token ids. A log feeds the downstream hop, and its standby
if there is one. It has two parts:

1. Pending steps, as they were sent. A *survivor* is a downstream hop that keeps its KV caches while
   its upstream is replaced. It may lack any number of the latest steps.
2. The compacted part: one growing buffer for each sequence. Forked sequences share the memory of
   their common positions. Every hop has computed the steps that the client has acknowledged, so
   only a *fresh* hop, without KV caches, needs them. Long prefills compute them fastest.

:meth:`ActivationLog.attach` starts feeding a hop:

- A fresh hop gets the compacted part as replay steps of ``REPLAY_POSITIONS``, then the pending
  steps.
- A survivor gets the pending steps after the last one it has.

Each step is delivered once, in order. Positions leave no gap and never overlap: ``check`` enforces
this for every new step.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Set
from itertools import count

import numpy as np

from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import OutOfResources, ProtocolViolation, SwarmnetError
from swarmnet_protocols.net.limits.resources import Reservation, ResourceLimitReached
from swarmnet_protocols.session.steps import Row, Step, check_rows

REPLAY_POSITIONS = 512
"""Most positions of one replay step.

Enough to compute efficiently. Few enough that two hops work on successive replay steps at the same
time.
"""
STANDBY_POSITIONS = 32
"""Most positions of one replay step to a standby.

The session does not wait for these steps. Other sessions on the standby's host wait for at most one
of them, so they are short.
"""
MIN_SHARED = 64
"""Fewest positions that a fork shares with its source in memory. Fewer are copied."""
MOST_KEPT = 4
"""Most bytes of a buffer that a fork may keep alive, as a multiple of the bytes it shares."""


class LogDropped(OutOfResources):
    """The log reached its limit and dropped its compacted part.

    It can still feed a survivor, but not a fresh hop.
    """


class StepsCompacted(SwarmnetError):
    """The hop lacks steps that were compacted. Only a fresh hop can be fed."""


class _SequenceBuffer:
    """The compacted values of one sequence, [length, ...].

    First come values shared with other sequences, then the sequence's own values. The own buffer
    doubles when it is full. Appended values never change.
    """

    def __init__(self, shared: Array | None = None) -> None:
        """Begin with the values ``shared``, a view of another sequence's buffer."""
        self.shared = shared
        self.forked_at = 0 if shared is None else len(shared)
        self.length = self.forked_at
        self._own: Array | None = None

    @property
    def storages(self) -> dict[int, int]:
        """Return the memory that this buffer keeps alive: identity → bytes of each part."""
        parts = [_memory_of(part) for part in (self.shared, self._own) if part is not None]
        return {id(part): part.nbytes for part in parts}

    def begins_like(self, other: "_SequenceBuffer") -> bool:
        """Return whether ``other`` has the shared values of this buffer in the same memory."""
        if self.shared is None or other.length < self.forked_at:
            return False
        is_shared = _memory_of(other._first()) is _memory_of(self.shared)
        return is_shared and other._first_length >= self.forked_at

    def values(self, start: int, end: int) -> Array:
        """Return the values of positions [start, end). Later appends do not change them."""
        parts = []
        if self.shared is not None and start < self.forked_at:
            parts.append(self.shared[start:end])
        if self._own is not None and end > self.forked_at:
            parts.append(self._own[max(0, start - self.forked_at) : end - self.forked_at])
        if not parts:
            raise ProtocolViolation("a sequence without positions has no values")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def append(self, values: Array) -> None:
        filled = self.length - self.forked_at
        end = filled + len(values)
        if self._own is None or end > len(self._own):
            size = max(end, 2 * filled, 16)
            grown = np.empty((size, *values.shape[1:]), values.dtype)
            if self._own is not None:
                grown[:filled] = self._own[:filled]
            self._own = grown
        self._own[filled:end] = values
        self.length = self.forked_at + end

    def prefix(self, end: int) -> "_SequenceBuffer":
        """Return a sequence that begins with the first ``end`` values.

        It shares their memory, unless that would keep more than ``MOST_KEPT`` times as much alive.
        """
        within = min(end, self._first_length)
        if within >= MIN_SHARED:
            first = self._first()
            if _memory_of(first).nbytes <= MOST_KEPT * first[:within].nbytes:
                fork = _SequenceBuffer(first[:within])
                if end > within:
                    fork.append(self.values(within, end))
                return fork
        copy = _SequenceBuffer()
        if end:
            copy.append(self.values(0, end))
        return copy

    @property
    def _first_length(self) -> int:
        """Number of values in the memory of the first part."""
        return self.forked_at or self.length

    def _first(self) -> Array:
        first = self._own if self.shared is None else self.shared
        if first is None:
            raise ProtocolViolation("a sequence without positions has no values")
        return first


def _memory_of(part: Array) -> Array:
    """Return the array that owns the memory of a part of a buffer."""
    return part if part.base is None else part.base


class Cursor:
    """The place of one downstream hop in the log.

    ``ActivationLog.attach`` makes a cursor, and ``next`` advances it.

    - ``replay``: the remaining replay steps.
    - ``index``: the index of the next pending step.
    - ``applied``: the last step that a survivor has or was sent; 0 for a fresh hop.
    """

    def __init__(self, replay: Iterator[Step], index: int, applied: int) -> None:
        self.replay = replay
        self.index = index
        self.applied = applied


class ActivationLog:
    """The steps that one hop has sent. No I/O."""

    def __init__(self, reservation: Reservation, *, keep_values: bool = True) -> None:
        """Count the log's bytes in ``reservation``, and drop the compacted part at its limit.

        ``keep_values`` False: the log never has a compacted part. A hop without a downstream hop
        needs none.
        """
        self._reservation = reservation
        self._buffers: dict[int, _SequenceBuffer] | None = {} if keep_values else None
        """The compacted part by sequence; None once it is dropped."""
        self._compacted_bytes = 0
        self._pending_bytes = 0
        self._compacted = 0
        """Number of the last step in the compacted part."""
        self._pending: deque[tuple[int, Step]] = deque()
        self._indices = count()
        self._lengths: dict[int, int] = {}
        self._acked = 0
        self._last = 0
        self._cursors: list[Cursor] = []

    @property
    def last(self) -> int:
        """Number of the newest step."""
        return self._last

    @property
    def lengths(self) -> Mapping[int, int]:
        """Positions of each sequence after the newest step."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """Bytes of both parts."""
        return self._compacted_bytes + self._pending_bytes

    @property
    def unacknowledged(self) -> list[Step]:
        """The steps whose outputs the client does not have yet."""
        return [step for _, step in self._pending if not step.replay and step.seq > self._acked]

    def append(self, step: Step) -> None:
        """Add the newest step.

        At the limit, hops that still lack acknowledged steps are no longer fed. Raises what
        ``check`` raises, and ``OutOfResources`` if pending steps alone reach the limit.
        """
        self.check(step)
        more_bytes = step.values.nbytes
        try:
            self._resize_reservation(more_bytes)
        except ResourceLimitReached:
            self._end_late_cursors()
            self._resize_reservation(more_bytes)
        self._pending_bytes += more_bytes
        self._lengths.update({row.sequence: row.end for row in step.rows})
        self._last = max(self._last, step.seq)
        self._pending.append((next(self._indices), step))
        self.acknowledge(step.acked)

    def check(self, step: Step) -> None:
        """Check that ``step`` follows the newest step, and its rows follow the positions so far.

        Raises ``ProtocolViolation``.
        """
        if step.replay:
            if self._last:
                raise ProtocolViolation("a replay after steps were applied")
        elif step.seq != self._last + 1:
            raise ProtocolViolation(f"step {step.seq} after step {self._last}")
        check_rows(step.rows, self._lengths)

    def acknowledge(self, seq: int) -> None:
        """Note that the client has the outputs up to step ``seq``.

        Compacts the steps that no survivor needs.
        """
        self._acked = max(self._acked, seq)
        while self._pending:
            index, step = self._pending[0]
            is_unsent = any(self._lacks(cursor, index, step) for cursor in self._cursors)
            if is_unsent or not (step.replay or step.seq <= self._acked):
                return
            self._pending.popleft()
            self._pending_bytes -= step.values.nbytes
            self._compact(step)

    def retain(self, sequences: Set[int]) -> None:
        """Forget all sequences except ``sequences`` and the sequences of pending steps.

        A fresh hop does not get the forgotten ones. The shortest compacted sequence always stays:
        its replay tells a fresh hop the number of the last compacted step.
        """
        kept = sequences | {
            each for _, step in self._pending for row in step.rows for each in (row.sequence, row.source)
        }
        buffers = self._buffers or {}
        if not buffers.keys() & kept:
            kept |= {*sorted(buffers, key=lambda number: buffers[number].length)[:1]}
        for number in self._lengths.keys() - kept:
            del self._lengths[number]
            buffers.pop(number, None)
        self._count_compacted()
        self._resize_reservation()

    def values(self, sequence: int, count: int) -> Array | None:
        """Return the first ``count`` positions of a sequence after the newest step.

        None if the log does not have them.
        """
        if not 0 < count <= self._lengths.get(sequence, 0):
            return None
        pieces: list[Array] = []
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
                return np.concatenate(pieces[::-1])
        buffer = None if self._buffers is None else self._buffers.get(sequence)
        if buffer is None or buffer.length < count:
            return None
        return np.concatenate([buffer.values(0, count), *pieces[::-1]])

    def attach(self, applied: int, *, is_standby: bool = False) -> Cursor:
        """Start feeding a hop that has computed all steps up to ``applied``, until ``detach``.

        ``applied`` is 0 for a fresh hop. A standby gets its replay in smaller parts.

        Raises ``LogDropped`` if a fresh hop cannot be fed. Raises ``StepsCompacted`` if this
        survivor cannot be fed although a fresh hop could.
        """
        replay: Iterator[Step] = iter(())
        if applied == 0:
            if self._buffers is None:
                raise LogDropped("the activation log was too long to keep")
            positions = STANDBY_POSITIONS if is_standby else REPLAY_POSITIONS
            replay = self._replay_steps(self._buffers, positions)
        elif applied < self._compacted:
            raise StepsCompacted(f"steps {applied + 1} to {self._compacted} are compacted")
        cursor = Cursor(replay, self._pending[0][0] if self._pending else 0, applied)
        self._cursors.append(cursor)
        return cursor

    def detach(self, cursor: Cursor) -> None:
        """Stop feeding the hop of ``cursor``. Idempotent."""
        if cursor in self._cursors:
            self._cursors.remove(cursor)

    def next(self, cursor: Cursor) -> Step | None:
        """Return the next step for the hop of ``cursor``; None if it has all steps.

        Raises ``StepsCompacted`` if the hop can no longer be fed.
        """
        if cursor not in self._cursors:
            raise StepsCompacted("the hop is no longer fed")
        for step in cursor.replay:
            return step
        if 0 < cursor.applied < self._compacted:
            raise StepsCompacted(
                f"steps {cursor.applied + 1} to {self._compacted} are compacted since a replay"
            )
        for index, step in self._pending:
            if self._lacks(cursor, index, step):
                cursor.index = index + 1
                if cursor.applied:
                    cursor.applied = step.seq
                self.acknowledge(self._acked)
                return step
        return None

    @staticmethod
    def _lacks(cursor: Cursor, index: int, step: Step) -> bool:
        """Return whether the hop of ``cursor`` still needs the pending step at ``index``.

        It does not if the step was already sent, or if a survivor has computed it.
        """
        has_computed = cursor.applied > 0 and (step.replay or step.seq <= cursor.applied)
        return index >= cursor.index and not has_computed

    def _end_late_cursors(self) -> None:
        """Stop feeding hops that keep acknowledged steps pending.

        Such a hop is a standby that is too slow, or a hop that is being rebuilt.
        """
        self._cursors = [
            cursor
            for cursor in self._cursors
            if not any(
                self._lacks(cursor, index, step)
                for index, step in self._pending
                if step.replay or step.seq <= self._acked
            )
        ]
        self.acknowledge(self._acked)

    def _compact(self, step: Step) -> None:
        """Move ``step``, the oldest pending one, to the compacted part."""
        self._compacted = max(self._compacted, step.seq)
        if self._buffers is None:
            self._resize_reservation()
            return
        sources = [self._buffers.get(row.source) or _SequenceBuffer() for row in step.rows]
        # Make all forks before the first append: they start from the sequences before the step.
        starts = [
            buffer.prefix(row.start) if row.rewrite else buffer
            for row, buffer in zip(step.rows, sources, strict=True)
        ]
        for row, buffer, values in zip(step.rows, starts, step.split(), strict=True):
            buffer.append(values)
            self._buffers[row.sequence] = buffer
        self._count_compacted()
        self._resize_reservation()

    def _count_compacted(self) -> None:
        storages: dict[int, int] = {}
        for buffer in (self._buffers or {}).values():
            storages |= buffer.storages
        self._compacted_bytes = sum(storages.values())

    def _resize_reservation(self, more_bytes: int = 0) -> None:
        """Reserve the present size and ``more_bytes``.

        Drops the compacted part if its bytes do not fit. Raises if pending steps do not fit either.
        """
        try:
            self._reservation.resize(self.nbytes + more_bytes)
        except ResourceLimitReached:
            self._buffers, self._compacted_bytes = None, 0
            self._reservation.resize(self.nbytes + more_bytes)

    def _replay_steps(self, buffers: Mapping[int, _SequenceBuffer], positions: int) -> Iterator[Step]:
        """Yield replay steps of at most ``positions`` that rebuild the compacted part.

        Later compaction does not change their values. Shared positions are sent once: the other
        sequences are forked from the first of the sequences that share them.
        """
        parts: list[tuple[Row, Array]] = []
        done: dict[int, _SequenceBuffer] = {}
        for number, buffer in buffers.items():
            source = next((each for each, other in done.items() if buffer.begins_like(other)), number)
            # A fork needs a position. If it has none of its own, its last one is computed again.
            begin = 0 if source == number else min(buffer.forked_at, buffer.length - 1)
            for start in range(begin, buffer.length, positions):
                count = min(positions, buffer.length - start)
                is_fork = start == begin and source != number
                row = Row(number, start, count, 0, source if is_fork else number, rewrite=is_fork)
                parts.append((row, buffer.values(start, start + count)))
            done[number] = buffer
        seqs = [0] * (len(parts) - 1) + [self._compacted]
        steps = [
            Step(seq=seq, rows=(row,), values=values, acked=seq, replay=True)
            for seq, (row, values) in zip(seqs, parts, strict=False)
        ]
        return iter(steps)
