"""Plain data parallelism, the yardstick: gradients are averaged before every optimizer step."""

import torch

from swarmnet_protocols.training.methods.base import Average, Kind, Settings, WholeSwarm


class AllReduceSettings(Settings):
    """None."""


class AllReduce(WholeSwarm):
    """Every worker's own optimizer steps on the mean gradient, from equal parameters with equal optimizer state.

    The parameters are the worker's: it calls ``begin`` with them after each optimizer step, for ``agreed`` to name them.
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
        """The mean gradient; zeros after a discarded round, when the worker takes no step."""
        return torch.zeros_like(parameters) if average is None else average.values
