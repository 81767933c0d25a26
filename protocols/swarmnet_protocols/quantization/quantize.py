"""Quantises matrices when they are loaded, into formats of packed weights.

Every value is computed by elementwise operations in a fixed order, so that all machines round a
checkpoint to the same weights.
"""

from collections.abc import Callable, Mapping

import torch

from swarmnet_protocols.quantization.formats import BLOCKS, GROUP, UNQUANTIZED, Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor

_PANEL_WEIGHTS = 1 << 18
"""Weights that are quantised at a time: few enough for the processor's cache."""
_TOPS = (13 / 15, 14 / 15, 1.0, 16 / 15)
"""Candidates in the search for a scale. A candidate maps the largest weight of a group to this
multiple of the largest code. Below 1, some codes are unused and the step is larger. Above 1, the
extremes are clipped and the step is smaller."""


def can_be_quantized(matrix: PackedTensor) -> bool:
    """Return whether :func:`quantize` takes the matrix: numbers of 16 or 32 bits, in rows of whole
    groups."""
    return matrix.shape[1] % GROUP == 0 and all(each.format in UNQUANTIZED for each in matrix.segments)


def quantize(matrix: PackedTensor, format: Format) -> PackedTensor:
    """Round ``matrix`` to one of the formats of ``PRECISIONS``. Requires ``can_be_quantized``.

    A few rows at a time are expanded to float32.
    """
    rows, columns = matrix.shape
    height = max(1, _PANEL_WEIGHTS // columns)
    panels = (matrix.rows(first, min(first + height, rows)) for first in range(0, rows, height))
    encode, (block, _) = _ENCODERS[format], BLOCKS[format]
    data = [encode(panel.dequantize().view(-1, block)).view(panel.shape[0], -1) for panel in panels]
    return PackedTensor.of(format, torch.cat(data))


def _encode_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Encode blocks [n, 32] as Q8_0, uint8 [n, 34]: w = d q."""
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = _over(blocks, scale).round_()
    return torch.cat([_bytes(scale), codes.to(torch.int8).view(torch.uint8)], 1)


def _encode_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Encode blocks [n, 32] as Q5_0, uint8 [n, 22]: w = d (q - 16). The fifth bits of all codes are
    together."""
    weights = blocks.T.contiguous()
    scale = _symmetric_scale(weights, 16).half().float()
    codes = (_over(weights, scale).round_().clamp_(-16, 15) + 16).to(torch.uint8)
    fifth = (codes >> 4).view(4, 8, -1) << torch.arange(8, dtype=torch.uint8)[:, None]
    low = codes & 15
    nibbles = low[: GROUP // 2] | low[GROUP // 2 :] << 4
    return torch.cat([_bytes(scale[:, None]), fifth.sum(1, dtype=torch.uint8).T, nibbles.T], 1)


def _encode_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Encode blocks [n, 256] as Q4_K, uint8 [n, 144]."""
    header, codes = _affine_block(blocks, 15)
    return torch.cat([header, _nibbles_of_pairs(codes)], 1)


def _encode_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """Encode blocks [n, 256] as Q5_K, uint8 [n, 176]: as Q4_K, with the fifth bits of the eight
    groups in the bits of 32 bytes."""
    header, codes = _affine_block(blocks, 31)
    fifth = (codes >> 4) << torch.arange(8, dtype=torch.uint8)[:, None]
    return torch.cat([header, fifth.sum(1, dtype=torch.uint8), _nibbles_of_pairs(codes & 15)], 1)


def _encode_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Encode blocks [n, 256] as Q6_K, uint8 [n, 210]: w = d s q for 16 groups, whose scales s have
    8 bits."""
    groups = blocks.view(-1, 16, 16)
    scales = _symmetric_scale(blocks.view(-1, 16).T.contiguous(), 32).view(-1, 16)
    scale = (scales.abs().amax(1, keepdim=True) / 127).half().float()
    steps = _over(scales, scale).round_()
    codes = (_over(groups, (scale * steps)[:, :, None]).round_().clamp_(-32, 31) + 32).to(torch.uint8)
    quarters = codes.view(-1, 2, 4, 32)  # of each half of the block
    low = quarters & 15
    nibbles = (low[:, :, :2] | low[:, :, 2:] << 4).flatten(1)
    high = (quarters >> 4) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = high.sum(2, dtype=torch.uint8).flatten(1)
    return torch.cat([nibbles, high, steps.to(torch.int8).view(torch.uint8), _bytes(scale)], 1)


def _affine_block(blocks: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode blocks [n, 256] as w = d s q - e m. Returns the headers, uint8 [n, 16], and the codes
    q, uint8 [n, 8, 32].

    A block has eight groups, with codes from 0 to ``top``. Its header has d and e, and for each
    group s and m in 6 bits.
    """
    groups = blocks.view(-1, 8, GROUP)
    found = _affine(blocks.view(-1, GROUP).T.contiguous(), top)
    (scale, scale_steps), (least, least_steps) = (_in_63_steps(each.view(-1, 8)) for each in found)
    step, minus = (scale * scale_steps)[:, :, None], (least * least_steps)[:, :, None]
    codes = _over(groups + minus, step).round_().clamp_(0, top).to(torch.uint8)
    s, m = scale_steps.to(torch.uint8), least_steps.to(torch.uint8)
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    rest = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    return torch.cat([_bytes(scale), _bytes(least), first, second, rest], 1), codes


def _in_63_steps(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values [n, 8], none negative, as a unit [n, 1] that 16 bits represent, and multiples
    of it from 0 to 63 [n, 8]."""
    unit = (values.amax(1, keepdim=True) / 63).half().float()
    return unit, _over(values, unit).round_().clamp_(0, 63)


def _nibbles_of_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of four bits [n, 8, 32] as bytes [n, 128]. A byte has a code of an even group in
    its low bits, and the code of the next group in its high bits."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).flatten(1)


def _symmetric_scale(weights: torch.Tensor, half: int) -> torch.Tensor:
    """Return the scales d [n] of w = d q, with codes q from -``half`` to ``half`` - 1, for groups
    [2 ** k, n].

    For each candidate in ``_TOPS``, weights are rounded to codes, and d is the regression of the
    weights on the codes. The candidate with the least squared error wins. The weight of largest
    magnitude gets a negative code, because there is one more negative code than positive codes. The
    sign of d follows.
    """
    least, most = weights.amin(0), weights.amax(0)
    largest = torch.where(-least >= most, least, most)
    best_gain, best = torch.zeros_like(largest), torch.zeros_like(largest)
    for share in _TOPS:
        codes = (weights * _over(torch.full_like(largest, -share * half), largest)).round_()
        codes.clamp_(-half, half - 1)
        sum_xq, sum_qq = _sum(weights * codes), _sum(codes * codes)
        scale = _over(sum_xq, sum_qq)
        gain = scale * sum_xq  # how much smaller the squared error is than with all codes 0
        best = torch.where(gain > best_gain, scale, best)
        best_gain = torch.maximum(gain, best_gain)
    return best


def _affine(weights: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales d and minima m [n], neither below 0, for groups [32, n].

    They mean w = d q - m, with codes q from 0 to ``top``. For each candidate in ``_TOPS``, weights
    are rounded to codes, and d and m are the linear regression of the weights on the codes. The
    candidate with the least squared error wins.
    """
    least, most = weights.amin(0).clamp_(max=0), weights.amax(0)
    sum_x, sum_xx = _sum(weights), _sum(weights * weights)
    best_error = torch.full_like(least, torch.inf)
    best_scale, best_least = torch.zeros_like(least), torch.zeros_like(least)
    for share in _TOPS:
        steps = _over(torch.full_like(least, share * top), most - least)
        codes = ((weights - least) * steps).round_().clamp_(0, top)
        sum_q, sum_qq, sum_xq = _sum(codes), _sum(codes * codes), _sum(weights * codes)
        scale = _over(GROUP * sum_xq - sum_x * sum_q, GROUP * sum_qq - sum_q * sum_q)
        minus = (scale * sum_q - sum_x) / GROUP
        scale = torch.where(minus < 0, _over(sum_xq, sum_qq), scale)
        minus.clamp_(min=0)
        error = scale * (scale * sum_qq - 2 * minus * sum_q - 2 * sum_xq) + minus * (
            GROUP * minus + 2 * sum_x
        )
        is_better = error + sum_xx < best_error
        best_error = torch.where(is_better, error + sum_xx, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        best_least = torch.where(is_better, minus, best_least)
    return best_scale.clamp_(min=0), best_least


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of the columns of [2 ** k, n], in an order that does not depend on the
    machine."""
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


def _over(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the quotient; 0 where the divisor is 0."""
    return torch.where(other == 0, 0.0, one / torch.where(other == 0, 1.0, other))


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Return values [n, 1] as 16-bit numbers, uint8 [n, 2]."""
    return values.half().view(torch.uint8)


_ENCODERS: Mapping[Format, Callable[[torch.Tensor], torch.Tensor]] = {
    Format.Q8_0: _encode_q8_0,
    Format.Q5_0: _encode_q5_0,
    Format.Q4_K: _encode_q4_k,
    Format.Q5_K: _encode_q5_k,
    Format.Q6_K: _encode_q6_k,
}
