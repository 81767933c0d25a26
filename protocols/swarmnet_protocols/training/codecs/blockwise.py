"""Blockwise quantization (``int8``, ``int4``, ``fp4``): a signed code per value, a scale per block.

A payload is the scales [blocks] in bfloat16, then the codes in two's complement. There is one code
per byte, or two with the first in the low half. Code c has the value ``levels(c) * scale``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.training.codecs.payload import (
    SCALE_BYTES,
    check_scales,
    check_size,
    read,
    round_up_scales,
    write,
)

_VALUES_AT_ONCE = 1 << 14
"""Values computed at a time, a multiple of every block size.

With more, they would leave the cache, and torch would use several threads.
"""


@dataclass(frozen=True)
class BlockCodec:
    """Codes of ``bits`` (8 or 4) bits and magnitude at most ``largest_code``.

    - Each block has ``block`` values. Its largest magnitude is scaled to at most ``peak``.
    - ``codes`` maps scaled values to the codes (int8) of the nearest levels. ``levels`` maps codes
      to levels (float32).
    - Magnitudes above ``peak * MAX_SCALE`` are clamped. Blocks with a scale below ``MIN_SCALE``
      become zero.
    """

    name: str
    bits: int
    block: int
    largest_code: int
    peak: float
    codes: Callable[[torch.Tensor], torch.Tensor]
    levels: Callable[[torch.Tensor], torch.Tensor]
    biased: bool = True
    sparse: bool = False

    def encode(self, values: torch.Tensor) -> bytes:
        parts = [self._encode_part(part) for part in torch.split(values, _VALUES_AT_ONCE)]
        return b"".join([scales for scales, _ in parts] + [codes for _, codes in parts])

    def _encode_part(self, values: torch.Tensor) -> tuple[Buffer, Buffer]:
        blocks = self._in_blocks(values)
        largest = blocks.abs().amax(dim=1)
        if not largest.isfinite().all():
            raise ValueError("a value is not finite")
        scales = round_up_scales(largest / self.peak)
        # A block with scale zero is divided by infinity, which gives zero.
        divisors = scales.float().where(scales > 0, torch.inf)
        scaled = (blocks / divisors[:, None]).clamp_(-self.peak, self.peak)
        codes = self.codes(scaled).view(-1)[: len(values)]
        return write(scales), write(codes if self.bits == 8 else _pack(codes))

    def decode(self, payload: Buffer, count: int) -> torch.Tensor:
        check_size(payload, self.max_bytes(count), count)
        scales_bytes = self._blocks(count) * SCALE_BYTES
        view = memoryview(payload)
        scales = read(view[:scales_bytes], torch.bfloat16)
        check_scales(scales)
        codes = read(view[scales_bytes:], torch.int8)
        if self.bits == 4:
            codes = _unpack(codes)
        if codes[count:].any():
            raise ProtocolViolation("the padding is not zero")
        if count and codes.amin() < -self.largest_code:
            raise ProtocolViolation(f"a code is below {-self.largest_code}")
        values = torch.empty(count)
        parts = zip(
            torch.split(values, _VALUES_AT_ONCE),
            torch.split(codes[:count], _VALUES_AT_ONCE),
            torch.split(scales, _VALUES_AT_ONCE // self.block),
            strict=True,
        )
        for part, part_codes, part_scales in parts:
            levels = self._in_blocks(self.levels(part_codes))
            part.copy_(levels.mul_(part_scales.float()[:, None]).view(-1)[: len(part)])
        return values

    def max_bytes(self, count: int) -> int:
        return self._blocks(count) * SCALE_BYTES + -(-count * self.bits // 8)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _in_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values [n], padded with zeros, as [blocks, block]."""
        padded = F.pad(values, (0, -len(values) % self.block))
        return padded.view(self._blocks(len(values)), self.block)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack four-bit codes [n] into bytes [ceil(n / 2)]."""
    pairs = F.pad(codes, (0, len(codes) % 2)).view(-1, 2)
    return (pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [n], int8, into codes [2n], int8. A right shift keeps the sign."""
    return torch.stack(((packed << 4) >> 4, packed >> 4), dim=1).view(-1)


def _integer_codes(scaled: torch.Tensor) -> torch.Tensor:
    # torch would divide even a small tensor among threads. On a busy machine that took 20 times as
    # long as numpy.
    return torch.from_numpy(np.rint(scaled.numpy()).astype(np.int8))


def _integer_levels(codes: torch.Tensor) -> torch.Tensor:
    return codes.float()


_FLOAT32_MANTISSA_BITS = 23
_EXPONENT_OF_CODE_0 = 126
"""The biased float32 exponent of half the smallest power: code c > 0 has exponent 126 + c."""


def _power_codes(scaled: torch.Tensor) -> torch.Tensor:
    magnitudes = scaled.abs()
    bits = magnitudes.view(torch.int32)
    odd = (bits >> _FLOAT32_MANTISSA_BITS) & 1
    # Rounding the mantissa to zero bits, half to even, carries into the exponent where the next
    # power of two is nearer.
    exponents = (bits + 0x3FFFFF + odd) >> _FLOAT32_MANTISSA_BITS
    powers = (exponents - _EXPONENT_OF_CODE_0).clamp_(min=1)
    return powers.where(magnitudes > 0.5, 0).to(torch.int8) * scaled.sign().to(torch.int8)


def _power_levels(codes: torch.Tensor) -> torch.Tensor:
    exponents = codes.abs().to(torch.int32) + _EXPONENT_OF_CODE_0
    powers = (exponents << _FLOAT32_MANTISSA_BITS).view(torch.float32)
    return powers * codes.sign()


INT8 = BlockCodec("int8", 8, 256, 127, 127.0, _integer_codes, _integer_levels)
"""8.06 bits per value: symmetric integers, rounded half to even."""

INT4 = BlockCodec("int4", 4, 64, 7, 7.0, _integer_codes, _integer_levels)
"""4.25 bits per value: symmetric integers, rounded half to even."""

FP4 = BlockCodec("fp4", 4, 64, 7, 64.0, _power_codes, _power_levels)
"""4.25 bits per value, E3M0: a sign, and zero or a power 2^0 .. 2^6.

Streaming DiLoCo, Douillard et al., arXiv 2501.18512, quantized outer gradients.
"""
