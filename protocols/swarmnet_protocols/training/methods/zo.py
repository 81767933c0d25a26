"""Zeroth-order training with shared randomness (MeZO, arXiv 2305.17333; Just One Byte): only slopes travel.

All workers try the same random directions, each on data of its own, so their slopes can be averaged as other contributions
are, with the same checks and aggregators. A round of H steps is H scalars; a history of n rounds is n H.
"""

from collections.abc import Sequence

import torch
from pydantic import Field

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.methods.arithmetic import add_scaled
from swarmnet_protocols.training.methods.base import Average, Kind, Settings, WholeSwarm
from swarmnet_protocols.training.randomness import normals

_CHUNK = 1 << 20
"""Values of the parameters at a time when a history is replayed: its directions are never held whole."""


class ZeroOrderSettings(Settings):
    sync_every: int = Field(default=20, ge=1, le=4096)
    """H, steps between exchanges, each along a direction of its own."""
    epsilon: float = Field(default=1e-3, gt=0)
    """How far along a direction the loss is taken."""
    learning_rate: float = Field(default=1e-6, gt=0)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Of the directions."""


class ZeroOrder(WholeSwarm):
    """A worker's step j: g_j = [L(θ_i + ε z_j) - L(θ_i - ε z_j)] / 2ε; θ_i <- θ_i - η g_j z_j, z_j drawn from (seed, round, j).

    After a round all go on from θ <- θ - η Σ_j ḡ_j z_j: where its H steps began, moved by the mean slopes. A slope
    that comes after its round was committed counts for nothing: the mean in the log is what was applied.
    """

    kind: Kind = "scalars"
    name = "zo"
    codec = "log8"
    overlap_steps = 0

    def __init__(self, settings: ZeroOrderSettings) -> None:
        super().__init__()
        self._settings = settings
        self.steps_per_round = settings.sync_every

    def range(self, round: int) -> tuple[int, int]:
        return 0, self.steps_per_round

    def direction(self, round: int, step: int, count: int) -> torch.Tensor:
        """z of a step, float32 [count]."""
        return normals(self._settings.seed, (round, step), 0, count)

    def probe(self, parameters: torch.Tensor, direction: torch.Tensor, sign: int) -> torch.Tensor:
        """Where to take the loss: θ + sign ε z, sign 1 or -1."""
        return add_scaled(parameters, sign * self._settings.epsilon, direction)

    def slope(self, loss_plus: float, loss_minus: float) -> float:
        """The slope of the loss along a direction, from the losses at its two probes."""
        return (loss_plus - loss_minus) / (2 * self._settings.epsilon)

    def step(self, parameters: torch.Tensor, direction: torch.Tensor, slope: float) -> torch.Tensor:
        """θ - η g z."""
        return add_scaled(parameters, -self._settings.learning_rate * slope, direction)

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        return parameters

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        log = [] if average is None else [(round, average.values)]
        self._weights = self.replay(self._weights, log)
        return self._weights.clone()

    def replay(self, parameters: torch.Tensor, log: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """The parameters after the committed rounds in ``log``: (round, mean slopes [H]) in order.

        Bit for bit what ``apply`` gave those who were there. Raises ``ProtocolViolation`` for an entry that is not H
        finite slopes.
        """
        for round, slopes in log:
            if slopes.shape != (self.steps_per_round,) or not slopes.isfinite().all():
                raise ProtocolViolation(
                    f"round {round} in the log is not {self.steps_per_round} finite slopes"
                )
        moved = parameters.clone()
        for start in range(0, len(moved), _CHUNK):
            end = min(start + _CHUNK, len(moved))
            part = moved[start:end]
            for round, slopes in log:
                for step, slope in enumerate(slopes.tolist()):
                    part = self.step(part, normals(self._settings.seed, (round, step), start, end), slope)
            moved[start:end] = part
        return moved
