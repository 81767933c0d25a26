"""NoLoCo (Kolehmainen et al., arXiv 2506.10911, modified Nesterov momentum): random pairs average.

A worker's partner follows from the round's number, a seed, and the workers that it knows of. No
worker sends to or waits for more than one other (``pairs.py``).

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

from swarmnet_protocols.training.methods.arithmetic import add_scaled, in_parts
from swarmnet_protocols.training.methods.base import Average, OuterMethod, Settings

_BITS = 256
"""Bits of a hash."""


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


def _left_over(tree: list[int], bits: int) -> int:
    """Return the leaf of an odd ``tree`` that has no pair in it. Its leaves differ in the low
    ``bits``."""
    while len(tree) > 1:
        bits -= 1
        ones = [leaf for leaf in tree if leaf >> bits & 1]
        tree = ones if len(ones) % 2 else [leaf for leaf in tree if not leaf >> bits & 1]
    return tree[0]


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
        """Return the pair of ``me``.

        The workers are leaves of a binary tree, at the bits of a hash of the seed, the round and
        their names. Every subtree pairs its leaves, and an odd one is left over for the tree above.
        So a worker that only some workers know of changes about two pairs, and not all.
        """
        leaves = {
            int.from_bytes(sha256(f"{self._settings.seed}/{round}/{peer}".encode()).digest()): peer
            for peer in roster
        }
        mine = next(leaf for leaf, peer in leaves.items() if peer == me)
        tree, siblings = list(leaves), []
        for bit in reversed(range(_BITS)):
            siblings.append((bit, [leaf for leaf in tree if (leaf ^ mine) >> bit & 1]))
            tree = [leaf for leaf in tree if not (leaf ^ mine) >> bit & 1]
            if len(tree) == 1:
                break
        for bit, found in reversed(siblings):
            if len(found) % 2:
                return tuple(sorted((me, leaves[_left_over(found, bit)])))
        return (me,)

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        return self._part(parameters, slice(None))

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        """Return the new φ_i.

        ``average`` None: the partner is gone, and the worker takes the step alone.
        """
        for part in in_parts(len(parameters)):
            weights, momentum = self._weights[part], self._state["own.momentum"][part]
            mean = self._part(parameters, part) if average is None else average.values[part]
            pull = add_scaled(mean, -self._settings.gamma, weights)
            momentum.copy_(add_scaled(pull, self._settings.alpha, momentum))
            weights += momentum
        return self._weights

    def _part(self, parameters: torch.Tensor, part: slice) -> torch.Tensor:
        """Return a part of the contribution."""
        progress = (parameters[part] - self._weights[part]) * self._settings.beta
        return add_scaled(progress, self._settings.gamma, self._weights[part])
