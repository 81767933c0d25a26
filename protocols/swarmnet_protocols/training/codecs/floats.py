"""Plain floating point: values as float32, bfloat16 or float16, rounded half to even."""

from dataclasses import dataclass

import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.training.codecs.payload import all_finite, check_size, read, view, write
from swarmnet_protocols.training.shared_randomness import round_to_bfloat16


@dataclass(frozen=True)
class FloatCodec:
    """Sends each value in ``dtype``. Values beyond its range become its largest finite number.

    float16 is biased because it has no value below 6e-8 and none above 65504. bfloat16 has the
    range of float32. A payload of float32 shares its memory with the values, unless it is
    read-only.
    """

    name: str
    dtype: torch.dtype
    biased: bool
    sparse: bool = False

    def encode(self, values: torch.Tensor, seed: int | None = None) -> Buffer:
        """Encode ``values``. With ``seed``, round to bfloat16 at random, without a bias."""
        if not all_finite(values):
            raise ValueError("a value is not finite")
        if self.dtype == torch.float32:
            return view(values)
        largest = torch.finfo(self.dtype).max
        values = values.clamp(-largest, largest)
        if seed is not None and self.dtype == torch.bfloat16:
            return write(round_to_bfloat16(values, seed, (0, 0)))
        return write(values.to(self.dtype))

    def decode(self, payload: Buffer, count: int) -> torch.Tensor:
        check_size(payload, self.max_bytes(count), count)
        values = read(payload, self.dtype, copy=self.dtype != torch.float32).float()
        if not all_finite(values):
            raise ProtocolViolation("a value is not finite")
        return values

    def max_bytes(self, count: int) -> int:
        return count * self.dtype.itemsize


FLOAT32 = FloatCodec("float32", torch.float32, biased=False)
BFLOAT16 = FloatCodec("bfloat16", torch.bfloat16, biased=False)
FLOAT16 = FloatCodec("float16", torch.float16, biased=True)
