"""Hosts of the simulated swarm that give wrong outputs, all of them finite, or say wrong things about them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from swarmnet_node.node import Hosting
from tests.support.swarm_lab import Lab

THREE_OF_EACH = {
    name + each: span for name, span in (("a", (0, 2)), ("b", (2, 4)), ("c", (4, 6))) for each in "123"
}


def rolled(outputs: torch.Tensor) -> torch.Tensor:
    """As large as the true ones, and wrong."""
    return torch.roll(outputs, 1, dims=-1)


class LyingStage:
    """A stage whose every output is what ``lie`` makes of the true one."""

    def __init__(self, stage: Any, lie: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._stage = stage
        self._lie = lie

    def part(self, start: int, end: int) -> "LyingStage":
        return LyingStage(self._stage.part(start, end), self._lie)

    def forward(self, rows: Any) -> list[torch.Tensor]:
        return [self._lie(outputs) for outputs in self._stage.forward(rows)]

    def run_sequences(self, *arguments: Any) -> torch.Tensor:
        return self._lie(self._stage.run_sequences(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


def lying(hosting: Hosting, lie: Callable[[torch.Tensor], torch.Tensor] = rolled) -> Hosting:
    """A node that lies in all it computes."""
    load = hosting.load
    loaded: Any = lambda start, end: LyingStage(load(start, end), lie)  # noqa: E731
    return dataclasses.replace(hosting, load=loaded)


async def start(lab: Lab, spans: Mapping[str, tuple[int, int]], liars: Sequence[str] = ()) -> None:
    """Nodes for these spans; ``liars`` among them lie."""
    for name, span in spans.items():
        hosting = lab.hosting(span)
        await lab.start(name, lying(hosting) if name in liars else hosting)
