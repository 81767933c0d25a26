"""One microbatch between two workers: the nested request that asks for a gradient.

1. The caller names the microbatch and its chain (``Microbatch``).
2. The receiver admits it, and says whether it has the inputs from an earlier request.
3. If not, the caller sends the inputs. The receiver computes, asks the next worker of the chain in
   the same way, and answers with the gradient of the inputs.

The origin signs the chain each time that it sends the microbatch. So only the workers that it chose
send the microbatch on. Each signature brings a worker one tensor.

If a later worker fails, the answer is its stage (``StageFailed``). The origin then replaces that
worker, and sends the same microbatch again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import loop_time, race
from swarmnet_protocols.net import Buffer, PeerId, Transport
from swarmnet_protocols.net.identity import public_key_of, verify
from swarmnet_protocols.net.protocol_ids import MICROBATCH
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.bandwidth import LinkRates
from swarmnet_protocols.training.pipeline.receipts import (
    Receipt,
    check_receipts,
    receipts_from_wire,
    receipts_to_wire,
    tensor_hash,
)
from swarmnet_protocols.wire import pipeline_pb2 as pb
from swarmnet_protocols.wire import refusal_pb2

ToNext = TypedStream[pb.MicrobatchRequest, pb.MicrobatchReply]
ToCaller = TypedStream[pb.MicrobatchReply, pb.MicrobatchRequest]
EVALUATED = b"\1"
"""The answer to a microbatch of an evaluation."""
_DOMAIN = b"swarmnet-chain-1"
PARTS = 4
"""Parts of a tensor of usual size. The receiver times all but the first. With more, a small tensor
takes more messages. With fewer, less of it is timed."""
LEAST_PART_BYTES = 16 << 10
"""Least bytes of a part, except the last. With less, tensors of tiny models take more messages.
With more, fewer tensors have a second part, so the receiver times fewer."""
_PASSING = (refusal_pb2.REASON_OVERLOADED, refusal_pb2.REASON_OUT_OF_RESOURCES)


class StageFailed(SwarmnetError):
    """The worker of ``stage`` in a chain failed, or was ``busy``."""

    def __init__(self, stage: int, reason: str, *, busy: bool = False) -> None:
        super().__init__(f"stage {stage}: {reason}")
        self.stage = stage
        self.busy = busy


@dataclass(frozen=True, order=True)
class MicrobatchId:
    """Names one of the origin's microbatches of a round."""

    round: int
    origin: PeerId
    number: int


@dataclass(frozen=True)
class Microbatch:
    """A microbatch on its way to the worker of ``stage``.

    - ``chain``: the workers of stages 1, 2, ... The stage after the last is the origin, which
      computes the loss.
    - ``tokens``: the predicted tokens.
    - ``is_forward_only``: True in an evaluation. The answer is then one byte instead of a gradient,
      and nobody keeps anything.
    - ``sent``: the number of times that the origin has sent the microbatch, this time included.
    - ``signature``: the origin's, of ``signed_bytes``. Audits need none.
    """

    id: MicrobatchId
    stage: int
    chain: tuple[PeerId, ...]
    tokens: int = 0
    is_forward_only: bool = False
    sent: int = 1
    signature: bytes = b""

    @property
    def receiver(self) -> PeerId:
        return (*self.chain, self.id.origin)[self.stage - 1]

    @property
    def sender(self) -> PeerId:
        return (self.id.origin, *self.chain)[self.stage - 1]

    @property
    def is_home(self) -> bool:
        """True if the receiver is the origin."""
        return self.stage == len(self.chain) + 1

    @property
    def has_receipts(self) -> bool:
        """True if the answer may have receipts. Answers of the origin or to an evaluation have
        none."""
        return not self.is_home and not self.is_forward_only

    @property
    def rest(self) -> tuple[PeerId, ...]:
        """The workers after the receiver."""
        return self.chain[self.stage :]

    def signed_bytes(self, job: bytes) -> bytes:
        """Return the bytes that the origin signs: all but the stage."""
        id = self.id
        numbers = f"{id.round}/{id.number}/{self.sent}/{self.tokens}/{int(self.is_forward_only)}"
        return _DOMAIN + job + "/".join([numbers, id.origin, *self.chain]).encode()

    def subject(self, job: bytes) -> bytes:
        """Return a name for the receiver's part in this microbatch of ``job``."""
        id = self.id
        return job + f"{id.round}/{id.origin}/{id.number}/{self.stage}".encode()

    def check_receipts(
        self, receipts: Sequence[Receipt], job: bytes, outputs: Buffer, gradient: Buffer
    ) -> None:
        """Raise ``ProtocolViolation`` unless all workers from the receiver on have signed receipts
        that agree.

        ``outputs``: the tensor that the receiver got; ``gradient``: its answer.
        """
        if self.has_receipts:
            stages = range(self.stage, len(self.chain) + 1)
            workers = [(self.chain[stage - 1], replace(self, stage=stage).subject(job)) for stage in stages]
            hashes = {"outputs": tensor_hash(outputs), "gradient": tensor_hash(gradient)}
            check_receipts(receipts, workers, **hashes)

    def onward(self) -> "Microbatch":
        """Return the same microbatch on its way to the next stage."""
        return replace(self, stage=self.stage + 1)


def microbatch_to_wire(job: bytes, microbatch: Microbatch) -> pb.Microbatch:
    id = microbatch.id
    return pb.Microbatch(
        job=job,
        round=id.round,
        origin=id.origin,
        number=id.number,
        stage=microbatch.stage,
        chain=microbatch.chain,
        tokens=microbatch.tokens,
        forward_only=microbatch.is_forward_only,
        sent=microbatch.sent,
        signature=microbatch.signature,
    )


def microbatch_from_wire(
    wire: pb.Microbatch,
    *,
    job: bytes,
    stages: int,
    count: int,
    positions: int,
    way: tuple[PeerId, PeerId] | None = None,
) -> Microbatch:
    """Parse a microbatch of a job with ``stages`` stages.

    - ``count``: the microbatches of an origin in a round.
    - ``positions``: most tokens of a microbatch.
    - ``way``: its sender and receiver. None if the message only names a worker's part.

    Raises ``ProtocolViolation`` if the microbatch is of another job, is out of range, names a peer
    twice, or goes another way than its origin has signed.
    """
    is_in_range = wire.number < count and 1 <= wire.stage <= stages and wire.tokens <= positions
    if wire.job != job or not is_in_range:
        raise ProtocolViolation("a microbatch of another job, or out of range")
    if len(wire.chain) != stages - 1 or len({wire.origin, *wire.chain}) != stages:
        raise ProtocolViolation("a chain without one worker for each stage")
    peers = [peer_from_wire(each) for each in (wire.origin, *wire.chain)]
    id = MicrobatchId(wire.round, peers[0], wire.number)
    microbatch = Microbatch(
        id, wire.stage, tuple(peers[1:]), wire.tokens, wire.forward_only, wire.sent, wire.signature
    )
    if way is not None:
        if way != (microbatch.sender, microbatch.receiver):
            raise ProtocolViolation("a microbatch that takes another way")
        if not verify(public_key_of(id.origin), wire.signature, microbatch.signed_bytes(job)):
            raise ProtocolViolation("a chain that the origin has not signed")
    return microbatch


def peer_from_wire(id: str) -> PeerId:
    """Parse a peer id. Raises ``ProtocolViolation``."""
    try:
        public_key_of(PeerId(id))
    except ValueError as error:
        raise ProtocolViolation("not a peer id") from error
    return PeerId(id)


@dataclass
class BoundaryBytes:
    """Bytes of tensors that crossed the boundaries of a worker's stage."""

    forward: int = 0
    """Bytes of activations that it sent to the next stage."""
    backward: int = 0
    """Bytes of gradients that it sent to the stage before."""
    received: int = 0


@dataclass(frozen=True)
class MicrobatchClient:
    """Asks other workers of a job for gradients."""

    transport: Transport
    job: bytes
    timing: Timing
    signed: bool
    """True if workers sign receipts."""
    traffic: BoundaryBytes = field(default_factory=BoundaryBytes)
    rates: LinkRates = field(default_factory=LinkRates)

    async def gradient(
        self,
        microbatch: Microbatch,
        addresses: Sequence[str],
        outputs: Buffer,
        sizes: Container[int],
    ) -> tuple[bytearray, tuple[Receipt, ...]]:
        """Return the encoded gradient of ``outputs`` from the receiver of ``microbatch``.

        Also return the receipts of the receiver and the workers after it. ``sizes``: the sizes
        that the gradient may have. Raises ``StageFailed``.
        """
        try:
            stream = await MICROBATCH.open(
                self.transport, microbatch.receiver, self.timing, addresses=addresses
            )
            try:
                answer, receipts = await self._ask(stream, microbatch, outputs, sizes)
            finally:
                stream.close()
            if self.signed:
                await asyncio.to_thread(microbatch.check_receipts, receipts, self.job, outputs, answer)
            return answer, receipts
        except StageFailed:
            raise
        except SwarmnetError as error:
            busy = isinstance(error, Refused) and error.reason in _PASSING
            raise StageFailed(microbatch.stage, str(error), busy=busy) from error

    async def _ask(
        self, stream: ToNext, microbatch: Microbatch, outputs: Buffer, sizes: Container[int]
    ) -> tuple[bytearray, tuple[Receipt, ...]]:
        begin = microbatch_to_wire(self.job, microbatch)
        if self.signed and not microbatch.is_forward_only:
            begin.inputs = await asyncio.to_thread(tensor_hash, outputs)
        await stream.send(pb.MicrobatchRequest(begin=begin))
        reply, _ = await stream.receive()
        if not reply.HasField("admitted"):
            raise _failure(reply, microbatch)
        self.rates.told[stream.peer] = float(reply.admitted.bytes_per_s)
        if not reply.admitted.known:
            for part, payload in parts(outputs):
                await stream.send(pb.MicrobatchRequest(part=part), payload)
                self.traffic.forward += len(payload)
        receipts: tuple[Receipt, ...] = ()
        if self.signed and microbatch.has_receipts:
            reply, _ = await stream.receive()
            if not reply.HasField("receipts"):
                raise _failure(reply, microbatch)
            receipts = receipts_from_wire(reply.receipts, len(microbatch.chain))

        async def next_part() -> tuple[pb.Part, Buffer]:
            reply, payload = await stream.receive()
            if not reply.HasField("part"):
                raise _failure(reply, microbatch)
            return reply.part, payload

        gradient = await collected(next_part, sizes, partial(self.rates.add, stream.peer))
        self.traffic.received += len(gradient)
        return gradient, receipts


def _failure(reply: pb.MicrobatchReply, microbatch: Microbatch) -> SwarmnetError:
    stage = reply.failed.stage
    if not reply.HasField("failed") or not microbatch.stage < stage <= len(microbatch.chain) + 1:
        return ProtocolViolation("an unexpected message of the next worker")
    return StageFailed(stage, "failed, as the worker before it says", busy=reply.failed.busy)


def parts(data: Buffer) -> Iterator[tuple[pb.Part, memoryview]]:
    """Yield the messages in which a tensor is sent, with their payloads."""
    view, part = memoryview(data), pb.Part(size_bytes=len(data))
    most = max(LEAST_PART_BYTES, -(-len(data) // PARTS))
    for start in range(0, len(view), step := min(most, MICROBATCH.max_payload_bytes)):
        yield part, view[start : start + step]


async def collected(
    next_part: Callable[[], Awaitable[tuple[pb.Part, Buffer]]],
    sizes: Container[int],
    timed: Callable[[int, float], None] = lambda *_: None,
) -> bytearray:
    """Return the bytes of a tensor of one of these sizes. Memory grows with what has arrived.

    ``timed`` gets the bytes and the seconds of all parts but the first.
    """
    part, payload = await next_part()
    began_s, first_bytes, data = loop_time(), len(payload), bytearray()
    while True:
        check_part(part, sizes, len(data), len(payload))
        data += payload
        if len(data) == part.size_bytes:
            timed(len(data) - first_bytes, loop_time() - began_s)
            return data
        part, payload = await next_part()


def check_part(part: pb.Part, sizes: Container[int], start: int, size_bytes: int) -> None:
    """Raise ``ProtocolViolation`` unless a part fits in a tensor of one of these ``sizes``."""
    if part.size_bytes not in sizes or not 0 < size_bytes <= part.size_bytes - start:
        raise ProtocolViolation("a tensor of another size than the job's")


async def answer_microbatch(
    stream: ToCaller,
    timing: Timing,
    admit: Callable[[], Awaitable[bool]],
    sizes: Container[int],
    rates: LinkRates,
    gradient: Callable[[bytearray | None], Awaitable[tuple[Buffer, Sequence[Receipt]]]],
) -> None:
    """Answer one request whose first message was received.

    - ``admit`` returns whether the inputs are known.
    - ``sizes``: the sizes that the inputs may have. ``rates`` gets their bandwidth.
    - ``gradient`` returns the gradient of the inputs, and the receipts that go with it. It gets the
      inputs unless they are known.

    Sends heartbeats meanwhile. Raises the errors of both, except ``StageFailed``.
    """

    async def next_part() -> tuple[pb.Part, Buffer]:
        request, payload = await stream.receive()
        if not request.HasField("part"):
            raise ProtocolViolation("an unexpected message of the caller")
        return request.part, payload

    async def answer() -> None:
        known = await admit()
        admitted = pb.Admitted(known=known, bytes_per_s=int(rates.arriving.get(stream.peer, 0)))
        await stream.send(pb.MicrobatchReply(admitted=admitted))
        timed = partial(rates.add, stream.peer)
        inputs = None if known else await collected(next_part, sizes, timed)
        try:
            values, receipts = await gradient(inputs)
        except StageFailed as failed:
            await stream.send(pb.MicrobatchReply(failed=pb.Failed(stage=failed.stage, busy=failed.busy)))
            return
        if receipts:
            await stream.send(pb.MicrobatchReply(receipts=receipts_to_wire(receipts)))
        for part, payload in parts(values):
            await stream.send(pb.MicrobatchReply(part=part), payload)

    heartbeat = pb.MicrobatchReply(heartbeat=pb.Heartbeat())
    await race(answer(), stream.send_heartbeats(timing.heartbeat_s, lambda: heartbeat))
