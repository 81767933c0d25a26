"""A bound on the size of activations and gradients of other workers. Pure.

A tensor is absurd if its norm is far above what its receiver has seen of all senders. Each sender
counts once, however much it sends. A model may really change, as in a spike of its loss: a norm is
usual again when the latest tensors of most other senders have it, too. So another worker that
computes the same microbatch confirms it.
"""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median, median_low

from swarmnet_protocols.net import PeerId

ABSURD = 100.0
"""Norm of a tensor that is refused, as a multiple of the usual norm. Within a job norms change by
less than ten from step to step. With less, a spike of an honest model costs work. With more, a liar
moves the weights further."""
REMEMBERED = 64
"""Norms of a sender that make its usual one, their median. With fewer, a rare honest norm moves it.
With more, it is late when a model changes."""
ENOUGH = 4
"""Norms before the first refusal."""
MOST_SENDERS = 256
"""Senders that are remembered. With fewer, a large stage forgets honest ones. With more, peers that
come and go fill the memory."""


class UsualNorms:
    """The norms of the tensors that one worker receives at one boundary."""

    def __init__(self) -> None:
        self._seen: dict[PeerId, deque[float]] = {}
        """The norms that were admitted, by sender."""
        self._latest: dict[PeerId, float] = {}
        """The last norm that each sender sent, admitted or not."""

    def admit(self, sender: PeerId, norm: float) -> bool:
        """Return whether a tensor with this norm is usual, and remember the norm."""
        if not math.isfinite(norm):
            return False
        others = [latest for peer, latest in self._latest.items() if peer != sender]
        self._latest[sender] = norm
        seen = self._seen.setdefault(sender, deque(maxlen=REMEMBERED))
        if sum(map(len, self._seen.values())) >= ENOUGH:
            usual = _middle(median(each) for each in self._seen.values() if each)
            if norm > ABSURD * max(usual, _middle(others)):
                return False
        if norm:  # the gradient of a microbatch without a token
            seen.append(norm)
        for books in (self._seen, self._latest):
            if len(books) > MOST_SENDERS:
                del books[next(iter(books))]
        return True


def _middle(norms: Iterable[float]) -> float:
    """Return the median; of two norms, the smaller, so that one sender of two raises nothing."""
    return median_low([*norms] or [0.0])
