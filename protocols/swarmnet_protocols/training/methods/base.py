"""The interface of a method, and base classes for methods that average among all workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict

from swarmnet_protocols.errors import IntegrityError

Kind = Literal["parameters", "gradients", "scalars"]

OWN = "own."
"""Prefix of the names of outer state that differs between workers."""


@dataclass(frozen=True, eq=False)
class Average:
    """The average of a committed round.

    It has float32 [end - start] for the round's range, and the peer ids of its contributors.
    """

    values: torch.Tensor
    contributors: tuple[str, ...]


class Settings(BaseModel):
    """The settings of a method, validated on construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Method(Protocol):
    """An update rule. All vectors are float32 on the CPU.

    1. A worker calls ``begin`` once.
    2. In each round it takes ``steps_per_round`` inner steps, calls ``contribution``, exchanges,
       and calls ``apply``.

    With ``overlap_steps`` = k > 0 the exchange runs during the first k inner steps of the next
    round. ``apply`` is called after these steps. If k equals ``steps_per_round``, the next round's
    ``contribution`` is called before ``apply``.

    ``kind`` determines the argument ``parameters`` of ``contribution`` and ``apply``:

    - "parameters": the worker's current parameters [n]. ``apply`` returns its new ones.
    - "gradients": the mean gradient of the worker's round [n]. ``apply`` returns the gradient for
      the worker's own optimizer. After a discarded round the worker takes no step.
    - "scalars": for ``contribution`` the slopes that the worker measured [k]; for ``apply`` the
      parameters. They may be bfloat16, and ``apply`` changes the vector of ``begin`` in place.

    The vectors of ``begin`` and ``restore`` then belong to the method. ``apply`` may change them in
    place, and so the vectors that ``agreed`` and ``state`` returned. With "gradients", the vector
    of ``begin`` is the weights: only the optimizer may change these. Between two calls of ``apply``
    all stay as they are: newcomers download them without a copy. ``parameters`` and the values of
    ``average`` may be used only during the call.

    Outer arithmetic is elementwise IEEE float32 in a fixed order: equal inputs give equal bits on
    every machine.
    """

    @property
    def kind(self) -> Kind:
        """The kind of values in a contribution."""

    @property
    def name(self) -> str:
        """The name in job files."""

    @property
    def shares_weights(self) -> bool:
        """True if ``agreed`` is equal on all workers.

        If not, each worker has its own replica, near the others.
        """

    @property
    def codec(self) -> str:
        """The default codec of contributions."""

    @property
    def feedback_decay(self) -> float:
        """Factor applied in each round to the residual of error feedback."""

    @property
    def steps_per_round(self) -> int:
        """Number of inner steps in a round."""

    @property
    def overlap_steps(self) -> int:
        """Number of inner steps of the next round that run during the exchange."""

    def begin(self, parameters: torch.Tensor) -> None:
        """Start from the shared parameters [n], with outer state zero. ``restore`` may follow."""

    def partners(self, round: int, roster: Sequence[str], me: str) -> tuple[str, ...]:
        """Return the members of ``roster`` that average with ``me`` in this round.

        Sorted, including ``me``. The roster may be in any order.
        """

    def range(self, round: int) -> tuple[int, int]:
        """Return the range [start, end) of parameters that this round exchanges.

        It is [0, k) for k scalars.
        """

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        """Return this worker's contribution: the values of ``range(round)``."""

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        """Return the worker's new parameters, or with ``kind`` "gradients" the mean gradient for
        its optimizer.

        ``average`` None: the round was discarded, and outer state stays as it was. A worker that
        did not contribute may apply the others' average, and then has the same parameters as
        they.
        """

    def agreed(self) -> torch.Tensor:
        """Return the weights [n] that all workers share bit for bit between rounds."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return outer state other than ``agreed()``.

        It is equal on all workers, except names with the prefix "own.".
        """

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from the ``state()`` of this or another worker, after ``begin(agreed)``.

        "own." entries may be missing. Raises ``IntegrityError`` for a wrong name, shape or dtype,
        or a value that is not finite.
        """


class AllToAll:
    """Every worker averages all parameters with every other worker in every round."""

    shares_weights = True
    feedback_decay = 1.0

    def __init__(self) -> None:
        self._weights = torch.empty(0)

    def begin(self, parameters: torch.Tensor) -> None:
        self._weights = parameters

    def partners(self, round: int, roster: Sequence[str], me: str) -> tuple[str, ...]:
        return tuple(sorted(roster))

    def range(self, round: int) -> tuple[int, int]:
        return 0, len(self._weights)

    def agreed(self) -> torch.Tensor:
        return self._weights

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        check_state(state, {})


class OuterMethod(AllToAll):
    """Workers take inner steps from the outer weights θ and contribute Δ_i = θ - θ_i.

    Δ_i is the pseudo-gradient. After a discarded round a worker keeps θ_i, so its next
    pseudo-gradient covers both rounds.
    """

    kind: Kind = "parameters"
    overlap_steps = 0
    state_names: tuple[str, ...] = ()

    def __init__(self, steps_per_round: int) -> None:
        super().__init__()
        self.steps_per_round = steps_per_round
        self._state: dict[str, torch.Tensor] = {}

    def begin(self, parameters: torch.Tensor) -> None:
        super().begin(parameters)
        self._state = {name: torch.zeros_like(parameters) for name in self.state_names}

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        return self._weights - parameters

    @property
    def contributes_difference(self) -> bool:
        """True if no subclass replaces this class's ``contribution``."""
        return type(self).contribution is OuterMethod.contribution

    def progress(self, parameters: torch.Tensor) -> torch.Tensor:
        """Return what this worker's inner steps added to the parameters and no round has yet."""
        return parameters - self._weights

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self._state)

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        check_state(state, self._state)
        self._state |= state


def check_state(state: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> None:
    """Check that ``state`` has the names, shapes and dtypes of ``like``, and finite values.

    Names with the prefix "own." may be missing. Raises ``IntegrityError``.
    """
    for name in like.keys() - state.keys():
        if not name.startswith(OWN):
            raise IntegrityError(f"outer state lacks {name!r}")
    for name, values in state.items():
        expected = like.get(name)
        if expected is None or values.shape != expected.shape or values.dtype != expected.dtype:
            raise IntegrityError(
                f"{name!r} {list(values.shape)[:8]} {values.dtype} is no outer state of this method"
            )
        if not values.isfinite().all():
            raise IntegrityError(f"outer state {name!r} is not finite")
