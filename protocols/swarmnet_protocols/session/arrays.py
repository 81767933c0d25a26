"""Activations as numpy arrays: their element types, rounding, and cutting."""

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate
from typing import Any

import numpy as np

from swarmnet_protocols.arrays import Array, as_float32
from swarmnet_protocols.wire import session_pb2 as pb

_EXPONENT = np.uint16(0x7F80)
"""The exponent of a bfloat16 number. Infinity and NaN have all of its bits."""
_NAN = np.uint16(0x7FC0)


class ElementType(Enum):
    """The type of the numbers of a tensor on the wire. Its value is the wire's code."""

    FLOAT32 = pb.DTYPE_FLOAT32
    BFLOAT16 = pb.DTYPE_BFLOAT16
    FLOAT16 = pb.DTYPE_FLOAT16
    INT8 = pb.DTYPE_INT8_BLOCKS
    """Numbers of 8 bits in blocks (``wire_tensors.py``)."""

    def __str__(self) -> str:
        return self.name.lower()

    @property
    def decoded(self) -> "ElementType":
        """The type of the numbers once they are received."""
        return ElementType.FLOAT32 if self is ElementType.INT8 else self

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The dtype of arrays of the received numbers."""
        return _DTYPES[self.decoded]

    @property
    def itemsize(self) -> int:
        """Bytes of a received number."""
        return self.dtype.itemsize


_DTYPES: dict[ElementType, np.dtype[Any]] = {
    ElementType.FLOAT32: np.dtype(np.float32),
    ElementType.BFLOAT16: np.dtype(np.uint16),
    ElementType.FLOAT16: np.dtype(np.float16),
}
_TYPES = {dtype: each for each, dtype in _DTYPES.items()}


def type_of(values: Array) -> ElementType:
    """Return the element type of activations."""
    return _TYPES[values.dtype]


def rounded(values: Array, to: ElementType) -> Array:
    """Return activations rounded to a type: to the nearest number, ties to even."""
    if values.dtype == to.dtype:
        return values
    exact = as_float32(values)
    if to.decoded is not ElementType.BFLOAT16:
        with np.errstate(over="ignore"):
            return exact.astype(to.dtype)
    bits = np.ascontiguousarray(exact).view(np.uint32)
    found = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    found[np.isnan(exact)] = _NAN
    return found


def are_finite(values: Array) -> bool:
    """Return whether no number is infinite or NaN."""
    if values.dtype == np.uint16:
        return bool(((values & _EXPONENT) != _EXPONENT).all())
    return bool(np.isfinite(values).all())


def split(values: Array, counts: Sequence[int]) -> tuple[Array, ...]:
    """Return consecutive parts of ``values`` with ``counts`` positions each, on the same memory."""
    return tuple(values[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True))
