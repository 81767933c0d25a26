"""One worker's part in the pipeline of a job: it serves microbatches, and settles rounds.

1. ``serve`` answers other workers until the transport closes.
2. In each round, ``gradient`` leaves in the trainer the gradient of the microbatches that this
   worker counts. Stage 0 originates microbatches (``MicrobatchOrigin``). A later stage waits until
   stage 0 has ended its exchange, and takes the microbatches that origins list.
   If methods average parameters, ``steps`` takes inner steps instead (``inner_steps.py``), until
   the origins say that their round is over. Each stage then averages on its own.
3. ``ended`` notes how the exchange of this worker's stage ended, and returns whether it counts.
4. ``advance`` begins the next round.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress

from swarmnet_node.training.pipeline.audits import StageAuditor
from swarmnet_node.training.pipeline.inner_steps import InnerSteps
from swarmnet_node.training.pipeline.origin import MicrobatchOrigin
from swarmnet_node.training.pipeline.stage_passes import Boundary, KeptMicrobatch, StagePasses
from swarmnet_node.training.pipeline.stage_workers import StagedJob, StageWorkers, WorkerStanding
from swarmnet_node.training.pipeline.turns import Compute, Pass, Turns
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import StepReport
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import ConfigError, NotAuthorised, ProtocolViolation
from swarmnet_protocols.machine.aio import News, cancel, loop_time, race
from swarmnet_protocols.net import Buffer, PeerId, Transport
from swarmnet_protocols.net.protocol_ids import MICROBATCH, STEP
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.codecs.boundary import codecs_by_size
from swarmnet_protocols.training.jobs import SealedJob
from swarmnet_protocols.training.matchmaking.rosters import EXCHANGES_PER_ROUND
from swarmnet_protocols.training.pipeline.chains import MAX_OPEN, MOST_BATCHES
from swarmnet_protocols.training.pipeline.ledger import (
    ELECTORS,
    Accounts,
    StepEnd,
    electors,
    lacking_tokens,
    steps_are_over,
)
from swarmnet_protocols.training.pipeline.microbatches import (
    EVALUATED,
    Microbatch,
    MicrobatchClient,
    MicrobatchId,
    StageFailed,
    ToCaller,
    answer_microbatch,
    microbatch_from_wire,
)
from swarmnet_protocols.training.pipeline.receipts import Receipt, tensor_hash
from swarmnet_protocols.training.pipeline.step_streams import ToOrigin, end_from_wire, listing_from_wire
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.round_runner import Outcome
from swarmnet_protocols.wire import pipeline_pb2 as pb
from swarmnet_protocols.wire import refusal_pb2

_log = logging.getLogger(__name__)

ROUND_WAIT_S = 20.0
"""Seconds that a request of the next round waits for this worker to reach it."""
MAX_AHEAD = 2
"""Rounds that an origin may be ahead. More are not remembered."""
NEWS_S = 2.0
"""Seconds that a stage waits for news of the origins between two exchanges of a round."""


class Pipeline:
    """The pipeline of a job with ``stages`` stages, at one worker."""

    def __init__(
        self,
        sealed: SealedJob,
        trainer: StageTrainer,
        transport: Transport,
        directory: Directory,
        compute: Compute,
        standing: WorkerStanding,
    ) -> None:
        """``trainer``: of this worker's stage."""
        settings, id = sealed.job, bytes.fromhex(sealed.id)
        if settings.stages is None:
            raise ConfigError("this job has no stages")
        sequences = settings.training.microbatch or settings.training.batch_size
        positions = sequences * settings.data.sequence_length
        boundary = Boundary(
            codecs_by_size(settings.stages.codec, positions, trainer.width),
            sequences,
            positions,
            trainer.width,
            settings.job.seed,
            trainer.vocabulary,
        )
        workers = StageWorkers(
            directory, id, settings.stages.count, transport.peer_id, standing.excluded.__contains__
        )
        method = settings.make_method()  # workers that take inner steps have weights of their own
        inner_steps = method.steps_per_round if method.kind == "parameters" else None
        signs = AggregationRules.named(settings.exchange.aggregate, 1.0).verifiable and inner_steps is None
        self.job = job = StagedJob(
            id, settings.stages.count, transport, workers, Timing(), standing, settings.eval.every_rounds
        )
        self._stage = trainer.stage
        self._workers = workers
        self._passes = passes = StagePasses(trainer, boundary, standing.sign if signs else None)
        self._compute = compute
        self._batch = batch = settings.training.batch_size // sequences
        """The microbatches of an origin's batch."""
        self._held_out = settings.eval.batches * batch + len(settings.data.sources)
        """The most microbatches of an evaluation."""
        self._numbers = batch * (inner_steps or min(settings.exchange.max_workers, MOST_BATCHES))
        """Most microbatches of an origin in a round."""
        self._turns = Turns(compute)
        self._rehearsed_s = 0.0
        """Seconds that a rehearsed microbatch took. They count until the first real one ends."""
        self._client = MicrobatchClient(
            job.transport, job.id, job.timing, passes.sign is not None, job.traffic
        )
        self._auditor = StageAuditor(job, passes, self._turns, self._of, self._place, count=self._numbers)
        self._origin = (
            None if self._stage else MicrobatchOrigin(job, passes, self._turns, self._client, batch=batch)
        )
        self._round = 0
        self._kept: dict[MicrobatchId, KeptMicrobatch] = {}
        self._accounts: dict[int, Accounts] = {}
        self._origins: frozenset[PeerId] = frozenset()
        """The origins that counted in the last round that this worker's stage committed."""
        self._attempts: dict[int, tuple[PeerId, ...]] = {}
        """The contributors of the last exchange of a round that was not committed."""
        self._settled: dict[MicrobatchId, int] | None = None
        """The microbatches in this worker's last contribution to the present round."""
        self._open: Counter[PeerId] = Counter()
        self._hearing = 0
        """Conversations of origins that are open. Each lasts until all stages have committed."""
        self._begun = -1
        """The last round whose gradient this worker was asked for."""
        self._last_round: int | None = None
        """The round after which this worker leaves. None until ``stop``."""
        self._is_late = False
        """True if this worker leaves, and its last round does not end in time."""
        self._stopping: asyncio.Task[None] | None = None
        """Sets ``_is_late`` after a while. None until ``stop``."""
        self._news = News()
        self._last_step = inner_steps
        self._inner = InnerSteps(passes, self._turns, self._news) if inner_steps else None

    @property
    def batch_s(self) -> float:
        """Seconds that this worker computes for one origin's batch. 0 until ``serve``."""
        return self._batch * (self._turns.microbatch_s or self._rehearsed_s)

    async def serve(self) -> None:
        """Measure this worker's speed, then serve other workers until the transport closes."""
        for _ in range(2):  # the first pass of a process takes longer
            started_s = loop_time()
            await self._compute(self._passes.rehearse)
            self._rehearsed_s = loop_time() - started_s
        await MICROBATCH.serve(self.job.transport, self._answer, self.job.timing)
        await self._auditor.serve()
        await STEP.serve(self.job.transport, self._hear, self.job.timing)

    async def close(self) -> None:
        """End all conversations."""
        await cancel(self._stopping)
        if self._origin is not None:
            await self._origin.close()

    async def finish(self, within_s: float) -> None:
        """Wait until no other worker needs what this one keeps, but at most ``within_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                if self._origin is not None:
                    await self._origin.done()
                await self._news.until(lambda: not self._hearing)

    def stop(self, within_s: float) -> None:
        """Leave after the present round, and refuse microbatches of later ones.

        If the round does not end ``within_s``, or this worker has no part in it, ``gradient``
        returns without it.
        """

        async def give_up() -> None:
            await self._news.tell()
            await asyncio.sleep(within_s)
            self._is_late = True
            await self._news.tell()

        if self._last_round is None:
            self._last_round = self._begun
            self._stopping = asyncio.create_task(give_up())

    @property
    def hears_origins(self) -> bool:
        """True while an origin has a conversation with this worker about a round."""
        return self._hearing > 0

    @property
    def is_in_step(self) -> bool:
        """True if all stages end each round together: workers average gradients."""
        return self._inner is None

    async def advance(self, round: int, state: bytes) -> None:
        """Begin ``round`` with the present weights, of the stage's ``state``."""
        self._round = round
        self._passes.choose_codecs(self._client.rates.of_round(), self._turns.microbatch_s)
        self._accounts = {each: accounts for each, accounts in self._accounts.items() if each >= round}
        before = list(self._kept.values())

        def restart() -> None:
            for kept in before:
                kept.drop_graph()
            if self.is_in_step:  # otherwise an inner step may have begun
                self._passes.restart(state)

        # The passes of this round follow on the computing thread, so they keep their graphs.
        await self._compute(restart)
        if self.is_in_step:  # otherwise microbatches are for whatever weights are here
            self._kept = {id: kept for id, kept in self._kept.items() if id.round >= round - 1}
            self._attempts, self._settled = {}, None
        await self._news.tell()

    def divide(self, batches_s: Sequence[float]) -> None:
        """Divide the microbatches of later rounds by the seconds that a batch takes each origin."""
        if self._origin is not None and self._inner is None:
            self._origin.batches_s = batches_s

    async def gradient(self, round: int, slot: int) -> bool:
        """Leave in the trainer the gradient of the microbatches that this worker counts in a round.

        Returns False if this worker leaves without a part in the round.
        """
        self._begun = round
        if self._origin is not None:
            is_late = self._news.until(lambda: self._is_late)
            return not await race(self._origin.originate(round, slot), is_late)

        def may_leave() -> bool:
            is_idle = not any(id.round == round for id in self._kept)
            return self._last_round is not None and (is_idle or self._is_late)

        def is_news() -> bool:
            accounts = self._accounts.get(round)
            if accounts is None or accounts.end() is None:
                return False
            return accounts.counted(round) != self._settled

        while not await self._news.until(lambda: is_news() or may_leave(), NEWS_S):
            if self._settled is not None:  # an exchange of this round lacked microbatches
                break
            await self._workers.refresh()
            self._choose_electors(round)
        if may_leave():
            return False
        self._settled = self._accounts[round].counted(round)
        counted = {id: tokens for id, tokens in self._settled.items() if self._has(id)}
        await self._turns.run(lambda: self._passes.settle(counted, self._kept))
        return True

    async def steps(self, round: int, slot: int, first: int, end: int) -> StepReport | None:
        """Take the inner steps [first, end) of a round. Return None if this worker stops.

        A later stage ends the round when the origins have ended it. Its worker takes about as many
        steps as theirs, on its share of their microbatches.
        """
        self._begun = round
        is_last = end == self._last_step
        if self._origin is not None:
            report = await self._origin.steps(round, slot, first, end)
            if is_last:
                me = self.job.transport.peer_id
                await self._origin.ended(round, StepEnd((me,), report.tokens))
            return report
        if self._inner is None:
            raise ConfigError("this job's method takes no inner steps")
        await self._workers.refresh()
        share = self._batch * len(self._workers.of(0)) / (len(self._workers.of(self._stage)) + 1)
        report = await self._inner.run(
            round,
            first,
            None if is_last else end,
            max(1, int(share + 0.5)),
            lambda: self._last_round is not None or steps_are_over(self._accounts, round),
        )
        return None if self._last_round is not None else report

    async def evaluate(
        self, round: int, contributors: Sequence[PeerId], most_s: float
    ) -> tuple[float, int] | None:
        """Return the validation loss after a round, and its number of tokens.

        ``contributors`` of its exchange in stage 0 divide the work. Other workers return None.
        Raises ``TimeoutError`` if a microbatch does not come home within ``most_s``.
        """
        me = self.job.transport.peer_id
        if self._origin is None:
            return None
        if me not in contributors:
            await self._origin.end_evaluation(round)
            return None
        place = sorted(contributors).index(me)
        return await self._origin.evaluate(round, place, len(contributors), most_s)

    def _accounts_of(self, round: int) -> Accounts:
        """Return what origins told about a round, from their first word on."""
        if round not in self._accounts:
            self._accounts[round] = Accounts()
            self._choose_electors(round)
        return self._accounts[round]

    def _choose_electors(self, round: int) -> None:
        """Let the origins of the last round vote.

        Origins do not vote if they have left, or reached a later round without a word on this one.
        """
        if (accounts := self._accounts.get(round)) is not None:
            missed = {each.worker.peer for each in self._workers.records[0] if each.position.round > round}
            present = (self._origins & self._workers.of(0).keys()) - (missed - accounts.ends.keys())
            accounts.electors = frozenset(electors(round, self.job.transport.peer_id, present, ELECTORS))

    def is_discarded(self, round: int) -> bool:
        """Return whether stage 0 has discarded a round. Then every stage discards it."""
        end = self._accounts[round].end() if self.is_in_step and round in self._accounts else None
        return end is not None and not end.tokens

    async def ended(self, round: int, exchange_number: int, outcome: Outcome) -> int | None:
        """Note the end of an exchange of this worker's stage. Return how many tokens its outcome
        lacks.

        None: the outcome does not count, and the stage repeats the exchange.
        """
        if self._inner is not None:
            return 0
        contributors = outcome.all_contributors()
        if self._origin is not None:
            end = StepEnd((), 0) if outcome.average is None else StepEnd(contributors, int(outcome.tokens))
            await self._origin.ended(round, end)
            return 0
        end_here = self._accounts[round].end() if round in self._accounts else None
        attempt = exchange_number - round * EXCHANGES_PER_ROUND
        tokens = outcome.tokens if outcome.average is not None else -1.0
        if end_here is not None and (lacking := lacking_tokens(end_here, tokens, attempt)) is not None:
            self._origins = frozenset(end_here.origins) or self._origins
            return lacking
        if end_here is not None and tokens > end_here.tokens:
            self._accounts[round].forget_lost()
        self._attempts[round] = contributors
        await self._news.tell()
        return None

    # ---- microbatches -------------------------------------------------------------------------

    async def _answer(self, stream: ToCaller) -> None:
        request, _ = await stream.receive()
        microbatch = microbatch_from_wire(
            request.begin,
            job=self.job.id,
            stages=self.job.stages,
            count=self._held_out if request.begin.forward_only else self._numbers,
            positions=self._passes.boundary.positions,
            way=(stream.peer, self.job.transport.peer_id),
        )
        if microbatch.stage % self.job.stages != self._stage:
            raise ProtocolViolation(f"this worker has stage {self._stage}")
        await self._workers.check(stream.peer, microbatch.stage - 1)
        if self._stage and microbatch.id.origin != stream.peer:
            await self._workers.check(microbatch.id.origin, 0)
        inputs_hash = request.begin.inputs
        kept, held = KeptMicrobatch(), AsyncExitStack()

        async def admit() -> bool:
            nonlocal kept
            kept = await self._admit(microbatch)
            is_known = kept.knows(inputs_hash, microbatch.sent)
            trains_here = not (microbatch.is_home or microbatch.is_forward_only)
            if self._inner is not None and trains_here and kept.answer is None:
                await held.enter_async_context(self._inner.place())
                held.push_async_callback(self._leave_place, kept)
            return is_known

        async def gradient(inputs: Buffer | None) -> tuple[Buffer, Sequence[Receipt]]:
            self.job.traffic.received += len(inputs or b"")
            if microbatch.is_forward_only:
                return await self._evaluate(microbatch, inputs or b""), ()
            if inputs and inputs_hash and await asyncio.to_thread(tensor_hash, inputs) != inputs_hash:
                raise ProtocolViolation("other inputs than the caller has named")
            async with kept.lock:
                kept.take(inputs, inputs_hash, microbatch.sent)
                try:
                    answer = await self._gradient(microbatch, kept)
                except ProtocolViolation:  # these inputs
                    kept.inputs = None
                    raise
            self.job.traffic.backward += len(answer)
            return answer, kept.receipts

        with self._place(stream.peer):
            async with held:
                sizes, rates = self._passes.boundary.inputs_sizes, self._client.rates
                await answer_microbatch(stream, self.job.timing, admit, sizes, rates, gradient)

    @contextmanager
    def _place(self, caller: PeerId) -> Iterator[None]:
        """Count an open microbatch of a caller. Raises ``Refusal`` if it has too many."""
        if self._open[caller] >= MAX_OPEN:
            raise Refusal(refusal_pb2.REASON_OVERLOADED, "too many open microbatches", 1.0)
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1
            self._open += Counter()

    async def _admit(self, microbatch: Microbatch) -> KeptMicrobatch:
        """Return what is kept of a microbatch. Raises ``Refusal`` if it is not of this round."""
        id = microbatch.id
        is_leaving = self._last_round is not None and id.round > self._last_round
        if not microbatch.is_home and (is_leaving or not self.job.standing.has_place()):
            raise Refusal(refusal_pb2.REASON_OVERLOADED, "this worker only receives now", 1.0)
        if microbatch.is_forward_only:
            await self._reach(id.round)
            return KeptMicrobatch()
        if microbatch.is_home:
            found = None if self._origin is None else self._origin.home(id)
            if found is None:
                raise Refusal(refusal_pb2.REASON_UNKNOWN_STATE, "this microbatch is not under way")
            return found[0]
        if self._inner is None:
            await self._reach(id.round)
        if id not in self._kept:
            if self._inner is not None:
                self._forget_before(id)
            elif id.round < self._round:
                raise self._over(id)
            self._kept[id] = KeptMicrobatch(tokens=microbatch.tokens)
        return self._kept[id]

    async def _leave_place(self, kept: KeptMicrobatch) -> None:
        """Drop the graph of a microbatch without a gradient, after a pass that is under way."""
        if kept.answer is None:
            await self._compute(kept.drop_graph)

    def _forget_before(self, id: MicrobatchId) -> None:
        """Forget other inner steps of an origin: all their microbatches are home."""
        step = id.round, id.number // self._batch
        self._kept = {
            each: kept
            for each, kept in self._kept.items()
            if each.origin != id.origin or (each.round, each.number // self._batch) == step
        }

    async def _reach(self, round: int) -> None:
        """Wait until this worker is at ``round`` or later. Raises ``Refusal`` if it is behind.

        A worker in its inner steps may still be averaging the round before.
        """

        def has_reached() -> bool:
            return self._round >= round or (self._inner is not None and self._inner.is_open)

        await self._news.until(lambda: has_reached() or round > self._round + 1, ROUND_WAIT_S)
        if not has_reached():
            raise Refusal(refusal_pb2.REASON_UNKNOWN_STATE, f"this worker is at round {self._round}", 1.0)

    async def _gradient(self, microbatch: Microbatch, kept: KeptMicrobatch) -> Buffer:
        """Return the gradient of a microbatch's inputs.

        Compute what is not known yet. Ask the next worker unless the rest of the chain has already
        computed it.
        """
        id, passes = microbatch.id, self._passes
        if microbatch.is_home:
            found = None if self._origin is None else self._origin.home(id)
            if found is not None:
                batch = found[1]
                await self._turns.run(lambda: passes.end(kept, batch, id, microbatch.sender), Pass.END)
        else:
            if kept.passed is None:
                self._check_round(id)
                ends = microbatch.sender, microbatch.onward().receiver
                await self._turns.run(lambda: passes.forward(kept, *ends), Pass.FORWARD)
            if kept.answer is None or kept.rest != microbatch.rest:
                if (outputs := kept.outputs) is None:
                    raise self._over(id)
                gradient, later = await self._ask_next(microbatch, outputs)
                # receipts must agree; without them, another worker's rounding is not worth a pass
                if kept.answer is None or (kept.receipts and gradient != kept.answer.grad_outputs):
                    self._check_round(id)
                    subject = microbatch.subject(self.job.id)

                    def backward() -> None:
                        passes.backward(kept, gradient, id, microbatch.onward().receiver)
                        passes.sign_receipt(kept, subject, later)

                    try:
                        await self._turns.run(backward, Pass.BACKWARD)
                    except ProtocolViolation as error:
                        raise StageFailed(microbatch.stage + 1, str(error)) from error
                else:
                    kept.receipts = (*kept.receipts[:1], *later)
                kept.rest = microbatch.rest
        if kept.answer is None:
            raise self._over(id)
        return kept.answer.grad_inputs

    async def _evaluate(self, microbatch: Microbatch, inputs: Buffer) -> Buffer:
        """Pass a microbatch of an evaluation on. Nothing of it is kept."""
        if self._origin is not None:
            await self._origin.note_loss(microbatch, inputs)
            return EVALUATED
        ends = microbatch.sender, microbatch.onward().receiver
        outputs = await self._turns.run(lambda: self._passes.evaluated(inputs, *ends))
        answer, _ = await self._ask_next(microbatch, outputs)
        return answer

    async def _ask_next(
        self, microbatch: Microbatch, outputs: Buffer
    ) -> tuple[bytearray, tuple[Receipt, ...]]:
        """Return the next worker's answer and receipts. Raises ``StageFailed``."""
        onward = microbatch.onward()
        addresses = self._workers.addresses(onward.stage % self.job.stages, onward.receiver)
        sizes = self._passes.boundary.answer_sizes(onward)
        return await self._client.gradient(onward, addresses, outputs, sizes)

    def _check_round(self, id: MicrobatchId) -> None:
        if self._inner is None and id.round != self._round:
            raise self._over(id)

    def _over(self, id: MicrobatchId) -> Refusal:
        return Refusal(refusal_pb2.REASON_UNKNOWN_STATE, f"round {id.round} is over here")

    def _of(self, microbatch: Microbatch) -> KeptMicrobatch | None:
        """Return what is kept of a microbatch, on its way to this worker or from it."""
        if self._origin is None:
            return self._kept.get(microbatch.id)
        return self._origin.kept(microbatch)

    def _has(self, id: MicrobatchId) -> bool:
        kept = self._kept.get(id)
        return kept is not None and kept.answer is not None

    # ---- the end of a round -------------------------------------------------------------------

    async def _hear(self, stream: ToOrigin) -> None:
        """Hear an origin about one round, until this worker's stage has committed it."""
        if not self._stage:
            raise NotAuthorised("stage 0 has origins only")
        await self._workers.check(stream.peer, 0)
        first, _ = await stream.receive()
        round = first.listing.round
        listed = self._listing(first.listing)
        heartbeat = pb.StepReply(heartbeat=pb.Heartbeat())

        async def converse() -> None:
            if self._inner is None:
                await self._reach(round)
            await race(self._note(stream, round, listed), self._say(stream, round))

        self._hearing += 1
        try:
            await race(converse(), stream.send_heartbeats(self.job.timing.heartbeat_s, lambda: heartbeat))
        finally:
            self._hearing -= 1
            if round in self._accounts:
                self._accounts[round].lost.add(stream.peer)
            await self._news.tell()

    def _listing(self, wire: pb.Listing) -> dict[int, int]:
        most = self._passes.boundary.positions
        return listing_from_wire(wire, job=self.job.id, count=self._numbers, most=most)

    async def _note(self, stream: ToOrigin, round: int, listed: dict[int, int]) -> None:
        origin = stream.peer
        while True:
            if self._is_near(round):
                self._accounts_of(round).list(origin, listed)
                missing = [number for number in listed if not self._has(MicrobatchId(round, origin, number))]
                excluded = sorted(self.job.standing.excluded.keys() & self._workers.of(self._stage).keys())
                await stream.send(pb.StepReply(listed=pb.Listed(missing=missing, excluded=excluded)))
                await self._news.tell()
            request, _ = await stream.receive()
            while request.HasField("end"):
                if self._is_near(round):
                    self._accounts_of(round).ends[origin] = end_from_wire(request.end)
                    await self._news.tell()
                request, _ = await stream.receive()
            listed = self._listing(request.listing)
            if request.listing.round != round:
                raise ProtocolViolation("the listing of another round")

    def _is_near(self, round: int) -> bool:
        """Return whether what an origin tells about a round is remembered."""
        return self._round <= round <= self._round + MAX_AHEAD

    async def _say(self, stream: ToOrigin, round: int) -> None:
        said: tuple[PeerId, ...] | None = None

        def is_news() -> bool:
            return self._round > round or self._attempts.get(round) not in {None, said}

        while self._round <= round:
            attempt = self._attempts.get(round)
            if attempt is not None and attempt != said:
                await stream.send(pb.StepReply(attempt=pb.Attempt(contributors=attempt)))
                said = attempt
            await self._news.until(is_news)
        await stream.send(pb.StepReply(committed=pb.Committed()))
        await asyncio.Event().wait()  # the origin ends the conversation
