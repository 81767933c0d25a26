"""Arrays of numpy, and tensors of torch on the same memory."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


def as_tensor(values: "Array | torch.Tensor") -> "torch.Tensor":
    """Return an array as a tensor on the same memory. Tensors stay as they are."""
    import torch

    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values
