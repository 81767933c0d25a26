"""A bound on the size of activations and gradients of other workers. Pure."""

from collections import deque
from statistics import median

ABSURD = 100.0
"""Norm of a tensor that is refused, as a multiple of the usual norm. Within a job norms change by
less than ten from step to step. With less, a spike of an honest model stops it. With more, a liar
moves the weights further."""
REMEMBERED = 64
"""Norms that make the usual one, their median. With fewer, a liar that sends many moves it."""
ENOUGH = 4
"""Norms before the first refusal."""


class UsualNorms:
    """The norms of the tensors that one stage receives at one boundary."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=REMEMBERED)

    def admit(self, norm: float) -> bool:
        """Return whether a tensor with this norm is usual, and remember the norm if it is."""
        if len(self._seen) >= ENOUGH and norm > ABSURD * median(self._seen):
            return False
        self._seen.append(norm)
        return True
