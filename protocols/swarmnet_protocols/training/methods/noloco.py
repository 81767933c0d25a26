"""NoLoCo (Kolehmainen et al., arXiv 2506.10911, modified Nesterov momentum): random pairs average.

Matchmaking still gathers all workers, because the pairs of a round follow from its roster. Then
each pair averages on its own: no worker sends to or waits for more than one other.

δ_i <- α δ_i + (β/n) Σ_k (θ_k - φ_k) - γ (φ_i - mean_k φ_k); φ_i <- φ_i + δ_i; θ_i <- φ_i.

- k runs over the n = 2 members of the pair of i.
- θ_i: parameters after the inner steps; φ_i: slow weights; δ_i: outer momentum.
- α, β, γ: settings.
"""

import math
from collections.abc import Sequence
from hashlib import sha256
from typing import Self

import torch
from pydantic import Field, model_validator

from swarmnet_protocols.training.methods.arithmetic import add_scaled
from swarmnet_protocols.training.methods.base import Average, OuterMethod, Settings


def gamma_bound(alpha: float, replicas: float = math.inf) -> float:
    """Return the least γ that no longer shrinks the variance between ``replicas``.

    The replicas form new pairs each round. For the deviation d of a replica from the mean and its
    momentum δ: δ <- α δ - γ (d - m), d <- d + δ, where m is the mean of d in the pair. The expected
    share of a deviation's variance within pairs of n = 2 out of N replicas is q = (1 - 1/n)(1 +
    1/(N - 1)). The second moments of (d, δ) shrink if and only if 0 < γ < 2 (1 - α²) / (1 + α - 2 α
    q).
    """
    within = 0.5 * (1 + 1 / (replicas - 1))
    return 2 * (1 - alpha**2) / (1 + alpha - 2 * alpha * within)


class NoLoCoSettings(Settings):
    sync_every: int = Field(default=50, ge=1)
    """H, inner steps between exchanges."""
    alpha: float = Field(default=0.8, ge=0, lt=1)
    """Outer momentum."""
    beta: float = Field(default=1.0, gt=0)
    """Outer learning rate."""
    gamma: float = Field(default=0.4, gt=0)
    """Pull of the replicas in a pair towards their mean."""
    seed: int = Field(default=0, ge=0)
    """Seed of the pairing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        bound = gamma_bound(self.alpha)
        if self.gamma >= bound:
            raise ValueError(
                f"gamma = {self.gamma} must be less than {bound:.4g} = 2 (1 - alpha²) for alpha = {self.alpha}:"
                " replicas of a large swarm would drift apart"
            )
        return self


class NoLoCo(OuterMethod):
    """A worker contributes β (θ_k - φ_k) + γ φ_k. The step needs only the mean over the pair.

    A contribution holds whole weights rather than a difference, so a coarse codec costs more
    accuracy than with other methods. Error feedback works although the next partner receives the
    residual, because φ accumulates all contributions.

    ``agreed`` is this worker's own φ_i: replicas stay near each other and are never equal. A worker
    without a partner, or with a lost partner, takes the step alone.
    """

    name = "noloco"
    shares_weights = False
    codec = "float32"
    state_names = ("own.momentum",)

    def __init__(self, settings: NoLoCoSettings) -> None:
        super().__init__(settings.sync_every)
        self._settings = settings

    def partners(self, round: int, roster: Sequence[str], me: str) -> tuple[str, ...]:
        """Return the pair of ``me``: neighbours in a random order from the seed and the round."""
        order = sorted(
            roster, key=lambda peer: sha256(f"{self._settings.seed}/{round}/{peer}".encode()).digest()
        )
        first = order.index(me) & ~1
        return tuple(sorted(order[first : first + 2]))

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        progress = (parameters - self._weights) * self._settings.beta
        return add_scaled(progress, self._settings.gamma, self._weights)

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        """Return the new φ_i.

        ``average`` None: the partner is gone, and the worker takes the step alone.
        """
        mean = self.contribution(round, parameters) if average is None else average.values
        pull = add_scaled(mean, -self._settings.gamma, self._weights)
        momentum = add_scaled(pull, self._settings.alpha, self._state["own.momentum"])
        self._state["own.momentum"] = momentum
        self._weights = self._weights + momentum
        return self._weights
