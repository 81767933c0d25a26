"""A training worker, from its start to the last round of its job.

``Worker.run`` resumes from the newest checkpoint and repeats rounds until the job is done. One
round:

1. Train: run the inner steps on this worker's slot of the data. With overlap, the exchange of the
   previous round ends during these steps.
2. Finish the exchange of the previous round: apply its average, publish the new shared state,
   evaluate and copy a checkpoint, which is written during the next steps.
3. Match: form a group with the other workers in this round (``matchmaking``). Its roster has the
   slots of the next round.
4. Exchange: average the contributions of the group in the background (``rounds.averaging``).

Between rounds all workers hold the same shared state, and compare its hash. A worker is out of sync
if its group is at a later round or has another state. It then asks the voters for their round and
state, and downloads the state that most of them have. Now it has no slot, like a new worker: it
joins one exchange without a contribution to get one.

``state_keeper.py`` does that. The protocols between workers are in ``swarmnet_protocols.training``.
All computation is in ``replica.py``.
"""

import asyncio
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch

from swarmnet_node.owner.given import Given
from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.events import EventHandler, Meters, exchange_fields
from swarmnet_node.training.known_workers import KnownWorkers
from swarmnet_node.training.pipeline.pipeline import Pipeline
from swarmnet_node.training.pipeline.stage_choice import StageMover
from swarmnet_node.training.pipeline.stage_copies import StageCopies
from swarmnet_node.training.pipeline.stage_part import StagePart
from swarmnet_node.training.pipeline.stage_workers import WorkerStanding
from swarmnet_node.training.replica import NO_STEPS, Replica, combined
from swarmnet_node.training.state_keeper import StateKeeper
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import StepReport, Trainer
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement, Announcer
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel, in_background, persist, race
from swarmnet_protocols.models import Progress
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.bandwidth import ArrivalRates
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.codecs.values import Values
from swarmnet_protocols.training.job_records import job_announcement, worker_announcement
from swarmnet_protocols.training.jobs import SealedJob, open_job
from swarmnet_protocols.training.matchmaking import Matchmaking, NoPlace, OutOfSync
from swarmnet_protocols.training.methods import Average
from swarmnet_protocols.training.pacing import LEAST_WAIT_S, Wait, WorkerPace
from swarmnet_protocols.training.pairs import Pairs
from swarmnet_protocols.training.pipeline.microbatches import BoundaryBytes
from swarmnet_protocols.training.pipeline.stages import stage_key
from swarmnet_protocols.training.rosters import Roster
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.averaging import Averager
from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.round_runner import Outcome, RoundContext
from swarmnet_protocols.training.rounds.terms import RoundMember, Slice
from swarmnet_protocols.training.state_transfer import StateServer

P = ParamSpec("P")
T = TypeVar("T")

PAUSE_GRACE_S = 2.5
"""Seconds that a running exchange has to end before a pause. With more, the memory is free later.
With less, more workers have to take over the part of a worker that pauses."""
ANNOUNCE_S = 20.0
"""Seconds between announcements in the directory."""
LAST_WORD_S = 2.0
"""Seconds in which a worker announces that it leaves. With more, a worker ends later when the
directory does not answer. With less, a slow directory misses the announcement."""
_NO_EVALUATION = "the other stages did not compute it in time"
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


@dataclass(frozen=True)
class PendingExchange:
    """The exchange of ``round`` among ``workers``, which runs in the background."""

    round: int
    workers: int
    report: StepReport
    task: "asyncio.Future[Outcome]"
    start_s: float
    matchmaking_s: float
    waited: Wait | None = None
    """The worker that the group waited for."""


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
        self._stopped = asyncio.Event()
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
        self._pending: PendingExchange | None = None
        self._late = NO_STEPS
        """The work of a contribution that came too late for its round. It counts in the next."""
        self._last_exchange = 0
        self._spare = False
        """True while the job has enough workers, and this worker waits for a place."""
        method = self._method
        self._pace = WorkerPace(method.steps_per_round, method.overlap_steps, trainer.step_s)
        self._rates = ArrivalRates()
        self._interrupted: asyncio.Future[SwarmnetError | None] = asyncio.get_running_loop().create_future()
        """Ends ``run`` at once: with an error, or with None for a pause."""
        self._metered_at = Meters()
        """The meters at the last round's end."""
        self._group_id = self.job_id
        """The id under which workers that average together meet: the job's, or a stage's."""
        slots = 1
        if isinstance(trainer, StageTrainer):
            self._group_id = stage_key(bytes.fromhex(self.job_id), trainer.stage).hex()
            slots = opened.job.exchange.max_workers  # one worker may count the data of all
        key, timing = bytes.fromhex(self._group_id), Timing()
        self._workers = KnownWorkers(
            dependencies.directory,
            self._group_id,
            self._transport.peer_id,
            has_trained=lambda: self._replica.revision > 0,
        )
        self._state_server = StateServer(self._transport, key, timing)
        exchange = opened.job.exchange
        self._matchmaking = Matchmaking(
            self._transport,
            key,
            max_members=exchange.max_workers,
            timeout_s=exchange.deadline_s,
            timing=timing,
            same_state=self._method.shares_weights,
            is_excluded=self._workers.excluded.__contains__,
        )
        context = RoundContext(
            self._transport,
            key,
            dependencies.sign,
            RoundTiming(exchange.deadline_s / 3, 2 * exchange.deadline_s / 3, exchange.deadline_s),
            AggregationRules.named(
                exchange.aggregate,
                float(slots * opened.job.round_tokens),
                exact=isinstance(trainer, StageTrainer) and method.kind == "gradients",
            ),
            dependencies.codec_executor,
            on_proven=self._exclude,
        )
        self._averager = Averager(context)
        self._pairs = Pairs(context, self._state_server, self._replica.codec)
        self._keeper = StateKeeper(
            self.job_id,
            self._replica,
            checkpoints,
            self._workers,
            self._matchmaking,
            self._state_server,
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
        await self._state_server.serve()
        await self._matchmaking.serve()
        if self._stages is not None:
            await self._stages.pipeline.advance(self.round, self._matchmaking.position.state)
            await self._stages.pipeline.serve()
        await self._tell_privacy(None)
        self._metered_at = self._meters()
        async with self._averager:
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
                ending=self._last_word,
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
                    await cancel(self._pending.task if self._pending else None)
                    if self._stages is not None:
                        await self._stages.pipeline.close()
            await announcer.withdraw(LAST_WORD_S)  # others then know that this worker is not lost
            if not self.is_pausing and self.next_stage is None:
                done = {"rounds": self._job.job.rounds, "revision": self._replica.revision}
                self._emit("done", round=self.round, **done)

    def stop(self) -> None:
        """Make ``run`` return after the current round."""
        self.stopping = True
        self._stopped.set()
        if self._stages is not None:
            self._stages.pipeline.stop(self._job.exchange.deadline_s)

    def fail(self, error: SwarmnetError) -> None:
        """Make ``run`` save a checkpoint at once and raise ``error``."""
        if not self._interrupted.done():
            self._interrupted.set_result(error)

    def pause(self) -> None:
        """Make ``run`` leave the group, save a checkpoint and return, within an inner step.

        The steps of the present round are lost. An exchange has ``PAUSE_GRACE_S`` to end.
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
            if 0 < self.round < self._job.job.rounds and not self._stages.is_over:
                await self._stages.hand_over(self._announcer.try_to_announce)
        if self.round < self._job.job.rounds:
            await self._matchmaking.leave()
        elif not self._method.shares_weights:
            await self._merge_replicas()
        await self._save()
        await self._keeper.written()
        if self._stages is not None and self.round >= self._job.job.rounds:
            await self._stay(self._dependencies.stay_s)

    async def _stay(self, seconds: float) -> None:
        """Serve the stage after the last round, because no other machine may have it."""
        if seconds > 0:
            self._emit("finished", round=self.round, rounds=self._job.job.rounds, stays_s=seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stopped.wait()

    async def _leave_group(self) -> None:
        """Leave before the end of a round. No other worker waits for this one."""
        await self._matchmaking.leave()
        if self._pending is not None:
            await asyncio.wait([self._pending.task], timeout=PAUSE_GRACE_S)
            if self._pending.task.done():
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
            (contribution, report), _ = await asyncio.gather(self._train(self._slot), looking)
            if self._stages is not None and self._stages.pipeline.is_discarded(self.round):
                await self._apply(self.round, None)
                self.round += 1
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
            if self._method.shares_weights:
                await self._join_group(contribution, report)
            else:
                await self._join_partner(contribution, report)
        except OutOfSync:
            if self._replica.keeps_progress:
                self._late = report
            raise

    async def _join_group(self, contribution: Values | None, report: StepReport) -> None:
        """Form this round's group, and start its exchange."""
        start_s = self._now()
        roster = await self._form_group(float(report.tokens))
        enough = len(roster.members) >= self._job.exchange.min_workers
        self._slot = roster.slot(self._transport.peer_id) if enough else None
        if self._stages is not None:
            self._stages.pipeline.divide([member.round_s for member in roster.members])
        if not any(member.weight for member in roster.members):
            # No member has trained: the group only assigns slots.
            if not enough:
                await self._wait_for_workers(len(roster.members))
            elif contribution is not None and self._stages is not None:
                await self._stages.goes_on(self.round)  # the round may be over for the other stages
            return
        self._start_exchange(roster, contribution, report, self._now() - start_s)
        self.round += 1

    async def _join_partner(self, contribution: Values | None, report: StepReport) -> None:
        """Average with this round's partner, if the method averages in pairs."""
        self._pace.end_round()
        start_s, me, exchange = self._now(), self._transport.peer_id, self._job.exchange
        others = {each.peer: each for each in self._workers.alive()}
        roster = sorted([me, *others])
        self._pace.others_s = [each.round_s for each in others.values()]
        enough = len(roster) >= exchange.min_workers
        self._slot = roster.index(me) % exchange.max_workers if enough else None
        if contribution is None:
            loaded = await self._keeper.compare(self.round)
            await self._continue_from(loaded)
            if loaded is None and not enough:
                await self._wait_for_workers(len(roster))
            return
        partners = [peer for peer in self._method.partners(self.round, roster, me) if peer != me]
        partner = others[PeerId(partners[0])] if partners else None
        outcome = await self._pairs.average(self.round, partner, contribution, float(report.tokens))
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        done.set_result(outcome)
        waited_s = self._now() - start_s
        self._pending = PendingExchange(self.round, len(roster), report, done, start_s, waited_s)
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

    async def _train(self, slot: int) -> tuple[Values | None, StepReport]:
        """Train one round. Return its contribution.

        Return None as contribution if the last exchange shows that this worker is behind.
        """
        report = NO_STEPS
        await self._tell_privacy(self.round)
        if self._stages is not None and self._method.kind == "gradients":
            gradient = self._stages.pipeline.gradient(self.round, slot)
            if not await self._stages.during(self.round, gradient):
                self._slot = None
                return None, NO_STEPS
        if self._method.kind == "parameters":
            steps = self._pace.steps
            steps_s = self._pace.steps_s(steps)
            if steps_s and not self._method.shares_weights:
                self._state_server.expect(self.round, steps_s)
            overlapped = self._pace.overlap if self._pending is not None else 0
            report = await self._inner_steps(slot, 0, overlapped)
            if overlapped < steps and self._slot is not None:
                await self._finish_exchange()
                if self._slot is not None:
                    report = combined(report, await self._inner_steps(slot, overlapped, steps))
            if self._slot is None:
                return None, NO_STEPS
        contribution, more = await self._compute(self._replica.contribution, self.round, slot)
        self._count(more)
        return contribution, combined(report, more)

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

    def _count(self, report: StepReport) -> None:
        trainer, sample_tokens = self._replica.trainer, self._job.data.sequence_length
        gpu_s = report.seconds if trainer.is_on_accelerator else 0.0
        self._dependencies.given.trained(report.tokens, sample_tokens, trainer.blocks, gpu_s)

    async def _inner_steps(self, slot: int, first: int, end: int) -> StepReport:
        """Run the inner steps [first, end) of this round. The slot is lost if this worker is
        behind."""
        if end == first:
            return NO_STEPS
        if self._stages is not None:
            steps = self._stages.pipeline.steps(self.round, slot, first, end)
            done = await self._stages.during(self.round, steps)
            self._slot, report = (self._slot, done) if done else (None, NO_STEPS)
        else:
            before_s = self._pace.spent.compute
            report = await self._compute(self._replica.steps, self.round, slot, first, end)
            self._pace.stepped(end - first, self._pace.spent.compute - before_s)
        self._count(report)
        return report

    async def _form_group(self, weight: float) -> Roster:
        """Form this round's group. Return its roster.

        ``weight``: the tokens that this worker trained on in the round.
        """
        spent = self._pace.end_round()
        me = RoundMember(
            self._transport.peer_id,
            tuple(self._transport.addresses()),
            weight=weight,
            last_exchange=self._last_exchange,
            round_s=self._round_s,
        )
        roster = await self._matchmaking.form_group(
            me, self._workers.alive(), self._rates.bytes_per_s(), spent
        )
        self._workers.set_roster(roster.members)
        self._spare = False
        self._pace.others_s = [member.round_s for member in roster.members]
        return roster

    def _start_exchange(
        self, roster: Roster, contribution: Values | None, report: StepReport, matchmaking_s: float
    ) -> None:
        """Start to average this round's contributions in the background."""
        peers = [member.peer for member in roster.members]
        partners = self._method.partners(self.round, peers, self._transport.peer_id)
        start, end = self._method.range(self.round)
        is_last = self.stopping or self.round + 1 >= self._job.job.rounds
        averaging = self._averager.average(
            roster.exchange_number,
            [member for member in roster.group_of(self._transport.peer_id) if member.peer in partners],
            torch.zeros(end - start) if contribution is None else contribution,
            weight=float(report.tokens),
            codec=self._replica.codec,
            state=self._matchmaking.position.state,
            spread_s=0.0 if is_last else self._pace.steps_s(self._pace.overlap),
            groups=roster.groups,
        )
        self._last_exchange = roster.exchange_number
        task = asyncio.create_task(averaging, name="exchange")
        workers = len(roster.members)
        self._pending = PendingExchange(
            self.round, workers, report, task, self._now(), matchmaking_s, roster.waited
        )

    async def _finish_exchange(self) -> None:
        """Wait for the pending exchange, if any, and apply its outcome."""
        pending = self._pending
        if pending is None:
            return
        start_s = self._now()
        outcome = await asyncio.shield(pending.task)  # a pause lets it end
        self._pace.spend(network=self._now() - start_s)
        wait_s = pending.matchmaking_s + self._now() - start_s
        slowest = outcome.waited
        if slowest is not None:  # a transfer during inner steps keeps nobody waiting
            slowest = replace(slowest, seconds=min(slowest.seconds, wait_s))
        waits = [each for each in (pending.waited, slowest) if each is not None]
        waited = max(waits, key=lambda each: each.seconds, default=None)
        self._pending = None
        self._rates.add(outcome.arrivals)
        if outcome.behind:
            # The others may have committed without this worker. Matchmaking for the same round,
            # without a slot, shows whether they did.
            self.round, self._slot = pending.round, None
            self._emit("behind", round=pending.round, reason=outcome.reason)
            return
        if self._stages is not None:
            lost = await self._stages.pipeline.ended(pending.round, self._last_exchange, outcome)
            if lost is None:
                self.round = pending.round
                self._stages.end_if_over(self.round)
                return
            if lost:
                self._emit("lost", round=pending.round, tokens=lost, counted=round(outcome.tokens))
        contributors = outcome.all_contributors()
        average = None if outcome.average is None else Average(outcome.average, contributors)
        delivered = outcome.slices_with(self._transport.peer_id)
        await self._apply(pending.round, average, delivered)
        del average
        free: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        pending, outcome = replace(pending, task=free), replace(outcome, average=None)
        params_hash = await self._compute(self._replica.params_hash)
        self._emit(
            "round",
            round=pending.round,
            loss=round(pending.report.loss, 6) if pending.report.tokens and not self._stage else None,
            tokens=round(outcome.tokens),
            own_tokens=pending.report.tokens,
            workers=pending.workers,
            **exchange_fields(outcome) | self._metered(outcome, wait_s),
            exchange_s=round(self._now() - pending.start_s, 3),
            waited_for=None
            if waited is None or waited.seconds < LEAST_WAIT_S
            else {"peer_id": waited.peer, "why": waited.why, "seconds": round(waited.seconds, 3)},
            params_hash=params_hash,
        )
        if (pending.round + 1) % self._job.eval.every_rounds == 0 and not self.is_pausing:
            await self._evaluate(pending.round, contributors)
            await self._save()

    async def _evaluate(self, round_: int, contributors: Sequence[PeerId]) -> None:
        """Emit the validation loss after a round. In a job with stages, stage 0 knows it."""
        if self._stages is None:
            found: tuple[float, int] | None = await self._compute(self._replica.evaluate)
        else:
            most_s = self._job.exchange.deadline_s
            evaluation = self._stages.pipeline.evaluate(round_, contributors, most_s)
            try:
                found = await self._stages.during(self.round, evaluation)
            except TimeoutError:
                self._emit("notice", text=f"round {round_} has no validation loss: {_NO_EVALUATION}")
                return
        if found is not None:
            self._emit("eval", round=round_, val_loss=round(found[0], 6), tokens=found[1])

    async def _apply(self, round: int, average: Average | None, delivered: Sequence[Slice] = ()) -> None:
        """Apply the outcome of ``round``, and publish the state after it."""
        await self._keeper.withdraw()
        await self._compute(self._replica.apply, round, average, delivered)
        await self._keeper.publish(self.round)
        if self._stages is not None:
            await self._stages.pipeline.advance(round + 1, self._matchmaking.position.state)

    async def _continue_from(self, round: int | None) -> None:
        """Continue from ``round``, whose state was loaded. None: no state was."""
        if round is None:
            return
        self.round, self._slot = round, None
        if self._stages is not None:
            await self._stages.pipeline.advance(round, self._matchmaking.position.state)

    def _exclude(self, peer: PeerId) -> None:
        """Have nothing to do with a worker that is proven to be dishonest."""
        if peer not in self._workers.excluded:
            self._emit("notice", text=f"{peer} sent false results: this worker excludes it")
        self._workers.exclude([peer])

    async def _save(self) -> None:
        """Save the state after the rounds whose exchange is over."""
        await self._keeper.save(self.round if self._pending is None else self._pending.round)

    async def _merge_replicas(self) -> None:
        """Average the replicas at the end of a job whose workers keep different parameters.

        If this fails, each worker keeps its own replica.
        """
        # A worker without a slot has a copy of another worker's replica. That other worker
        # contributes it.
        weight = 0.0 if self._slot is None else 1.0
        try:
            roster = await self._form_group(weight)
        except (OutOfSync, NoPlace) as left_out:
            self._emit("merge", round=self.round, committed=False, reason=str(left_out))
            return
        start_s = self._now()
        outcome = await self._averager.average(
            roster.exchange_number,
            roster.group_of(self._transport.peer_id),
            self._method.agreed(),
            weight=weight,
            codec=get_codec("float32"),
            groups=roster.groups,
        )
        if outcome.average is not None:
            await self._compute(self._replica.merge, outcome.average)
            await self._keeper.publish(self.round)
        exchange_s = round(self._now() - start_s, 3)
        self._emit(
            "merge",
            round=self.round,
            workers=len(roster.members),
            exchange_s=exchange_s,
            params_hash=await self._compute(self._replica.params_hash),
            **exchange_fields(outcome),
        )

    # ---- helpers --------------------------------------------------------------------------------

    def _meters(self) -> Meters:
        traffic = BoundaryBytes() if self._stages is None else self._stages.pipeline.job.traffic
        bytes = traffic.forward, traffic.backward, traffic.received
        return Meters(self._now(), self._pace.computed_s, *bytes)

    def _metered(self, outcome: Outcome, wait_s: float) -> dict[str, Any]:
        """Return the fields of the event "round" about time and traffic since the last one."""
        now, before = self._meters(), self._metered_at
        self._metered_at, spent = now, now.since(before)
        compute_s = min(spent.compute_s, spent.round_s)
        if self._stages is not None:  # it also waits for microbatches
            wait_s = spent.round_s - compute_s
        return {
            "round_s": round(spent.round_s, 3),
            "compute_s": round(compute_s, 3),
            "wait_s": round(wait_s, 3),
            "forward_bytes": spent.forward_bytes,
            "backward_bytes": spent.backward_bytes,
            "bytes_sent": outcome.bytes_sent + spent.forward_bytes + spent.backward_bytes,
            "bytes_received": outcome.bytes_received + spent.boundary_received,
        }

    @property
    def _stage(self) -> int:
        """The stage that this worker trains. Stage 0, or the whole model, computes the loss."""
        return 0 if self._stages is None else self._stages.stage

    @property
    def _round_s(self) -> float:
        """Seconds that a batch takes a worker of a stage, or a round any other; 0 if unknown."""
        return self._pace.round_s if self._stages is None else self._stages.pipeline.batch_s

    def _announcements(self) -> Iterable[Announcement]:
        stages = self._stages
        yield worker_announcement(
            self._group_id,
            self._transport.addresses(),
            self._matchmaking.position,
            self._round_s,
            spare=self._spare,
            leaving=stages is not None and stages.leaves,
            stays=stages is None or stages.stays,
        )
        yield job_announcement(self._sealed)
        if stages is not None:
            yield from stages.copies.announcements()

    def _last_word(self) -> Iterable[Announcement]:
        is_done = self.round >= self._job.job.rounds
        yield worker_announcement(self._group_id, (), self._matchmaking.position, is_done=is_done)
        if self._stages is not None:
            yield from self._stages.copies.announcements(ending=True)

    def _emit(self, event: str, **fields: Any) -> None:
        self._handler({"event": event, **fields})

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on the computing thread."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        result = await loop.run_in_executor(self._dependencies.executor, lambda: function(*args, **kwargs))
        self._pace.spend(compute=loop.time() - start_s)
        return result
