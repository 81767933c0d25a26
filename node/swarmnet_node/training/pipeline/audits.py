"""Audits of microbatches: another worker of a stage computes again what one has answered.

1. An origin asks a worker of the stage (``verdict``).
2. That worker fetches from the neighbours in the chain what the audited worker got. It computes the
   answer again, and compares it with the receipt (``StageAuditor``).
"""

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
    pieces,
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


async def verdict(job: StagedJob, auditor: PeerId, microbatch: Microbatch, receipt: Receipt) -> bool:
    """Return whether ``auditor`` finds that a receipt is false.

    ``microbatch``: on its way to the worker of the receipt.
    """
    audit = pb.Audit(microbatch=microbatch_to_wire(job.id, microbatch), receipt=receipt_to_wire(receipt))
    try:
        addresses = job.workers.addresses(microbatch.stage, auditor)
        stream = await AUDIT.open(job.transport, auditor, job.timing, addresses=addresses)
        reply, _ = await stream.ask(pb.AuditRequest(audit=audit))
        return reply.verdict.checked and reply.verdict.false_answer
    except SwarmnetError:
        return False


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
                for payload in pieces(self._recalled(microbatch, gradient=request.recall.gradient)):
                    await stream.send(pb.AuditReply(part=pb.Part()), payload)
            else:
                microbatch, receipt = (
                    self._read(request.audit.microbatch),
                    receipt_from_wire(request.audit.receipt),
                )
                await self._check(stream.peer, microbatch, receipt)
                heartbeat = pb.AuditReply(heartbeat=pb.Heartbeat())
                await race(
                    self._judge(stream, microbatch, receipt),
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
        me, tensor = self._job.transport.peer_id, None
        if me == microbatch.sender:
            if (kept := self._kept(microbatch)) is not None:
                tensor = kept.grad_outputs if gradient else kept.outputs
        elif me == microbatch.onward().receiver and (kept := self._kept(microbatch.onward())) is not None:
            tensor = kept.grad_inputs if gradient else kept.inputs
        if tensor is None:
            raise Refusal(refusal_pb2.REASON_UNKNOWN_STATE, "this tensor is not here")
        return tensor

    async def _check(self, asker: PeerId, microbatch: Microbatch, receipt: Receipt) -> None:
        accused, mine = microbatch.receiver, self._passes.trainer.stage
        if (
            microbatch.stage != mine
            or asker != microbatch.id.origin
            or accused == self._job.transport.peer_id
        ):
            raise NotAuthorised("only an origin may ask for an audit, of another worker of this stage")
        await self._job.workers.check(asker, 0)
        if not receipt.is_signed(microbatch.subject(self._job.id), accused):
            raise ProtocolViolation(f"a receipt that {accused} has not signed")

    async def _judge(self, stream: _ToAsker, microbatch: Microbatch, receipt: Receipt) -> None:
        is_false = await self._is_false(microbatch, receipt)
        if is_false:
            self._job.standing.exclude(microbatch.receiver)
        found = pb.Verdict(checked=is_false is not None, false_answer=bool(is_false))
        await stream.send(pb.AuditReply(verdict=found))

    async def _is_false(self, microbatch: Microbatch, receipt: Receipt) -> bool | None:
        """Return whether a receipt is false.

        None if that cannot be known: neighbours do not give the tensors, or this worker has another
        state.
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
            if tuple(map(tensor_hash, answer)) == (receipt.outputs, receipt.grad_inputs):
                return False
            outputs = await fetch(after, receipt.outputs, gradient=False)
            grad_inputs = await fetch(before, receipt.grad_inputs, gradient=True)
            return not await self._turns.run(
                lambda: passes.agree(answer, (outputs, grad_inputs), receipt.bits)
            )
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

            async def next_part() -> Buffer:
                _, payload = await stream.receive()
                return payload

            tensor = await collected(
                next_part, boundary.gradient_bytes if gradient else boundary.inputs_bytes
            )
        finally:
            stream.close()
        if tensor_hash(tensor) != hash:
            raise ProtocolViolation(f"{peer} does not have the tensor of a receipt")
        return tensor
