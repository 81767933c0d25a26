"""Cache arena: the KV caches of all sequences of a stage, in buffers that never move.

Each layer has one buffer of keys and one of values. An accelerator attends to all sequences of a
batch in one call, and replays recorded steps. Both need caches at fixed addresses.

1. A sequence gets a range of consecutive positions, the same in all layers.
2. Attention reads the range directly, so there are no pages. Other operations use views of the
   range.
3. When no gap is large enough, the ranges are compacted, so that no free memory is lost between
   them (docs/decisions/0059).

Layout: keys [positions + SPARE_ROWS, key heads, key size], values [positions + SPARE_ROWS, key
heads, value size].
"""

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

Buffers = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""

SPARE_ROWS = 64
"""Positions behind all sequences. The padding rows of a recorded step write there."""


class CacheShape(Protocol):
    """Sizes of the keys and values of one position in one layer."""

    @property
    def heads(self) -> int: ...

    @property
    def key_size(self) -> int: ...

    @property
    def value_size(self) -> int: ...


class Owner(Protocol):
    """A sequence of the arena.

    ``layers`` are its views of the buffers. The arena sets them whenever its range changes.
    """

    length: int
    layers: list[Buffers]

    @property
    def span(self) -> range:
        """Its layers, counted from the first layer of the arena."""


class CacheArena:
    """Buffers for ``positions`` positions of all sequences together.

    Used on the torch thread. Sequences may be dropped on any thread.
    """

    def __init__(
        self,
        shapes: Sequence[CacheShape],
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        positions: int,
    ) -> None:
        """``devices`` has the device of each layer."""
        self.positions = positions
        self.buffers: list[Buffers] = [
            (
                torch.zeros(positions + SPARE_ROWS, shape.heads, shape.key_size, dtype=dtype, device=device),
                torch.zeros(
                    positions + SPARE_ROWS, shape.heads, shape.value_size, dtype=dtype, device=device
                ),
            )
            for shape, device in zip(shapes, devices, strict=True)
        ]
        self.bytes_per_position = sum(
            (keys[0].numel() + values[0].numel()) * dtype.itemsize for keys, values in self.buffers
        )
        self._ranges: WeakKeyDictionary[Owner, range] = WeakKeyDictionary()
        """The positions of each living sequence."""

    def start_of(self, sequence: Owner) -> int:
        """Return the first position of a sequence's range, or 0 until it first grows.

        Growth and compaction may change it.
        """
        return self._ranges.get(sequence, range(0)).start

    def grow(self, sequence: Owner, capacity: int) -> None:
        """Enlarge a sequence's range to ``capacity`` positions, and keep its first ``length`` ones.

        Other sequences may move. Raises ``torch.OutOfMemoryError`` if the arena has fewer free
        positions.
        """
        mine = self._ranges.get(sequence, range(0))
        others = sorted(
            (each for owner, each in list(self._ranges.items()) if owner is not sequence),
            key=lambda each: each.start,
        )
        if sum(map(len, others)) + capacity > self.positions:
            raise torch.OutOfMemoryError(f"{capacity} positions in an arena of {self.positions} that is full")
        start = _first_gap(others, mine, capacity, self.positions)
        if start is None:
            self._compact(sequence)
            mine = self._ranges.get(sequence, range(0))
            start = mine.start if mine else sum(map(len, others))
        if len(mine) and start != mine.start:
            for buffers in self.buffers:
                for buffer in buffers:
                    kept = buffer[mine.start : mine.start + sequence.length]
                    buffer[start : start + sequence.length] = kept
        self._set(sequence, range(start, start + capacity))

    def _compact(self, last: Owner) -> None:
        """Move all ranges to the start of the arena, with ``last`` behind the others. Copies one
        buffer at a time."""
        ranges = sorted(self._ranges.items(), key=lambda each: (each[0] is last, each[1].start))
        old = torch.cat([torch.arange(each.start, each.stop) for _, each in ranges])
        for buffers in self.buffers:
            for buffer in buffers:
                buffer[: len(old)] = buffer.index_select(0, old.to(buffer.device))
        start = 0
        for sequence, each in ranges:
            self._set(sequence, range(start, start + len(each)))
            start += len(each)

    def _set(self, sequence: Owner, positions: range) -> None:
        self._ranges[sequence] = positions
        sequence.layers = [
            (_view(keys, positions), _view(values, positions))
            for keys, values in self.buffers[sequence.span.start : sequence.span.stop]
        ]


def _first_gap(others: Sequence[range], mine: range, capacity: int, total: int) -> int | None:
    """Return the first of ``capacity`` free positions, or None.

    That is the start of ``mine`` if it can grow in place, otherwise the first large enough gap.
    ``others`` are in the order of their starts.
    """
    following = min((each.start for each in others if each.start >= mine.stop), default=total)
    if len(mine) and mine.start + capacity <= following:
        return mine.start
    end = 0
    for each in sorted([*others, mine], key=lambda each: each.start):
        if each.start - end >= capacity:
            return end
        end = max(end, each.stop)
    return end if total - end >= capacity else None


def _view(buffer: torch.Tensor, positions: range) -> torch.Tensor:
    """Return the view of a range that attention reads: [1, key heads, capacity, size]."""
    return buffer[positions.start : positions.stop].transpose(0, 1)[None]
