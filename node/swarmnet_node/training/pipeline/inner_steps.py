"""The inner steps of a later stage's worker, in jobs whose methods average parameters.

A worker steps on the microbatches that pass through it, whoever sent them. One inner step:

1. Up to ``share`` microbatches take a place. Each keeps it from its forward to its backward pass.
2. When all have given a gradient, the worker takes the step, and the next ones get a place.

So the weights never change between the two passes of a microbatch, and every gradient is exact. A
microbatch whose later worker failed gives its place back. It is computed again when it returns.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from swarmnet_node.training.pipeline.stage_passes import StagePasses
from swarmnet_node.training.pipeline.turns import Turns
from swarmnet_node.training.replica import NO_STEPS, combined
from swarmnet_node.training.steps.trainer import StepReport
from swarmnet_protocols.machine.aio import News
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.wire import refusal_pb2

CLOSED_S = 2.0
"""Seconds that a microbatch waits for a worker that averages. With less, its origin asks again and
again. With more, it is late for another worker of the stage."""
IDLE_S = 2.0
"""Seconds that a worker without a microbatch waits at the end of a round. With less, a worker that
is late hurries through rounds. With more, others of its stage wait for it."""


class InnerSteps:
    """The inner steps of one worker, and the places in them."""

    def __init__(self, passes: StagePasses, turns: Turns, news: News) -> None:
        self._passes = passes
        self._turns = turns
        self._news = news
        self._share = 1
        self._taken = 0
        self._placed = 0
        self.is_open = False
        """True while microbatches get places."""

    async def run(
        self, round: int, first: int, end: int | None, share: int, is_over: Callable[[], bool]
    ) -> StepReport:
        """Take the inner steps [first, end) of a round, or fewer if it ``is_over``.

        ``end`` None: the round ends with these steps. What remains then makes a smaller step.
        ``share``: the microbatches of a step.
        """
        if not first:
            self._taken = 0
            await self._turns.run(self._passes.restart)
        self._share, self.is_open, report = share, True, NO_STEPS
        try:
            await self._news.tell()
            while not is_over() and (end is None or self._taken < end):
                await self._news.until(lambda: self._is_full() or is_over())
                if self._is_full():
                    report = combined(report, await self._step(round))
            if not report.tokens and not first:  # this worker is late, or nobody needed it
                await self._news.until(self._is_full, IDLE_S)
        finally:
            self.is_open = False
            await self._news.tell()
        await self._news.until(lambda: not self._placed)
        if self._is_full() or (end is None and self._passes.count):
            report = combined(report, await self._step(round))
        return report

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place in the next step. Raises ``Refusal`` while this worker averages."""
        await self._news.until(lambda: self.is_open, CLOSED_S)
        await self._news.until(lambda: not self.is_open or self._has_room())
        if not self.is_open:
            raise Refusal(refusal_pb2.REASON_OVERLOADED, "this worker averages", 1.0)
        self._placed += 1
        try:
            yield
        finally:
            self._placed -= 1
            await self._news.tell()

    def _has_room(self) -> bool:
        return self._passes.count + self._placed < self._share

    def _is_full(self) -> bool:
        return self._passes.count >= self._share and not self._placed

    async def _step(self, round: int) -> StepReport:
        taken, self._taken = self._taken, self._taken + 1
        report = await self._turns.run(lambda: self._passes.step(round, taken))
        await self._news.tell()
        return report
