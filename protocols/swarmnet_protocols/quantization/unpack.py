"""Unpacks the formats of packed weights with torch: on any device, with exactly the values of
gguf's Python code.

An accelerator keeps packed weights in its own memory and unpacks a panel of them for each product.
``unpack.h`` does the same on a CPU. Operations and their order follow ``gguf.quants``, one torch
operation for each numpy operation, so that no sum is rounded differently.

Shapes: N blocks of one format, uint8 [N, bytes of a block] in, float32 [N, weights of a block] out.
"""

from collections.abc import Callable, Mapping
from functools import cache

import torch

from swarmnet_protocols.quantization.formats import BLOCKS, Format

_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the sixteen 4-bit floats of MXFP4."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the sixteen codes of IQ4_NL and IQ4_XS."""


def unpack(format: Format, data: torch.Tensor) -> torch.Tensor:
    """Return the weights of whole blocks uint8 [rows, bytes of a row]: float32 [rows, weights of a
    row], on the device of ``data``."""
    _, block_bytes = BLOCKS[format]
    return _UNPACKERS[format](data.reshape(-1, block_bytes)).view(len(data), -1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the 16-bit floats at byte ``at`` of each block: float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _digits(data: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Split bytes into unsigned integers of ``bits`` bits, uint8 [N, -1]. Each group of ``group``
    bytes gives the lowest bits of all its bytes, then the next bits of all, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)[:, None]
    return ((data.reshape(len(data), -1, 1, group) >> shifts) & ((1 << bits) - 1)).reshape(len(data), -1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_digits(blocks[:, 2:], 4, 16).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _digits(blocks[:, 4:], 4, 16).float() + _half(blocks, 2)


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return integers of 5 bits, uint8 [N, 32]: one high bit of each in uint8 [N, 4], four low bits
    in uint8 [N, 16]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=high.device)
    bits = ((high[:, :, None] >> shifts) & 1).reshape(len(high), -1)
    return _digits(low, 4, 16) | (bits << 4)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]).float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima of the eight groups of each block of Q4_K or Q5_K, float32 [N,
    8, 1] each: w = scale q - minimum."""
    first, second, rest = torch.split(blocks[:, 4:16], 4, 1)
    scales = torch.cat([first & 0x3F, (rest & 0x0F) | ((first >> 2) & 0x30)], 1)
    minima = torch.cat([second & 0x3F, (rest >> 4) | ((second >> 2) & 0x30)], 1)
    return (_half(blocks, 0) * scales.float())[..., None], (_half(blocks, 2) * minima.float())[..., None]


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _half(blocks, 80) * (blocks[:, :16] & 0x0F).float()
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    digits = _digits(blocks[:, 16:80], 2, 32).view(len(blocks), 16, 16).float()
    return scales[..., None] * digits - minima[..., None]


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _digits(blocks[:, 96:104], 4, 8) | (_digits(blocks[:, 104:108], 2, 4) << 4)
    by = _half(blocks, 108) * (scales.float() - 32)
    digits = _digits(blocks[:, 32:96], 2, 32) | (_digits(blocks[:, :32], 1, 32) << 2)
    return by[..., None] * (digits.view(len(blocks), 16, 16).float() - 4)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    return scales * _digits(blocks[:, 16:], 4, 32).view(len(blocks), 8, 32).float() - minima


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    digits = _digits(blocks[:, 48:], 4, 32) | (_digits(blocks[:, 16:48], 1, 32) << 4)
    return scales * digits.view(len(blocks), 8, 32).float() - minima


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    digits = _digits(blocks[:, :128], 4, 64) | (_digits(blocks[:, 128:192], 2, 32) << 4)
    return scales[..., None] * (digits.view(len(blocks), 16, 16).float() - 32)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return (
        bits.view(torch.float32) * _table(_E2M1_DOUBLED, blocks.device)[_digits(blocks[:, 1:], 4, 16).int()]
    )


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _table(_IQ4, blocks.device)[_digits(blocks[:, 2:], 4, 16).int()]


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scales = _digits(blocks[:, 4:8], 4, 1) | (_digits(blocks[:, 2:4], 2, 1) << 4)
    by = _half(blocks, 0) * (scales.float() - 32)
    values = _table(_IQ4, blocks.device)[_digits(blocks[:, 8:], 4, 16).int()]
    return by[..., None] * values.view(len(blocks), 8, 32)


def _fp8(blocks: torch.Tensor) -> torch.Tensor:
    codes = blocks[:, 4:].contiguous().view(torch.float8_e4m3fn)
    return codes.float() * blocks[:, :4].contiguous().view(torch.float32)


def _int4(blocks: torch.Tensor) -> torch.Tensor:
    codes = _digits(blocks[:, 5:], 4, 32).float() - blocks[:, 4:5].float()
    return codes * blocks[:, :4].flatten().view(torch.float32)[:, None]


@cache
def _table(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Copied to a device once: a CUDA graph cannot record a copy from the CPU."""
    return torch.tensor(values, dtype=torch.float32, device=device)


_UNPACKERS: Mapping[Format, Callable[[torch.Tensor], torch.Tensor]] = {
    Format.F32: lambda blocks: blocks.contiguous().view(torch.float32),
    Format.F16: lambda blocks: blocks.contiguous().view(torch.float16).float(),
    Format.BF16: lambda blocks: blocks.contiguous().view(torch.bfloat16).float(),
    Format.Q4_0: _q4_0,
    Format.Q4_1: _q4_1,
    Format.Q5_0: _q5_0,
    Format.Q5_1: _q5_1,
    Format.Q8_0: _q8_0,
    Format.Q2_K: _q2_k,
    Format.Q3_K: _q3_k,
    Format.Q4_K: _q4_k,
    Format.Q5_K: _q5_k,
    Format.Q6_K: _q6_k,
    Format.IQ4_NL: _iq4_nl,
    Format.IQ4_XS: _iq4_xs,
    Format.MXFP4: _mxfp4,
    Format.FP8: _fp8,
    Format.INT4: _int4,
}
