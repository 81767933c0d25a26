"""Zeroth-order training with shared randomness: workers exchange only slopes.

SPSA (Spall 1992); MeZO (Malladi et al., arXiv 2305.17333); one direction per machine and sample as
in "Just One Byte" (Zelikman et al., arXiv 2306.10015).

- Worker i, step j of a round: g_ij = [L(θ + ε z_ij) - L(θ - ε z_ij)] / 2ε, on its own data.
- After the round of H steps: θ <- θ - η Σ_ij g_ij z_ij.

z_ij: random signs drawn from (seed, round, j, i), which every worker can draw; i is the slot of the
worker; ε, η: settings. θ stays as it is during a round, so one copy of the weights is enough.

Every worker probes directions of its own, so N workers move along N times as many directions.
The sum keeps the length of a move along one direction whatever N is. "Just One Byte" divides by
√(N H) instead, and a user would have to change η with the number of workers.

A contribution has a place for every direction of every slot, and is zero except in the places of
its worker. The places of one step are neighbours, so every slice of an exchange has some of every
worker. The workers' mean, times their number, is the sum. A worker counts at most the median norm
of all workers, as with other methods.

A round is at most N H bytes of slopes, so a history of rounds is short. Applying it takes N H
passes over the parameters. All slopes of a round are taken at its first θ: a round with so many
directions that curvature matters makes less progress than several short ones.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training import MAX_MEMBERS
from swarmnet_protocols.training.methods.base import AllToAll, Average, Kind, Settings
from swarmnet_protocols.training.shared_randomness import UINT32_END, add_signs, round_to_bfloat16

_CHUNK = 1 << 20
"""Parameters updated at a time, in float32. With more, a round takes more memory."""
_ROUNDING = UINT32_END - 1
"""Stream of the random bits with which a round's result is rounded. Directions have lower
numbers."""


class ZeroOrderSettings(Settings):
    sync_every: int = Field(default=100, ge=1, le=4096)
    """H, steps between exchanges, each along another direction."""
    epsilon: float = Field(default=1e-3, gt=0)
    """ε, distance along a direction at which the loss is measured."""
    learning_rate: float = Field(default=1e-6, gt=0)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the directions."""
    weights: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the weights and of the forward passes."""


class ZeroOrder(AllToAll):
    """Zeroth-order training along random signs.

    Random signs have the least variance of the perturbations that SPSA allows. MeZO uses normal
    numbers. A slope that arrives after its round was committed is ignored: workers apply the
    committed sum. ``apply`` changes the weights in place, unlike other methods.
    """

    kind: Kind = "scalars"
    name = "zo"
    codec = "log8"
    overlap_steps = 0

    def __init__(self, settings: ZeroOrderSettings) -> None:
        super().__init__()
        self._settings = settings
        self.slots = MAX_MEMBERS
        """Number of workers that may have directions of their own."""
        self.steps_per_round = settings.sync_every
        self.dtype: torch.dtype = getattr(torch, settings.weights)

    def range(self, round: int) -> tuple[int, int]:
        return 0, self.steps_per_round * self.slots

    def shift(self, part: torch.Tensor, start: int, round: int, place: int, sign: int) -> torch.Tensor:
        """Return ``part`` + sign ε z as a copy, where ``part`` begins at parameter ``start`` and
        z is the direction of ``place``."""
        shifted = torch.empty_like(part)
        for first in range(0, len(part), _CHUNK):
            values = part[first : first + _CHUNK].to(torch.float32, copy=True)
            stream = (round, place)
            add_signs(values, sign * self._settings.epsilon, self._settings.seed, stream, start + first)
            shifted[first : first + _CHUNK] = values
        return shifted

    def slope(self, plus: float, minus: float) -> float:
        """Return the slope between the losses at θ + ε z and θ - ε z."""
        return (plus - minus) / (2 * self._settings.epsilon)

    def place(self, step: int, slot: int) -> int:
        """Return the place of a step's direction among all directions of a round."""
        return step * self.slots + slot

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        return parameters

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        if average is not None:
            self.replay(self._weights, [(round, average.values * len(average.contributors))])
        return self._weights

    def replay(self, parameters: torch.Tensor, log: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Move the parameters in place by the committed rounds in ``log``: (round, summed slopes).

        They then equal the result of ``apply`` in each of these rounds, bit for bit. bfloat16 is
        rounded once a round, up or down at random, so that small moves are not lost. Raises
        ``ProtocolViolation`` for an entry that is not a finite slope for every place.
        """
        places = self.steps_per_round * self.slots
        for round, slopes in log:
            if slopes.shape != (places,) or not slopes.isfinite().all():
                raise ProtocolViolation(f"round {round} in the log is not {places} finite slopes")
        seed, rate = self._settings.seed, self._settings.learning_rate
        for start in range(0, len(parameters), _CHUNK):
            part = parameters[start : start + _CHUNK]
            for round, slopes in log:
                moved = part.to(torch.float32, copy=True)
                for place in slopes.nonzero().flatten().tolist():
                    add_signs(moved, -rate * float(slopes[place]), seed, (round, place), start)
                if part.dtype == torch.bfloat16:
                    moved = round_to_bfloat16(moved, seed, (round, _ROUNDING), start)
                part.copy_(moved)
