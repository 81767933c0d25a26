"""The formats of packed weights: gguf's formats under gguf's numbers, and two for quantised
safetensors checkpoints."""

from collections.abc import Mapping
from enum import IntEnum

from gguf import GGML_QUANT_SIZES


class Format(IntEnum):
    """A format of packed weights, which ``unpack.h`` and ``unpack.py`` read."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39
    FP8 = 1000
    """A block has a float32 scale and 128 codes of E4M3: w = scale * code."""
    INT4 = 1001
    """A block has a float32 scale, a uint8 zero point and 64 codes of 4 bits, low digits first: w =
    scale * (code - zero)."""


OWN_FORMATS = frozenset({Format.FP8, Format.INT4})
"""Formats that gguf does not have."""
WHOLE_ROWS = frozenset({Format.F32, Format.F16, Format.BF16, Format.FP8})
"""Formats whose rows C never interleaves (``interleaved.h``)."""
BLOCKS: Mapping[Format, tuple[int, int]] = {
    **{Format(kind): block for kind, block in GGML_QUANT_SIZES.items() if kind in {*Format}},
    Format.FP8: (128, 132),
    Format.INT4: (64, 37),
}
"""Format → (number of weights in a block, bytes of a block)."""
