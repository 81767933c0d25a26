"""One byte per value on a logarithmic scale, for the slopes of ``zo``.

For slopes only sign and magnitude matter.
"""

import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.training.codecs.payload import all_finite, check_size, read

_SIXTHS = (1.0, 1.1224621, 1.2599211, 1.4142135, 1.5874011, 1.7817974)
"""2 ** (j / 6) as float32.

Constants, because the last bit of a computed power differs between machines.
"""
_LOWEST_EXPONENT = -10
_MAGNITUDES = 127


class Log8Codec:
    """Sends each value as one signed byte: code 0 is zero, code ±i is ±2 ** ((i - 1) / 6 - 10).

    i goes from 1 to 127; -128 is not a code. The range is ±[9.8e-4, 2048] in steps of 12.2 %, so
    the nearest code is at most 6 % away. Smaller values round to zero or to the smallest magnitude.
    Larger values are clipped.
    """

    name = "log8"
    biased = False
    """No error feedback is needed.

    Each slope belongs to another direction, so the errors of two rounds are unrelated.
    """
    sparse = False

    def __init__(self) -> None:
        magnitudes = [_SIXTHS[i % 6] * 2.0 ** (i // 6 + _LOWEST_EXPONENT) for i in range(_MAGNITUDES)]
        self._values = torch.tensor([0.0, *magnitudes])
        self._midpoints = (self._values[1:] + self._values[:-1]) / 2

    def encode(self, values: torch.Tensor) -> bytes:
        if not all_finite(values):
            raise ValueError("a value is not finite")
        codes = torch.bucketize(values.abs(), self._midpoints) * values.sign().long()
        return codes.to(torch.int8).numpy().tobytes()

    def decode(self, payload: Buffer, count: int) -> torch.Tensor:
        check_size(payload, count, count)
        codes = read(payload, torch.int8).long()
        if (codes < -_MAGNITUDES).any():
            raise ProtocolViolation("-128 is not a code")
        return self._values[codes.abs()] * codes.sign()

    def max_bytes(self, count: int) -> int:
        return count
