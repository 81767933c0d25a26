"""The formats of packed weights, and the precisions to which a host quantises weights.

The formats are gguf's under gguf's numbers, and two for quantised safetensors checkpoints.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


GROUP = 32
"""Weights of a row that share a scale in most formats. Only rows whose length is a multiple of this
are quantised."""
_K_BLOCK = 256
"""Weights of a block of gguf's K formats. Only rows whose length is a multiple of this have such
formats."""


@dataclass(frozen=True)
class Precision:
    """A precision that a host can quantise to: weights have ``format``.

    ``finer``: module → a format of more bits for its weights.
    """

    name: str
    format: Format
    finer: Mapping[str, Format] = field(default_factory=dict)

    def format_of(self, weight: str, columns: int) -> Format:
        """Return the format of the tensor ``weight`` with ``columns`` numbers a row. The last part
        of the name, without ``.weight``, is its module."""
        wanted = self.finer.get(weight.removesuffix(".weight").rpartition(".")[2], self.format)
        return wanted if columns % _K_BLOCK == 0 else _FOR_OTHER_ROWS.get(wanted, wanted)

    def bytes_of(self, weight: str, shape: Sequence[int]) -> int:
        """Return the bytes of a weight of this shape, in 32 bits if it is not quantised."""
        count = math.prod(shape)
        if len(shape) == 1 or shape[-1] % GROUP:
            return 4 * count
        weights, size = BLOCKS[self.format_of(weight, shape[-1])]
        return count // weights * size


_FOR_OTHER_ROWS: Mapping[Format, Format] = {
    Format.Q4_K: Format.Q5_0,
    Format.Q5_K: Format.Q5_0,
    Format.Q6_K: Format.Q8_0,
}
"""The formats that replace the K formats where the length of rows is not a multiple of 256."""
_COSTLIEST = ("k_proj", "v_proj", "qkv_proj", "kv_a_proj_with_mqa", "kv_b_proj", "down_proj")
_COSTLY = ("up_proj", "gate_up_proj")
PRECISIONS: Mapping[str, Precision] = {
    "int8": Precision("int8", Format.Q8_0),
    # In these modules, rounding costs more perplexity for each bit than in the others
    # (docs/decisions/0072).
    "int4": Precision(
        "int4",
        Format.Q4_K,
        dict.fromkeys(_COSTLIEST, Format.Q6_K) | dict.fromkeys(_COSTLY, Format.Q5_K),
    ),
}
"""The precisions that a host can quantise to, by name."""
UNQUANTIZED = frozenset({Format.F32, Format.F16, Format.BF16})
"""The formats of weights that can be quantised."""
