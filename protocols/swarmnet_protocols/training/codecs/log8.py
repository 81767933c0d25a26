"""One byte a value, on a logarithmic scale: for slopes, of which sign and magnitude matter and the last digits do not."""

import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer

_SIXTHS = (1.0, 1.1224621, 1.2599211, 1.4142135, 1.5874011, 1.7817974)
"""2 ** (j / 6) as float32, written out: the last bit of a computed power differs between machines."""
_LOWEST_EXPONENT = -10
_MAGNITUDES = 127


class Log8Codec:
    """Byte b, as a signed integer: 0 is zero; ±i, 1 <= i <= 127, is ±2 ** ((i - 1) / 6 - 10).

    That is ±[9.8e-4, 2048] in steps of 12.2 %: the nearest code is at most 6 % away. Smaller values round to zero or to the
    smallest, larger ones are clipped. -128 is no code.
    """

    name = "log8"
    biased = False
    """Rounding errors of slopes along unrelated directions are nothing to feed back."""
    sparse = False

    def __init__(self) -> None:
        magnitudes = [_SIXTHS[i % 6] * 2.0 ** (i // 6 + _LOWEST_EXPONENT) for i in range(_MAGNITUDES)]
        self._values = torch.tensor([0.0, *magnitudes])
        self._midpoints = (self._values[1:] + self._values[:-1]) / 2

    def encode(self, values: torch.Tensor) -> bytes:
        """The payload of ``values``, float32 [n]. Raises ``ValueError`` unless all are finite."""
        if not values.isfinite().all():
            raise ValueError("only finite values can be encoded")
        codes = torch.bucketize(values.abs(), self._midpoints) * values.sign().long()
        return codes.to(torch.int8).numpy().tobytes()

    def decode(self, payload: Buffer, count: int) -> torch.Tensor:
        """Float32 [count]. Raises ``ProtocolViolation`` unless ``payload`` is ``count`` codes."""
        if len(payload) != count:
            raise ProtocolViolation(f"{len(payload)} bytes for {count} values of one byte")
        if count == 0:
            return torch.empty(0)
        codes = torch.frombuffer(bytearray(payload), dtype=torch.int8).long()
        if (codes < -_MAGNITUDES).any():
            raise ProtocolViolation("-128 is no code")
        return self._values[codes.abs()] * codes.sign()

    def max_bytes(self, count: int) -> int:
        return count
