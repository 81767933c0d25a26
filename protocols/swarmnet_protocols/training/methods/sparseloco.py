"""SparseLoCo (Sarfi et al., arXiv 2508.15706, section 3).

Workers send top-k pseudo-gradients with error feedback. There is no outer momentum.

e_i <- ρ e_i + Δ_i; q_i = Q(TopK(e_i)); e_i <- e_i - q_i; θ <- θ - α mean_i q_i.

Δ_i: pseudo-gradient of worker i; e_i: its residual; Q: two-bit quantization (``codecs/topk.py``);
ρ: ``decay``; α: ``outer_lr``.
"""

import torch
from pydantic import Field

from swarmnet_protocols.training.methods.arithmetic import add_scaled, in_parts
from swarmnet_protocols.training.methods.base import Average, OuterMethod, Settings


class SparseLoCoSettings(Settings):
    sync_every: int = Field(default=30, ge=1)
    """H, inner steps between exchanges."""
    decay: float = Field(default=0.95, ge=0, le=1)
    """ρ, factor applied to the residual in each round."""
    outer_lr: float = Field(default=3.0, gt=0)
    """α, usually above 1.

    A coordinate that only one of M workers sends moves by an M-th of its value. α > 1 compensates
    for this.
    """


class SparseLoCo(OuterMethod):
    """Contributes Δ_i.

    ``ErrorFeedback`` keeps the residual, as for every lossy codec, here with a decay.
    """

    name = "sparseloco"
    codec = "topk"

    def __init__(self, settings: SparseLoCoSettings) -> None:
        super().__init__(settings.sync_every)
        self.feedback_decay = settings.decay
        self._outer_lr = settings.outer_lr

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        if average is None:
            return parameters
        for part in in_parts(len(self._weights)):
            self._weights[part] = add_scaled(self._weights[part], -self._outer_lr, average.values[part])
        return self._weights
