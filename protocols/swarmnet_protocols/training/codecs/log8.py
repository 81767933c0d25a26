"""One byte per value on a logarithmic scale, for the slopes of ``zo``.

For slopes only sign and magnitude matter. A worker leaves the places of other workers zero, and a
run of zeros takes two bytes.
"""

import re

import numpy as np
import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.training.codecs.payload import all_finite

_SIXTHS = (1.0, 1.1224621, 1.2599211, 1.4142135, 1.5874011, 1.7817974)
"""2 ** (j / 6) as float32.

Constants, because the last bit of a computed power differs between machines.
"""
_LOWEST_EXPONENT = -10
_MAGNITUDES = 127
_RUN = -128
"""Mark of a run of zeros. The next byte is its length, 3 to 127."""
_ZEROS = re.compile(rb"\0{3,127}")


class Log8Codec:
    """Sends each value as one signed byte: code 0 is zero, code ±i is ±2 ** ((i - 1) / 6 - 10).

    i goes from 1 to 127. -128 and n stand for n zeros. The range is ±[9.8e-4, 2048] in steps of
    12.2 %, so the nearest code is at most 6 % away. Smaller values round to zero or to the smallest
    magnitude. Larger values are clipped.
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
        mark = _RUN.to_bytes(1, signed=True)
        return _ZEROS.sub(lambda run: mark + bytes([len(run[0])]), codes.to(torch.int8).numpy().tobytes())

    def decode(self, payload: Buffer, count: int) -> torch.Tensor:
        packed = np.frombuffer(payload, np.int8)
        is_mark = packed == _RUN
        is_length = np.concatenate([[False], is_mark])
        if is_length[-1] or (packed[is_length[:-1]] <= 0).any():
            raise ProtocolViolation("a run of zeros without a length")
        times = np.where(is_mark, 0, np.where(is_length[:-1], packed, 1)).astype(np.int64)
        if times.sum() != count:
            raise ProtocolViolation(f"{times.sum()} values instead of {count}")
        codes = torch.from_numpy(np.repeat(np.where(is_length[:-1], 0, packed), times)).long()
        return self._values[codes.abs()] * codes.sign()

    def max_bytes(self, count: int) -> int:
        return count
