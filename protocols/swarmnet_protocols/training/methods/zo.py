"""Zeroth-order training with shared randomness (MeZO, arXiv 2305.17333; Just One Byte): only slopes travel.

All workers try the same k random directions of a round, each on data of its own, so their slopes can be averaged as
other contributions are, with the same checks and aggregators. A round is k scalars; a history of n rounds is k n.
"""

from collections.abc import Sequence

import torch
from pydantic import Field

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.methods.arithmetic import add_scaled
from swarmnet_protocols.training.methods.base import Average, Kind, Settings, WholeSwarm
from swarmnet_protocols.training.randomness import normals

_CHUNK = 1 << 20
"""Values of the parameters at a time: directions are never held whole."""


class ZeroOrderSettings(Settings):
    directions: int = Field(default=1, ge=1, le=4096)
    """k, tried in each round."""
    epsilon: float = Field(default=1e-3, gt=0)
    """How far along a direction the loss is taken."""
    learning_rate: float = Field(default=1e-6, gt=0)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Of the directions."""


class ZeroOrder(WholeSwarm):
    """g_j = [L(θ + ε z_j) - L(θ - ε z_j)] / 2ε; θ <- θ - (η/k) Σ_j ḡ_j z_j, z_j drawn from (seed, round, j).

    For each direction a worker takes the loss at two ``probe``s and their ``slope``; ``contribution`` takes the k slopes.
    A slope that comes after its round was committed counts for nothing: the mean in the log is what was applied.
    """

    kind: Kind = "scalars"
    name = "zo"
    codec = "log8"
    steps_per_round = 1
    overlap_steps = 0

    def __init__(self, settings: ZeroOrderSettings) -> None:
        super().__init__()
        self._settings = settings

    @property
    def directions(self) -> int:
        return self._settings.directions

    def range(self, round: int) -> tuple[int, int]:
        return 0, self._settings.directions

    def probe(self, round: int, direction: int, parameters: torch.Tensor, sign: int) -> torch.Tensor:
        """Where to take the loss: θ + sign ε z, sign 1 or -1."""
        return self._moved(parameters, [(round, direction, sign * self._settings.epsilon)])

    def slope(self, loss_plus: float, loss_minus: float) -> float:
        """The slope of the loss along a direction, from the losses at its two probes."""
        return (loss_plus - loss_minus) / (2 * self._settings.epsilon)

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        return parameters

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        log = [] if average is None else [(round, average.values)]
        self._weights = self.replay(parameters, log)
        return self._weights.clone()

    def replay(self, parameters: torch.Tensor, log: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """The parameters after the committed rounds in ``log``: (round, mean slopes [k]) in order.

        Bit for bit what ``apply`` gave those who were there. Raises ``ProtocolViolation`` for an entry that is not k
        finite slopes.
        """
        steps = []
        for round, slopes in log:
            if slopes.shape != (self.directions,) or not slopes.isfinite().all():
                raise ProtocolViolation(f"round {round} in the log is not {self.directions} finite slopes")
            rate = self._settings.learning_rate / self.directions
            steps += [(round, direction, -rate * slope) for direction, slope in enumerate(slopes.tolist())]
        return self._moved(parameters, steps)

    def _moved(self, parameters: torch.Tensor, steps: Sequence[tuple[int, int, float]]) -> torch.Tensor:
        """Parameters plus, for each (round, direction, factor) in order, factor times that direction."""
        moved = parameters.clone()
        for start in range(0, len(moved), _CHUNK):
            end = min(start + _CHUNK, len(moved))
            part = moved[start:end]
            for round, direction, factor in steps:
                part = add_scaled(part, factor, normals(self._settings.seed, (round, direction), start, end))
            moved[start:end] = part
        return moved
