"""Recorded decode steps: one new position of several sequences, replayed with a single launch.

Without recordings, such a step takes hundreds of launches. A recording has a power of two of rows,
and reads memory at fixed addresses. The memory has the inputs, and for each row its position, the
place to write its keys, and the start and length of its sequence. Keys and values are in the arena,
which never moves. The life of a step:

1. Fill this memory, and pad the rows up to the next size. Padding rows write to the spare positions
   of the arena.
2. Replay the recording.

Only steps of one new position for each sequence, without LoRA, are recorded. Before its first use,
a recording is compared with the computation that it replaces. Any failure ends recording for the
stage, which then computes its steps directly.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarmnet_node.engine.caches.cache_arena import SPARE_ROWS, CacheArena
from swarmnet_node.engine.caches.kv_cache import SequenceCache
from swarmnet_node.engine.kernels.backend import Backend, Ranges, Recorder, Recording
from swarmnet_node.engine.torch_layers.attention import Batch, RangedBatch
from swarmnet_node.engine.torch_layers.trials import agree

_log = logging.getLogger(__name__)

MIN_LONGEST = 256
"""Smallest bound on the length of sequences, for recordings that depend on one."""

Compute = Callable[[torch.Tensor, torch.Tensor, Batch], torch.Tensor]
"""(hidden states [T, D], positions [T], batch) → hidden states [T, D] after the stage."""


@dataclass(frozen=True)
class _Slots:
    """The memory that a recording reads.

    ``inputs``: [rows, D]. ``numbers``: int64 [4, rows] of positions, places to write, starts and
    lengths.
    """

    inputs: torch.Tensor
    numbers: torch.Tensor


class DecodeGraphs:
    """The recordings of one stage, on one device. Used on the torch thread."""

    def __init__(
        self,
        compute: Compute,
        recorder: Recorder,
        backend: Backend,
        arena: CacheArena,
        like: torch.Tensor,
        *,
        is_fused: bool,
    ) -> None:
        """``like`` [D] has the width, dtype and device of hidden states.

        Unless ``is_fused``, recordings also depend on a bound on the lengths.
        """
        self._compute = compute
        self._recorder = recorder
        self._backend = backend
        self._arena = arena
        self._like = like
        self._is_fused = is_fused
        self._recordings: dict[tuple[int, int], tuple[_Slots, Recording]] = {}
        self._failure = ""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The rows, and the bound on the lengths of sequences, of each recording."""
        return sorted(self._recordings)

    @property
    def failure(self) -> str:
        """The reason why recording has ended. Empty while it goes on."""
        return self._failure

    def step(self, inputs: torch.Tensor, sequences: Sequence[SequenceCache]) -> torch.Tensor | None:
        """Compute the stage for one new position of each sequence: [T, D] to [T, D].

        The sequences are in the order of their starts, and have room for the position. None if such
        a step cannot be recorded.
        """
        count = len(sequences)
        if self._failure or count > SPARE_ROWS or any(each.lora is not None for each in sequences):
            return None
        lengths = [sequence.length + 1 for sequence in sequences]
        key = _next_power(count), self._longest(max(lengths))
        if key not in self._recordings:
            # Compute the first step of a size twice: to warm up, and to compare the recording with
            # it.
            slots = self._new_slots(key[0])
            self._fill(slots, inputs, sequences)
            expected = self._run(slots, key[1])[:count].clone()
            # A client may send inputs that give NaN. Such outputs cannot be compared.
            if bool(expected.isfinite().all()):
                self._record(key, slots, expected)
            return expected
        slots, recording = self._recordings[key]
        self._fill(slots, inputs, sequences)
        recording.replay()
        return recording.outputs[:count].clone()  # the next step overwrites the outputs

    def _longest(self, longest: int) -> int:
        """Return the bound on lengths for a recording. A kernel that reads the lengths does not
        need it."""
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
        """Compute one step as it is recorded.

        It only reads and writes memory at fixed addresses, and reads no value back.
        """
        positions, places, starts, lengths = slots.numbers.unbind()
        end = torch.full_like(starts[:1], self._arena.positions + SPARE_ROWS)
        queries = torch.arange(len(starts) + 1, dtype=torch.int32, device=starts.device)
        ranges = Ranges(torch.cat([starts, end]).int(), lengths.int(), queries, 1, longest)
        return self._compute(slots.inputs, positions, RangedBatch(self._arena, self._backend, places, ranges))

    def _record(self, key: tuple[int, int], slots: _Slots, expected: torch.Tensor) -> None:
        try:
            recording = self._recorder.record(lambda: self._run(slots, key[1]))
            recording.replay()
            is_right = agree(recording.outputs[: len(expected)], expected)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self._fail(str(error))
            return
        if is_right:
            self._recordings[key] = slots, recording
        else:
            self._fail("a recorded step has other outputs than the computation")

    def _fail(self, reason: str) -> None:
        self._failure = reason or "unknown"
        self._recordings.clear()
        _log.warning("decode steps are not recorded: %s", reason)


def _next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()
