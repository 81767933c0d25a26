"""One pass on one host, as its client asks for it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarmnet_client.swarm import Swarm
from swarmnet_protocols.aio import cancel
from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation, SwarmnetError
from swarmnet_protocols.protocol_ids import PASS
from swarmnet_protocols.routing import Hop
from swarmnet_protocols.session.link import Refused, parse, receive_within
from swarmnet_protocols.session.passes import cut, receive_tensor
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.transport import Buffer, Message, Stream
from swarmnet_protocols.wire import session_pb2 as pb


class GraphGone(SwarmnetError):
    """The host does not have, or no longer has, the graph that a backward pass was to use."""


async def ask(swarm: Swarm, hop: Hop, begin: pb.Begin, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Have ``hop`` compute the pass ``begin`` from ``tensors`` [P, D]; its answer has their shape.

    Raises ``GraphGone``, what opening a stream raises, ``Refused``, ``DeadlineExceeded``, ``StreamEnded`` or ``ProtocolViolation``.
    """
    timing = swarm.timing
    positions, hidden_size = tensors[0].shape
    stream = await swarm.transport.open(hop.peer, PASS, addresses=hop.addresses, deadline_s=timing.open_s)
    try:
        async with asyncio.timeout(timing.stall_s) as limit:
            conversation = _Conversation(stream, timing, limit)
            sending = asyncio.create_task(conversation.send(begin, tensors))
            try:
                return await receive_tensor(
                    conversation.next_part, positions=positions, hidden_size=hidden_size
                )
            finally:
                await cancel(sending)  # what stopped it, whoever listens has seen as well
    except Refused as refusal:
        if refusal.reason == pb.REASON_GRAPH_GONE and begin.backward and begin.graph:
            raise GraphGone(str(refusal)) from refusal
        raise
    except TimeoutError as error:
        raise DeadlineExceeded(f"{hop.peer} has not computed for {timing.stall_s:g} s") from error
    finally:
        stream.close()


@dataclass(frozen=True)
class _Conversation:
    """The client's side of one pass. Every part that goes or comes moves ``limit``; none goes before ``admitted``."""

    stream: Stream
    timing: Timing
    limit: asyncio.Timeout
    admitted: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, begin: pb.Begin, tensors: Sequence[torch.Tensor]) -> None:
        await self.stream.send(Message(pb.PassRequest(begin=begin).SerializeToString()))
        await self.admitted.wait()
        for tensor in tensors:
            for part, payload in cut(tensor):
                await self.stream.send(Message(pb.PassRequest(part=part).SerializeToString(), payload))
                self._moved()

    async def next_part(self) -> tuple[pb.Part, Buffer]:
        while True:
            message = await receive_within(self.stream, self.timing.silence_s)
            reply = parse(pb.PassReply, message.header)
            match reply.WhichOneof("kind"):
                case "part":
                    self._moved()
                    return reply.part, message.payload
                case "refused":
                    raise Refused(reply.refused.reason, reply.refused.detail)
                case "beat":
                    self.admitted.set()
                case _:
                    raise ProtocolViolation("an unexpected message on a pass")

    def _moved(self) -> None:
        self.limit.reschedule(asyncio.get_running_loop().time() + self.timing.stall_s)
