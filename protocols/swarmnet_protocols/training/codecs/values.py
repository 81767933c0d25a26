"""Values that are computed where they are read, so that no memory holds all of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from swarmnet_protocols.net import Buffer

_PIECE_BYTES = 1 << 20
"""Bytes that are computed at a time. With more, they would not fit the cache."""


class Values(Protocol):
    """Float32 values [n]: a tensor, or a vector that is computed part by part."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Difference:
    """``left - right``, float32 [n]. Neither may change while this is in use."""

    left: torch.Tensor
    right: torch.Tensor

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, part: slice) -> torch.Tensor:
        return self.left[part] - self.right[part]

    def between(self, start: int, end: int) -> "Difference":
        """Return the values [start, end), not computed yet."""
        return Difference(self.left[start:end], self.right[start:end])


@dataclass(frozen=True)
class DifferenceBytes:
    """The bytes of a difference in float32."""

    values: Difference

    def __len__(self) -> int:
        return 4 * len(self.values)

    def __getitem__(self, part: slice) -> Buffer:
        start, end, _ = part.indices(len(self))
        first = start // 4
        whole = self.values[first : -(-end // 4)].view(torch.uint8).numpy().data
        return whole[start - 4 * first : end - 4 * first]


Payload = Buffer | DifferenceBytes
"""Encoded values."""


def pieces(payload: Payload) -> Iterator[Buffer]:
    """Yield the bytes of a payload in order."""
    if not isinstance(payload, DifferenceBytes):
        yield payload
        return
    for start in range(0, len(payload), _PIECE_BYTES):
        yield payload[start : start + _PIECE_BYTES]
