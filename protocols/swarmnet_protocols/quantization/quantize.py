"""Quantises matrices when they are loaded, into formats of packed weights.

Every value is computed by elementwise operations in a fixed order, so that all machines round a checkpoint to the same weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor

GROUP = 32
"""Weights of a row that share a scale."""


@dataclass(frozen=True)
class Precision:
    """A precision that a host can quantise to: ``format``, but for the weights of the modules in ``finer`` a format of more bits."""

    name: str
    format: Format
    finer: Mapping[str, Format] = field(default_factory=dict)

    def format_of(self, weight: str) -> Format:
        """The format of the weight with this name, whose module is the last part."""
        return self.finer.get(weight.removesuffix(".weight").rpartition(".")[2], self.format)


_KEYS_AND_VALUES = ("k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_UP_AND_DOWN = ("up_proj", "down_proj", "gate_up_proj")
PRECISIONS: Mapping[str, Precision] = {
    "int8": Precision("int8", Format.Q8_0),
    # Each of these costs perplexity the most for its size (docs/decisions/0068).
    "int4": Precision(
        "int4",
        Format.Q4_1,
        dict.fromkeys(_KEYS_AND_VALUES, Format.Q8_0) | dict.fromkeys(_UP_AND_DOWN, Format.Q5_1),
    ),
}
"""The precisions that a host can quantise to, by name."""
UNQUANTIZED = frozenset({Format.F32, Format.F16, Format.BF16})
"""The formats that may be quantised."""
_PANEL_WEIGHTS = 1 << 18
"""Weights that are quantised at a time: few enough for the processor's cache."""
_TOPS = (13 / 15, 14 / 15, 1.0, 16 / 15)
"""Values of the largest weight of a group, in units of the largest code, from which the search for a scale begins. Below 1 some codes are
unused and the step is larger; above, the extremes are clipped and the step is smaller."""


def can_be_quantized(matrix: PackedTensor) -> bool:
    """Whether :func:`quantize` takes the matrix: numbers of 16 or 32 bits, in rows of whole groups."""
    return matrix.shape[1] % GROUP == 0 and all(each.format in UNQUANTIZED for each in matrix.segments)


def quantize_if_wanted(matrix: PackedTensor, precision: Precision | None, weight: str) -> PackedTensor:
    """``matrix``, which is the weight with this name, quantised if there is a precision and the matrix can be."""
    if precision is None or not can_be_quantized(matrix):
        return matrix
    return quantize(matrix, precision.format_of(weight))


def quantize(matrix: PackedTensor, format: Format) -> PackedTensor:
    """``matrix``, for which ``can_be_quantized`` holds, rounded to one of the formats of ``PRECISIONS``.

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
    """Groups [n, 32] as blocks of Q4_1, uint8 [n, 20]: w = d q + m."""
    scale, least, codes = _affine(groups, 15)
    return torch.cat([scale, least, _nibbles(codes)], 1)


def _encode_q5_1(groups: torch.Tensor) -> torch.Tensor:
    """Groups [n, 32] as blocks of Q5_1, uint8 [n, 24]: as Q4_1, with the fifth bits of all codes together."""
    scale, least, codes = _affine(groups, 31)
    bits = (codes >> 4).view(4, 8, -1) << torch.arange(8, dtype=torch.uint8)[:, None]
    return torch.cat([scale, least, bits.sum(1, dtype=torch.uint8).T, _nibbles(codes & 15)], 1)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes of four bits [32, n] as bytes [n, 16]: the first 16 in the low digits."""
    return (codes[: GROUP // 2] | codes[GROUP // 2 :] << 4).T


def _affine(groups: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """d and m, 16-bit numbers as uint8 [n, 2], and codes q from 0 to ``top``, uint8 [32, n], of w = d q + m for groups [n, 32].

    d and m have the least squared error among those of ``_TOPS``: for each of these, weights are rounded to codes, and d and m are the linear
    regression of the weights on their codes.
    """
    weights = groups.T.contiguous()
    least, most = weights.amin(0), weights.amax(0)
    sum_x, sum_xx = _sum(weights), _sum(weights * weights)
    best_error = torch.full_like(least, torch.inf)
    best_scale, best_least = torch.zeros_like(least), least.half().float()
    for share in _TOPS:
        steps = _over(torch.full_like(least, share * top), most - least)
        codes = ((weights - least) * steps).round_().clamp_(0, top)
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
    codes = _over(weights - best_least, best_scale).round_().clamp_(0, top).to(torch.uint8)
    return _bytes(best_scale[:, None]), _bytes(best_least[:, None]), codes


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
    Format.Q5_1: _encode_q5_1,
}
