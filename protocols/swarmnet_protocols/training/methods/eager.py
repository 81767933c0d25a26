"""Eager updates (Kale et al., arXiv 2502.12996, eager updates).

A worker applies its own contribution at once, and the average a round late:

Δ̃_i(t) = Δ_i(t)/M + [Δ̄(t-1) - Δ_i(t-1)/M]; θ_i <- Outer(θ_i, Δ̃_i), the outer step of DiLoCo.

Δ_i(t): pseudo-gradient of worker i in round t; Δ̄: mean pseudo-gradient; M: number of contributors
to Δ̄(t-1).
"""

import torch
from pydantic import Field

from swarmnet_protocols.training.methods.arithmetic import nesterov_
from swarmnet_protocols.training.methods.base import Average, OuterMethod, Settings


class EagerSettings(Settings):
    sync_every: int = Field(default=50, ge=1)
    """H, inner steps between exchanges. One exchange must complete in this time."""
    outer_lr: float = Field(default=0.4, gt=0)
    """η, smaller than DiLoCo's.

    With a momentum of 0.9 and averages that are a round late, a step of 0.7 oscillates and grows.
    """
    momentum: float = Field(default=0.6, ge=0, lt=1)


class Eager(OuterMethod):
    """Keeps θ_i as a sum of two parts, because the outer step is linear.

    - θ steps on Δ̄ and is equal on all workers.
    - The worker's own offset steps on Δ_i(t)/M - Δ_i(t-1)/M.

    A contribution is added as Δ_i/M and removed a round later. Both use the M of its own round, so
    that workers do not drift apart when M changes. There is no outer step after the first round,
    because there is no average yet.
    """

    name = "eager"
    codec = "float32"
    state_names = ("momentum", "own.offset", "own.momentum", "own.share", "own.delta", "own.start")

    def __init__(self, settings: EagerSettings) -> None:
        super().__init__(settings.sync_every)
        self.overlap_steps = settings.sync_every
        self._settings = settings

    def begin(self, parameters: torch.Tensor) -> None:
        super().begin(parameters)
        self._state["own.start"] = parameters.clone()

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        """Return the pseudo-gradient of this round alone. The previous one is in flight."""
        delta = self._state["own.start"] - parameters
        self._state |= {"own.delta": delta, "own.start": parameters.clone()}
        return delta

    def progress(self, parameters: torch.Tensor) -> torch.Tensor:
        return parameters - self._state["own.start"]

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        if average is None:
            return parameters
        state = self._state
        lr, mu = self._settings.outer_lr, self._settings.momentum
        share = state["own.delta"] / len(average.contributors)
        nesterov_(self._weights, state["momentum"], average.values, lr, mu)
        nesterov_(state["own.offset"], state["own.momentum"], share - state["own.share"], lr, mu)
        state["own.share"] = share
        state["own.start"] = self._weights + state["own.offset"]
        return state["own.start"]
