"""Zeroth-order training with shared randomness: workers exchange only slopes.

SPSA (Spall 1992); MeZO (Malladi et al., arXiv 2305.17333, algorithm 1).

- Step j of worker i: g_j = [L(θ_i + ε z_j) - L(θ_i - ε z_j)] / 2ε; θ_i <- θ_i - η g_j z_j.
- After a round of H steps: θ <- θ - η Σ_j ḡ_j z_j, from the θ at the start of the round.

z_j: random signs drawn from (seed, round, j), equal at all workers; ḡ_j: mean slope of all workers;
ε, η: settings.

All workers measure slopes along the same directions on their own data. So slopes are averaged,
checked and aggregated like other contributions. A round is H scalars, so a history of n rounds is n
H scalars.

Traffic is H bytes per worker and round in each direction, plus matchmaking and the decision. The
latter do not depend on H, and grow with the square of the workers. With H = 100, eight workers send
79 bytes per step in total over links of 20 ms and 88 over 100 ms. Two workers send 8. This includes
framing and excludes DHT announcements (``tests/sim/training/test_bytes.py``). A large H costs no
progress where gradients are linear: the mean of slopes measured at different points is the slope at
the mean of these points.
"""

from collections.abc import Callable, Sequence

import torch
from pydantic import Field

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.methods.base import AllToAll, Average, Kind, Settings
from swarmnet_protocols.training.shared_randomness import add_signs

_CHUNK = 1 << 20
"""Parameters updated at a time when a history is replayed. So no whole direction is in memory."""


class ZeroOrderSettings(Settings):
    sync_every: int = Field(default=100, ge=1, le=4096)
    """H, steps between exchanges, each along another direction."""
    epsilon: float = Field(default=1e-3, gt=0)
    """ε, distance along a direction at which the loss is measured."""
    learning_rate: float = Field(default=1e-6, gt=0)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the directions."""


class ZeroOrder(AllToAll):
    """Zeroth-order training along random signs.

    Random signs have the least variance of the perturbations that SPSA allows. MeZO uses normal
    numbers. A slope that arrives after its round was committed is ignored: workers apply the
    committed mean.
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
        """Take one step in place and return the slope and the mean loss.

        ``loss`` is called with ``parameters`` at θ + ε z and at θ - ε z. No other vector of this
        size is allocated (MeZO, algorithm 1), at the cost of up to two roundings of θ.
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
        """Return the parameters after the committed rounds in ``log``: (round, mean slopes [H]).

        They equal the result of ``apply`` in each of these rounds, bit for bit. Raises
        ``ProtocolViolation`` for an entry that is not H finite slopes.
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
        """Set θ to θ + by z in place, where ``part`` begins at parameter ``start``."""
        add_signs(part, by, self._settings.seed, (round, step), start)
