"""One microbatch between two workers: the nested request that asks for a gradient.

1. The caller names the microbatch and its chain (``Microbatch``).
2. The receiver admits it, and says whether it has the inputs from an earlier request.
3. If not, the caller sends the inputs. The receiver computes, asks the next worker of the chain in
   the same way, and answers with the gradient of the inputs.

If a later worker fails, the answer is its stage (``StageFailed``). The origin then replaces that
worker, and sends the same microbatch again.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.net import Buffer, PeerId, Transport
from swarmnet_protocols.net.identity import public_key_of
from swarmnet_protocols.net.protocol_ids import MICROBATCH
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import pipeline_pb2 as pb
from swarmnet_protocols.wire import refusal_pb2

ToNext = TypedStream[pb.MicrobatchRequest, pb.MicrobatchReply]
ToCaller = TypedStream[pb.MicrobatchReply, pb.MicrobatchRequest]
EVALUATED = b"\1"
"""The answer to a microbatch of an evaluation."""
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
    """

    id: MicrobatchId
    stage: int
    chain: tuple[PeerId, ...]
    tokens: int = 0
    is_forward_only: bool = False

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
    def rest(self) -> tuple[PeerId, ...]:
        """The workers after the receiver."""
        return self.chain[self.stage :]

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
    )


def microbatch_from_wire(  # noqa: PLR0913 - all by name but the first
    wire: pb.Microbatch,
    *,
    job: bytes,
    stages: int,
    count: int,
    positions: int,
    sender: PeerId,
    receiver: PeerId,
) -> Microbatch:
    """Parse a microbatch of a job with ``stages`` stages.

    ``count``: the microbatches of an origin in a round; ``positions``: most tokens of one. Raises
    ``ProtocolViolation`` if it is of another job, out of range, names a peer twice, or is not on
    its way from ``sender`` to ``receiver``.
    """
    is_in_range = wire.number < count and 1 <= wire.stage <= stages and wire.tokens <= positions
    if wire.job != job or not is_in_range:
        raise ProtocolViolation("a microbatch of another job, or out of range")
    if len(wire.chain) != stages - 1 or len({wire.origin, *wire.chain}) != stages:
        raise ProtocolViolation("a chain without one worker for each stage")
    peers = [peer_from_wire(each) for each in (wire.origin, *wire.chain)]
    id = MicrobatchId(wire.round, peers[0], wire.number)
    microbatch = Microbatch(id, wire.stage, tuple(peers[1:]), wire.tokens, wire.forward_only)
    if (microbatch.sender, microbatch.receiver) != (sender, receiver):
        raise ProtocolViolation("a microbatch that takes another way")
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
    """Of activations that it sent to the next stage."""
    backward: int = 0
    """Of gradients that it sent to the stage before."""
    received: int = 0


@dataclass(frozen=True)
class MicrobatchClient:
    """Asks other workers of a job for gradients."""

    transport: Transport
    job: bytes
    timing: Timing
    traffic: BoundaryBytes = field(default_factory=BoundaryBytes)

    async def gradient(
        self, microbatch: Microbatch, addresses: Sequence[str], outputs: Buffer, size_bytes: int
    ) -> bytearray:
        """Return the encoded gradient of ``outputs`` from the receiver of ``microbatch``.

        ``size_bytes``: the size of the gradient. Raises ``StageFailed``.
        """
        try:
            stream = await MICROBATCH.open(
                self.transport, microbatch.receiver, self.timing, addresses=addresses
            )
            try:
                return await self._ask(stream, microbatch, outputs, size_bytes)
            finally:
                stream.close()
        except StageFailed:
            raise
        except SwarmnetError as error:
            busy = isinstance(error, Refused) and error.reason in _PASSING
            raise StageFailed(microbatch.stage, str(error), busy=busy) from error

    async def _ask(
        self, stream: ToNext, microbatch: Microbatch, outputs: Buffer, size_bytes: int
    ) -> bytearray:
        await stream.send(pb.MicrobatchRequest(begin=microbatch_to_wire(self.job, microbatch)))
        reply, _ = await stream.receive()
        if not reply.HasField("admitted"):
            raise _failure(reply, microbatch)
        if not reply.admitted.known:
            for payload in _pieces(outputs):
                await stream.send(pb.MicrobatchRequest(part=pb.Part()), payload)
                self.traffic.forward += len(payload)

        async def next_part() -> Buffer:
            reply, payload = await stream.receive()
            if not reply.HasField("part"):
                raise _failure(reply, microbatch)
            return payload

        gradient = await _collected(next_part, size_bytes)
        self.traffic.received += size_bytes
        return gradient


def _failure(reply: pb.MicrobatchReply, microbatch: Microbatch) -> SwarmnetError:
    stage = reply.failed.stage
    if not reply.HasField("failed") or not microbatch.stage < stage <= len(microbatch.chain) + 1:
        return ProtocolViolation("an unexpected message of the next worker")
    return StageFailed(stage, "failed, as the worker before it says", busy=reply.failed.busy)


def _pieces(data: Buffer) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), MICROBATCH.max_payload_bytes):
        yield view[start : start + MICROBATCH.max_payload_bytes]


async def _collected(next_part: Callable[[], Awaitable[Buffer]], size_bytes: int) -> bytearray:
    """Return the bytes of a tensor. Memory grows with what has arrived."""
    data = bytearray()
    while len(data) < size_bytes:
        part = await next_part()
        if not 0 < len(part) <= size_bytes - len(data):
            raise ProtocolViolation("a tensor of another size than the job's")
        data += part
    return data


async def answer_microbatch(
    stream: ToCaller,
    timing: Timing,
    admit: Callable[[], Awaitable[bool]],
    size_bytes: int,
    gradient: Callable[[bytearray | None], Awaitable[Buffer]],
) -> None:
    """Answer one request whose first message was received.

    - ``admit`` returns whether the inputs are known.
    - ``size_bytes``: the size of the inputs.
    - ``gradient`` returns the gradient of the inputs. It gets them unless they are known.

    Sends heartbeats meanwhile. Raises the errors of both, except ``StageFailed``.
    """

    async def next_part() -> Buffer:
        request, payload = await stream.receive()
        if not request.HasField("part"):
            raise ProtocolViolation("an unexpected message of the caller")
        return payload

    async def answer() -> None:
        known = await admit()
        await stream.send(pb.MicrobatchReply(admitted=pb.Admitted(known=known)))
        inputs = None if known else await _collected(next_part, size_bytes)
        try:
            values = await gradient(inputs)
        except StageFailed as failed:
            await stream.send(pb.MicrobatchReply(failed=pb.Failed(stage=failed.stage, busy=failed.busy)))
            return
        for payload in _pieces(values):
            await stream.send(pb.MicrobatchReply(part=pb.Part()), payload)

    heartbeat = pb.MicrobatchReply(heartbeat=pb.Heartbeat())
    await race(answer(), stream.send_heartbeats(timing.heartbeat_s, lambda: heartbeat))
