"""What every method promises, and what those with outer weights share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict

from swarmnet_protocols.errors import IntegrityError

Kind = Literal["parameters", "gradients", "scalars"]

OWN = "own."
"""Prefix of the outer state that differs between workers."""


@dataclass(frozen=True, eq=False)
class Average:
    """What a committed round gave: the mean of the contributions to its range, float32 [end - start], and whose."""

    values: torch.Tensor
    contributors: tuple[str, ...]


class Settings(BaseModel):
    """The settings of one method, checked when they are made."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Method(Protocol):
    """How workers turn what they exchange into new parameters. All vectors are float32 on the CPU, and values: none that is given
    to ``begin`` or ``restore``, or comes from a method, is changed after that by either side. So a state can be handed to
    newcomers for as long as they take, without a copy. ``parameters`` are valid during a call only.

    A worker calls ``begin`` once, then for each round: ``steps_per_round`` inner steps, ``contribution``, the exchange,
    ``apply``. With ``overlap_steps`` = k > 0 the exchange runs while the worker takes k inner steps of the next round, and
    ``apply`` comes after those. If k is ``steps_per_round``, the next round's ``contribution`` comes first, ``apply`` second.

    ``kind`` says what the argument ``parameters`` of ``contribution`` and ``apply`` is:

    - "parameters": the worker's current parameters [n]. ``apply`` returns its new ones.
    - "gradients": the mean gradient of the worker's round [n]. ``apply`` returns the gradient that the worker's own
      optimizer steps on; after a discarded round the worker takes no step.
    - "scalars": for ``contribution`` the slopes that the worker measured [k]; for ``apply`` the parameters.

    Outer arithmetic is elementwise IEEE float32 in a fixed order: equal inputs give equal bits on every machine.
    """

    @property
    def kind(self) -> Kind: ...

    @property
    def name(self) -> str: ...

    @property
    def shares_weights(self) -> bool:
        """Whether ``agreed`` is the same on all workers. If not, each has replicas of its own that stay near the others."""

    @property
    def codec(self) -> str:
        """The codec that fits what is contributed, unless the job names another."""

    @property
    def feedback_decay(self) -> float:
        """What is kept, per round, of the error of a biased codec that is fed back."""

    @property
    def steps_per_round(self) -> int: ...

    @property
    def overlap_steps(self) -> int: ...

    def begin(self, parameters: torch.Tensor) -> None:
        """Start from the agreed parameters [n], with outer state zero. ``restore`` may follow."""

    def partners(self, round: int, roster: Sequence[str], me: str) -> tuple[str, ...]:
        """Who averages together in this round: sorted, ``me`` included. The order of ``roster`` does not matter."""

    def range(self, round: int) -> tuple[int, int]:
        """Start and end of what is exchanged in this round: of the parameters, or [0, k) for k scalars."""

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        """What this worker contributes: the values of ``range(round)``."""

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        """The worker's new parameters (``kind`` "gradients": the mean gradient).

        None stands for a discarded round: outer state is as if the round had not been. A worker that contributed nothing
        may apply what the others did, and is then equal to them.
        """

    def agreed(self) -> torch.Tensor:
        """The weights [n] that all workers share bit for bit between rounds."""

    def state(self) -> dict[str, torch.Tensor]:
        """Outer state beside ``agreed()``: equal on all workers, but for names prefixed "own."."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from the ``state()`` of this or another worker, after ``begin(agreed)``. "own." entries may be missing.

        Raises ``IntegrityError`` for another name, shape or dtype, or a value that is not finite.
        """


class WholeSwarm:
    """Every worker averages with every other, all parameters in every round."""

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


class OuterMethod(WholeSwarm):
    """Workers take inner steps from the outer weights and contribute how far they came: Δ = θ - θ_i.

    After a discarded round a worker keeps the way it came: its next contribution covers both rounds.
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

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self._state)

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        check_state(state, self._state)
        self._state |= state


def check_state(state: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> None:
    """Raise ``IntegrityError`` unless ``state`` has the names, shapes and dtypes of ``like``, and finite values.

    Names with the prefix "own." may be missing.
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
