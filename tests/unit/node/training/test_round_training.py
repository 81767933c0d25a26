"""The inner steps of a round."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from swarmnet_node.training.replica import NO_STEPS
from swarmnet_node.training.round_training import RoundTraining
from swarmnet_node.training.steps.trainer import StepReport
from swarmnet_protocols.training.pacing import WorkerPace


def test_the_time_of_a_round_counts_on_after_an_exchange() -> None:
    limits: list[tuple[int, float]] = []

    def steps(round: int, slot: int, first: int, end: int, limit: tuple[int, float]) -> StepReport:
        limits.append(limit)
        return StepReport(1.0, 8, 10.0, end - first)

    async def compute(function: Callable[[], Any]) -> Any:
        return function()

    async def finish() -> bool:
        return True

    replica: Any = SimpleNamespace(
        method=SimpleNamespace(kind="parameters", shares_weights=True),
        trainer=SimpleNamespace(is_on_accelerator=False, blocks=1),
        steps=steps,
        contribution=lambda *_: (None, NO_STEPS),
    )
    nobody: Any = SimpleNamespace(trained=lambda *_: None)
    pace = WorkerPace(96, 48, 1.0)
    pace.rounds_s = [96.0, 20.0]
    training = RoundTraining(replica, pace, None, nobody, nobody, 8, compute)
    _, report = asyncio.run(training.train(0, 0, finish))
    assert report.steps == 20
    assert limits == [(6, 26.0), (1, 16.0)]
