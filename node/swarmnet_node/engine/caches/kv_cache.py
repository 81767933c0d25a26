"""KV cache: the keys and values of one sequence on one stage.

The life of a cache:

1. **Registered.** ``Engine.register`` counts a new cache in the client's scope. Nothing is
   allocated.
2. **Grown.** ``Engine.compute`` enlarges the reservation, and then ``Stage.forward`` allocates with
   ``reserve``. A larger ``reserve`` allocates new tensors and copies the valid positions.
3. **Truncated.** ``truncate`` forgets positions, but frees no memory.
4. **Released.** ``Engine.release`` returns the reservation. The session calls it for caches that a
   step replaces, and for all caches when it ends. The last reference frees the tensors.

Layout. A :class:`SequenceCache` has two tensors for each layer of its stage::

    keys    [1, key heads, capacity, key size]
    values  [1, key heads, capacity, value size]

They are tensors of the stage's dtype on its device, or arrays on a stage that C computes. With
grouped-query attention there are fewer key heads than query heads. The first dimension is the batch
dimension that torch's attention expects. One head's positions are contiguous, as attention reads
them. Keys are stored after the rotary embedding. Positions ``[0, length)`` are valid; ``[length,
capacity)`` is uninitialised. ``capacity`` is a multiple of ``GROWTH_POSITIONS``, and the same in
all layers. There are no pages: every sequence has its own tensors, so attention needs no block
table.

Arena. On an accelerator the tensors are strided views of a range in a :class:`CacheArena`, which
all sequences share. The views change when the range moves.

Recurrent state. On a stage with recurrent layers, the cache also has their states
(``recurrent_state.py``) and the stage's inputs ``[capacity, hidden size]``. After ``truncate``,
states are computed again from these inputs.

Prefix. With a prefix-tuning adapter, positions ``[0, n)`` belong to the adapter, and the first
token has position n.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swarmnet_node.engine.kernels.backend import LoraLayers
from swarmnet_protocols.net.limits.resources import Reservation

if TYPE_CHECKING:
    import torch

    from swarmnet_node.engine.caches.cache_arena import CacheArena
    from swarmnet_node.engine.caches.recurrent_state import SequenceStates, StateGeometry

Prefix = tuple[Any, Any]
"""Keys and values [1, key heads, n, size] of a prefix-tuning adapter's n positions, for one
layer."""

GROWTH_POSITIONS = 64
"""Positions that buffers grow by, so that a sequence is copied about once in 64 tokens. With fewer,
it would be copied more often. With more, memory would be wasted."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of the keys and values of one position in one layer with ``heads`` key heads."""

    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class KVGeometry:
    """Shapes, dtype and device of a sequence's cache on one stage.

    - ``arena``: contains the caches, if the stage has an arena. A sequence takes room in all layers
      of the arena, even if the stage is a part with fewer layers.
    - ``first``: the number of the first of these layers in the arena.
    - ``states``: the geometry of recurrent states, if any. Such a stage has no arena.
    """

    layers: tuple[LayerShape, ...]
    dtype: "torch.dtype | np.dtype[Any]"
    """A dtype of numpy if the buffers are arrays."""
    device: "torch.device"
    arena: "CacheArena | None" = None
    first: int = 0
    states: "StateGeometry | None" = None
    devices: "tuple[torch.device, ...]" = ()
    """The device of each layer. Empty if all layers are on ``device``."""

    @property
    def bytes_per_position(self) -> int:
        """Bytes of one position's keys and values in all layers, and of its inputs if they are
        kept."""
        if self.arena is not None:
            return self.arena.bytes_per_position
        sizes = sum(s.heads * (s.key_size + s.value_size) for s in self.layers)
        return (sizes + (self.states.hidden_size if self.states else 0)) * self.dtype.itemsize

    def bytes_for(self, length: int) -> int:
        """Return the bytes that a new cache allocates for ``length`` positions, exactly."""
        return self.bytes_of(_capacity_for(length))

    def positions_in(self, size_bytes: int) -> int:
        """Return the positions of the longest sequence whose cache has at most ``size_bytes``."""
        if self.states is not None:
            size_bytes -= self.states.nbytes
        return max(0, size_bytes // self.bytes_per_position // GROWTH_POSITIONS * GROWTH_POSITIONS)

    def bytes_of(self, capacity: int) -> int:
        """Return the bytes of a cache with this capacity, in positions."""
        return capacity * self.bytes_per_position + (self.states.nbytes if self.states and capacity else 0)


def _capacity_for(length: int) -> int:
    return -(-length // GROWTH_POSITIONS) * GROWTH_POSITIONS


@contextmanager
def _without_gradients() -> Iterator[None]:
    """Change tensors, if there are any, without recording it for gradients."""
    with getattr(sys.modules.get("torch"), "inference_mode", nullcontext)():
        yield


class SequenceCache:
    """The KV cache of one sequence, and the adapter that applies to its positions."""

    def __init__(
        self,
        geometry: KVGeometry,
        lora: LoraLayers | None = None,
        prefix: Sequence[Prefix] = (),
    ) -> None:
        """``lora`` applies to the sequence's positions.

        ``prefix`` has keys and values for every layer, or is empty.
        """
        self.geometry = geometry
        self.lora = lora
        self.prefix_positions = prefix[0][0].shape[2] if prefix else 0
        self.length = self.prefix_positions
        self.layers: list[tuple[Any, Any]] = []
        """Key and value buffers of each layer. Empty until the first ``reserve``."""
        self.inputs: Any = ()
        """The stage's inputs [capacity, hidden size], if there are recurrent states."""
        self.states: SequenceStates | None = None
        """Recurrent states. None until the first ``reserve``, and on a stage without recurrent
        layers."""
        self.reservation: Reservation | None = None
        """The reservation of its bytes. None unless the sequence is registered with an engine."""
        self._prefix = prefix
        self._capacity = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated buffers."""
        return self.geometry.bytes_of(self._capacity)

    @property
    def behind(self) -> int:
        """Positions that recurrent states must compute again before a new one.

        Above 0 after a rewind or a failed forward.
        """
        return 0 if self.states is None else self.length - self.states.restorable(self.length)

    @property
    def span(self) -> range:
        """The layers of this cache, counted from the first layer of the arena."""
        return range(self.geometry.first, self.geometry.first + len(self.geometry.layers))

    @property
    def start(self) -> int:
        """The first position in the arena. 0 without an arena."""
        return 0 if self.geometry.arena is None else self.geometry.arena.start_of(self)

    @_without_gradients()
    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions.

        Afterwards ``nbytes`` is at least ``geometry.bytes_for(length)``. Raises
        ``torch.OutOfMemoryError`` if the arena or the device has no room.
        """
        capacity = _capacity_for(length)
        if capacity <= self._capacity:
            return
        is_new, arena = not self.layers, self.geometry.arena
        if arena is not None:
            arena.grow(self, capacity)
        elif is_new:
            self.layers = [self._empty(index, capacity) for index in range(len(self.geometry.layers))]
        else:
            for index in range(len(self.layers)):
                self.layers[index] = self._copy(index, self._empty(index, capacity), self.length)
        if is_new:
            for buffers, states in zip(self.layers, self._prefix, strict=False):
                for buffer, state in zip(buffers, states, strict=True):
                    buffer[:, :, : self.prefix_positions] = state
        if self.geometry.states is not None:
            self._reserve_states(self.geometry.states, capacity)
        self._capacity = capacity

    @_without_gradients()
    def truncate(self, length: int) -> None:
        """Forget the positions from ``length`` on. The buffers stay allocated.

        Raises ``ValueError`` for less than the prefix or more than the cache holds.
        """
        self._check_length(length)
        self.length = length
        if self.states is not None:
            self.states.restore(length)

    def _check_length(self, length: int) -> None:
        if not self.prefix_positions <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} positions to {length}")

    @_without_gradients()
    def fork(self, length: int) -> "SequenceCache":
        """Return an independent copy of the first ``length`` positions, in buffers of their size.

        Raises ``ValueError`` for less than the prefix or more than the cache holds.
        """
        self._check_length(length)
        twin = SequenceCache(self.geometry, self.lora, self._prefix)
        if self.layers:
            twin.reserve(length)
            twin.layers = [self._copy(index, fresh, length) for index, fresh in enumerate(twin.layers)]
            twin.length = length
            if self.states is not None and twin.states is not None:
                twin.inputs[:length] = self.inputs[:length]
                twin.states.copy_from(self.states)
                twin.states.restore(length)
        return twin

    def _reserve_states(self, geometry: "StateGeometry", capacity: int) -> None:
        import torch

        from swarmnet_node.engine.caches.recurrent_state import SequenceStates

        options: Any = {"dtype": self.geometry.dtype, "device": self.geometry.device}
        inputs = torch.empty(capacity, geometry.hidden_size, **options)
        if self.states is None:
            self.states = SequenceStates(geometry)
        else:
            inputs[: self.length] = self.inputs[: self.length]
        self.inputs = inputs

    def _empty(self, index: int, capacity: int) -> tuple[Any, Any]:
        shape, devices = self.geometry.layers[index], self.geometry.devices
        sizes = [(1, shape.heads, capacity, size) for size in (shape.key_size, shape.value_size)]
        if isinstance(self.geometry.dtype, np.dtype):
            return np.empty(sizes[0], self.geometry.dtype), np.empty(sizes[1], self.geometry.dtype)
        import torch

        device = devices[index] if devices else self.geometry.device
        options: Any = {"dtype": self.geometry.dtype, "device": device}
        return torch.empty(sizes[0], **options), torch.empty(sizes[1], **options)

    def _copy(self, index: int, fresh: tuple[Any, Any], length: int) -> tuple[Any, Any]:
        """Copy the first ``length`` positions of a layer into ``fresh``, and return ``fresh``."""
        for old, new in zip(self.layers[index], fresh, strict=True):
            new[:, :, :length] = old[:, :, :length]
        return fresh
