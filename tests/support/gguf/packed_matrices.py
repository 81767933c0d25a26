"""Random matrices of each packed format, whose values are of ordinary size.

gguf's Python code does not write all formats, so blocks get random bytes, and then scales.
"""

from collections.abc import Mapping

import numpy as np
import torch

from swarmnet.paths import default_cache_dir
from swarmnet_protocols.quantization.formats import BLOCKS, Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor, Segment
from swarmnet_protocols.quantization.products import Products, load_products

HALVES: Mapping[Format, list[int]] = {
    Format.F16: [0],
    Format.Q4_0: [0],
    Format.Q4_1: [0, 2],
    Format.Q5_0: [0],
    Format.Q5_1: [0, 2],
    Format.Q8_0: [0],
    Format.Q2_K: [80, 82],
    Format.Q3_K: [108],
    Format.Q4_K: [0, 2],
    Format.Q5_K: [0, 2],
    Format.Q6_K: [208],
    Format.IQ4_NL: [0],
    Format.IQ4_XS: [0],
}
"""Offsets of the 16-bit numbers in a block, which must be finite."""


def random_matrix(format: Format, rows: int, columns: int, seed: int = 0, size: float = 1.0) -> PackedTensor:
    """Make a matrix of random bytes. Its scales are random, with ``size`` as their deviation."""
    weights, block_bytes = BLOCKS[format]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // weights, block_bytes), np.uint8)
    if format in (Format.F32, Format.BF16):
        values = torch.from_numpy(size * rng.normal(size=(rows, columns))).float()
        kind = torch.float32 if format == Format.F32 else torch.bfloat16
        return PackedTensor.of(format, values.to(kind).view(torch.uint8))
    for at in HALVES.get(format, ()):
        scales = (size * rng.normal(size=blocks.shape[:2])).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if format in (Format.FP8, Format.INT4):
        scales = (size * rng.normal(size=blocks.shape[:2])).astype(np.float32)
        blocks[:, :, :4] = scales[..., None].view(np.uint8)
    if format == Format.FP8:
        blocks[:, :, 4:][(blocks[:, :, 4:] & 127) == 127] = 0  # these codes are NaN
    if format == Format.MXFP4:
        blocks[:, :, 0] = rng.integers(118, 132, blocks.shape[:2]) + round(np.log2(size))
    return PackedTensor.of(format, torch.from_numpy(blocks.reshape(rows, -1)))


def weight_matrix(format: Format, rows: int, columns: int, seed: int) -> PackedTensor:
    """Make a matrix of random bytes that gives outputs about as large as its inputs."""
    deviation = random_matrix(format, rows, columns, seed).dequantize().std()
    return random_matrix(format, rows, columns, seed, columns**-0.5 / deviation.item())


def loaded_copy(matrix: PackedTensor, products: Products) -> PackedTensor:
    """Copy a matrix, and bring the copy into the form that ``products`` multiplies on the CPU."""
    segments = tuple(Segment(each.format, each.data.copy()) for each in matrix.segments)
    found = products.loaded(PackedTensor(segments, matrix.inputs), torch.device("cpu"))
    assert isinstance(found, PackedTensor)
    return found


def values_of(matrix: PackedTensor) -> torch.Tensor:
    """The weights, float32, of a matrix whose rows may be interleaved."""
    return load_products(default_cache_dir()).dequantize(matrix)
