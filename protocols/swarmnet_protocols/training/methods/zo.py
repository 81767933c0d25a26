"""Zeroth-order training with shared randomness (SPSA, Spall 1992; MeZO, arXiv 2305.17333; Just One Byte): only slopes travel.

All workers try the same random directions, each on data of its own, so their slopes can be averaged as other contributions
are, with the same checks and aggregators. A round of H steps is H scalars; a history of n rounds is n H.

What a job sends is its slopes, a byte each, from every worker and back, and what a round costs whatever H is: to gather, to agree,
and to see who is there, which grows with the square of the workers. With H = 100 eight workers that come
at one time send 79 bytes a step in all over links of 20 ms, 88 over 100 ms, two send 8, framing included
(``tests/sim/test_training_bytes.py``); announcements in the directory, which go by time, are not. Where gradients are linear H
costs no progress: the mean of slopes measured where each worker's own steps led is the slope at the mean of these places.
"""

from collections.abc import Callable, Sequence

import torch
from pydantic import Field

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.methods.base import Average, Kind, Settings, WholeSwarm
from swarmnet_protocols.training.shared_randomness import add_signs

_CHUNK = 1 << 20
"""Values of the parameters at a time when a history is replayed: its directions are never held whole."""


class ZeroOrderSettings(Settings):
    sync_every: int = Field(default=100, ge=1, le=4096)
    """H, steps between exchanges, each along a direction of its own."""
    epsilon: float = Field(default=1e-3, gt=0)
    """How far along a direction the loss is taken."""
    learning_rate: float = Field(default=1e-6, gt=0)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Of the directions."""


class ZeroOrder(WholeSwarm):
    """A worker's step j: g_j = [L(θ_i + ε z_j) - L(θ_i - ε z_j)] / 2ε; θ_i <- θ_i - η g_j z_j.

    z_j is random signs, drawn from (seed, round, j): of all perturbations that SPSA allows, those that estimate with the
    least variance. MeZO draws normal ones.

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

    def step(
        self, parameters: torch.Tensor, round: int, step: int, loss: Callable[[], float]
    ) -> tuple[float, float]:
        """Take a step in place: the slope, and the mean of ``loss``, which is called with ``parameters`` at θ + ε z and θ - ε z.

        No other vector as large is made (MeZO, Algorithm 1); going there and back costs a rounding or two.
        """
        epsilon = self._settings.epsilon
        self._move(parameters, epsilon, round, step)
        plus = loss()
        self._move(parameters, -2 * epsilon, round, step)
        minus = loss()
        slope = (plus - minus) / (2 * epsilon)
        self._move(parameters, epsilon - self._settings.learning_rate * slope, round, step)
        return slope, (plus + minus) / 2

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        return parameters

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        if average is not None:
            self._weights = self.replay(self._weights, [(round, average.values)])
        return self._weights

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
            part = moved[start : start + _CHUNK]
            for round, slopes in log:
                for step, slope in enumerate(slopes.tolist()):
                    self._move(part, -self._settings.learning_rate * slope, round, step, start)
        return moved

    def _move(self, part: torch.Tensor, by: float, round: int, step: int, start: int = 0) -> None:
        """θ <- θ + by z in place, where ``part`` begins at parameter ``start``."""
        add_signs(part, by, self._settings.seed, (round, step), start)
