"""Quantises matrices when they are loaded, into formats of packed weights.

Every value is computed by elementwise operations in a fixed order, so that all machines round a checkpoint to the same weights.
"""

from collections.abc import Callable, Mapping

import torch

from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor

GROUP = 32
"""Weights of a row that share a scale."""
PRECISIONS: Mapping[str, Format] = {"int8": Format.Q8_0, "int4": Format.Q4_1}
"""The formats of the precisions that a host can quantise to."""
UNQUANTIZED = frozenset({Format.F32, Format.F16, Format.BF16})
"""The formats that may be quantised."""
_PANEL_WEIGHTS = 1 << 18
"""Weights that are quantised at a time: few enough for the processor's cache."""
_TOPS = (13.0, 14.0, 15.0, 16.0)
"""Values of the largest weight of a group, in units of its scale, from which the search for a 4-bit scale begins. Below 15 some codes
are unused and the step is larger; above, the extremes are clipped and the step is smaller."""


def precision_of(format: Format) -> str:
    """The name in ``PRECISIONS`` of a format."""
    return next(name for name, each in PRECISIONS.items() if each == format)


def can_be_quantized(matrix: PackedTensor) -> bool:
    """Whether :func:`quantize` takes the matrix: numbers of 16 or 32 bits, in rows of whole groups."""
    return matrix.shape[1] % GROUP == 0 and all(each.format in UNQUANTIZED for each in matrix.segments)


def quantize_if_wanted(matrix: PackedTensor, format: Format | None) -> PackedTensor:
    """``matrix``, quantised to ``format`` if there is one and the matrix can be."""
    return matrix if format is None or not can_be_quantized(matrix) else quantize(matrix, format)


def quantize(matrix: PackedTensor, format: Format) -> PackedTensor:
    """``matrix``, for which ``can_be_quantized`` holds, rounded to one of the formats in ``PRECISIONS``.

    A few rows at a time are expanded to float32.
    """
    rows, columns = matrix.shape
    height = max(1, _PANEL_WEIGHTS // columns)
    panels = (matrix.rows(first, min(first + height, rows)) for first in range(0, rows, height))
    encode = _ENCODERS[format]
    data = [encode(panel.dequantize().view(-1, GROUP)).view(panel.shape[0], -1) for panel in panels]
    return PackedTensor.of(format, torch.cat(data))


def _encode_q8_0(groups: torch.Tensor) -> torch.Tensor:
    """Groups [n, 32] as blocks of Q8_0, uint8 [n, 34]: w = d q."""
    scale = groups.abs().amax(1, keepdim=True) / 127
    codes = _over(groups, scale).round_()
    return torch.cat([_bytes(scale), codes.to(torch.int8).view(torch.uint8)], 1)


def _encode_q4_1(groups: torch.Tensor) -> torch.Tensor:
    """Groups [n, 32] as blocks of Q4_1, uint8 [n, 20]: w = d q + m, with d and m of the least squared error among those of ``_TOPS``.

    For each of these, weights are rounded to codes, and d and m are the linear regression of the weights on their codes.
    """
    weights = groups.T.contiguous()
    least, most = weights.amin(0), weights.amax(0)
    sum_x, sum_xx = _sum(weights), _sum(weights * weights)
    best_error = torch.full_like(least, torch.inf)
    best_scale, best_least = torch.zeros_like(least), least.half().float()
    for top in _TOPS:
        codes = ((weights - least) * _over(torch.full_like(least, top), most - least)).round_().clamp_(0, 15)
        sum_q, sum_qq, sum_xq = _sum(codes), _sum(codes * codes), _sum(weights * codes)
        scale = _over(GROUP * sum_xq - sum_x * sum_q, GROUP * sum_qq - sum_q * sum_q).half().float()
        offset = ((sum_x - scale * sum_q) / GROUP).half().float()
        error = scale * (scale * sum_qq + 2 * offset * sum_q - 2 * sum_xq) + offset * (
            GROUP * offset - 2 * sum_x
        )
        is_better = error + sum_xx < best_error
        best_error = torch.where(is_better, error + sum_xx, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        best_least = torch.where(is_better, offset, best_least)
    codes = _over(weights - best_least, best_scale).round_().clamp_(0, 15).to(torch.uint8)
    nibbles = codes[: GROUP // 2] | codes[GROUP // 2 :] << 4
    return torch.cat([_bytes(best_scale[:, None]), _bytes(best_least[:, None]), nibbles.T], 1)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """The sums of the columns of [2 ** k, n], in an order that does not depend on the machine."""
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


def _over(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The quotient; 0 where the divisor is 0."""
    return torch.where(other == 0, 0.0, one / torch.where(other == 0, 1.0, other))


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Values [n, 1] as 16-bit numbers, uint8 [n, 2]."""
    return values.half().view(torch.uint8)


_ENCODERS: Mapping[Format, Callable[[torch.Tensor], torch.Tensor]] = {
    Format.Q8_0: _encode_q8_0,
    Format.Q4_1: _encode_q4_1,
}
