"""What a codec is."""

from typing import Protocol

import torch

from swarmnet_protocols.net import Buffer


class Codec(Protocol):
    """Float32 values to bytes and back. Stateless: one may serve any number of callers."""

    @property
    def name(self) -> str: ...

    @property
    def biased(self) -> bool:
        """Whether some value may be lost however often it is sent, unless the caller feeds the error back."""

    @property
    def sparse(self) -> bool:
        """Whether most values decode as zero: those of a mean would not, and payloads are small enough for all to have all."""

    def encode(self, values: torch.Tensor) -> Buffer:
        """The payload of ``values``, float32 [n] on the CPU. Raises ``ValueError`` unless all are finite."""

    def decode(self, payload: Buffer, count: int) -> torch.Tensor:
        """Float32 [count], all finite. Raises ``ProtocolViolation`` unless ``payload`` is one of ``count`` values.

        The size is checked before anything is allocated.
        """

    def max_bytes(self, count: int) -> int:
        """The size of every payload of ``count`` values."""
