"""Differential privacy of rows by DP-SGD (Abadi et al. 2016, algorithm 1).

In each inner step, the gradient of every row is clipped to a norm C, and the sum over the batch
gets Gaussian noise of standard deviation z C. All that the worker sends follows from these sums.

A worker's own rows are permuted, and each is used once in an epoch. So a row that is used k times
takes part in k Gaussian mechanisms. Together they equal one mechanism with noise z / sqrt(k). Its
epsilon is exact (Balle and Wang 2018, "Improving the Gaussian Mechanism for Differential Privacy",
theorem 8).
"""

import math

import torch
from torch import Tensor

from swarmnet_node.training.data.sampler import BLOCK, BatchSampler, shares_of
from swarmnet_protocols.training.job_settings import PrivacySection

_LARGEST = 500.0
"""Largest epsilon that is computed. Privacy ends far below, and exponentials of more overflow."""
_CHUNK = 1 << 20
"""Values that get noise at a time. With more, the noise would take the memory of a gradient."""


class Privacy:
    """Clips the gradients of rows and adds noise to their sum. Its generator has a secret seed."""

    def __init__(self, privacy: PrivacySection, sampler: BatchSampler, device: torch.device) -> None:
        self._privacy = privacy
        self._sampler = sampler
        self._generator = torch.Generator(device)
        self._generator.seed()

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Add the gradient of a row to ``total``, clipped."""
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            return  # an infinite gradient cannot be clipped
        total.add_(gradient, alpha=min(1.0, self._privacy.clip_norm / max(norm, 1e-12)))

    def blur(self, total: Tensor) -> None:
        """Add noise to the sum over a batch."""
        scale = self._privacy.noise * self._privacy.clip_norm
        for part in torch.split(total, _CHUNK):
            noise = torch.empty_like(part).normal_(generator=self._generator)
            part.add_(noise, alpha=scale)

    def epsilon(self, rounds: int, repeated: int) -> float:
        """Return the epsilon of a row after ``rounds``. ``repeated``: rounds trained again."""
        uses = most_uses(self._sampler, rounds, repeated)
        return epsilon(self._privacy.noise, uses, self._privacy.delta)


def most_uses(sampler: BatchSampler, rounds: int, repeated: int) -> int:
    """Return how often a worker uses one of its own rows at most in so many rounds.

    ``repeated``: rounds that were trained again.
    """
    places = sampler.steps_per_round * sampler.batch_size
    counts = shares_of(BLOCK, [share.weight for share in sampler.shares])
    most = 0
    for count, share in zip(counts, sampler.shares, strict=True):
        taken = rounds * places if len(counts) == 1 else -(-rounds * places // BLOCK) * count
        again = repeated * -(-places // share.sequences)
        most = max(most, -(-taken // share.sequences) + again)
    return most


def epsilon(noise: float, uses: int, delta: float) -> float:
    """Return the least ε for which ``uses`` Gaussian mechanisms are (ε, ``delta``) private.

    ``noise``: their standard deviation over their sensitivity. Infinite above 500.
    """
    if not uses:
        return 0.0
    mu = math.sqrt(uses) / noise

    def delta_of(epsilon: float) -> float:
        return _normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * _normal(-mu / 2 - epsilon / mu)

    if delta_of(0.0) <= delta:
        return 0.0
    low, high = 0.0, _LARGEST
    if delta_of(high) > delta:
        return math.inf
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
