"""Audits of microbatches: a worker computes again what another one of its stage has answered.

1. An origin asks a worker of the stage (``verdict``).
2. That worker fetches from the neighbours in the chain what the audited worker got. It computes the
   answer again, and compares it with the receipt (``StageAuditor``).
3. If it finds the receipt false, the origin shows its accusation to all workers of the stage. Each
   computes the answer, and excludes whoever signed a false receipt or a false accusation.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from swarmnet_node.training.pipeline.stage_passes import KeptMicrobatch, StagePasses
from swarmnet_node.training.pipeline.stage_workers import StagedJob
from swarmnet_node.training.pipeline.turns import Turns
from swarmnet_protocols.errors import NotAuthorised, ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.net.protocol_ids import AUDIT
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.training.pipeline.microbatches import (
    Microbatch,
    collected,
    microbatch_from_wire,
    microbatch_to_wire,
    parts,
    peer_from_wire,
)
from swarmnet_protocols.training.pipeline.receipts import (
    Receipt,
    receipt_from_wire,
    receipt_to_wire,
    tensor_hash,
)
from swarmnet_protocols.wire import pipeline_pb2 as pb
from swarmnet_protocols.wire import refusal_pb2

_ToAsker = TypedStream[pb.AuditReply, pb.AuditRequest]


async def verdict(
    job: StagedJob,
    microbatch: Microbatch,
    receipt: Receipt,
    auditor: PeerId,
    accusation: tuple[PeerId, bytes] = (PeerId(""), b""),
) -> pb.Verdict:
    """Return what ``auditor`` finds about a receipt. An auditor that fails finds nothing.

    ``microbatch``: on its way to the worker of the receipt. ``accusation``: a worker that found the
    receipt false, and its signature.
    """
    wire, subject = microbatch_to_wire(job.id, microbatch), microbatch.subject(job.id)
    accuser, signature = accusation
    audit = pb.Audit(microbatch=wire, receipt=receipt_to_wire(receipt), accuser=accuser, accusation=signature)
    try:
        addresses = job.workers.addresses(microbatch.stage, auditor)
        stream = await AUDIT.open(job.transport, auditor, job.timing, addresses=addresses)
        reply, _ = await stream.ask(pb.AuditRequest(audit=audit))
    except SwarmnetError:
        return pb.Verdict()
    found = reply.verdict
    is_signed = not found.accusation or receipt.is_accused(subject, auditor, found.accusation)
    return found if is_signed else pb.Verdict()


class StageAuditor:
    """Answers audits of other workers of this worker's stage, and gives tensors to auditors."""

    def __init__(
        self,
        job: StagedJob,
        passes: StagePasses,
        turns: Turns,
        kept: Callable[[Microbatch], KeptMicrobatch | None],
        place: Callable[[PeerId], AbstractContextManager[None]],
        *,
        count: int,
    ) -> None:
        """``kept`` returns what this worker keeps of a microbatch. ``place`` bounds the requests of
        a peer. ``count``: the most microbatches of an origin in a round."""
        self._job = job
        self._passes = passes
        self._turns = turns
        self._kept = kept
        self._place = place
        self._count = count

    async def serve(self) -> None:
        """Answer other workers until the transport closes."""
        await AUDIT.serve(self._job.transport, self._answer, self._job.timing)

    async def _answer(self, stream: _ToAsker) -> None:
        request, _ = await stream.receive()
        with self._place(stream.peer):
            if request.HasField("recall"):
                microbatch = self._read(request.recall.microbatch)
                await self._job.workers.check(stream.peer, microbatch.stage)
                for part, payload in parts(self._recalled(microbatch, gradient=request.recall.gradient)):
                    await stream.send(pb.AuditReply(part=part), payload)
            else:
                audit = request.audit
                microbatch, receipt = self._read(audit.microbatch), receipt_from_wire(audit.receipt)
                accuser = peer_from_wire(audit.accuser) if audit.accuser else None
                await self._check(stream.peer, microbatch, receipt, accuser, audit.accusation)
                heartbeat = pb.AuditReply(heartbeat=pb.Heartbeat())
                await race(
                    self._judge(stream, microbatch, receipt, accuser),
                    stream.send_heartbeats(self._job.timing.heartbeat_s, lambda: heartbeat),
                )

    def _read(self, wire: pb.Microbatch) -> Microbatch:
        microbatch = microbatch_from_wire(
            wire,
            job=self._job.id,
            stages=self._job.stages,
            count=self._count,
            positions=self._passes.boundary.positions,
        )
        if microbatch.is_home:
            raise ProtocolViolation("stage 0 has no receipts")
        return microbatch

    def _recalled(self, microbatch: Microbatch, *, gradient: bool) -> Buffer:
        """Return a tensor that this worker exchanged with the audited one, its neighbour."""
        me, onward, tensor = self._job.transport.peer_id, microbatch.onward(), None
        if me == microbatch.sender and (kept := self._kept(microbatch)) is not None:
            tensor = (kept.answer.grad_outputs if kept.answer else None) if gradient else kept.outputs
        elif me == onward.receiver and (kept := self._kept(onward)) is not None:
            tensor = (kept.answer.grad_inputs if kept.answer else None) if gradient else kept.inputs
        if tensor is None:
            raise Refusal(refusal_pb2.REASON_UNKNOWN_STATE, "this tensor is not here")
        return tensor

    async def _check(
        self,
        asker: PeerId,
        microbatch: Microbatch,
        receipt: Receipt,
        accuser: PeerId | None,
        accusation: bytes,
    ) -> None:
        accused, mine, workers = microbatch.receiver, self._passes.trainer.stage, self._job.workers
        if microbatch.stage != mine or asker != microbatch.id.origin:
            raise NotAuthorised("only an origin may ask for an audit, of a worker of this stage")
        await workers.check(asker, 0)
        for peer in {accused, accuser or accused} - {workers.me, *workers.of(mine)}:
            await workers.check(peer, mine)  # invented workers would fill the list of excluded ones
        subject = microbatch.subject(self._job.id)
        if not receipt.is_signed(subject, accused):
            raise ProtocolViolation(f"a receipt that {accused} has not signed")
        if accuser is not None and not receipt.is_accused(subject, accuser, accusation):
            raise ProtocolViolation(f"an accusation that {accuser} has not signed")

    async def _judge(
        self, stream: _ToAsker, microbatch: Microbatch, receipt: Receipt, accuser: PeerId | None
    ) -> None:
        is_honest, standing = await self._is_honest(microbatch, receipt), self._job.standing
        found, liar = pb.Verdict(honest=bool(is_honest)), accuser if is_honest else None
        if is_honest is False:
            found.accusation = standing.sign(receipt.accusation(microbatch.subject(self._job.id)))
            liar = microbatch.receiver
        if liar is not None and liar != self._job.workers.me:
            standing.exclude(liar)
        await stream.send(pb.AuditReply(verdict=found))

    async def _is_honest(self, microbatch: Microbatch, receipt: Receipt) -> bool | None:
        """Return whether this worker finds the answer of a receipt.

        None if that cannot be known: neighbours do not give the tensors, this worker has another
        state, or rounding may explain the difference.
        """
        before, after = microbatch.sender, microbatch.onward().receiver
        passes, fetch = self._passes, partial(self._fetch, microbatch)
        try:
            inputs = await fetch(before, receipt.inputs, gradient=False)
            grad_outputs = await fetch(after, receipt.grad_outputs, gradient=True)
            answer = await self._turns.run(
                lambda: passes.answer(receipt.state, inputs, grad_outputs, microbatch.id)
            )
            if answer is None:
                return None
            hashes = await asyncio.to_thread(lambda: tuple(map(tensor_hash, answer)))
            if hashes == (receipt.outputs, receipt.grad_inputs):
                is_honest: bool | None = True
            else:
                outputs = await fetch(after, receipt.outputs, gradient=False)
                grad_inputs = await fetch(before, receipt.grad_inputs, gradient=True)
                is_honest = await self._turns.run(
                    lambda: passes.agree(answer, (outputs, grad_inputs), receipt.bits)
                )
            # a finer arithmetic may find a lie where a coarser one finds the same answer
            return is_honest and (passes.trainer.bits >= receipt.bits or None)
        except SwarmnetError:
            return None

    async def _fetch(self, microbatch: Microbatch, peer: PeerId, hash: bytes, *, gradient: bool) -> Buffer:
        """Return the tensor with this hash from a neighbour of the audited worker.

        Raises ``ProtocolViolation`` for another tensor.
        """
        job, boundary = self._job, self._passes.boundary
        stage = microbatch.stage - 1 if peer == microbatch.sender else microbatch.stage + 1
        addresses = job.workers.addresses(stage % job.stages, peer)
        stream = await AUDIT.open(job.transport, peer, job.timing, addresses=addresses)
        try:
            wire = microbatch_to_wire(job.id, microbatch)
            await stream.send(pb.AuditRequest(recall=pb.Recall(microbatch=wire, gradient=gradient)))

            async def next_part() -> tuple[pb.Part, Buffer]:
                reply, payload = await stream.receive()
                return reply.part, payload

            tensor = await collected(next_part, boundary.codecs if gradient else boundary.inputs_sizes)
        finally:
            stream.close()
        if await asyncio.to_thread(tensor_hash, tensor) != hash:
            raise ProtocolViolation(f"{peer} does not have the tensor of a receipt")
        return tensor
