"""CO2 (Sun et al., arXiv 2401.16265, algorithm 1): the exchange overlaps the next inner steps.

Outer updates are therefore one round late: m <- clip(μ m + (x - x̄)/Λ, ±φ); x <- x - α m.

- x: outer weights. x̄: mean of the workers' parameters Λ rounds ago.
- m: outer momentum. μ: ``momentum``. α: ``outer_lr``.
- Λ: staleness in rounds (staleness gap penalty).
- φ: ``clip`` (outer momentum clipping).
"""

import re
from collections.abc import Mapping

import torch
from pydantic import Field

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.training.methods.arithmetic import add_scaled
from swarmnet_protocols.training.methods.base import Average, OuterMethod, Settings, check_state

MAX_BASES = 8
"""Most rounds in flight in a restored state."""


class CO2Settings(Settings):
    sync_every: int = Field(default=8, ge=1)
    """τ, inner steps between exchanges. One exchange must complete in this time.

    With 48, a worker sends a sixth of the bytes, and the loss in the standard task is 3 % higher at
    the end.
    """
    outer_lr: float = Field(default=0.5, gt=0)
    """α. The inner learning rate must be larger than with other methods.

    If all rounds pull in the same direction, x moves by only α/(1 + α - μ) of their steps. The
    standard task needs three times the inner learning rate.
    """
    momentum: float = Field(default=0.3, ge=0, lt=1)
    """μ."""
    clip: float = Field(default=1.0, gt=0)
    """φ, the largest element of the outer momentum."""


class CO2(OuterMethod):
    """CO2 with a measured Λ: the number of contributions before ``apply``, at least one.

    Workers stay equal if all of them apply the average of a round at the same point of the run:
    after their contribution to the same later round. The contribution to round r is x(r) - x_i(r),
    so x(r) is kept until round r is applied.
    """

    name = "co2"
    codec = "float32"
    state_names = ("momentum",)

    def __init__(self, settings: CO2Settings) -> None:
        super().__init__(settings.sync_every)
        self.overlap_steps = settings.sync_every
        self._settings = settings
        self._bases: dict[int, torch.Tensor] = {}

    def begin(self, parameters: torch.Tensor) -> None:
        super().begin(parameters)
        self._bases = {}

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        self._bases[round] = self._weights
        return super().contribution(round, parameters)

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        late = max(1, max(self._bases, default=round) - round)
        base = self._bases.get(round, self._weights)
        self._bases = {later: weights for later, weights in self._bases.items() if later > round}
        # Workers that have just contributed to the next round have stored its base, x(round + 1). A
        # worker that did not contribute stores it here, so that the next update is the same on all.
        self._bases.setdefault(round + 1, self._weights)
        if average is None:
            return parameters
        behind = (self._weights - base) + average.values
        momentum = add_scaled(self._state["momentum"] * self._settings.momentum, 1 / late, behind)
        momentum = momentum.clamp(-self._settings.clip, self._settings.clip)
        self._state["momentum"] = momentum
        self._weights = add_scaled(self._weights, -self._settings.outer_lr, momentum)
        return self._weights

    def state(self) -> dict[str, torch.Tensor]:
        return super().state() | {f"base.{round}": base for round, base in self._bases.items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        bases = {name: values for name, values in state.items() if re.fullmatch(r"base\.\d{1,10}", name)}
        if len(bases) > MAX_BASES:
            raise IntegrityError(f"outer state of {len(bases)} rounds in flight, more than {MAX_BASES}")
        check_state(bases, dict.fromkeys(bases, self._weights))
        super().restore({name: values for name, values in state.items() if name not in bases})
        self._bases = {int(name.removeprefix("base.")): values for name, values in bases.items()}
