"""SparseLoCo (Sarfi et al., arXiv 2508.15706): the largest of what was not sent yet, and no outer momentum."""

import torch
from pydantic import Field

from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.methods.arithmetic import add_scaled
from swarmnet_protocols.training.methods.base import Average, OuterMethod, Settings


class SparseLoCoSettings(Settings):
    sync_every: int = Field(default=30, ge=1)
    """H, inner steps between exchanges."""
    decay: float = Field(default=0.95, ge=0, le=1)
    """Of the error that is fed back."""
    outer_lr: float = Field(default=1.0, gt=0)


class SparseLoCo(OuterMethod):
    """e_i <- decay e_i + Δ_i; q_i = Q(TopK(e_i)); e_i <- e_i - q_i; θ <- θ - α mean_i q_i.

    The contribution is q_i, as it will be decoded: the codec gives it back unchanged.
    """

    name = "sparseloco"
    codec = "topk"
    state_names = ("own.residual",)

    def __init__(self, settings: SparseLoCoSettings) -> None:
        super().__init__(settings.sync_every)
        self._settings = settings
        self._unsent: torch.Tensor | None = None

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        wanted = self._state["own.residual"] * self._settings.decay + (self._weights - parameters)
        codec = get_codec(self.codec)
        sent = codec.decode(codec.encode(wanted), len(wanted))
        self._unsent = wanted - sent
        return sent

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        unsent, self._unsent = self._unsent, None
        if average is None:
            return parameters.clone()
        if unsent is not None:
            self._state["own.residual"] = unsent
        self._weights = add_scaled(self._weights, -self._settings.outer_lr, average.values)
        return self._weights.clone()
