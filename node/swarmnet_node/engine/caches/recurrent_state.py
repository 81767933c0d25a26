"""Recurrent state: a sequence's state of fixed size in layers other than attention.

These are layers of linear attention, state-space models and short convolutions. Such a layer has a
*mixer*, a module of transformers. A mixer reads and replaces its states by calls to a cache, which
each forward passes to it. The states are the last inputs of its convolution, and the matrix or
vector of its recurrence. Here that cache is a :class:`MixerCache` with the states of one sequence.

Batches. :func:`split_mixers` makes a mixer compute the rows of a packed batch one after another. So
a sequence has the same outputs alone and in a batch.

Rewinding. A state cannot forget positions. So :class:`SequenceStates` keeps ``SNAPSHOTS`` earlier
states, and the KV cache (``kv_cache.py``) keeps the stage's inputs of all positions:

1. ``restore`` takes the newest snapshot that is early enough.
2. The stage computes the positions after it again.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swarmnet_protocols.errors import ConfigError

SNAPSHOTS = 3
"""Most snapshots of a sequence. Each takes as much memory as the states themselves."""
SNAPSHOT_POSITIONS = 64
"""Smallest number of positions between two snapshots."""

StateKey = tuple[int, str, int]
"""(layer, kind, number): the layer counted from the first of the whole stage, ``conv`` or
``recurrent``, and the number of the state among the layer's states of this kind."""


@dataclass(frozen=True)
class StateShape:
    """One state of one layer, with a batch dimension of 1."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class StateGeometry:
    """The states of a sequence on one stage, and the size of the inputs kept for each position."""

    states: tuple[StateShape, ...]
    hidden_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the states of one sequence and of its snapshots."""
        one = sum(prod(state.shape) * state.dtype.itemsize for state in self.states)
        return (1 + SNAPSHOTS) * one

    def part(self, start: int, end: int) -> "StateGeometry | None":
        """Return the geometry of layers [start, end), counted from the first of the whole stage.

        None if these have no states.
        """
        states = tuple(state for state in self.states if start <= state.key[0] < end)
        return StateGeometry(states, self.hidden_size) if states else None


class SequenceStates:
    """The states of one sequence after ``length`` positions, and snapshots of earlier ones."""

    def __init__(self, geometry: StateGeometry) -> None:
        """Allocates ``geometry.nbytes``."""
        self.length = 0
        self.is_torn = False
        """True if a forward failed after it changed some of the states. ``restore`` repairs
        them."""
        self._slots = {
            state.key: torch.zeros((1 + SNAPSHOTS, *state.shape), dtype=state.dtype, device=state.device)
            for state in geometry.states
        }
        self._snapshots: dict[int, int] = {}
        """The slot of each snapshot, by its length. Slot 0 has the current states."""

    def state(self, key: StateKey) -> torch.Tensor:
        """Return the current state. The caller may change it in place."""
        return self._slots[key][0]

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Lengths of the snapshots, ascending."""
        return tuple(sorted(self._snapshots))

    def advance(self, count: int) -> None:
        """Note that the states include ``count`` more positions. Take a snapshot when one is
        due."""
        self.length += count
        self.is_torn = False
        if self.length - max(self._snapshots, default=0) >= SNAPSHOT_POSITIONS:
            self._snapshots[self.length] = self._free_slot()
            self._copy(0, self._snapshots[self.length])

    def restorable(self, length: int) -> int:
        """Return the length, in positions, that ``restore(length)`` would go back to."""
        if self.length <= length and not self.is_torn:
            return self.length
        return max((at for at in self._snapshots if at <= length), default=0)

    def restore(self, length: int) -> None:
        """Go back to the latest states after at most ``length`` positions.

        ``self.length`` is then the number of positions in these states.
        """
        if self.length <= length and not self.is_torn:
            return
        self.length = self.restorable(length)
        self._snapshots = {at: slot for at, slot in self._snapshots.items() if at <= length}
        self.is_torn = False
        if self.length:
            self._copy(self._snapshots[self.length], 0)

    def copy_from(self, other: "SequenceStates") -> None:
        """Become equal to the states of another sequence of the same geometry."""
        self.length, self.is_torn, self._snapshots = other.length, other.is_torn, dict(other._snapshots)
        for key, slots in self._slots.items():
            slots.copy_(other._slots[key])

    def _free_slot(self) -> int:
        if len(self._snapshots) == SNAPSHOTS:
            return self._snapshots.pop(dispensable((*self.snapshots, self.length)))
        return min(set(range(1, 1 + SNAPSHOTS)) - set(self._snapshots.values()))

    def _copy(self, source: int, target: int) -> None:
        for slots in self._slots.values():
            slots[target].copy_(slots[source])


def dispensable(lengths: Sequence[int]) -> int:
    """Return the snapshot to drop. ``lengths`` ascend; the newest always stays.

    Dropping a snapshot leaves a gap between its neighbours. The snapshot to drop has the smallest
    gap, relative to its distance from the newest. So recent snapshots stay close together, and a
    short rewind has few positions to compute again.
    """
    newest = lengths[-1]
    gaps = {
        length: (after - before) / (newest - length)
        for before, length, after in zip((0, *lengths), lengths[:-1], lengths[1:], strict=False)
    }
    return min(gaps, key=gaps.__getitem__)


class MixerCache:
    """The states of one sequence, with the methods of transformers' ``Cache`` that mixers use."""

    def __init__(self, states: SequenceStates) -> None:
        self._states = states
        self._is_new = states.length == 0

    def get_conv_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        return None if self._is_new else self._states.state((layer, "conv", state_idx))

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        return None if self._is_new else self._states.state((layer, "recurrent", state_idx))

    def update_conv_state(self, new: torch.Tensor, layer: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Append inputs [1, channels, n] of the convolution, and keep the last ones.

        Returns the inputs that the convolution now sees.
        """
        state = self._states.state((layer, "conv", state_idx))
        size = state.shape[-1]
        if self._is_new:
            seen = functional.pad(new, (max(0, size - new.shape[-1]), 0))
        else:
            seen = torch.cat([state, new], -1)
        state.copy_(seen[..., -size:])
        return seen

    def update_recurrent_state(
        self, new: torch.Tensor, layer: int | None = None, state_idx: int = 0, *, layer_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        state = self._states.state((layer_idx if layer is None else layer, "recurrent", state_idx))
        return state.copy_(new)

    def is_recording_past(self, _: int) -> bool:
        return False


class BatchStates:
    """The states of a packed batch with ``counts[i]`` positions of sequence i.

    The model passes this to every layer as its cache. ``states`` is empty for a pass: it computes
    whole sequences, which have no earlier state.
    """

    is_sliding: tuple[bool, ...] = ()
    """transformers chooses masks by this attribute. There are no masks here."""

    def __init__(self, counts: Sequence[int], states: Sequence[SequenceStates] = ()) -> None:
        self.counts = list(counts)
        self.rows: list[MixerCache | None] = [MixerCache(each) for each in states] or [None] * len(counts)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values unchanged: attention caches them itself."""
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return 0


class StateProbe(BatchStates):
    """Finds the mixers of a stage and their states, by computing one position."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__([1])
        self.mixers: list[nn.Module] = []
        self.states: dict[StateKey, StateShape] = {}
        self._running: list[nn.Module] = []
        self._layers = list(layers)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context, track which module is computing."""
        with ExitStack() as hooks:
            for layer in self._layers:
                for module in layer.modules():
                    hooks.enter_context(module.register_forward_pre_hook(self._enter))
                    hooks.enter_context(module.register_forward_hook(self._leave))
            yield

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        self._add_mixer()

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        self._add_mixer()

    def update_conv_state(
        self,
        new: torch.Tensor,
        layer: int,
        state_idx: int = 0,
        *,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        self._add_mixer()
        size = conv_kernel_size or new.shape[-1]
        self._add_state((layer, "conv", state_idx), (*new.shape[:-1], size), new)
        return functional.pad(new, (max(0, size - new.shape[-1]), 0))

    def update_recurrent_state(
        self, new: torch.Tensor, layer: int | None = None, state_idx: int = 0, *, layer_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._add_mixer()
        number = layer_idx if layer is None else layer
        self._add_state((number, "recurrent", state_idx), tuple(new.shape), new)
        return new

    def is_recording_past(self, _: int) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"this model has layers with other state than keys, values and recurrent states: they use {name} of their cache",
            hint="docs/families.md lists families that work",
        )

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._running.append(module)

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def _add_mixer(self) -> None:
        if self._running[-1] not in self.mixers:
            self.mixers.append(self._running[-1])

    def _add_state(self, key: StateKey, shape: tuple[int, ...], like: torch.Tensor) -> None:
        self.states[key] = StateShape(key, shape, like.dtype, like.device)


def split_mixers(mixers: Iterable[nn.Module]) -> None:
    """Make each mixer compute a packed batch's sequences one after another, each with its own
    states."""
    for mixer in mixers:
        mixer.forward = _split(mixer.forward)


def _split(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    parameters = inspect.signature(forward)

    @functools.wraps(forward)
    def split(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = parameters.bind(*args, **kwargs).arguments
        extra = {name: value for name, value in given.pop("kwargs", {}).items() if name != "packed"}
        [cache] = [name for name, value in given.items() if isinstance(value, BatchStates)]
        batch: BatchStates = given.pop(cache)
        parts = torch.split(given.pop("hidden_states"), batch.counts, 1)
        if isinstance(batch, StateProbe):
            return forward(hidden_states=parts[0], **{cache: batch}, **given, **extra)
        outputs = [
            forward(hidden_states=part, **{cache: row}, **given, **extra)
            for part, row in zip(parts, batch.rows, strict=True)
        ]
        return torch.cat(outputs, 1)

    return split
