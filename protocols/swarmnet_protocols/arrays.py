"""Arrays of numpy, and tensors of torch on the same memory.

numpy has no bfloat16. An array of ``uint16`` holds the bits of bfloat16 numbers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


def as_tensor(values: "Array | torch.Tensor") -> "torch.Tensor":
    """Return an array as a tensor on the same memory. Tensors stay as they are."""
    import torch

    if not isinstance(values, np.ndarray):
        return values
    if values.dtype == np.uint16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def as_array(values: "Array | torch.Tensor") -> Array:
    """Return a tensor on the CPU as an array on the same memory. Arrays stay as they are."""
    if isinstance(values, np.ndarray):
        return values
    import torch

    tensor = values.detach()
    if tensor.dtype is not torch.bfloat16:
        return np.asarray(tensor.numpy())
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def as_float32(values: Array) -> Array:
    """Return numbers as float32, exactly. float32 arrays are returned as they are."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def joined(parts: "Sequence[Array | torch.Tensor]") -> "Array | torch.Tensor":
    """Return the parts one after another, as the kind of the first."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate([np.asarray(each) for each in parts])
    import torch

    return torch.cat([as_tensor(each) for each in parts])
