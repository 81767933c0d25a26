"""One pass on one host: whole sequences through some blocks, forward or backward, for a client that trains."""

import asyncio
from functools import partial

import torch

from swarmnet_node.engine import Engine
from swarmnet_node.stage import Stage
from swarmnet_protocols.aio import race
from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation
from swarmnet_protocols.session.link import Refused, parse, receive_within
from swarmnet_protocols.session.passes import MAX_POSITIONS, check_counts, cut, receive_tensor
from swarmnet_protocols.session.steps import wire_dtype
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.transport import Buffer, Message, Stream
from swarmnet_protocols.wire import session_pb2 as pb


class HostedPass:
    """A pass that was admitted. It knows nothing of passes before it and leaves nothing behind."""

    def __init__(
        self, wanted: pb.Begin, stage: Stage, engine: Engine, stream: Stream, timing: Timing
    ) -> None:
        """Raises ``ProtocolViolation`` for lengths that make no sense, ``Refused`` for too many positions."""
        check_counts(wanted.counts)
        self._counts = tuple(wanted.counts)
        self._positions = sum(self._counts)
        if self._positions > MAX_POSITIONS:
            raise Refused(pb.REASON_TOO_LONG, f"{self._positions} positions, {MAX_POSITIONS} is the most")
        self._backward = wanted.backward
        self._wire = wire_dtype(wanted.wire)
        self._stage = stage
        self._engine = engine
        self._stream = stream
        self._timing = timing

    async def run(self) -> None:
        """Take the tensors, compute when sessions leave room, answer; beat meanwhile.

        Raises ``StreamEnded`` when the client is gone, ``DeadlineExceeded`` when it is too slow, ``ProtocolViolation``
        for tensors that are not what was announced.
        """
        await race(self._answer(), self._beat())

    async def _answer(self) -> None:
        inputs = await self._receive()
        compute = partial(self._stage.run_sequences, inputs, self._counts)
        if self._backward:
            compute = partial(self._stage.gradients, inputs, self._counts, await self._receive())
        outputs = await self._engine.compute_behind(compute, self._positions)
        for part, payload in cut(outputs.to(self._wire)):
            await self._send(pb.PassReply(part=part), payload)

    async def _beat(self) -> None:
        while True:
            await self._send(pb.PassReply(beat=pb.Beat()))
            await asyncio.sleep(self._timing.beat_s)

    async def _receive(self) -> torch.Tensor:
        return await receive_tensor(
            self._next_part, positions=self._positions, hidden_size=self._stage.hidden_size
        )

    async def _next_part(self) -> tuple[pb.Part, Buffer]:
        message = await receive_within(self._stream, self._timing.chunk_s)
        request = parse(pb.PassRequest, message.header)
        if not request.HasField("part"):
            raise ProtocolViolation("a pass begins once")
        return request.part, message.payload

    async def _send(self, reply: pb.PassReply, payload: memoryview | bytes = b"") -> None:
        try:
            async with asyncio.timeout(self._timing.chunk_s):
                await self._stream.send(Message(reply.SerializeToString(), payload))
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._stream.peer} does not take its answer") from error
