"""Blockwise quantization (``int8``, ``int4``, ``fp4``): a signed code per value, a scale per block.

A payload is the scales [blocks] in bfloat16, then the codes in two's complement. There is one code
per byte, or two with the first in the low half. Code c has the value ``levels(c) * scale``.

Codecs of boundaries also rotate blocks, as TAH-Quant does (arXiv 2506.01352): for a block x of n
values, the codes encode H x / √n, where H is the Hadamard matrix. One large value becomes n values
of equal magnitude, so that a smaller scale holds the block. A negative scale marks a rotated
block. Products of H and codes are sums of small integers, and √n is a power of two. So all machines
decode the same bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

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
from swarmnet_protocols.training.shared_randomness import random_fractions

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
    - ``rotates``: a whole block is rotated if this lowers its largest magnitude.
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
    rotates: bool = False

    def encode(self, values: torch.Tensor, seed: int | None = None) -> bytes:
        """Encode ``values``. With ``seed``, round to integers at random, without a bias."""
        starts = range(0, len(values), _VALUES_AT_ONCE)
        parts = [self._encode_part(values[at : at + _VALUES_AT_ONCE], at, seed) for at in starts]
        return b"".join([scales for scales, _ in parts] + [codes for _, codes in parts])

    def _encode_part(self, values: torch.Tensor, start: int, seed: int | None) -> tuple[Buffer, Buffer]:
        blocks = self._in_blocks(values)
        largest = blocks.abs().amax(dim=1)
        if not largest.isfinite().all():
            raise ValueError("a value is not finite")
        is_rotated = torch.zeros(len(blocks), dtype=torch.bool)
        if self.rotates:
            rotated = _rotate(blocks)
            lower = rotated.abs().amax(dim=1)
            is_rotated = lower < largest
            is_rotated[len(values) // self.block :] = False
            blocks, largest = rotated.where(is_rotated[:, None], blocks), lower.where(is_rotated, largest)
        scales = round_up_scales(largest / self.peak)
        # A block with scale zero is divided by infinity, which gives zero.
        divisors = scales.float().where(scales > 0, torch.inf)
        scaled = (blocks / divisors[:, None]).clamp_(-self.peak, self.peak)
        if seed is not None:
            scaled.view(-1).add_(random_fractions(seed, start, scaled.numel())).floor_()
        codes = self.codes(scaled).view(-1)[: len(values)]
        signed = torch.where(is_rotated & (scales > 0), -scales, scales)
        return write(signed), write(codes if self.bits == 8 else _pack(codes))

    def decode(self, payload: Buffer, count: int) -> torch.Tensor:
        check_size(payload, self.max_bytes(count), count)
        scales_bytes = self._blocks(count) * SCALE_BYTES
        view = memoryview(payload)
        scales = read(view[:scales_bytes], torch.bfloat16)
        is_rotated = (scales < 0) & self.rotates
        check_rotated(is_rotated, count // self.block)
        scales[is_rotated] *= -1
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
            torch.split(is_rotated, _VALUES_AT_ONCE // self.block),
            strict=True,
        )
        for part, part_codes, part_scales, rotated in parts:
            levels = self._in_blocks(self.levels(part_codes))
            if rotated.any():
                levels = _rotate(levels).where(rotated[:, None], levels)
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


def check_rotated(is_rotated: torch.Tensor, whole: int) -> None:
    """Raise ``ProtocolViolation`` if a block after the first ``whole`` is rotated."""
    if is_rotated[whole:].any():
        raise ProtocolViolation("a block that is not whole is rotated")


def _rotate(blocks: torch.Tensor) -> torch.Tensor:
    """Return H x / √n for the blocks x [blocks, n]. A second time, this gives x again."""
    size = blocks.shape[1]
    return blocks @ _hadamard(size) / math.isqrt(size)


@cache
def _hadamard(size: int) -> torch.Tensor:
    """Return the Hadamard matrix of a power of two in Sylvester's order: 1 and -1, symmetric."""
    if size == 1:
        return torch.ones(1, 1)
    return torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), _hadamard(size // 2))


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

BOUNDARY_INT8, BOUNDARY_INT4 = replace(INT8, rotates=True), replace(INT4, rotates=True)
"""The same bits per value for activations and gradients, which have outliers."""
