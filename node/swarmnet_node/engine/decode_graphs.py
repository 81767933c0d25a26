"""Recorded decode steps: one new position for each of some sequences, replayed with one launch instead of hundreds.

A recording has a number of rows, the powers of two, and memory of its own at fixed addresses: its inputs, and for each row the number of its position,
where its keys are written, and where its sequence begins and how long it is. A step fills these, with rows to spare up to the next size, and replays.
Spare rows write to the spare positions of the arena. Keys and values are in the arena, which never moves.

Only steps of one new position for each sequence, without LoRA, are recorded. Each recording is compared with the computation that it replaces before it
is used; whatever fails ends recording for this stage, and steps are computed as before.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarmnet_node.engine.attention import Batch, RangedBatch
from swarmnet_node.engine.caches.cache_arena import SPARE_ROWS, CacheArena
from swarmnet_node.engine.caches.kv_cache import SequenceCache
from swarmnet_node.engine.kernels.backend import Backend, Ranges, Recorder, Recording

_log = logging.getLogger(__name__)

MIN_LONGEST = 256
"""The least bound on the length of sequences, where recordings depend on it."""

Compute = Callable[[torch.Tensor, torch.Tensor, Batch], torch.Tensor]
"""Hidden states [T, D] of new positions [T] of a batch, in and out."""
Agree = Callable[[torch.Tensor, torch.Tensor], bool]
"""Whether outputs equal expected ones but for rounding."""


@dataclass(frozen=True)
class _Slots:
    """The memory that a recording reads: inputs [rows, D], and int64 [4, rows] of positions, places to write, starts and lengths."""

    inputs: torch.Tensor
    numbers: torch.Tensor


class DecodeGraphs:
    """The recordings of one stage, on one device. Used on the torch thread."""

    def __init__(  # noqa: PLR0913 - what to record, where, and how to check it
        self,
        compute: Compute,
        agree: Agree,
        recorder: Recorder,
        backend: Backend,
        arena: CacheArena,
        like: torch.Tensor,
        *,
        is_fused: bool,
    ) -> None:
        """``like`` [D] has the width, dtype and device of hidden states. Unless ``is_fused``, recordings also depend on a bound of the lengths."""
        self._compute = compute
        self._agree = agree
        self._recorder = recorder
        self._backend = backend
        self._arena = arena
        self._like = like
        self._is_fused = is_fused
        self._recordings: dict[tuple[int, int], tuple[_Slots, Recording]] = {}
        self._failure = ""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows, and the bound on the lengths of sequences, of each recording so far."""
        return sorted(self._recordings)

    @property
    def failure(self) -> str:
        """Why nothing is recorded any more; empty while it is."""
        return self._failure

    def step(self, inputs: torch.Tensor, sequences: Sequence[SequenceCache]) -> torch.Tensor | None:
        """Hidden states [T, D] of one new position of each sequence, in and out; None if this step is not for a recording.

        The sequences are in the order of their starts, and have room for the position.
        """
        count = len(sequences)
        if self._failure or count > SPARE_ROWS or any(each.lora is not None for each in sequences):
            return None
        lengths = [sequence.length + 1 for sequence in sequences]
        key = _next_power(count), self._longest(max(lengths))
        if key not in self._recordings:
            # The first step of a size is computed twice: it warms up, and shows whether the recording is right.
            slots = self._new_slots(key[0])
            self._fill(slots, inputs, sequences)
            expected = self._run(slots, key[1])[:count].clone()
            if bool(expected.isfinite().all()):  # else a client sent such numbers: they show nothing
                self._record(key, slots, expected)
            return expected
        slots, recording = self._recordings[key]
        self._fill(slots, inputs, sequences)
        recording.replay()
        return recording.outputs[:count].clone()  # the next step overwrites them

    def _longest(self, longest: int) -> int:
        """The bound on lengths for a recording: a kernel that reads the lengths needs none."""
        if self._is_fused:
            return self._arena.positions
        return min(self._arena.positions, max(MIN_LONGEST, _next_power(longest)))

    def _new_slots(self, rows: int) -> _Slots:
        numbers = torch.zeros(4, rows, dtype=torch.int64, device=self._like.device)
        return _Slots(self._like.new_zeros(rows, len(self._like)), numbers)

    def _fill(self, slots: _Slots, inputs: torch.Tensor, sequences: Sequence[SequenceCache]) -> None:
        spare = range(self._arena.positions, self._arena.positions + slots.numbers.shape[1] - len(sequences))
        rows = [(each.length, each.start + each.length, each.start, each.length + 1) for each in sequences]
        rows += [(0, at, at, 1) for at in spare]
        slots.numbers.copy_(torch.tensor(rows, dtype=torch.int64).T)
        slots.inputs[: len(inputs)].copy_(inputs)

    def _run(self, slots: _Slots, longest: int) -> torch.Tensor:
        """One step as it is recorded: it reads and writes memory at fixed addresses only, and nothing is read back."""
        positions, places, starts, lengths = slots.numbers.unbind()
        end = torch.full_like(starts[:1], self._arena.positions + SPARE_ROWS)
        queries = torch.arange(len(starts) + 1, dtype=torch.int32, device=starts.device)
        ranges = Ranges(torch.cat([starts, end]).int(), lengths.int(), queries, 1, longest)
        return self._compute(slots.inputs, positions, RangedBatch(self._arena, self._backend, places, ranges))

    def _record(self, key: tuple[int, int], slots: _Slots, expected: torch.Tensor) -> None:
        try:
            recording = self._recorder.record(lambda: self._run(slots, key[1]))
            recording.replay()
            is_right = self._agree(recording.outputs[: len(expected)], expected)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self._fail(str(error))
            return
        if is_right:
            self._recordings[key] = slots, recording
        else:
            self._fail("a recorded step computes something else")

    def _fail(self, reason: str) -> None:
        self._failure = reason or "unknown"
        self._recordings.clear()
        _log.warning("decode steps are not recorded: %s", reason)


def _next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()
