"""A training worker: inner steps, then a round with the others, until the job's rounds are done.

``Worker.run`` is the whole life of a worker. What it must agree on with others is decided in ``swarmnet_protocols.training``; what it
computes is the trainer's. Between the two stands the state: bytes that are equal on all workers after every committed
round, named by their hash.
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from swarmnet_node.training.dependencies import Hosted, Report, WorkerDependencies
from swarmnet_node.training.neighbours import LOOK_S, Neighbours
from swarmnet_node.training.outcomes import (
    Pending,
    averaging_rules,
    contributors,
    facts,
    round_facts,
    slices_of,
)
from swarmnet_node.training.replica import NOTHING_DONE, Replica, together
from swarmnet_node.training.state import max_state_bytes
from swarmnet_node.training.trainer import StepReport
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel, race
from swarmnet_protocols.training.bandwidth import ArrivalRates
from swarmnet_protocols.training.catch_up import Position, Stay, catch_up
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.job_records import WorkerInfo, publish_job, publish_worker
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.training.matchmaking import Matchmaking, OutOfSync
from swarmnet_protocols.training.methods import Average
from swarmnet_protocols.training.rosters import Candidate, Roster
from swarmnet_protocols.training.rounds.averaging import Averager, RoundTiming
from swarmnet_protocols.training.state_transfer import PackedState, StateDownload, StateServer

P = ParamSpec("P")
T = TypeVar("T")

ANNOUNCE_S = 20.0
UNDECIDED_S = 1.0
"""Before the witnesses are asked again, when they were between two rounds."""
HEAL_S = 5.0
"""Before another try to fetch a state, when nobody gave it."""


class Worker:
    """One worker of one job, used once."""

    def __init__(self, dependencies: WorkerDependencies, hosted: Hosted, report: Report) -> None:
        sealed = open_job(hosted.sealed)
        self.job_id = sealed.id
        self.round = 0
        self.stopping = False
        self._dependencies = dependencies
        self._job = sealed.job
        self._sealed = hosted.sealed
        self._replica = Replica(sealed.job, hosted.trainer, dependencies.stopwatch)
        self._checkpoints = hosted.checkpoints
        self._report = report
        self._method = self._replica.method
        self._codec = self._replica.codec
        self._last_exchange = 0
        self._rates = ArrivalRates()
        self._slot: int | None = None
        """Which share of the data is ours; a newcomer has none before its first roster."""
        self._state = b""
        self._others = Neighbours(dependencies.directory, self.job_id, dependencies.transport.peer_id)
        self._pending: Pending | None = None
        self._step_s = 0.0
        """What an inner step took lately: an exchange is spread over those that it overlaps."""
        self._failure: SwarmnetError | None = None
        self._failed = asyncio.Event()
        key = bytes.fromhex(self.job_id)
        self._states = StateServer(dependencies.transport, key, dependencies.timing)
        self._matchmaking = Matchmaking(
            dependencies.transport,
            key,
            max_members=self._job.exchange.max_workers,
            timing=dependencies.timing,
            same_state=self._method.shares_weights,
        )

    async def run(self) -> None:
        """Train until the last round of the job, or until ``stop``. Raises what the disk raises, and what ``fail`` was given."""
        await self._resume()
        await self._states.serve()
        await self._matchmaking.serve()
        deadline_s = self._job.exchange.deadline_s
        timing = RoundTiming(deadline_s / 3, 2 * deadline_s / 3, deadline_s)
        exchange = Averager(
            self._dependencies.transport,
            bytes.fromhex(self.job_id),
            timing=timing,
            rules=averaging_rules(self._job),
            executor=self._dependencies.codec_executor,
            sign=self._dependencies.sign,
        )
        async with exchange:
            self._report(
                {
                    "event": "ready",
                    "peer_id": self._dependencies.transport.peer_id,
                    "addresses": list(self._dependencies.transport.addresses()),
                    "job": self.job_id,
                    "name": self._job.job.name,
                    "round": self.round,
                    "rounds": self._job.job.rounds,
                    "parameters": self._replica.trainer.parameter_count,
                }
            )
            announcing = asyncio.create_task(self._keep_announcing(), name="announce")
            try:
                await race(self._failed.wait(), self._to_the_end(exchange))
                if self._failure is not None:
                    await self._save()
                    raise self._failure
                done = {"round": self.round, "rounds": self._job.job.rounds}
                self._report({"event": "done"} | done | {"revision": self._replica.revision})
            finally:
                await cancel(announcing, self._pending.outcome if self._pending else None)

    def stop(self) -> None:
        """End after the present round."""
        self.stopping = True

    def fail(self, error: SwarmnetError) -> None:
        """The worker cannot go on: ``run`` saves where it is and raises ``error``."""
        self._failure = error
        self._failed.set()

    async def _to_the_end(self, exchange: Averager) -> None:
        await self._train(exchange)
        if self.round < self._job.job.rounds:
            await self._matchmaking.leave()
            await self._save()
            return
        if not self._method.shares_weights:
            await self._merge(exchange)
        await self._save()

    # ---- a round ----------------------------------------------------------------------------------------

    async def _train(self, exchange: Averager) -> None:
        """All rounds that are left. The last exchange may end behind, and then its round is still to be done."""
        while not self._is_last_done():
            try:
                await self._take_part(exchange)
                if self._is_last_done() or not self._method.overlap_steps:
                    await self._settle()
            except OutOfSync as elsewhere:
                await self._heal(elsewhere)

    def _is_last_done(self) -> bool:
        return self.stopping or self.round >= self._job.job.rounds

    async def _take_part(self, exchange: Averager) -> None:
        """One round: our share of the work if we have one, then the exchange."""
        contribution, report = None, NOTHING_DONE
        if self._slot is not None:
            contribution, report = await self._work(self._slot)
        await self._settle()
        if self._slot is None:
            contribution, report = None, NOTHING_DONE  # behind: it was for a round that is not yet
        began = self._now()
        me = self._dependencies.transport.peer_id
        roster = await self._gather(float(report.tokens))
        enough = len(roster.members) >= self._job.exchange.min_workers
        self._slot = roster.slot(me) if enough else None
        if not any(member.weight for member in roster.members):
            # Nobody has trained yet: this roster only hands out the shares of the data.
            if not enough:
                self._report({"event": "waiting", "round": self.round, "workers": len(roster.members)})
                await asyncio.sleep(LOOK_S)
            return
        partners = self._method.partners(self.round, [member.peer for member in roster.members], me)
        members = [member for member in roster.members if member.peer in partners]
        start, end = self._method.range(self.round)
        values = torch.zeros(end - start) if contribution is None else contribution
        self._last_exchange = roster.exchange_number
        outcome = asyncio.create_task(
            exchange.average(
                roster.exchange_number,
                members,
                values,
                weight=float(report.tokens),
                codec=self._codec,
                spread_s=self._hidden_s(),
            ),
            name="exchange",
        )
        now = self._now()
        weights = {member.peer: member.weight for member in roster.members}
        self._pending = Pending(self.round, weights, report, outcome, now, now - began)
        self.round += 1

    def _hidden_s(self) -> float:
        """How long inner steps go on beside the exchange of this round; none come after the last."""
        is_last = self.stopping or self.round + 1 >= self._job.job.rounds
        return 0.0 if is_last else self._method.overlap_steps * self._step_s

    async def _work(self, slot: int) -> tuple[torch.Tensor | None, StepReport]:
        """The inner steps of this round, with the exchange of the last one landing among them; what we contribute."""
        report = NOTHING_DONE
        if self._method.kind == "parameters":
            steps = self._method.steps_per_round
            first = min(self._method.overlap_steps, steps) if self._pending is not None else 0
            report = await self._steps(slot, 0, first)
            if first < steps:
                await self._settle()
                if self._slot is None:
                    return None, NOTHING_DONE
                report = together(report, await self._steps(slot, first, steps))
        contribution, more = await self._compute(self._replica.contribution, self.round, slot)
        return contribution, together(report, more)

    async def _steps(self, slot: int, first: int, end: int) -> StepReport:
        began = self._now()
        report = await self._compute(self._replica.steps, self.round, slot, first, end)
        self._step_s = (self._now() - began) / max(1, end - first)
        return report

    async def _gather(self, weight: float) -> Roster:
        await self._others.look()
        transport = self._dependencies.transport
        addresses = tuple(transport.addresses())
        me = Candidate(transport.peer_id, addresses, weight=weight, last_exchange=self._last_exchange)
        roster = await self._matchmaking.form_group(
            me,
            self._others.known(),
            measured=self._rates.bytes_per_s(),
            timeout_s=self._job.exchange.deadline_s,
        )
        self._others.meet(roster.members)
        return roster

    async def _settle(self) -> None:
        """Wait for the exchange on its way, if there is one, and take what it gave."""
        pending = self._pending
        if pending is None:
            return
        began = self._now()
        outcome = await pending.outcome
        self._rates.add(outcome.arrivals)
        self._matchmaking.exclude(outcome.refuted)
        waited_s = pending.gather_s + self._now() - began
        self._pending = None
        if outcome.behind:
            # The others may have decided without us: as a newcomer of that round we find out.
            self.round, self._slot = pending.round, None
            self._report({"event": "behind", "round": pending.round, "reason": outcome.reason})
            return
        average = None
        if outcome.average is not None:
            average = Average(outcome.average, contributors(outcome))
        delivered = slices_of(self._dependencies.transport.peer_id, outcome)
        await self._compute(self._replica.apply, pending.round, average, delivered)
        await self._share_state()
        params_hash = await self._compute(self._replica.params_hash)
        self._report(
            {
                **round_facts(pending, outcome),
                "exchange_s": round(self._now() - pending.began, 3),
                "wait_s": round(waited_s, 3),
                "params_hash": params_hash,
            }
        )
        if (pending.round + 1) % self._job.eval.every_rounds == 0:
            await self._evaluate(pending.round)
            await self._save()

    async def _merge(self, exchange: Averager) -> None:
        """Make one model of replicas that differ: their average, by the job's rule. Without it each keeps its own."""
        event: dict[str, Any] = {"event": "merge", "round": self.round}
        # A replica that was fetched is counted where it came from.
        weight = 0.0 if self._slot is None else 1.0
        try:
            roster = await self._gather(weight)
        except OutOfSync as elsewhere:
            self._report({**event, "committed": False, "reason": str(elsewhere)})
            return
        began = self._now()
        outcome = await exchange.average(
            roster.exchange_number,
            roster.members,
            self._method.agreed(),
            weight=weight,
            codec=get_codec("float32"),
        )
        if outcome.average is not None:
            await self._compute(self._replica.merge, outcome.average)
            await self._share_state()
        event |= {"workers": len(roster.members), "exchange_s": round(self._now() - began, 3)}
        self._report(
            {**event, "params_hash": await self._compute(self._replica.params_hash), **facts(outcome)}
        )

    async def _evaluate(self, number: int) -> None:
        loss, tokens = await self._compute(self._replica.evaluate)
        self._report({"event": "eval", "round": number, "val_loss": round(loss, 6), "tokens": tokens})

    # ---- the shared state -------------------------------------------------------------------------------

    async def _resume(self) -> None:
        """Go on from our newest checkpoint, or from the job's first parameters."""
        saved = await self._compute(self._checkpoints.load_newest, self.job_id)
        if saved is not None:
            self.round = saved.round
            await self._compute(self._replica.restore, saved)
        await self._share_state()

    async def _heal(self, elsewhere: OutOfSync) -> None:
        """Fetch the state that the others start from, and stand where they stand: where the witnesses are, whoever sent us away."""
        began = self._now()
        await self._others.look(now=True)
        said = await self._matchmaking.positions(self._others.witnesses())
        if not said:  # all of them are gone
            said = await self._matchmaking.positions(self._others.known())
        mine = Position(self.round, self._state)
        verdict = catch_up(mine, said, same_state=self._method.shares_weights)
        if isinstance(verdict, Stay):
            reason = f"{elsewhere}, and most workers of the last roster do not say so"
            self._report({"event": "heal_failed", "round": elsewhere.round, "reason": reason})
            if verdict.is_settled and elsewhere.round > self.round + 1:
                self._others.doubt(elsewhere.peer)
            else:
                await asyncio.sleep(UNDECIDED_S)
            return
        if self.round and verdict.position.round > self.round + 2:
            await self._save()
            await self._compute(self._checkpoints.set_aside)
        download = StateDownload(
            bytes.fromhex(self.job_id),
            verdict.position.state,
            max_bytes=max_state_bytes(self._replica.trainer.parameter_count),
        )
        try:
            data = await download.run(
                self._dependencies.transport,
                self._others.sources(verdict.peers, only=not self._method.shares_weights),
                self._dependencies.timing,
                partial(self._dependencies.progress, "fetching the state"),
            )
        except SwarmnetError as error:
            # A state may be gone by the time we ask for it; the next gathering says which is the one now.
            self._report({"event": "heal_failed", "round": verdict.position.round, "reason": str(error)})
            await asyncio.sleep(HEAL_S)
            return
        await self._compute(self._replica.take, data)
        self.round, self._slot, self._pending = verdict.position.round, None, None
        await self._share_state()
        self._report(
            {
                "event": "healed",
                "round": self.round,
                "bytes": len(data),
                "seconds": round(self._now() - began, 3),
                "dropped": [{"peer_id": peer, "reason": why} for peer, why in download.dropped.items()],
            }
        )

    async def _share_state(self) -> None:
        """Offer the present state to newcomers; its id is what we and the others compare."""
        self._state = self._states.offer(await self._compute(lambda: PackedState.of(self._replica.pack())))
        await self._matchmaking.set_position(self.round, self._state)

    async def _save(self) -> None:
        done = self.round if self._pending is None else self._pending.round

        def save() -> None:
            self._checkpoints.save(self._replica.checkpoint(self.job_id, done), self._replica.trainer.write)

        await self._compute(save)

    # ---- the others -------------------------------------------------------------------------------------

    async def _keep_announcing(self) -> None:
        while True:
            transport = self._dependencies.transport
            info = WorkerInfo(transport.peer_id, tuple(transport.addresses()), self.round, self._state)
            with contextlib.suppress(SwarmnetError):  # the record outlives a missed announcement
                await publish_worker(self._dependencies.directory, self.job_id, info)
                await publish_job(self._dependencies.directory, self._sealed)
            await asyncio.sleep(ANNOUNCE_S * self._dependencies.rng.uniform(0.8, 1.0))

    # ---- small things -----------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._dependencies.executor, lambda: function(*args, **kwargs))
