"""One worker's part in a job with stages: its pipeline, and its looks at all stages.

1. ``background`` keeps a copy of the next stage, and moves the worker to a stage that needs it.
2. Before a round, ``take_up`` finds out whether the other stages went on without this one.
3. ``during`` does the work of a round. While it waits for other stages, it looks at them.
4. ``hand_over`` waits until another worker has the state of this stage.

Each look reads the directory (``StageWorkers``), asks workers, and calls ``decide``.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from swarmnet_node.training.pipeline.pipeline import Pipeline
from swarmnet_node.training.pipeline.stage_choice import StageMover
from swarmnet_node.training.pipeline.stage_copies import StageCopies
from swarmnet_node.training.state_keeper import StateKeeper
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import all_of, cancel, persist, within
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import StageRecord
from swarmnet_protocols.training.pipeline.stage_decisions import (
    Decision,
    Restore,
    StagesView,
    decide,
    job_round,
)

T = TypeVar("T")

LOOK_S = 5.0
"""Seconds between two looks at the stages, while a worker waits for other stages. With less, it
asks its stage too often. With more, it notices late that the stage has gone on without it."""
FEW_MATES = 2
"""Other workers of its stage that a worker asks in a look. With more, a large stage has more
messages. With less, two workers that lag notice it later."""
HAND_OVER_S = 180.0
"""Seconds that the only worker of a stage waits until another one has its state. With more, its
owner waits longer for a worker that may never come. With less, a large state is not copied in
time."""
_ONLY_WORKER = "this is the only worker of its stage; it leaves as soon as another one has its state"
_NO_EVALUATION = "the other stages did not compute it in time"
_NO_TAKER = "no other worker took the state of this stage; start this machine again to go on with it"


@dataclass
class StagePart:
    """The part of one worker in a job of ``rounds`` rounds."""

    pipeline: Pipeline
    keeper: StateKeeper
    copies: StageCopies
    mover: StageMover | None
    """Decides when the worker moves to another stage. None: it stays."""
    stop: Callable[[], None]
    """Makes the worker leave after its present round."""
    rounds: int
    next_stage: int | None = None
    """The stage to which the worker moves. None until it moves."""
    leaves: bool = False
    """True while the worker waits until another one has its stage's state."""
    is_over: bool = False
    """True if the job ended without the worker."""
    is_stranded: bool = False
    """True while the other stages went on without this worker's stage."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker leaves."""
    told: str = ""
    """The reason why the stage cannot go on, as it was told last."""

    @property
    def stage(self) -> int:
        return self.copies.trainer.stage

    @property
    def about(self) -> dict[str, Any]:
        """The fields about the worker's stage in events."""
        return {
            "stage": self.stage,
            "stages": self.pipeline.job.stages,
            "blocks": list(self.copies.trainer.block_range),
        }

    @property
    def stays(self) -> bool:
        """True if the worker does not move to another stage now: its copy would end."""
        return self.mover is None or self.copies.has_copy

    def background(self) -> Iterable[Coroutine[Any, Any, object]]:
        """Yield what runs during the rounds."""
        yield persist("copies of a stage", self.copies.keep)
        if self.mover is not None:
            yield self._move_when_needed(self.mover)

    async def during(self, round: int, work: Coroutine[Any, Any, T]) -> T | None:
        """Do the ``work`` of a round together with the workers of the other stages.

        Return None if this worker is behind. It looks itself, because nobody tells it.
        """
        working = asyncio.create_task(work, name="pipeline")
        try:
            while not (await asyncio.wait([working], timeout=LOOK_S))[0]:
                if not await self.goes_on(round):
                    return None
            return working.result()
        finally:
            await cancel(working)

    async def goes_on(self, round: int) -> bool:
        """Look at the stages, because this worker waits for them. Return whether it goes on in
        ``round``.

        While an origin talks to this worker, the origin waits for it, so it does not lag. If
        methods average parameters, stages do not wait for each other at the end of a round. A lag
        of one round is then usual.
        """
        may_lag = math.inf if self.pipeline.hears_origins else 0 if self.pipeline.is_in_step else 1
        decision = await self._look(round, may_lag, waited=True)
        if decision is Decision.END:
            self.end_if_over(round)
        self.is_stranded = decision is Decision.WAIT or isinstance(decision, Restore)
        return decision is Decision.KEEP

    async def take_up(self, round: int) -> int | None:
        """Return the round in which this worker goes on: where the job stands, if no other worker
        of its stage is there.

        None if nobody has the state of the stage. The worker then asks again.
        """
        try:
            decision = await self._look(round, 0, waited=self.is_stranded)
            if decision is Decision.WAIT:
                raise Unreachable(
                    f"nobody has the state of stage {self.stage}; "
                    "start a machine that trained this stage, with its data directory"
                )
            if isinstance(decision, Restore):
                holders = [each.worker for each in self._copies() if each.position == decision.copy]
                await self.keeper.restore(decision, holders)
                round = decision.round
        except SwarmnetError as error:
            if self.told != str(error):
                self.told = str(error)
                self.keeper.emit("stage_lost", **self.about, reason=self.told)
            await asyncio.sleep(LOOK_S)
            return None
        self.is_stranded, self.told = False, ""
        return round

    def end_if_over(self, round: int) -> bool:
        """Stop if the other workers have left after the last round. Return whether they have."""
        if not self.pipeline.job.workers.have_left(self.rounds):
            return False
        text = f"the job ended without this worker, which has its stage after {round} rounds"
        self.keeper.emit("notice", text=text)
        self.is_over = True
        self.stop()
        return True

    async def evaluate(
        self, round: int, contributors: Sequence[PeerId], most_s: float
    ) -> tuple[float, int] | None:
        """Return the validation loss after a round, and its number of tokens.

        None in later stages, or if the evaluation took too long. Arguments as in
        ``Pipeline.evaluate``.
        """
        try:
            return await self.during(round + 1, self.pipeline.evaluate(round, contributors, most_s))
        except TimeoutError:
            self.keeper.emit("notice", text=f"round {round} has no validation loss: {_NO_EVALUATION}")
            return None

    async def stay(self, seconds: float) -> None:
        """Serve the stage after the last round, because no other machine may have it."""
        if seconds > 0:
            self.keeper.emit("finished", round=self.rounds, rounds=self.rounds, stays_s=seconds)
            await within(seconds, self.stopped.wait())

    async def hand_over(self, round: int, announce: Callable[[], Awaitable[object]]) -> None:
        """Wait until another worker has the state of this stage, if the job goes on.

        ``announce``: tells the directory that this worker waits.
        """
        if self.is_over or not 0 < round < self.rounds:
            return
        try:
            async with asyncio.timeout(HAND_OVER_S):
                while not await self._is_handed_over():
                    if not self.leaves:
                        self.leaves = True
                        self.keeper.emit("notice", text=_ONLY_WORKER)
                        await announce()
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            self.keeper.emit("notice", text=_NO_TAKER)

    # ---- looks ----------------------------------------------------------------------------------

    async def _look(self, round: int, may_lag: float, *, waited: bool) -> Decision | Restore:
        workers = self.pipeline.job.workers
        await self.keeper.workers.refresh(at_once=not waited)
        await workers.refresh()
        mates = await self._mates(round)
        view = StagesView(
            round=round,
            has_trained=self.keeper.replica.revision > 0,
            waited=waited,
            mates=mates,
            job_round=job_round(
                [[each.position.round for each in at if each.trains] for at in workers.records], self.stage
            ),
            copies=[each.position for each in self._copies()],
            may_lag=may_lag,
            is_over=workers.have_left(self.rounds),
        )
        decision = decide(view)
        if decision is Decision.WAIT or isinstance(decision, Restore):  # records may be 20 s old
            await workers.refresh(0.0)
            there = await all_of(*map(self._others, range(self.pipeline.job.stages)))
            now = job_round([[each.round for each in at.values()] for at in there], self.stage)
            decision = decide(replace(view, job_round=now, copies=[each.position for each in self._copies()]))
        return decision

    async def _mates(self, round: int) -> list[int]:
        """Return the rounds of this stage's other workers that answer.

        Ask a few. If one of them is ahead or silent, ask all.
        """
        ask, mates = self.keeper.matchmaking.positions, self.keeper.workers.alive()
        few = self.pipeline.job.standing.rng.sample(mates, min(FEW_MATES, len(mates)))
        found = await ask(few)
        if len(few) < len(mates) and (
            len(found) < len(few) or any(each.round > round for each in found.values())
        ):
            found = await ask(mates)
        return [each.round for each in found.values()]

    async def _others(self, stage: int) -> dict[PeerId, WorkerPosition]:
        """Return the positions of the workers of another stage."""
        job = self.pipeline.job
        return {} if stage == self.stage else await job.positions(stage, job.workers.trained_by(stage))

    def _copies(self) -> list[StageRecord]:
        """Return the copies of this stage at workers of other stages."""
        records = self.pipeline.job.workers.records[self.stage]
        return [each for each in records if each.copy and each.worker.addresses]

    async def _is_handed_over(self) -> bool:
        here, stage, job = self.keeper.matchmaking.position, self.stage, self.pipeline.job
        with suppress(SwarmnetError):  # the directory does not answer; the next look asks again
            await job.workers.refresh(0.0)
            if any(each.position == here for each in self._copies()):
                return True
            others = [each for each in job.workers.trained_by(stage) if each.peer != job.workers.me]
            return here in (await job.positions(stage, others)).values()
        return False

    async def _move_when_needed(self, mover: StageMover) -> None:
        stage, pipeline = self.stage, self.pipeline
        move = await mover.decide(
            pipeline.job.workers, stage, lambda: pipeline.batch_s, lambda: self.copies.has_copy
        )
        self.next_stage = move.start
        self.keeper.emit("moving", stage=stage, to=move.start, reason=move.reason)
        self.stop()
