"""Activations as tensors, for code that computes with torch. Both share their memory on a CPU."""

import numpy as np
import torch

from swarmnet_protocols.arrays import Array
from swarmnet_protocols.session.arrays import ElementType

_DTYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
}
_TYPES = {dtype: each for each, dtype in _DTYPES.items()}


def array_of(tensor: torch.Tensor) -> Array:
    """Return a tensor on the CPU as an array."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        bits: Array = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        return bits
    values: Array = tensor.numpy()
    return values


def torch_dtype(type: ElementType) -> torch.dtype:
    """Return the dtype of received numbers of this type."""
    return _DTYPES[type.decoded]


def element_type(dtype: torch.dtype) -> ElementType:
    """Return the element type of a dtype of activations."""
    return _TYPES[dtype]
