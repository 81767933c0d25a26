"""Streaming DiLoCo (Douillard et al., arXiv 2501.18512, streaming partial updates with overlap).

Workers exchange one fragment at a time, during inner steps. Round r exchanges fragment p = r mod P:

θ_p <- Outer(θ_p, Δ̄_p), the outer step of DiLoCo, then θ_i,p <- (1 - α) θ_p + α θ_i,p.

θ_p: fragment p of the global parameters; θ_i,p: fragment p of worker i; P: ``fragments``; α:
``mixing``.
"""

from typing import Self

import torch
from pydantic import Field, model_validator

from swarmnet_protocols.training.methods.arithmetic import add_scaled, nesterov_
from swarmnet_protocols.training.methods.base import Average, OuterMethod, Settings


class StreamingSettings(Settings):
    sync_every: int = Field(default=100, ge=1)
    """H, inner steps between two exchanges of the same fragment."""
    fragments: int = Field(default=4, ge=1)
    """P, contiguous parts of the parameter vector of equal size, up to rounding."""
    overlap_steps: int = Field(default=5, ge=0)
    """τ, inner steps during the exchange of a fragment."""
    mixing: float = Field(default=0.5, ge=0, lt=1)
    """α, the share of the worker's own fragment that is kept."""
    outer_lr: float = Field(default=0.4, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sync_every % self.fragments:
            raise ValueError(f"fragments = {self.fragments} must divide sync_every = {self.sync_every}")
        if self.overlap_steps >= self.sync_every // self.fragments:
            raise ValueError(
                f"overlap_steps = {self.overlap_steps} must be less than sync_every / fragments ="
                f" {self.sync_every // self.fragments}: only one fragment is exchanged at a time"
            )
        return self


class Streaming(OuterMethod):
    """Streaming DiLoCo. After a discarded round the worker's fragment is reset to θ_p."""

    name = "streaming"
    codec = "int4"
    state_names = ("momentum",)

    def __init__(self, settings: StreamingSettings) -> None:
        super().__init__(settings.sync_every // settings.fragments)
        self.overlap_steps = settings.overlap_steps
        self._settings = settings

    def range(self, round: int) -> tuple[int, int]:
        fragments = self._settings.fragments
        fragment = round % fragments
        return len(self._weights) * fragment // fragments, len(self._weights) * (fragment + 1) // fragments

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        fragment = slice(*self.range(round))
        return self._weights[fragment] - parameters[fragment]

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        fragment = slice(*self.range(round))
        mixed = parameters.clone()
        if average is None:
            mixed[fragment] = self._weights[fragment]
            return mixed
        outer = self._weights[fragment]
        nesterov_(
            outer,
            self._state["momentum"][fragment],
            average.values,
            self._settings.outer_lr,
            self._settings.momentum,
        )
        mixed[fragment] = add_scaled(outer, self._settings.mixing, parameters[fragment] - outer)
        return mixed
