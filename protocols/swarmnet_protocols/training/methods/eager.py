"""Eager updates (Kale et al., arXiv 2502.12996): the average comes a round late, the worker's own part at once."""

import torch
from pydantic import Field

from swarmnet_protocols.training.methods.arithmetic import nesterov
from swarmnet_protocols.training.methods.base import Average, OuterMethod, Settings


class EagerSettings(Settings):
    sync_every: int = Field(default=50, ge=1)
    """H, inner steps between exchanges; an exchange has as long to complete."""
    outer_lr: float = Field(default=0.4, gt=0)
    """Smaller than DiLoCo's: with a momentum of 0.9, averages that come a round late make a step of 0.7 oscillate and grow."""
    momentum: float = Field(default=0.6, ge=0, lt=1)


class Eager(OuterMethod):
    """Δ̃_i(t) = Δ_i(t)/M + [Δ̄(t-1) - Δ_i(t-1)/M]; θ_i <- Outer(θ_i, Δ̃_i) as in DiLoCo, M the contributors to Δ̄(t-1).

    The outer step is linear, so θ_i is kept as two: θ, which steps on Δ̄ and is equal on all workers, and an offset of the
    worker's own, which steps on Δ_i(t)/M - Δ_i(t-1)/M. Each own part is taken out with the M it was put in with, so
    workers do not drift apart when M changes. There is no outer step after the first round, when no average is there.
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
        self._state["own.start"] = parameters

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        """How far the worker came in this round alone: what came before is on its way already."""
        delta = self._state["own.start"] - parameters
        self._state |= {"own.delta": delta, "own.start": parameters.clone()}
        return delta

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        if average is None:
            return parameters
        state = self._state
        lr, mu = self._settings.outer_lr, self._settings.momentum
        share = state["own.delta"] / len(average.contributors)
        self._weights, state["momentum"] = nesterov(self._weights, state["momentum"], average.values, lr, mu)
        state["own.offset"], state["own.momentum"] = nesterov(
            state["own.offset"], state["own.momentum"], share - state["own.share"], lr, mu
        )
        state["own.share"] = share
        state["own.start"] = self._weights + state["own.offset"]
        return state["own.start"]
