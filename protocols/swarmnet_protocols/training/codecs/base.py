"""The interface of a codec."""

from typing import Protocol

import torch

from swarmnet_protocols.net import Buffer


class Codec(Protocol):
    """Encodes float32 vectors as bytes. Stateless, so one instance serves all callers."""

    @property
    def name(self) -> str:
        """The name in job files."""

    @property
    def biased(self) -> bool:
        """True if the mean of many encodings of one vector differs from the vector.

        Then the caller must use error feedback.
        """

    @property
    def sparse(self) -> bool:
        """True if most values decode as zero.

        A mean of such vectors is not sparse, so members exchange all contributions instead.
        """

    def encode(self, values: torch.Tensor) -> Buffer:
        """Encode ``values``, float32 [n] on the CPU. Raises ``ValueError`` if one is not finite.

        The values may not change while the payload is in use.
        """

    def decode(self, payload: Buffer, count: int) -> torch.Tensor:
        """Decode to float32 [count], all finite, which may be the payload's memory.

        Checks the size before it allocates memory.

        Raises ``ProtocolViolation`` for a payload that ``encode`` cannot have returned.
        """

    def max_bytes(self, count: int) -> int:
        """Return the most bytes that a payload of ``count`` values can have."""
