"""DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1).

H inner steps, then one outer step on the mean pseudo-gradient:

- Δ_i = θ - θ_i after H inner steps of worker i from θ; Δ̄ = mean_i Δ_i.
- v <- μ v + Δ̄; θ <- θ - η (Δ̄ + μ v).

θ: global parameters; v: outer Nesterov momentum; η: ``outer_lr``; μ: ``momentum``.
"""

import torch
from pydantic import Field

from swarmnet_protocols.training.methods.arithmetic import nesterov_
from swarmnet_protocols.training.methods.base import Average, OuterMethod, Settings


class DiLoCoSettings(Settings):
    sync_every: int = Field(default=50, ge=1)
    """H, inner steps between exchanges."""
    outer_lr: float = Field(default=0.7, gt=0)
    """η."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """μ."""


class DiLoCo(OuterMethod):
    """Every worker starts its next round from the new θ."""

    name = "diloco"
    codec = "float32"
    state_names = ("momentum",)

    def __init__(self, settings: DiLoCoSettings) -> None:
        super().__init__(settings.sync_every)
        self._settings = settings

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        if average is None:
            return parameters
        nesterov_(
            self._weights,
            self._state["momentum"],
            average.values,
            self._settings.outer_lr,
            self._settings.momentum,
        )
        return self._weights
