"""A small task for update rules: a few workers pull a few parameters towards targets of their
own."""

from collections.abc import Sequence

import numpy as np

from tests.support.models.rounding import UNIT
from tests.support.training import reference

WORKERS = 4
ROUNDS = 10
SIZE = 203
NAMES = tuple(f"worker-{i}" for i in range(WORKERS))


class Task:
    """Workers that pull the parameters towards targets of their own, with a different perturbation
    at every step."""

    def __init__(self, size: int = SIZE) -> None:
        rng = np.random.default_rng(3)
        self.start = rng.standard_normal(size).astype(np.float32).astype(np.float64)
        self._targets = rng.standard_normal((WORKERS, size))
        self._wobble = 0.01 * rng.standard_normal((7, size))

    def gradient(self, worker: int, step: int, x: reference.Vector) -> reference.Vector:
        away: reference.Vector = x - self._targets[worker] + self._wobble[step % 7]
        return away

    def inner(self, worker: int, step: int, x: reference.Vector) -> reference.Vector:
        return x - 0.05 * self.gradient(worker, step, x)

    def loss(self, worker: int, x: reference.Vector) -> float:
        return float(((x - self._targets[worker]) ** 2).sum() / 2)

    def run(self) -> reference.Run:
        return reference.Run(self.start, self.inner, WORKERS, ROUNDS)


OPERATIONS = 20
"""Operations of a round that change one number, at most. Each rounds once."""


def assert_agree(ours: Sequence[np.ndarray], theirs: Sequence[reference.Vector]) -> None:
    for t, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        error = np.abs(got - expected).max() / np.abs(expected).max()
        assert error < ROUNDS * OPERATIONS * UNIT, f"round {t}: relative error {error:.2e}"
