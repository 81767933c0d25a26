"""A training worker, from its start to the last round of its job.

``Worker.run`` resumes from the newest checkpoint and repeats rounds until the job is done. One
round:

1. Train (``round_training.py``): run the inner steps on this worker's slot of the data. With
   overlap, the exchange of the previous round ends during these steps.
2. Finish the exchange of the previous round: apply its average, publish the new shared state,
   evaluate and copy a checkpoint, which is written during the next steps.
3. Match: form a group with the other workers in this round (``matchmaking``). Its roster has the
   slots of the next round.
4. Exchange: average the contributions of the group in the background (``exchanges``).

Between rounds all workers hold the same shared state, and compare its hash. A worker is out of sync
if its group is at a later round or has another state. It then asks the voters for their round and
state, and downloads the state that most of them have. Now it has no slot, like a new worker: it
joins one exchange without a contribution to get one.

``state_keeper.py`` saves and fetches states. The protocols between workers are in
``swarmnet_protocols.training``. All computation is in ``replica.py``.
"""

import asyncio
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from swarmnet_node.owner.given import Given
from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.events import EventHandler, RoundMeter, exchange_fields
from swarmnet_node.training.exchanges import Exchanges
from swarmnet_node.training.known_workers import KnownWorkers
from swarmnet_node.training.pipeline.pipeline import Pipeline
from swarmnet_node.training.pipeline.stage_choice import StageMover
from swarmnet_node.training.pipeline.stage_copies import StageCopies
from swarmnet_node.training.pipeline.stage_part import StagePart
from swarmnet_node.training.pipeline.stage_workers import WorkerStanding
from swarmnet_node.training.replica import NO_STEPS, Replica
from swarmnet_node.training.round_training import RoundTraining
from swarmnet_node.training.state_keeper import StateKeeper
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import StepReport, Trainer
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement, Announcer
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import in_background, loop_time, persist, race
from swarmnet_protocols.models import Progress
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.training.codecs.values import Values
from swarmnet_protocols.training.job_records import job_announcement, worker_announcement
from swarmnet_protocols.training.jobs import SealedJob, open_job
from swarmnet_protocols.training.matchmaking.matchmaking import NoPlace
from swarmnet_protocols.training.matchmaking.positions import OutOfSync
from swarmnet_protocols.training.methods import Average
from swarmnet_protocols.training.pacing import WorkerPace
from swarmnet_protocols.training.pipeline.microbatches import BoundaryBytes
from swarmnet_protocols.training.pipeline.stages import stage_key
from swarmnet_protocols.training.rounds.terms import Slice

P = ParamSpec("P")
T = TypeVar("T")

ANNOUNCE_S = 20.0
"""Seconds between announcements in the directory."""
LAST_WORD_S = 2.0
"""Seconds in which a worker announces that it leaves. With more, a worker ends later when the
directory does not answer. With less, a slow directory misses the announcement."""
SPARE_S = 5.0
"""Seconds until a spare worker asks again for a place. With less, many spares keep the others busy.
With more, a place stays free for longer."""


@dataclass(frozen=True)
class WorkerDependencies:
    """Network, threads and random source of a worker. Tests replace them."""

    transport: Transport
    directory: Directory
    executor: Executor
    """One thread, which runs all torch computation."""
    codec_executor: Executor
    """A second thread, which encodes and decodes contributions during inner steps."""
    writer: Executor
    """A third thread, which writes checkpoints during inner steps."""
    rng: random.Random
    sign: Callable[[bytes], bytes]
    """Signs with the key of the transport's peer id."""
    progress: Progress = lambda *_: None
    stay_s: float = 0.0
    """Seconds that a worker of a stage stays after the last round, so that others can collect the
    model."""
    mover: StageMover | None = None
    """Decides when the worker moves to another stage. None: it stays."""
    available_bytes: Callable[[], int] = lambda: sys.maxsize
    """Returns the memory that this worker may still take within its owner's limit."""
    given: Given = field(default_factory=Given)
    """Totals of the work of this machine since its data directory exists."""


class Worker:
    """One worker of one job. ``run`` may be called once."""

    def __init__(
        self,
        dependencies: WorkerDependencies,
        sealed: bytes,
        trainer: Trainer | StageTrainer,
        checkpoints: CheckpointStore,
        handler: EventHandler,
    ) -> None:
        """``sealed`` is the job in its published form; ``handler`` receives the worker's events.

        With the trainer of a stage, the worker averages with the workers of that stage only.
        """
        opened = open_job(sealed)
        self.job_id = opened.id
        self.round = 0
        self.stopping = False
        self.is_pausing = False
        self._dependencies = dependencies
        self._transport = dependencies.transport
        self._job = opened.job
        self._sealed = sealed
        self._replica = Replica(opened.job, trainer)
        self._method = self._replica.method
        self._checkpoints = checkpoints
        self._handler = handler
        self._slot: int | None = None
        """This worker's share of the data in the next round. None until a roster assigns one."""
        self._late = NO_STEPS
        """The work of a contribution that came too late for its round. It counts in the next."""
        self._spare = False
        """True while the job has enough workers, and this worker waits for a place."""
        method = self._method
        self._pace = WorkerPace(method.steps_per_round, method.overlap_steps, trainer.step_s)
        self._interrupted: asyncio.Future[SwarmnetError | None] = asyncio.get_running_loop().create_future()
        """Ends ``run`` at once: with an error, or with None for a pause."""
        self._group_id = self.job_id
        """The id under which workers that average together meet: the job's, or a stage's."""
        if isinstance(trainer, StageTrainer):
            self._group_id = stage_key(bytes.fromhex(self.job_id), trainer.stage).hex()
        self._workers = KnownWorkers(
            dependencies.directory,
            self._group_id,
            self._transport.peer_id,
            has_trained=lambda: self._replica.revision > 0,
        )
        self._exchanges = Exchanges(
            self._transport,
            bytes.fromhex(self._group_id),
            opened.job,
            self._replica,
            self._workers,
            self._pace,
            dependencies.sign,
            dependencies.codec_executor,
            self._exclude,
            lambda: self._round_s,
        )
        self._matchmaking = self._exchanges.matchmaking
        self._keeper = StateKeeper(
            self.job_id,
            self._replica,
            checkpoints,
            self._workers,
            self._matchmaking,
            self._exchanges.states,
            self._pace,
            self._compute,
            dependencies.writer,
            dependencies.progress,
            self._emit,
        )
        self._stages: StagePart | None = None
        """This worker's part in a job with stages."""
        if isinstance(trainer, StageTrainer):
            self._stages = self._stage_part(opened, trainer)
        self._training = RoundTraining(
            self._replica,
            self._pace,
            self._stages,
            self._exchanges.states,
            dependencies.given,
            opened.job.data.sequence_length,
            self._compute,
        )
        traffic = BoundaryBytes() if self._stages is None else self._stages.pipeline.job.traffic
        self._meter = RoundMeter(self._pace, traffic)

    def _stage_part(self, opened: SealedJob, trainer: StageTrainer) -> StagePart:
        given = self._dependencies
        standing = WorkerStanding(
            given.sign,
            self._workers.excluded,
            self._exclude,
            given.rng,
            has_place=lambda: self._slot is not None,
            emit=self._emit,
        )
        pipeline = Pipeline(opened, trainer, self._transport, given.directory, self._compute, standing)
        copies = StageCopies(pipeline.job, trainer, given.directory, self._keeper, given.available_bytes)
        return StagePart(pipeline, self._keeper, copies, given.mover, self.stop, opened.job.job.rounds)

    @property
    def next_stage(self) -> int | None:
        """The stage to which this worker moves. Its caller then starts a worker of that stage."""
        return None if self._stages is None else self._stages.next_stage

    async def run(self) -> None:
        """Train until the last round of the job, ``stop`` or ``pause``. Then save a checkpoint.

        Raises the error given to ``fail``, and ``OutOfResources`` if the disk is full.
        """
        self.round = await self._keeper.resume()
        await self._exchanges.serve()
        await self._advance()
        if self._stages is not None:
            await self._stages.pipeline.serve()
        await self._tell_privacy(None)
        self._meter.begin()
        async with self._exchanges.averager:
            self._emit(
                "ready",
                peer_id=self._transport.peer_id,
                addresses=list(self._transport.addresses()),
                job=self.job_id,
                name=self._job.job.name,
                round=self.round,
                rounds=self._job.job.rounds,
                parameters=self._replica.trainer.parameter_count,
                **({} if self._stages is None else self._stages.about),
            )
            dependencies = self._dependencies
            self._announcer = announcer = Announcer(
                dependencies.directory,
                dependencies.rng,
                self._announcements,
                ANNOUNCE_S,
                ending=partial(self._announcements, ending=True),
            )
            others = () if self._stages is None else self._stages.background()
            async with in_background(persist("the announcement", announcer.run), *others):
                try:
                    failure = await race(self._interrupted, self._run_rounds())
                    if self.is_pausing:
                        await self._leave_group()
                    if not self._interrupted.cancelled():
                        await self._save()
                        await self._keeper.written()
                    if failure is not None:
                        raise failure
                finally:
                    await self._exchanges.close()
                    if self._stages is not None:
                        await self._stages.pipeline.close()
            await announcer.withdraw(LAST_WORD_S)  # others then know that this worker is not lost
            if not self.is_pausing and self.next_stage is None:
                done = {"rounds": self._job.job.rounds, "revision": self._replica.revision}
                self._emit("done", round=self.round, **done)

    def stop(self) -> None:
        """Make ``run`` return after the current round."""
        self.stopping = True
        if self._stages is not None:
            self._stages.stopped.set()
            self._stages.pipeline.stop(self._job.exchange.deadline_s)

    def fail(self, error: SwarmnetError) -> None:
        """Make ``run`` save a checkpoint at once and raise ``error``."""
        if not self._interrupted.done():
            self._interrupted.set_result(error)

    def pause(self) -> None:
        """Make ``run`` leave the group, save a checkpoint and return, within an inner step.

        The steps of the present round are lost. An exchange has a moment to end.
        """
        if not self._interrupted.done():
            self.is_pausing = True
            self._interrupted.set_result(None)

    # ---- rounds ---------------------------------------------------------------------------------

    async def _run_rounds(self) -> None:
        while not self._is_done():
            try:
                await self._run_round()
                if self._is_done() or not self._method.overlap_steps:
                    # may set the round back; then the loop repeats it
                    await self._finish_exchange()
            except OutOfSync as out_of_sync:
                await self._continue_from(
                    await self._keeper.catch_up(out_of_sync, self.round, self._late.tokens)
                )
            except NoPlace as no_place:
                await self._wait_for_place(no_place)
        if self._stages is not None:
            await self._stages.pipeline.finish(self._job.exchange.deadline_s)
            await self._stages.hand_over(self.round, self._announcer.try_to_announce)
        if self.round < self._job.job.rounds:
            await self._matchmaking.leave()
        elif not self._method.shares_weights:
            await self._merge_replicas()
        await self._save()
        await self._keeper.written()
        if self._stages is not None and self.round >= self._job.job.rounds:
            await self._stages.stay(self._dependencies.stay_s)

    async def _leave_group(self) -> None:
        """Leave before the end of a round. No other worker waits for this one."""
        await self._matchmaking.leave()
        if await self._exchanges.ends_in_time():
            await self._finish_exchange()

    def _is_done(self) -> bool:
        return self.stopping or self.round >= self._job.job.rounds

    async def _run_round(self) -> None:
        """Run one round, up to the start of its exchange.

        Raises ``OutOfSync`` if the others are at another round or state. The contribution is then
        late.
        """
        contribution, report = None, NO_STEPS
        if self._stages is not None and (self._slot is None or self._stages.is_stranded):
            at = await self._stages.take_up(self.round)
            if at is None:
                return
            if at != self.round:
                await self._continue_from(at)
        looking = self._workers.refresh()
        late, self._late = self._late, NO_STEPS
        if late.tokens:
            await looking
            contribution, report = (await self._compute(self._replica.contribution, self.round, 0))[0], late
        elif self._slot is None:
            await looking
        else:  # read the directory during the inner steps
            await self._tell_privacy(self.round)
            finish = None if self._exchanges.pending_round is None else self._keeps_slot
            training = self._training.train(self.round, self._slot, finish)
            (contribution, report), _ = await asyncio.gather(training, looking)
            if contribution is None:
                self._slot = None
            if self._stages is not None and self._stages.pipeline.is_discarded(self.round):
                self.round += 1
                await self._apply(self.round - 1, None)
                return
            if self.stopping and self._slot is None:  # it leaves without a part in this round
                return
        await self._finish_exchange()
        if self.round and self._workers.is_new and self._method.shares_weights:
            # Workers that start together may begin in several groups.
            await self._continue_from(await self._keeper.compare(self.round))
        # The slot may have been lost above. Then the contribution comes from a state that the group
        # does not have.
        if self._slot is None and not late.tokens:
            contribution, report = None, NO_STEPS
        try:
            await self._join(contribution, report)
        except OutOfSync:
            if self._replica.keeps_progress:
                self._late = report
            raise

    async def _join(self, contribution: Values | None, report: StepReport) -> None:
        """Find the workers of this round, and start to average with them."""
        asked_s, exchange, weight = loop_time(), self._job.exchange, float(report.tokens)
        in_pairs = not self._method.shares_weights
        roster = await self._exchanges.form_group(weight, in_pairs=in_pairs)
        self._spare = False
        members = roster.members
        enough = len(members) >= exchange.min_workers
        self._slot = roster.slot(self._transport.peer_id) % exchange.max_workers if enough else None
        if self._stages is not None:
            self._stages.pipeline.divide([member.round_s for member in members])
        if contribution is None and in_pairs:
            loaded = await self._keeper.compare(self.round)
            await self._continue_from(loaded)
            if loaded is None and not enough:
                await self._wait_for_workers(len(members))
            return
        if not any(member.weight for member in members):
            # No member has trained: the group only assigns slots.
            if not enough:
                await self._wait_for_workers(len(members))
            elif contribution is not None and self._stages is not None:
                await self._stages.goes_on(self.round)  # the round may be over for the other stages
            return
        is_last = self.stopping or self.round + 1 >= self._job.job.rounds
        await self._exchanges.start(
            roster, contribution, report, round=self.round, asked_s=asked_s, is_last=is_last
        )
        self.round += 1

    async def _wait_for_workers(self, present: int) -> None:
        self._emit("waiting", round=self.round, workers=present)
        await asyncio.sleep(self._workers.pause_s())

    async def _wait_for_place(self, no_place: NoPlace) -> None:
        """Wait as a spare worker. Others take it up when somebody has left."""
        if not self._spare:
            most = self._job.exchange.max_workers
            self._emit("spare", round=self.round, workers=no_place.workers, max_workers=most)
        self._slot, self._spare = None, True
        await asyncio.sleep(SPARE_S)

    async def _tell_privacy(self, round: int | None) -> None:
        """Emit the epsilon with ``round``, which is about to be trained, and after all rounds."""
        if self._job.privacy is None:
            return
        rounds, repeated = await self._compute(self._checkpoints.begin_round, round)
        epsilon, at_end = (
            self._replica.trainer.epsilon(each, repeated) for each in (rounds, self._job.job.rounds)
        )
        delta = self._job.privacy.delta
        self._emit("privacy", next_round=round, epsilon=epsilon, epsilon_at_end=at_end, delta=delta)

    async def _keeps_slot(self) -> bool:
        """Finish the pending exchange. Return whether this worker keeps its slot."""
        await self._finish_exchange()
        return self._slot is not None

    async def _finish_exchange(self) -> None:
        """Wait for the pending exchange, if any, and apply its outcome."""
        ended = await self._exchanges.finish()
        if ended is None:
            return
        exchange, outcome = ended
        del ended  # it has the average
        if outcome.behind:
            # The others may have committed without this worker. Matchmaking for the same round,
            # without a slot, shows whether they did.
            self.round, self._slot = exchange.round, None
            self._emit("behind", round=exchange.round, reason=outcome.reason)
            return
        if self._stages is not None:
            lost = await self._stages.pipeline.ended(exchange.round, self._exchanges.last_number, outcome)
            if lost is None:
                self.round = exchange.round
                self._stages.end_if_over(self.round)
                return
            if lost:
                self._emit("lost", round=exchange.round, tokens=lost, counted=round(outcome.tokens))
        contributors = outcome.all_contributors()
        average = None if outcome.average is None else Average(outcome.average, contributors)
        delivered = outcome.slices_with(self._transport.peer_id)
        await self._apply(exchange.round, average, delivered)
        del average
        outcome = replace(outcome, average=None)
        params_hash = await self._compute(self._replica.params_hash)
        stage = None if self._stages is None else self._stages.stage
        self._emit("round", **self._meter.fields(exchange, outcome, stage), params_hash=params_hash)
        if (exchange.round + 1) % self._job.eval.every_rounds == 0 and not self.is_pausing:
            if self._stages is None:
                found: tuple[float, int] | None = await self._compute(self._replica.evaluate)
            else:
                most_s = self._job.exchange.deadline_s
                found = await self._stages.evaluate(exchange.round, contributors, most_s)
            if found is not None:
                self._emit("eval", round=exchange.round, val_loss=round(found[0], 6), tokens=found[1])
            await self._save()

    async def _apply(self, round: int, average: Average | None, delivered: Sequence[Slice] = ()) -> None:
        """Apply the outcome of ``round``, the last one, and publish the state after it."""
        await self._keeper.withdraw()
        await self._compute(self._replica.apply, round, average, delivered)
        await self._keeper.publish(self.round)
        await self._advance()

    async def _continue_from(self, round: int | None) -> None:
        """Continue from ``round``, whose state was loaded. None: no state was."""
        if round is not None:
            self.round, self._slot = round, None
            await self._advance()

    async def _advance(self) -> None:
        if self._stages is not None:
            await self._stages.pipeline.advance(self.round, self._matchmaking.position.state)

    def _exclude(self, peer: PeerId) -> None:
        """Have nothing to do with a worker that is proven to be dishonest."""
        if peer not in self._workers.excluded:
            self._emit("notice", text=f"{peer} sent false results: this worker excludes it")
        self._workers.exclude([peer])

    async def _save(self) -> None:
        """Save the state after the rounds whose exchange is over."""
        pending = self._exchanges.pending_round
        await self._keeper.save(self.round if pending is None else pending)

    async def _merge_replicas(self) -> None:
        """Average the replicas at the end of a job whose workers keep different parameters.

        If this fails, each worker keeps its own replica.
        """
        # A worker without a slot has a copy of another worker's replica. That other worker
        # contributes it.
        weight = 0.0 if self._slot is None else 1.0
        try:
            roster, outcome, exchange_s = await self._exchanges.merge(weight)
        except (OutOfSync, NoPlace) as left_out:
            self._emit("merge", round=self.round, committed=False, reason=str(left_out))
            return
        if outcome.average is not None:
            await self._compute(self._replica.merge, outcome.average)
            await self._keeper.publish(self.round)
        self._emit(
            "merge",
            round=self.round,
            workers=len(roster.members),
            exchange_s=round(exchange_s, 3),
            params_hash=await self._compute(self._replica.params_hash),
            **exchange_fields(outcome),
        )

    # ---- helpers --------------------------------------------------------------------------------

    @property
    def _round_s(self) -> float:
        """Seconds that a batch takes a worker of a stage, or a round any other; 0 if unknown."""
        return self._pace.round_s if self._stages is None else self._stages.pipeline.batch_s

    def _announcements(self, *, ending: bool = False) -> Iterable[Announcement]:
        stages = self._stages
        yield worker_announcement(
            self._group_id,
            () if ending else self._transport.addresses(),
            self._matchmaking.position,
            self._round_s,
            spare=self._spare,
            leaving=stages is not None and stages.leaves,
            stays=stages is None or stages.stays,
            is_done=ending and self.round >= self._job.job.rounds,
        )
        if not ending:
            yield job_announcement(self._sealed)
        if stages is not None:
            yield from stages.copies.announcements(ending=ending)

    def _emit(self, event: str, **fields: Any) -> None:
        self._handler({"event": event, **fields})

    async def _compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on the computing thread."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        result = await loop.run_in_executor(self._dependencies.executor, lambda: function(*args, **kwargs))
        self._pace.spend(compute=loop.time() - start_s)
        return result
