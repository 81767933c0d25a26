"""Keys and values that one stage keeps for one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from swarmnet_node.engine.adapters import StageAdapter

Prefix = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [1, heads, n, size] that a layer's part of a lane begins with."""

GROWTH_POSITIONS = 64
"""Buffers grow in steps of this many positions: growing copies what is there, about once in 64 tokens."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for each position."""

    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class KVGeometry:
    """What a stage keeps for each position of a lane."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_position(self) -> int:
        """Bytes of keys and values of one position, all layers together."""
        return sum(s.heads * (s.key_size + s.value_size) for s in self.layers) * self.dtype.itemsize

    def bytes_for(self, length: int) -> int:
        """Exactly what a new lane allocates to reach ``length`` positions."""
        return _capacity_for(length) * self.bytes_per_position


def _capacity_for(length: int) -> int:
    return -(-length // GROWTH_POSITIONS) * GROWTH_POSITIONS


class SequenceCache:
    """The keys and values of one sequence, in buffers that grow with use.

    Each layer has ``keys`` [1, heads, capacity, key size] and ``values`` [1, heads, capacity, value size]; only the first
    ``length`` positions mean anything. The first of them are those of ``prefix``, which is no token's.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        adapter: "StageAdapter | None" = None,
        prefix: Sequence[Prefix] = (),
    ) -> None:
        """``adapter`` is applied to the lane's tokens; ``prefix`` is what of it belongs to the layers, or nothing."""
        self.geometry = geometry
        self.adapter = adapter
        self.prefix_positions = prefix[0][0].shape[2] if prefix else 0
        self.length = self.prefix_positions
        self._prefix = prefix
        self._capacity = 0
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers as they are allocated now."""
        return self._capacity * self.geometry.bytes_per_position

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key and value buffers of a layer."""
        return self._layers[index]

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions; afterwards ``nbytes`` is at least ``geometry.bytes_for(length)``."""
        capacity = _capacity_for(length)
        if capacity <= self._capacity:
            return
        if not self._layers:
            self._layers = [self._empty(shape, capacity) for shape in self.geometry.layers]
            for buffers, states in zip(self._layers, self._prefix, strict=False):
                for buffer, state in zip(buffers, states, strict=True):
                    buffer[:, :, : self.prefix_positions] = state
        else:
            for index, shape in enumerate(self.geometry.layers):
                self._layers[index] = self._copy(index, self._empty(shape, capacity))
        self._capacity = capacity

    def truncate(self, length: int) -> None:
        """Forget the positions from ``length`` on. The buffers stay, for the positions that take their place."""
        if not self.prefix_positions <= length <= self.length:
            raise ValueError(f"cannot cut {self.length} positions to {length}")
        self.length = length

    @torch.inference_mode()
    def fork(self) -> "SequenceCache":
        """An independent copy, with buffers no larger than it needs."""
        twin = SequenceCache(self.geometry, self.adapter, self._prefix)
        if self._layers:
            twin.reserve(self.length)
            twin._layers = [self._copy(index, fresh) for index, fresh in enumerate(twin._layers)]
            twin.length = self.length
        return twin

    def _empty(self, shape: LayerShape, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"dtype": self.geometry.dtype, "device": self.geometry.device}
        keys = torch.empty(1, shape.heads, capacity, shape.key_size, **options)  # type: ignore[call-overload]
        values = torch.empty(1, shape.heads, capacity, shape.value_size, **options)  # type: ignore[call-overload]
        return keys, values

    def _copy(
        self, index: int, fresh: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for old, new in zip(self._layers[index], fresh, strict=True):
            new[:, :, : self.length] = old[:, :, : self.length]
        return fresh
