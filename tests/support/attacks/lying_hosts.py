"""Hosts of the simulated swarm that give wrong but finite outputs, or report wrong ones."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swarmnet_node.hosted_blocks import Hosting
from tests.support.attacks.forgers import Forger, rolled
from tests.support.swarm.swarm_lab import Lab

THREE_OF_EACH = {
    name + each: span for name, span in (("a", (0, 2)), ("b", (2, 4)), ("c", (4, 6))) for each in "123"
}


class LyingStage:
    """A stage that passes each of its outputs through ``lie``."""

    def __init__(self, stage: Any, lie: Forger, precision: str | None = None) -> None:
        self._stage = stage
        self._lie = lie
        self.precision: str = stage.precision if precision is None else precision

    def part(self, start: int, end: int) -> "LyingStage":
        return LyingStage(self._stage.part(start, end), self._lie, self.precision)

    def forward(self, rows: Any) -> list[torch.Tensor]:
        return [self._lie(outputs) for outputs in self._stage.forward(rows)]

    def run_sequences(self, *arguments: Any) -> torch.Tensor:
        return self._lie(self._stage.run_sequences(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


def lying(hosting: Hosting, lie: Forger = rolled, *, precision: str | None = None) -> Hosting:
    """A node whose outputs are all wrong, or right in ``precision`` and wrong in that of others."""
    load = hosting.load
    loaded: Any = lambda start, end: LyingStage(load(start, end), lie, precision)  # noqa: E731
    return dataclasses.replace(hosting, load=loaded)


async def start(
    lab: Lab, spans: Mapping[str, tuple[int, int]], liars: Sequence[str] = (), lie: Forger = rolled
) -> None:
    """Start nodes for these spans; the ``liars`` among them lie."""
    for name, span in spans.items():
        hosting = lab.hosting(span)
        await lab.start(name, lying(hosting, lie) if name in liars else hosting)
