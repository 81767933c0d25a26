"""The training of a round, up to the contribution to its exchange.

1. Inner steps. With overlap, the exchange of the round before ends between them.
2. The contribution, computed from the state after the last step.

In a job with stages, the workers of all stages do the steps together.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from swarmnet_node.owner.given import Given
from swarmnet_node.training.pipeline.stage_part import StagePart
from swarmnet_node.training.pipeline.turns import Compute
from swarmnet_node.training.replica import NO_STEPS, Replica, combined
from swarmnet_node.training.steps.trainer import StepReport
from swarmnet_protocols.training.codecs.values import Values
from swarmnet_protocols.training.pacing import StepLimit, WorkerPace
from swarmnet_protocols.training.state_transfer import StateServer


@dataclass
class RoundTraining:
    """Trains the rounds of one worker. ``stages``: its part in a job with stages."""

    replica: Replica
    pace: WorkerPace
    stages: StagePart | None
    states: StateServer
    given: Given
    sample_tokens: int
    """Tokens of a sequence."""
    compute: Compute

    async def train(
        self, round: int, slot: int, finish: Callable[[], Awaitable[bool]] | None
    ) -> tuple[Values | None, StepReport]:
        """Train one round. Return its contribution, or None if this worker loses its slot.

        ``finish`` ends the exchange of the round before, and returns whether this worker keeps its
        slot. None if no exchange is pending.
        """
        method, report = self.replica.method, NO_STEPS
        if self.stages is not None and method.kind == "gradients":
            gradient = self.stages.pipeline.gradient(round, slot)
            if not await self.stages.during(round, gradient):
                return None, NO_STEPS
        if method.kind == "parameters":
            steps = self.pace.steps
            steps_s = self.pace.steps_s(steps)
            if steps_s and not method.shares_weights:
                self.states.expect(round, steps_s)
            overlapped = 0 if finish is None else self.pace.overlap
            done = await self._steps(round, slot, 0, overlapped)
            if done is not None and overlapped < steps:
                report = done
                keeps_slot = finish is None or await finish()
                done = await self._steps(round, slot, overlapped, steps, report) if keeps_slot else None
            if done is None:
                return None, NO_STEPS
            report = combined(report, done)
        contribution, more = await self.compute(partial(self.replica.contribution, round, slot))
        self._count(more)
        return contribution, combined(report, more)

    async def _steps(
        self, round: int, slot: int, first: int, end: int, before: StepReport = NO_STEPS
    ) -> StepReport | None:
        """Run the inner steps [first, end) of a round. Return None if this worker is behind.

        ``before``: the work of the steps before the exchange. Its time counts.
        """
        if end == first:
            return NO_STEPS
        if self.stages is not None:
            steps = self.stages.pipeline.steps(round, slot, first, end)
            report = await self.stages.during(round, steps)
        else:
            whole = self.pace.limit
            limit = StepLimit(max(1, whole.least - before.steps), whole.most_s - before.seconds)
            before_s = self.pace.spent.compute
            report = await self.compute(partial(self.replica.steps, round, slot, first, end, limit))
            self.pace.stepped(report.steps, self.pace.spent.compute - before_s)
        self._count(report or NO_STEPS)
        return report

    def _count(self, report: StepReport) -> None:
        trainer = self.replica.trainer
        gpu_s = report.seconds if trainer.is_on_accelerator else 0.0
        self.given.trained(report.tokens, self.sample_tokens, trainer.blocks, gpu_s)
