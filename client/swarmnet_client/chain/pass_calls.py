"""One pass at one host: the request, its tensors, the answer, and who is at fault if there is none."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch

from swarmnet_client.chain.adapter_upload import Placement
from swarmnet_client.chain.blame import Blame
from swarmnet_client.chain.hops import ChainReport, ChainSpec
from swarmnet_client.swarm.swarm import Swarm
from swarmnet_protocols.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerUnreachable,
    ProtocolViolation,
    SwarmnetError,
)
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import Buffer, PeerId, Stream
from swarmnet_protocols.net.protocol_ids import PASS
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.chain_search import Hop
from swarmnet_protocols.session.adapters import block_of
from swarmnet_protocols.session.passes import receive_tensor, split_tensor, unpack_tensors
from swarmnet_protocols.session.steps import wire_code
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

PASSES_PER_HOST = 2
"""Passes of a batch at one host at a time: one is computed while the tensors of the other travel."""

T = TypeVar("T")


class GraphGone(SwarmnetError):
    """The host does not have the graph of a forward pass that the backward pass was to use."""


class InDoubt(SwarmnetError):
    """A host failed, and outputs of other hosts for the same sequences may be why: all of them are to be computed again."""


@dataclass(frozen=True)
class HopPass:
    """The forward pass of some sequences at one host, with its inputs [P, D].

    ``before`` are the hosts whose outputs led to ``inputs``. ``graph`` is the id under which the host may have kept the autograd graph,
    empty for none.
    """

    hop: Hop
    before: tuple[Hop, ...]
    counts: tuple[int, ...]
    inputs: torch.Tensor
    graph: bytes


class PassClient:
    """Runs the passes of one batch on its hosts, at most ``PASSES_PER_HOST`` at a time on each, and none on a host that failed meanwhile."""

    def __init__(self, swarm: Swarm, spec: ChainSpec, report: ChainReport) -> None:
        self._swarm = swarm
        self._spec = spec
        self._report = report
        self._placement = Placement(swarm, spec.adapter)
        self._rooms: defaultdict[PeerId, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(PASSES_PER_HOST)
        )
        self._failures: Counter[PeerId] = Counter()
        self._blame = Blame(swarm)

    async def forward(self, hop_pass: HopPass) -> torch.Tensor:
        """The outputs [P, D] of a forward pass.

        Raises ``ConfigError`` if no host would compute it, ``InDoubt`` if the host cannot compute with what the hosts before it made,
        another ``SwarmnetError`` if it fails otherwise.
        """

        async def question(adapter: bytes) -> torch.Tensor:
            begin = self._begin(hop_pass, adapter, backward=False)
            (outputs,) = await ask_pass(
                self._swarm, hop_pass.hop, begin, (hop_pass.inputs,), [hop_pass.inputs.shape]
            )
            return outputs

        return await self._answer(hop_pass.hop, question, hop_pass.before)

    async def backward(
        self, hop_pass: HopPass, grad_outputs: torch.Tensor, after: Sequence[HopPass]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The gradients of a forward pass's inputs, and of the adapter's tensors for its blocks, from those of its outputs [P, D].

        ``grad_outputs`` came back through the passes ``after`` it. Raises ``GraphGone`` if the host has dropped its graph,
        ``SwarmnetError`` as ``forward`` does.
        """
        adapter_tensors = self._adapter_tensors(hop_pass.hop)
        shapes = [hop_pass.inputs.shape]
        if adapter_tensors:
            shapes.append(torch.Size((sum(tensor.numel() for tensor in adapter_tensors.values()), 1)))
        tensors = (grad_outputs,) if hop_pass.graph else (hop_pass.inputs, grad_outputs)

        async def question(adapter: bytes) -> list[torch.Tensor]:
            begin = self._begin(hop_pass, adapter, backward=True)
            return await ask_pass(self._swarm, hop_pass.hop, begin, tensors, shapes)

        made_by = [*hop_pass.before, *(hop for each in after for hop in (*each.before, each.hop))]
        gradients, *column = await self._answer(hop_pass.hop, question, made_by)
        return gradients, unpack_tensors(column[0], adapter_tensors) if column else {}

    def _adapter_tensors(self, hop: Hop) -> Mapping[str, torch.Tensor]:
        tensors = self._spec.adapter.tensors if self._spec.adapter is not None else {}
        return {name: tensor for name, tensor in tensors.items() if hop.start <= block_of(name) < hop.end}

    def _begin(self, hop_pass: HopPass, adapter: bytes, *, backward: bool) -> pb.Begin:
        return pb.Begin(
            swarm=self._swarm.id,
            manifest=self._swarm.manifest,
            span=pb.Span(start=hop_pass.hop.start, end=hop_pass.hop.end),
            counts=hop_pass.counts,
            backward=backward,
            wire=wire_code(self._spec.wire),
            adapter=adapter,
            graph=hop_pass.graph,
        )

    async def _answer(self, hop: Hop, question: Callable[[bytes], Awaitable[T]], made_by: Sequence[Hop]) -> T:
        failures = self._failures[hop.peer]
        async with self._rooms[hop.peer]:
            if self._failures[hop.peer] > failures:
                raise PeerUnreachable(f"{hop.peer} has failed another pass meanwhile")
            try:
                answer = await self._placement.ask(hop, question)
            except (GraphGone, ConfigError):
                raise
            except SwarmnetError as error:
                self._report.failovers += 1
                suspects = self._blame.attribute(error, hop, made_by=made_by)
                self._failures.update(each.peer for each in suspects)
                if suspects != [hop]:
                    raise InDoubt(str(error)) from error
                raise
        if self._failures[hop.peer] == failures:  # otherwise it is a suspect of another pass
            self._swarm.served(hop.peer)
        return answer


async def ask_pass(
    swarm: Swarm, hop: Hop, begin: pb.Begin, tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size]
) -> list[torch.Tensor]:
    """Have ``hop`` compute the pass ``begin`` from ``tensors``; returns tensors of ``shapes``.

    Raises ``GraphGone``, what opening a stream raises, ``Refused``, ``DeadlineExceeded``, ``StreamEnded`` or ``ProtocolViolation``.
    """
    timing = swarm.timing
    stream = await swarm.transport.open(hop.peer, PASS, addresses=hop.addresses, deadline_s=timing.open_s)
    try:
        async with asyncio.timeout(timing.stall_s) as limit:
            request = _PassRequest.on(stream, timing, limit)
            sending = asyncio.create_task(request.send(begin, tensors))
            try:
                return [
                    await receive_tensor(request.next_part, positions=rows, hidden_size=width)
                    for rows, width in shapes
                ]
            finally:
                await cancel(sending)  # the receiving side has seen the same error
    except Refused as refusal:
        if refusal.reason == refusal_pb2.REASON_GRAPH_GONE and begin.backward and begin.graph:
            raise GraphGone(str(refusal)) from refusal
        raise
    except TimeoutError as error:
        raise DeadlineExceeded(f"{hop.peer} has not computed for {timing.stall_s:g} s") from error
    finally:
        stream.close()


@dataclass(frozen=True)
class _PassRequest:
    """The client's side of one pass. Each part moves the deadline ``limit``; tensors are sent once the host has ``admitted`` the pass."""

    stream: TypedStream[pb.PassRequest, pb.PassReply]
    timing: Timing
    limit: asyncio.Timeout
    admitted: asyncio.Event

    @classmethod
    def on(cls, stream: Stream, timing: Timing, limit: asyncio.Timeout) -> Self:
        admitted = asyncio.Event()  # by the first heartbeat
        typed = TypedStream(
            stream,
            pb.PassRequest,
            pb.PassReply,
            silence_s=timing.silence_s,
            on_heartbeat=lambda _: admitted.set(),
        )
        return cls(typed, timing, limit, admitted)

    async def send(self, begin: pb.Begin, tensors: Sequence[torch.Tensor]) -> None:
        await self.stream.send(pb.PassRequest(begin=begin))
        await self.admitted.wait()
        for tensor in tensors:
            for part, payload in split_tensor(tensor):
                await self.stream.send(pb.PassRequest(part=part), payload)
                self._moved()

    async def next_part(self) -> tuple[pb.Part, Buffer]:
        reply, payload = await self.stream.receive()
        if not reply.HasField("part"):
            raise ProtocolViolation("an unexpected message on a pass")
        self._moved()
        return reply.part, payload

    def _moved(self) -> None:
        self.limit.reschedule(asyncio.get_running_loop().time() + self.timing.stall_s)
