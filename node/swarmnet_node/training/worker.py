"""A training worker, from its start to the last round of its job.

``Worker.run`` resumes from the newest checkpoint and repeats rounds until the job is done. One
round:

1. Train: run the inner steps on this worker's slot of the data. With overlap, the exchange of the
   last round ends during these steps.
2. Finish the exchange of the last round: apply its average, publish the new shared state, evaluate
   and save a checkpoint.
3. Match: form a group with the other workers in this round (``matchmaking``). Its roster has the
   slots of the next round.
4. Exchange: average the contributions of the group in the background (``rounds.averaging``).

Between rounds all workers hold the same shared state, and compare its hash. A worker is out of sync
if its group is at a later round or has another state. It then asks the voters for their round and
state, and downloads the state that most of them have. Now it has no slot, like a new worker: it
joins one exchange without a contribution to get one.

The protocols between workers are in ``swarmnet_protocols.training``. All computation is in
``replica.py``.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.events import EventHandler, exchange_fields
from swarmnet_node.training.known_workers import DISTRUST_S, REFRESH_S, KnownWorkers
from swarmnet_node.training.replica import NO_STEPS, Replica, combined
from swarmnet_node.training.shared_state import max_state_bytes
from swarmnet_node.training.trainer import StepReport, Trainer
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement, Announcer
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel, in_background, persist, race
from swarmnet_protocols.models import Progress
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.bandwidth import ArrivalRates
from swarmnet_protocols.training.catch_up import CatchUp, Stay, WorkerPosition, catch_up, join
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.job_records import WorkerInfo, job_announcement, worker_announcement
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.training.matchmaking import Matchmaking, OutOfSync
from swarmnet_protocols.training.methods import Average
from swarmnet_protocols.training.rosters import Candidate, Roster
from swarmnet_protocols.training.rounds.aggregation_rules import aggregate, clip_to_median_norm_, outliers
from swarmnet_protocols.training.rounds.averaging import AggregationRules, Averager, Outcome, RoundTiming
from swarmnet_protocols.training.state_transfer import PackedState, StateDownload, StateServer

P = ParamSpec("P")
T = TypeVar("T")

ANNOUNCE_S = 20.0
"""Seconds between announcements in the directory."""
UNDECIDED_S = 1.0
"""Seconds until the voters are asked again, after an answer without a majority."""
NEW_S = 60.0
"""Seconds during which a worker without a checkpoint is new (``catch_up.join``). If workers need
longer to find each other, they stay in several groups. With more, a majority
of strangers can replace the weights of a worker that has trained so long."""
LOOK_AGAIN = 4
"""A worker reads the directory again after its time in the job divided by this, at most
``REFRESH_S``. Workers that start together look for each other often; later each read would take
time from the inner steps."""
NEW_DISTRUST_S = 5.0
"""Seconds that a new worker ignores a worker that alone claimed a later round. Short, because that
worker may be in a smaller group, which will join this one."""
RETRY_DOWNLOAD_S = 5.0
"""Seconds until another attempt to download the shared state."""


@dataclass(frozen=True)
class WorkerDependencies:
    """Network, threads, clock and random source of a worker. Tests replace them."""

    transport: Transport
    directory: Directory
    executor: Executor
    """One thread, which runs all torch computation."""
    codec_executor: Executor
    """A second thread, which encodes and decodes contributions during inner steps."""
    rng: random.Random
    sign: Callable[[bytes], bytes]
    """Signs with the key of the transport's peer id."""
    timing: Timing = field(default_factory=Timing)
    stopwatch: Callable[[], float] = time.perf_counter
    progress: Progress = lambda *_: None


@dataclass(frozen=True)
class PendingExchange:
    """The exchange of ``round``, which runs in the background."""

    round: int
    weights: dict[PeerId, float]
    """The weight of every member of the roster."""
    report: StepReport
    task: "asyncio.Task[Outcome]"
    start_s: float
    matchmaking_s: float


class Worker:
    """One worker of one job. ``run`` may be called once."""

    def __init__(
        self,
        dependencies: WorkerDependencies,
        sealed: bytes,
        trainer: Trainer,
        checkpoints: CheckpointStore,
        handler: EventHandler,
    ) -> None:
        """``sealed`` is the job in its published form; ``handler`` receives the worker's events."""
        opened = open_job(sealed)
        self.job_id = opened.id
        self.round = 0
        self.stopping = False
        self._dependencies = dependencies
        self._transport = dependencies.transport
        self._job = opened.job
        self._sealed = sealed
        self._replica = Replica(opened.job, trainer, dependencies.stopwatch)
        self._method = self._replica.method
        self._checkpoints = checkpoints
        self._emit = handler
        self._slot: int | None = None
        """This worker's share of the data in the next round. None until a roster assigns one."""
        self._state = b""
        """The hash of the shared state."""
        self._pending: PendingExchange | None = None
        self._last_exchange = 0
        self._step_s = 0.0
        """Seconds of a recent inner step. An exchange that overlaps N steps is paced to take N
        times as long."""
        self._rates = ArrivalRates()
        self._started_s = -math.inf
        """When this worker started without a checkpoint."""
        self._failure: SwarmnetError | None = None
        self._failed = asyncio.Event()
        job_hash = bytes.fromhex(self.job_id)
        self._workers = KnownWorkers(dependencies.directory, self.job_id, self._transport.peer_id)
        self._state_server = StateServer(self._transport, job_hash, dependencies.timing)
        self._matchmaking = Matchmaking(
            self._transport,
            job_hash,
            max_members=self._job.exchange.max_workers,
            timing=dependencies.timing,
            same_state=self._method.shares_weights,
            is_excluded=self._workers.excluded.__contains__,
        )
        deadline_s = self._job.exchange.deadline_s
        self._averager = Averager(
            self._transport,
            job_hash,
            dependencies.sign,
            timing=RoundTiming(deadline_s / 3, 2 * deadline_s / 3, deadline_s),
            rules=averaging_rules(self._job),
            executor=dependencies.codec_executor,
            on_proven=lambda peer: self._workers.exclude([peer]),
        )

    async def run(self) -> None:
        """Train until the last round of the job, or until ``stop``. Then save a checkpoint.

        Raises the error given to ``fail``, and ``OutOfResources`` if the disk is full.
        """
        await self._resume()
        await self._state_server.serve()
        await self._matchmaking.serve()
        async with self._averager:
            self._emit(
                {
                    "event": "ready",
                    "peer_id": self._transport.peer_id,
                    "addresses": list(self._transport.addresses()),
                    "job": self.job_id,
                    "name": self._job.job.name,
                    "round": self.round,
                    "rounds": self._job.job.rounds,
                    "parameters": self._replica.trainer.parameter_count,
                }
            )
            dependencies = self._dependencies
            announcer = Announcer(dependencies.directory, dependencies.rng, self._announcements, ANNOUNCE_S)
            async with in_background(persist("the announcement", announcer.run)):
                try:
                    await race(self._failed.wait(), self._run_rounds())
                    if self._failure is not None:
                        await self._save()
                        raise self._failure
                finally:
                    await cancel(self._pending.task if self._pending else None)
            done = {"round": self.round, "rounds": self._job.job.rounds}
            self._emit({"event": "done"} | done | {"revision": self._replica.revision})

    def stop(self) -> None:
        """Make ``run`` return after the current round."""
        self.stopping = True

    def fail(self, error: SwarmnetError) -> None:
        """Make ``run`` save a checkpoint at once and raise ``error``."""
        self._failure = error
        self._failed.set()

    # ---- rounds ---------------------------------------------------------------------------------

    async def _run_rounds(self) -> None:
        while not self._is_done():
            try:
                await self._run_round()
                if self._is_done() or not self._method.overlap_steps:
                    # may set the round back; then the loop repeats it
                    await self._finish_exchange()
            except OutOfSync as out_of_sync:
                await self._catch_up(out_of_sync)
        if self.round < self._job.job.rounds:
            await self._matchmaking.leave()
        elif not self._method.shares_weights:
            await self._merge_replicas()
        await self._save()

    def _is_done(self) -> bool:
        return self.stopping or self.round >= self._job.job.rounds

    async def _run_round(self) -> None:
        """Run one round, up to the start of its exchange.

        Raises ``OutOfSync`` if its group is at another round or state.
        """
        contribution, report = None, NO_STEPS
        age_s = self._now() - self._started_s
        looking = self._workers.refresh(min(REFRESH_S, age_s / LOOK_AGAIN))
        if self._slot is None:
            await looking
        else:  # read the directory during the inner steps
            (contribution, report), _ = await asyncio.gather(self._train(self._slot), looking)
        await self._finish_exchange()
        if self.round and self._is_new() and self._method.shares_weights:
            await self._join_larger_group()
        # out of sync: the contribution belongs to another state than the group's
        if self._slot is None:
            contribution, report = None, NO_STEPS
        start_s = self._now()
        roster = await self._form_group(float(report.tokens))
        enough = len(roster.members) >= self._job.exchange.min_workers
        self._slot = roster.slot(self._transport.peer_id) if enough else None
        if not any(member.weight for member in roster.members):
            # No member has trained: the group only assigns slots.
            if not enough:
                self._emit({"event": "waiting", "round": self.round, "workers": len(roster.members)})
                await asyncio.sleep(REFRESH_S)
            return
        self._start_exchange(roster, contribution, report, self._now() - start_s)
        self.round += 1

    async def _train(self, slot: int) -> tuple[torch.Tensor | None, StepReport]:
        """Train one round. Return its contribution.

        Return None as contribution if the last exchange shows that this worker is behind.
        """
        report = NO_STEPS
        if self._method.kind == "parameters":
            steps = self._method.steps_per_round
            overlapped = min(self._method.overlap_steps, steps) if self._pending is not None else 0
            report = await self._inner_steps(slot, 0, overlapped)
            if overlapped < steps:
                await self._finish_exchange()
                if self._slot is None:
                    return None, NO_STEPS
                report = combined(report, await self._inner_steps(slot, overlapped, steps))
        contribution, more = await self._compute(self._replica.contribution, self.round, slot)
        return contribution, combined(report, more)

    async def _inner_steps(self, slot: int, first: int, end: int) -> StepReport:
        start_s = self._now()
        report = await self._compute(self._replica.steps, self.round, slot, first, end)
        self._step_s = (self._now() - start_s) / max(1, end - first)
        return report

    async def _form_group(self, weight: float) -> Roster:
        """Form this round's group. Return its roster.

        ``weight``: the tokens that this worker trained on in the round.
        """
        addresses = tuple(self._transport.addresses())
        me = Candidate(self._transport.peer_id, addresses, weight=weight, last_exchange=self._last_exchange)
        roster = await self._matchmaking.form_group(
            me,
            self._workers.alive(),
            measured=self._rates.bytes_per_s(),
            timeout_s=self._job.exchange.deadline_s,
        )
        self._workers.set_roster(roster.members, is_new=self._is_new())
        return roster

    def _start_exchange(
        self, roster: Roster, contribution: torch.Tensor | None, report: StepReport, matchmaking_s: float
    ) -> None:
        """Start to average this round's contributions in the background."""
        peers = [member.peer for member in roster.members]
        partners = self._method.partners(self.round, peers, self._transport.peer_id)
        start, end = self._method.range(self.round)
        is_last = self.stopping or self.round + 1 >= self._job.job.rounds
        averaging = self._averager.average(
            roster.exchange_number,
            [member for member in roster.members if member.peer in partners],
            torch.zeros(end - start) if contribution is None else contribution,
            weight=float(report.tokens),
            codec=self._replica.codec,
            state=self._state if self._method.shares_weights else b"",
            spread_s=0.0 if is_last else self._method.overlap_steps * self._step_s,
        )
        self._last_exchange = roster.exchange_number
        weights = {member.peer: member.weight for member in roster.members}
        task = asyncio.create_task(averaging, name="exchange")
        self._pending = PendingExchange(self.round, weights, report, task, self._now(), matchmaking_s)

    async def _finish_exchange(self) -> None:
        """Wait for the pending exchange, if any, and apply its outcome."""
        pending = self._pending
        if pending is None:
            return
        start_s = self._now()
        outcome = await pending.task
        wait_s = pending.matchmaking_s + self._now() - start_s
        self._pending = None
        self._rates.add(outcome.arrivals)
        if outcome.behind:
            # The others may have committed without this worker. Matchmaking for the same round,
            # without a slot, tells.
            self.round, self._slot = pending.round, None
            self._emit({"event": "behind", "round": pending.round, "reason": outcome.reason})
            return
        contributors = outcome.all_contributors()
        average = None if outcome.average is None else Average(outcome.average, contributors)
        delivered = outcome.slices_with(self._transport.peer_id)
        await self._compute(self._replica.apply, pending.round, average, delivered)
        await self._publish_state()
        params_hash = await self._compute(self._replica.params_hash)
        trained = sum(pending.weights.get(peer, 0.0) for peer in contributors)
        self._emit(
            {
                "event": "round",
                "round": pending.round,
                "loss": round(pending.report.loss, 6) if pending.report.tokens else None,
                "tokens": round(trained),
                "workers": len(pending.weights),
                **exchange_fields(outcome),
                "exchange_s": round(self._now() - pending.start_s, 3),
                "wait_s": round(wait_s, 3),
                "params_hash": params_hash,
            }
        )
        if (pending.round + 1) % self._job.eval.every_rounds == 0:
            loss, tokens = await self._compute(self._replica.evaluate)
            self._emit(
                {"event": "eval", "round": pending.round, "val_loss": round(loss, 6), "tokens": tokens}
            )
            await self._save()

    async def _merge_replicas(self) -> None:
        """Average the replicas at the end of a job whose workers keep different parameters.

        If this fails, each worker keeps its own.
        """
        event: dict[str, Any] = {"event": "merge", "round": self.round}
        # A worker without a slot has a copy of another worker's replica. That other worker
        # contributes it.
        weight = 0.0 if self._slot is None else 1.0
        try:
            roster = await self._form_group(weight)
        except OutOfSync as out_of_sync:
            self._emit({**event, "committed": False, "reason": str(out_of_sync)})
            return
        start_s = self._now()
        outcome = await self._averager.average(
            roster.exchange_number,
            roster.members,
            self._method.agreed(),
            weight=weight,
            codec=get_codec("float32"),
        )
        if outcome.average is not None:
            await self._compute(self._replica.merge, outcome.average)
            await self._publish_state()
        event |= {"workers": len(roster.members), "exchange_s": round(self._now() - start_s, 3)}
        params_hash = await self._compute(self._replica.params_hash)
        self._emit({**event, "params_hash": params_hash, **exchange_fields(outcome)})

    # ---- the shared state -----------------------------------------------------------------------

    async def _resume(self) -> None:
        """Load the newest checkpoint, or keep the job's initial parameters."""
        saved = await self._compute(self._checkpoints.load_newest, self.job_id)
        if saved is not None:
            self.round = saved.round
            self._workers.exclude(saved.excluded)
            await self._compute(self._replica.restore, saved)
        else:
            self._started_s = self._now()
        await self._publish_state()

    def _is_new(self) -> bool:
        return self._replica.revision == 0 or self._now() - self._started_s < NEW_S

    async def _join_larger_group(self) -> None:
        """Move to the state of a larger group, if there is one.

        Workers that start together may begin in several groups.
        """
        verdict = await self._compare()
        if isinstance(verdict, CatchUp):
            await self._move(verdict)

    async def _compare(self) -> CatchUp | Stay:
        """Decide whether this worker moves to another round or state, by asking other workers."""
        mine = WorkerPosition(self.round, self._state)
        if self._is_new() and self._method.shares_weights:
            mates = self._workers.mates
            others = [each for each in self._workers.alive() if each.peer not in mates or not self.round]
            positions = await self._matchmaking.positions(others)
            return join(mine, len(mates) + 1 if self.round else 0, positions)
        positions = await self._matchmaking.positions(self._workers.voters())
        if not positions:  # all voters have left
            positions = await self._matchmaking.positions(self._workers.alive())
        return catch_up(mine, positions, same_state=self._method.shares_weights)

    async def _catch_up(self, out_of_sync: OutOfSync) -> None:
        """Move to the round and state that most workers have.

        ``out_of_sync`` is one worker's claim, so it decides nothing.
        """
        await self._workers.refresh(within_s=0.0)
        verdict = await self._compare()
        if isinstance(verdict, CatchUp):
            await self._move(verdict)
            return
        reason = f"{out_of_sync}, but a majority of the last roster does not confirm it"
        self._emit({"event": "heal_failed", "round": out_of_sync.round, "reason": reason})
        if verdict.is_settled and out_of_sync.round > self.round + 1:
            self._workers.distrust(out_of_sync.peer, NEW_DISTRUST_S if self._is_new() else DISTRUST_S)
        else:
            await asyncio.sleep(UNDECIDED_S)

    async def _move(self, verdict: CatchUp) -> None:
        """Download the state of ``verdict``, and continue from there."""
        start_s = self._now()
        if self.round and verdict.position.round > self.round + 2:
            await self._save()
            await self._compute(self._checkpoints.set_aside)
        # Workers that ask meanwhile learn where this one will be, and wait for it.
        await self._matchmaking.set_position(verdict.position.round, verdict.position.state)
        download = StateDownload(
            bytes.fromhex(self.job_id),
            verdict.position.state,
            max_bytes=max_state_bytes(self._replica.trainer.parameter_count),
        )
        try:
            data = await download.run(
                self._transport,
                self._workers.sources(verdict.peers, only=not self._method.shares_weights),
                self._dependencies.timing,
                partial(self._dependencies.progress, "fetching the state"),
            )
        except SwarmnetError as error:
            # The sources may have replaced the state meanwhile. The next matchmaking tells which
            # state is current.
            await self._matchmaking.set_position(self.round, self._state)
            self._emit({"event": "heal_failed", "round": verdict.position.round, "reason": str(error)})
            await asyncio.sleep(RETRY_DOWNLOAD_S)
            return
        await self._compute(self._replica.load_shared, data)
        self.round, self._slot, self._pending = verdict.position.round, None, None
        await self._publish_state()
        self._emit(
            {
                "event": "healed",
                "round": self.round,
                "bytes": len(data),
                "seconds": round(self._now() - start_s, 3),
                "dropped": [{"peer_id": peer, "reason": why} for peer, why in download.dropped.items()],
            }
        )

    async def _publish_state(self) -> None:
        """Offer the current shared state for download, and announce its hash in matchmaking."""
        packed = await self._compute(lambda: PackedState.of(self._replica.pack_shared()))
        self._state = self._state_server.offer(packed)
        await self._matchmaking.set_position(self.round, self._state)

    async def _save(self) -> None:
        """Write a checkpoint of the rounds whose exchange is over."""
        done = self.round if self._pending is None else self._pending.round
        excluded = tuple(self._workers.excluded)

        def save() -> None:
            checkpoint = self._replica.checkpoint(self.job_id, done, excluded)
            self._checkpoints.save(checkpoint, self._replica.trainer.write)

        await self._compute(save)

    # ---- helpers --------------------------------------------------------------------------------

    def _announcements(self) -> Iterable[Announcement]:
        addresses = tuple(self._transport.addresses())
        info = WorkerInfo(self._transport.peer_id, addresses, self.round, self._state)
        yield worker_announcement(self.job_id, info)
        yield job_announcement(self._sealed)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on the computing thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._dependencies.executor, lambda: function(*args, **kwargs))


def averaging_rules(job: Job) -> AggregationRules:
    """Return the job's aggregation rules, equal on all workers."""

    def aggregate_clipped(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return aggregate(job.exchange.aggregate, clip_to_median_norm_(rows, weights), weights)

    tokens = job.training.batch_size * job.data.sequence_length * job.make_method().steps_per_round
    verifiable = job.exchange.aggregate != "mean"
    return AggregationRules(
        aggregate_clipped, screen=outliers, max_weight=float(tokens), verifiable=verifiable
    )
