"""Arrays of numpy, and tensors of torch on the same memory.

numpy has no bfloat16. An array of ``uint16`` holds the bits of bfloat16 numbers.
"""

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
