"""Data-parallel training, the baseline: workers average gradients before every optimizer step.

g <- mean_i g_i(θ); θ <- Optimizer(θ, g), where g_i is worker i's gradient.
"""

import torch

from swarmnet_protocols.training.methods.base import AllToAll, Average, Kind, Settings


class AllReduceSettings(Settings):
    """This method has no settings."""


class AllReduce(AllToAll):
    """Every worker's own optimizer steps on the mean gradient.

    All workers have equal parameters and equal optimizer state. The vector of ``begin`` is the
    worker's weights, so ``agreed`` returns them after each optimizer step.
    """

    kind: Kind = "gradients"
    name = "allreduce"
    codec = "float32"
    steps_per_round = 1
    overlap_steps = 0

    def __init__(self, settings: AllReduceSettings) -> None:
        super().__init__()

    def contribution(self, round: int, parameters: torch.Tensor) -> torch.Tensor:
        return parameters

    def apply(self, round: int, parameters: torch.Tensor, average: Average | None) -> torch.Tensor:
        """Return the mean gradient.

        After a discarded round it is zero, and the worker takes no step.
        """
        return torch.zeros_like(parameters) if average is None else average.values
