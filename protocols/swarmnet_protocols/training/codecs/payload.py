"""Helpers of all codecs: checked reads of a payload, and bfloat16 scales.

numpy copies the bytes, because it releases the GIL. A copy of 128 MB by Python would stop inner
steps for 0.3 s.
"""

import numpy as np
import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer

MAX_SCALE = 2.0**99
"""Largest scale or bucket mean on the wire.

127 times this, summed over thousands of workers, is still finite.
"""

MIN_SCALE = 2.0**-99
"""Smallest scale except zero.

Its multiples are normal numbers, so machines that flush subnormals decode the same bits.
"""

SCALE_BYTES = 2

_SCALE_EXPONENT_BIAS = 127
_SCALE_MANTISSA_BITS = 7
_MIN_SCALE_BITS = (_SCALE_EXPONENT_BIAS - 99) << _SCALE_MANTISSA_BITS
_MAX_SCALE_BITS = (_SCALE_EXPONENT_BIAS + 99) << _SCALE_MANTISSA_BITS


def check_size(payload: Buffer, size_bytes: int, count: int) -> None:
    """Raise ``ProtocolViolation`` unless ``payload`` has ``size_bytes``."""
    if len(payload) != size_bytes:
        raise ProtocolViolation(f"{len(payload)} bytes for {count} values, which take {size_bytes}")


def read(payload: Buffer, dtype: torch.dtype, *, copy: bool = True) -> torch.Tensor:
    """Copy the payload into a tensor [len(payload) / itemsize].

    Without ``copy``, the tensor shares the payload's memory, unless that is read-only.
    """
    if len(payload) == 0:
        return torch.empty(0, dtype=dtype)
    data = np.frombuffer(payload, np.uint8)
    return torch.from_numpy(data.copy() if copy or not data.flags.writeable else data).view(dtype)


def write(values: torch.Tensor) -> Buffer:
    """Copy a CPU tensor's bytes."""
    return view(values.clone())


def view(values: torch.Tensor) -> Buffer:
    """Return a CPU tensor's memory."""
    if values.numel() == 0:  # an empty tensor may have any strides
        return b""
    return values.contiguous().view(torch.uint8).numpy().data


def all_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool(low.isfinite() & high.isfinite())


def round_up_scales(scales: torch.Tensor) -> torch.Tensor:
    """Round non-negative float32 scales up to bfloat16.

    Scales out of bounds become zero or ``MAX_SCALE``.
    """
    rounded = ((scales.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16)
    rounded.clamp_(max=_MAX_SCALE_BITS)
    return rounded.where(rounded >= _MIN_SCALE_BITS, 0).view(torch.bfloat16)


def check_scales(scales: torch.Tensor) -> None:
    """Check that each bfloat16 scale is zero or in [``MIN_SCALE``, ``MAX_SCALE``].

    Raises ``ProtocolViolation``.
    """
    bits = scales.view(torch.int16)
    good = (bits == 0) | ((bits >= _MIN_SCALE_BITS) & (bits <= _MAX_SCALE_BITS))
    if not good.all():
        raise ProtocolViolation("a scale is negative, not finite, or out of bounds")
