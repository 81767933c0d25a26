"""A worker of stage 0 as the origin of microbatches.

One round:

1. ``originate`` sends this worker's part of the microbatches through chains of workers, until all
   are home. A worker that fails is replaced, and the microbatch goes the same way again.
2. It tells every worker which microbatches that worker counts. A worker that is lost before its
   stage has committed the round is replaced, too.
3. ``ended`` tells all workers which origins stage 0 has averaged.

``evaluate`` sends held-out microbatches through all stages, forwards only.

If the method averages parameters, ``steps`` does 1 for each inner step, and takes the step. Workers
count what passes through them, and ``ended`` tells them that this origin's round is over.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from swarmnet_node.training.data.sampler import target_count
from swarmnet_node.training.pipeline.audits import verdict
from swarmnet_node.training.pipeline.stage_passes import KeptMicrobatch, StagePasses
from swarmnet_node.training.pipeline.stage_workers import StagedJob
from swarmnet_node.training.pipeline.turns import Pass, Turns
from swarmnet_node.training.replica import NO_STEPS, combined
from swarmnet_node.training.steps.trainer import StepReport
from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import News, all_of, cancel, in_background, loop_time, race
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.net.protocol_ids import STEP
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.training.pipeline.audits import Accusations, AuditDraws, is_odd, stretch
from swarmnet_protocols.training.pipeline.chains import (
    MAX_OPEN,
    OPEN_HERE,
    OPEN_PER_WORKER,
    StageDraws,
    part_of,
)
from swarmnet_protocols.training.pipeline.ledger import (
    ELECTORS,
    MicrobatchLedger,
    StepEnd,
    electors,
)
from swarmnet_protocols.training.pipeline.microbatches import (
    Microbatch,
    MicrobatchClient,
    MicrobatchId,
    StageFailed,
)
from swarmnet_protocols.training.pipeline.receipts import Receipt, tensor_hash
from swarmnet_protocols.training.pipeline.step_streams import (
    ToWorker,
    end_to_wire,
    listing,
    missing_from_wire,
    peers_from_wire,
)
from swarmnet_protocols.wire import pipeline_pb2 as pb
from swarmnet_protocols.wire import refusal_pb2

_log = logging.getLogger(__name__)

NO_NUMBERS = range(0)
"""The part of an origin that begins no microbatch of a round."""
RETRY_S = 0.5
"""Seconds until a stage without a worker is looked at again."""
MISSING_S = 10.0
"""Seconds without a worker of a stage until this is told. With less, people hear of workers that
are about to start. With more, a job stands still in silence."""
RETELL_S = 2.0
"""Seconds until a worker that failed is told the end of a round again. With less, dead workers are
dialled often. With more, a worker that comes back waits for longer."""
TELLERS = 2 * ELECTORS - 1
"""Origins that tell the end of a round to a worker without a microbatch. With fewer, a worker falls
behind when two of its electors fail at once."""
SPARE_S = 10.0
"""Seconds that a teller waits for a worker's electors. With less, workers hear more in each round.
With more, a worker whose electors have failed waits longer."""


class _Step:
    """One round of this origin, until all stages have committed it."""

    def __init__(
        self,
        round: int,
        numbers: range,
        total: int = 1,
        *,
        is_evaluated: bool = True,
        has_books: bool = True,
        is_evaluation: bool = False,
    ) -> None:
        """``numbers``: this origin's part of the ``total`` microbatches of all origins.

        ``has_books`` False: workers count what passes through them, and the ledger is empty.
        """
        self.round = round
        self.numbers = numbers
        self.total = total
        self.has_books = has_books
        self.is_evaluation = is_evaluation
        self.losses: dict[int, float] = {}
        """The summed losses of an evaluation, by number."""
        self.ledger = MicrobatchLedger()
        self.draws: dict[int, StageDraws] = {}
        """The draws of each stage's workers, from the first microbatch on."""
        self.used: set[tuple[int, PeerId]] = set()
        """Stages and workers that computed a microbatch."""
        self.begin({})
        self.end: StepEnd | None = None
        self.committed: set[int] = set()
        self.is_evaluated = is_evaluated
        """False until an evaluation after the round has ended."""
        self.tasks: dict[tuple[object, int, PeerId], asyncio.Task[None]] = {}
        """Conversations with workers of each stage, and replacements of workers."""
        self.audits: list[asyncio.Task[None]] = []
        self.states: dict[int, dict[PeerId, bytes]] = {}
        """The state that each worker of a stage computed with."""
        self.news = News()

    def begin(self, batches: Mapping[int, torch.Tensor]) -> None:
        """Begin with the microbatches of an inner step."""
        self.batches = batches
        self.begun = {number: KeptMicrobatch() for number in batches}
        self.home = {number: KeptMicrobatch() for number in batches}

    async def close(self) -> None:
        """End all conversations."""
        await cancel(*self.tasks.values(), *self.audits)


class MicrobatchOrigin:
    """The microbatches that one worker of stage 0 originates."""

    def __init__(
        self,
        job: StagedJob,
        passes: StagePasses,
        turns: Turns,
        client: MicrobatchClient,
        *,
        batch: int,
    ) -> None:
        self._job = job
        self._standing = job.standing
        self._accusations = Accusations()
        self._draws = AuditDraws(job.standing.rng)
        self._electors: tuple[PeerId, ...] = ()
        """The origins that counted in the last round."""
        self._batch = batch
        self._workers = job.workers
        self._passes = passes
        self._turns = turns
        self._compute = turns.compute
        self._client = client
        self._steps: dict[int, _Step] = {}
        self._evaluation: _Step | None = None
        self._missing: tuple[int, int] | None = None
        """The round and the stage without a worker that were told last."""
        self.batches_s: Sequence[float] = ()
        """The seconds that a batch takes each origin of the last roster, 0 if unknown."""

    async def originate(self, round: int, slot: int) -> None:
        """Bring this worker's part of a round home. All workers then confirm what they count."""
        step = await self._begin(round, slot)
        await self._bring_all_home(step, 0)
        await step.news.until(lambda: step.ledger.is_confirmed)
        tokens = sum(step.ledger.tokens.values())
        me = self._job.transport.peer_id
        own = [
            (MicrobatchId(round, me, number), batch, step.begun[number], step.home[number])
            for number, batch in step.batches.items()
        ]
        await self._compute(lambda: self._passes.settle_own(tokens, own))

    async def steps(self, round: int, slot: int, first: int, end: int) -> StepReport:
        """Take the inner steps [first, end) of a round, each with the microbatches of a batch."""
        step, report = self._steps.get(round), NO_STEPS
        if step is None or not first:
            step = await self._begin(round, slot, has_books=False)
        for number in range(first, end):
            await self._bring_all_home(step, number)
            tokens = sum(map(target_count, step.batches.values()))
            await self._compute(partial(self._passes.settle_own, tokens))
            report = combined(report, await self._compute(partial(self._passes.step, round, number)))
        return report

    async def ended(self, round: int, end: StepEnd) -> None:
        """Tell the workers of all stages how stage 0 ended a round."""
        step = self._steps.setdefault(round, _Step(round, NO_NUMBERS))
        step.end = end
        await self._workers.refresh()
        me = self._job.transport.peer_id
        origins = self._electors or {me, *self._workers.of(0)}
        for stage in range(1, self._job.stages):
            for peer in self._workers.of(stage):
                if me in (tellers := electors(round, peer, origins, TELLERS)):
                    is_elector = tellers.index(me) < ELECTORS
                    self._start(self._tell, step, stage, peer, 0.0 if is_elector else SPARE_S)
        if step.has_books:
            self._electors = end.origins or self._electors
        await step.news.tell()

    async def evaluate(self, round: int, place: int, origins: int, most_s: float) -> tuple[float, int]:
        """Return the validation loss after a round, and its number of tokens.

        Held-out data that all workers share is divided: this is origin ``place`` of ``origins``.
        Raises ``TimeoutError`` if a microbatch does not come home within ``most_s``.
        """
        try:
            return await self._evaluate(round + 1, place, origins, most_s)
        finally:
            await self.end_evaluation(round)

    async def end_evaluation(self, round: int) -> None:
        """Let the workers of other stages leave. They stay until the evaluation is over."""
        if (step := self._steps.get(round)) is not None:
            step.is_evaluated = True
            await step.news.tell()

    async def _evaluate(self, round: int, place: int, origins: int, most_s: float) -> tuple[float, int]:
        held_out = await self._compute(lambda: self._passes.trainer.held_out(place, origins))
        numbers = range(place * len(held_out), (place + 1) * len(held_out))
        step = self._evaluation = _Step(
            round, numbers, origins * len(held_out), has_books=False, is_evaluation=True
        )
        step.begin({number: batch for number, (_, batch) in enumerate(held_out)})

        async def send(number: int) -> None:
            batch = step.batches[number]
            async with asyncio.timeout(most_s):
                chain = await self._complete(step, number, ())
                outputs = await self._turns.run(lambda: self._passes.begin_evaluation(batch, chain[0]))
                await self._travel(step, number, chain, outputs)

        await self._all_of(step, send)
        return self._passes.trainer.mean_loss(
            (source, step.losses[number], target_count(batch))
            for number, (source, batch) in enumerate(held_out)
        )

    async def note_loss(self, microbatch: Microbatch, inputs: Buffer) -> None:
        """Compute the loss of a microbatch that comes home in an evaluation. Raises ``Refusal``."""
        step, id = self._evaluation, microbatch.id
        if step is None or step.round != id.round or id.number not in step.batches:
            raise Refusal(refusal_pb2.REASON_UNKNOWN_STATE, "this microbatch is not under way")
        batch = step.batches[id.number]
        step.losses[id.number] = await self._turns.run(
            lambda: self._passes.evaluate(batch, inputs, microbatch.sender)
        )

    async def done(self) -> None:
        """Wait until all stages have committed all rounds."""
        for step in list(self._steps.values()):
            await step.news.until(partial(self._is_committed, step))

    async def close(self) -> None:
        """End all conversations."""
        await all_of(*(step.close() for step in self._steps.values()))

    def home(self, id: MicrobatchId) -> tuple[KeptMicrobatch, torch.Tensor] | None:
        """Return what is kept of an own microbatch that comes home, and its tokens."""
        step = self._steps.get(id.round)
        if step is None or id.number not in step.batches:
            return None
        return step.home[id.number], step.batches[id.number]

    def kept(self, microbatch: Microbatch) -> KeptMicrobatch | None:
        """Return what is kept of an own microbatch, on its way out or home."""
        step = self._steps.get(microbatch.id.round)
        if step is None or microbatch.id.origin != self._job.transport.peer_id:
            return None
        return (step.home if microbatch.is_home else step.begun).get(microbatch.id.number)

    # ---- microbatches -------------------------------------------------------------------------

    def _part(self, slot: int) -> tuple[range, int]:
        """Return this origin's microbatches in the next round, and the number of all origins'."""
        if slot >= len(self.batches_s):
            origins = max(slot, len(self._workers.of(0))) + 1
            return range(slot * self._batch, (slot + 1) * self._batch), origins * self._batch
        return part_of(self.batches_s, slot, self._batch), len(self.batches_s) * self._batch

    async def _begin(self, round: int, slot: int, *, has_books: bool = True) -> _Step:
        """Begin this origin's part of a round.

        Drop earlier rounds that are over, and later ones: they began from a state that is gone.
        """
        for old, before in list(self._steps.items()):
            if old >= round or self._is_committed(before) or old < round - 1:
                del self._steps[old]
                await before.close()
        is_due = (round + 1) % self._job.every_rounds == 0
        step = _Step(round, *self._part(slot), is_evaluated=not is_due, has_books=has_books)
        self._steps[round] = step
        await self._compute(self._passes.restart)
        return step

    async def _bring_all_home(self, step: _Step, inner: int) -> None:
        """Send the microbatches of an inner step through all stages."""
        trainer = self._passes.trainer
        batches = await self._compute(lambda: trainer.microbatches(step.round, inner, step.numbers))
        step.begin(dict(enumerate(batches, inner * len(batches))))
        await self._all_of(step, partial(self._bring_home, step))
        await asyncio.gather(*step.audits)
        for stage, states in list(step.states.items()):
            for peer in [each for each in states if is_odd(states, each) or each in self._standing.excluded]:
                await self._start(self._replace, step, stage, peer)
        for stage, peer in step.used:
            self._start(self._tell, step, stage, peer)

    async def _all_of(self, step: _Step, bring: Callable[[int], Awaitable[None]]) -> None:
        """Bring all microbatches of a step home, a few at a time."""
        others = [len(self._workers.of(stage)) for stage in range(self._job.stages)]
        # each microbatch of an evaluation has little time: few go at once
        batches = 1.0 if step.is_evaluation else len(step.batches) / self._batch
        share = (1 + sum(others)) * batches / (1 + others[0])
        open_here = OPEN_HERE + round(OPEN_PER_WORKER * share)
        places = asyncio.Semaphore(min(open_here, MAX_OPEN * max(1, others[1])))

        async def place(number: int) -> None:
            async with places:
                await bring(number)

        await all_of(*map(place, step.batches))

    async def _bring_home(self, step: _Step, number: int) -> None:
        begun = step.begun[number]
        chain = await self._complete(step, number, ())  # the codec of the outputs depends on the link
        begin = partial(self._passes.begin, begun, step.batches[number], chain[0])
        await self._turns.run(begin, Pass.BEGIN)
        while begun.answer is None:
            gradient, chain = await self._travel(step, number, chain, begun.outputs)
            try:
                await self._turns.run(partial(self._passes.finish, begun, gradient, chain[0]), Pass.BACKWARD)
            except ProtocolViolation as error:
                chain = self._without(chain, StageFailed(1, str(error)), {})

    async def _travel(
        self, step: _Step, number: int, chain: tuple[PeerId, ...], outputs: Buffer | None
    ) -> tuple[bytearray, tuple[PeerId, ...]]:
        """Send stage 0's outputs along ``chain``, with replacements where it fails, until they are
        home.

        Empty: a new chain. Returns the gradient of stage 0's outputs, and the chain that computed
        it.
        """
        id = MicrobatchId(step.round, self._job.transport.peer_id, number)
        tokens = target_count(step.batches[number])
        blamed: dict[PeerId, PeerId] = {}
        job, begun = self._job.id, step.begun[number]
        while True:
            chain = await self._complete(step, number, chain)
            addresses = self._workers.addresses(1, chain[0])
            begun.sent += 1
            sent = Microbatch(id, 1, chain, tokens, step.is_evaluation, begun.sent)
            sent = replace(sent, signature=self._standing.sign(sent.signed_bytes(job)))
            sizes = self._passes.boundary.answer_sizes(sent)
            try:
                gradient, receipts = await self._client.gradient(sent, addresses, outputs or b"", sizes)
                self._check(step, sent, receipts)
            except StageFailed as failed:
                chain = self._without(chain, failed, blamed)
                continue
            step.used.update(enumerate(chain, 1))
            if step.has_books:
                step.ledger.enter(number, chain, tokens)
            return gradient, chain

    # ---- audits -------------------------------------------------------------------------------

    def _check(self, step: _Step, microbatch: Microbatch, receipts: Sequence[Receipt]) -> None:
        """Check the receipts of a microbatch that is home, and start audits of some.

        Raises ``StageFailed`` if the last worker sent something else than it says, or if a worker
        computed with another state than most of its stage.
        """
        home = step.home[microbatch.id.number]
        if not (self._client.signed and microbatch.has_receipts):
            return
        answer = b"" if home.answer is None else home.answer.grad_inputs
        answered = (home.inputs_hash, tensor_hash(answer))
        if answered != (receipts[-1].outputs, receipts[-1].grad_outputs):
            raise StageFailed(len(receipts), f"{microbatch.chain[-1]} sent other tensors than it says")
        for stage, receipt in enumerate(receipts, 1):
            leg = replace(microbatch, stage=stage)
            states = step.states.setdefault(stage, {})
            states[leg.receiver] = receipt.state
            if is_odd(states, leg.receiver):
                raise StageFailed(stage, f"{leg.receiver} has another state than its stage")
            answers = stretch(len(self._workers.of(stage)), self._batch * max(1, len(self._electors)))
            if receipt.state and self._draws.draw(leg.receiver, answers):
                step.audits.append(asyncio.create_task(self._audit(step, leg, receipt), name="audit"))

    async def _audit(self, step: _Step, microbatch: Microbatch, receipt: Receipt) -> None:
        """Have a worker compute an answer again. If it accuses, have the whole stage compute it."""
        stage, accused = microbatch.stage, microbatch.receiver
        ask = partial(verdict, self._job, microbatch, receipt)
        others = [peer for peer in self._workers.candidates(stage) if peer != accused]
        if accused in self._standing.excluded or not others:
            return
        accuser = self._standing.rng.choice(others)
        if accusation := (await ask(accuser)).accusation:
            self._accuse(step, stage, accuser, accused)
            judges = [accused, *(peer for peer in others if peer != accuser)]
            found = await all_of(*(ask(peer, (accuser, accusation)) for peer in judges))
            for peer, each in zip(judges, found, strict=True):
                if each.honest or each.accusation:
                    self._accuse(step, stage, peer, accuser if each.honest else accused)

    def _accuse(self, step: _Step, stage: int, accuser: PeerId, accused: PeerId) -> None:
        """Note that a worker excludes another one of its stage. Follow if most of them do."""
        if accused in self._standing.excluded:
            return
        if self._accusations.accuse(accuser, accused, self._workers.of(stage)):
            self._standing.exclude(accused)
            self._start(self._replace, step, stage, accused)

    # ---- chains -------------------------------------------------------------------------------

    async def _complete(self, step: _Step, number: int, chain: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        """Return the ``chain`` of a microbatch with a worker in each empty place."""
        places = list(chain or [PeerId("")] * (self._job.stages - 1))
        began_s = loop_time()
        while "" in places:
            index = places.index(PeerId(""))
            candidates = self._workers.candidates(index + 1)
            if free := [each for each in candidates if each not in places]:
                places[index] = self._choose(step, number, index + 1, free)
            else:
                # A worker that moved here has left its place in another stage.
                places = [PeerId("") if each in candidates else each for each in places]
                missing = step.round, index + 1
                is_told = self._missing == missing or self._workers.of(index + 1)
                if not is_told and loop_time() > began_s + MISSING_S:
                    self._missing = missing
                    self._standing.emit("stage_missing", round=step.round, missing=index + 1)
                await asyncio.sleep(RETRY_S)
                await self._workers.refresh(RETRY_S)
        return tuple(places)

    def _choose(self, step: _Step, number: int, stage: int, free: Iterable[PeerId]) -> PeerId:
        """Return a worker of a stage for a microbatch: if possible, another worker than before."""
        workers = {peer: self._workers.batch_s(stage, peer) for peer in self._workers.of(stage)}
        if stage not in step.draws:
            seed = f"{step.round}/{stage}"
            step.draws[stage] = StageDraws(step.numbers, step.total, workers, seed)
        replaced = step.ledger.chains.get(number, ())[stage - 1 : stage]
        others = [peer for peer in free if peer not in replaced] or free
        return step.draws[stage].choose({peer: workers[peer] for peer in others}, self._standing.rng)

    def _without(
        self, chain: tuple[PeerId, ...], failed: StageFailed, blamed: dict[PeerId, PeerId]
    ) -> tuple[PeerId, ...]:
        """Return the chain with an empty place where a worker failed.

        If two workers fail after the same predecessor, the predecessor is to blame: it is cut off
        from both, or sends them what they refuse. Only the predecessor is then replaced. This
        worker is the stage after the last. ``blamed``: predecessor → its failed successor.
        """
        _log.debug("microbatch: %s", failed)
        index = min(failed.stage, len(chain)) - 1
        places, culprit = list(chain), chain[index]
        if index and not failed.busy and failed.stage <= len(chain):
            before = chain[index - 1]
            if blamed.setdefault(before, culprit) != culprit:
                self._workers.forgive(blamed[before])
                index, culprit = index - 1, before
        self._workers.avoid(culprit, busy=failed.busy)
        places[index] = PeerId("")
        return tuple(places)

    # ---- the end of a round -------------------------------------------------------------------

    def _start(
        self,
        work: Callable[..., Coroutine[Any, Any, None]],
        step: _Step,
        stage: int,
        peer: PeerId,
        *rest: Any,
    ) -> asyncio.Task[None]:
        """Start ``work`` for a worker of a stage, unless it is under way. Return its task."""
        task = step.tasks.get((work, stage, peer))
        if task is None or task.done():
            name = f"step {step.round} of {peer}"
            task = asyncio.create_task(work(step, stage, peer, *rest), name=name)
            step.tasks[work, stage, peer] = task
        return task

    async def _tell(self, step: _Step, stage: int, peer: PeerId, wait_s: float = 0.0) -> None:
        """Tell a worker about a round until its stage has committed the round.

        If the worker fails, replace it, and try again: it may come back and miss the round's end.
        ``wait_s``: seconds in which others may tell a worker without a microbatch.
        """
        await step.news.until(lambda: stage in step.committed or bool(step.ledger.listed(peer)), wait_s)
        while stage not in step.committed:
            try:
                await self._tell_once(step, stage, peer)
            except SwarmnetError as error:
                _log.debug("round %d: %s of stage %d is lost: %s", step.round, peer, stage, error)
                self._workers.avoid(peer, busy=False)
                await self._replace(step, stage, peer)
                await asyncio.sleep(RETELL_S)

    async def _tell_once(self, step: _Step, stage: int, peer: PeerId) -> None:
        addresses = self._workers.addresses(stage, peer)
        stream = await STEP.open(self._job.transport, peer, self._job.timing, addresses=addresses)
        heartbeat = pb.StepRequest(heartbeat=pb.Heartbeat())
        try:
            async with in_background(stream.send_heartbeats(self._job.timing.heartbeat_s, lambda: heartbeat)):
                await self._converse(step, stage, stream)
        finally:
            stream.close()

    async def _converse(self, step: _Step, stage: int, stream: ToWorker) -> None:
        listed: list[dict[int, int]] = []
        peer = stream.peer

        async def say() -> None:
            said: dict[int, int] | None = None
            has_ended = False

            def is_news() -> bool:
                is_told = said == step.ledger.listed(peer) and has_ended == (step.end is not None)
                return self._is_committed(step) or not is_told

            while not self._is_committed(step):
                if said != (now := step.ledger.listed(peer)):
                    listed.append(now)
                    await stream.send(listing(self._job.id, step.round, now))
                    said = now
                if step.end is not None and not has_ended:
                    await stream.send(end_to_wire(step.end))
                    has_ended = True
                await step.news.until(is_news)

        async def hear() -> None:
            while True:
                reply, _ = await stream.receive()
                match reply.WhichOneof("kind"):
                    case "listed" if listed:
                        answered = listed.pop(0)
                        missing = missing_from_wire(reply.listed, answered)
                        for accused in peers_from_wire(reply.listed.excluded):
                            self._accuse(step, stage, peer, accused)
                        step.ledger.confirm(peer, answered, missing)
                        await step.news.tell()
                        if missing:
                            self._start(self._replace, step, stage, peer, missing)
                    case "attempt":
                        contributors = peers_from_wire(reply.attempt.contributors)
                        for absent in sorted(step.ledger.absent(stage, contributors)):
                            self._start(self._replace, step, stage, absent)
                    case "committed":
                        step.committed.add(stage)
                        await step.news.tell()
                    case _:
                        raise ProtocolViolation("an unexpected message of a worker")

        await race(hear(), say())

    async def _replace(
        self, step: _Step, stage: int, peer: PeerId, numbers: Collection[int] | None = None
    ) -> None:
        """Have other workers of the stage compute microbatches that ``peer`` does not count.

        ``numbers`` None: all that are listed to it.
        """
        for number in sorted(step.ledger.listed(peer) if numbers is None else numbers):
            chain = step.ledger.chains[number]
            if stage in step.committed or chain[stage - 1] != peer:
                continue
            places = list(chain)
            places[stage - 1] = PeerId("")
            begun = step.begun[number]
            gradient, _ = await self._travel(step, number, tuple(places), begun.outputs)
            await self._turns.run(partial(self._passes.finish, begun, gradient))
            for index, worker in enumerate(step.ledger.chains[number]):
                self._start(self._tell, step, index + 1, worker)
            await step.news.tell()

    def _is_committed(self, step: _Step) -> bool:
        return step.is_evaluated and len(step.committed) == self._job.stages - 1
