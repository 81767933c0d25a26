"""A batch on its way through the swarm and back, for training: forward and backward passes, one host after another.

The batch is cut into microbatches, which go through the hosts one behind the other, so that every host has work. What each
host was sent stays here: whoever hosts the same blocks later can compute the gradients from it.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarmnet_client.chain import ChainReport
from swarmnet_client.hops import ChainSpec
from swarmnet_client.patience import Patience
from swarmnet_client.swarm import Swarm
from swarmnet_protocols.aio import all_of, cancel
from swarmnet_protocols.errors import (
    DeadlineExceeded,
    NoRoute,
    NotAuthorised,
    OutOfResources,
    PeerUnreachable,
    ProtocolViolation,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.protocol_ids import PASS
from swarmnet_protocols.routing import Hop
from swarmnet_protocols.session.link import Refused, parse, receive_within
from swarmnet_protocols.session.passes import MAX_POSITIONS, MAX_SEQUENCES, cut, receive_tensor
from swarmnet_protocols.session.steps import wire_code
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.transport import Buffer, Message, PeerId, Stream
from swarmnet_protocols.wire import session_pb2 as pb

MICROBATCHES = 8
"""A batch is cut into so many or more where it can be: three hops are idle for a fifth of the time then."""
MIN_POSITIONS = 128
"""Smaller microbatches are not worth their trip."""
PASSES_PER_HOST = 2
"""At once: one is computed while the tensors of the other travel."""


@dataclass(frozen=True)
class Leg:
    """One host's share of a forward, and what it was sent [P, D]."""

    hop: Hop
    inputs: torch.Tensor


@dataclass(frozen=True)
class Microbatch:
    """Sequences of these lengths, and the legs of their forward from the first block to the last."""

    counts: tuple[int, ...]
    legs: tuple[Leg, ...]


def split(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Sequences of these lengths as microbatches, in order. Raises ``OutOfResources`` for one that no host takes."""
    if max(counts) > MAX_POSITIONS:
        raise OutOfResources(
            f"a sequence of {max(counts)} positions", hint=f"train on sequences of {MAX_POSITIONS} at most"
        )
    size = min(max(sum(counts) // MICROBATCHES, MIN_POSITIONS), MAX_POSITIONS)
    parts: list[list[int]] = [[]]
    for count in counts:
        if parts[-1] and (sum(parts[-1]) + count > size or len(parts[-1]) == MAX_SEQUENCES):
            parts.append([])
        parts[-1].append(count)
    return [tuple(part) for part in parts]


class RemoteBatch:
    """Sequences of ``counts`` positions, laid one after another: forward once, then backward as often as wanted.

    Both wait through failures as long as somebody hosts every block, with the same result. They raise ``NoRoute`` when nobody
    does for ``recover_s``, ``OutOfResources`` when the hosts have no room, ``Unreachable`` when every attempt fails.
    """

    def __init__(self, swarm: Swarm, spec: ChainSpec, counts: Sequence[int]) -> None:
        """Raises ``OutOfResources`` for a sequence that is too long."""
        self.report = ChainReport()
        self._swarm = swarm
        self._spec = spec
        self._parts = split(counts)
        self._done: list[Microbatch] = []
        self._rooms: defaultdict[PeerId, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(PASSES_PER_HOST)
        )
        self._failures: Counter[PeerId] = Counter()

    async def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states [P, D] through all blocks. Raises ``ValueError`` for values that are not finite."""
        span = (0, self._spec.blocks)
        done = await all_of(
            *(
                self._forward(span, values, counts)
                for counts, values in zip(self._parts, self._cut(inputs), strict=True)
            )
        )
        self._done = [
            Microbatch(counts, tuple(legs)) for counts, (legs, _) in zip(self._parts, done, strict=True)
        ]
        self.report.route = [(leg.hop.peer, leg.hop.start, leg.hop.end) for leg in self._done[-1].legs]
        return torch.cat([outputs for _, outputs in done])

    async def backward(self, gradients: torch.Tensor) -> torch.Tensor:
        """From gradients of the outputs of ``forward`` [P, D] to those of its inputs. Raises ``ValueError`` as it does."""
        done = await all_of(
            *(
                self._backward(microbatch, values)
                for microbatch, values in zip(self._done, self._cut(gradients), strict=True)
            )
        )
        return torch.cat(done)

    def _cut(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        if not torch.isfinite(values).all():
            raise ValueError("hidden states or gradients that are not finite: no host computes with them")
        return torch.split(values.to(self._spec.wire), [sum(counts) for counts in self._parts])

    async def _forward(
        self, span: tuple[int, int], values: torch.Tensor, counts: tuple[int, ...]
    ) -> tuple[list[Leg], torch.Tensor]:
        """Through the blocks of ``span``, by whoever hosts them now."""
        legs: list[Leg] = []
        reached = span[0]
        patience = Patience(self._swarm.timing.recover_s)
        while reached < span[1]:
            try:
                hop = self._swarm.route((reached, span[1]))[0]
                outputs = await self._pass(hop, counts, (values,))
            except SwarmnetError as error:
                await self._recover(patience, error)
                continue
            patience.answered()
            legs.append(Leg(hop, values))
            reached, values = hop.end, outputs
        return legs, values

    async def _backward(self, microbatch: Microbatch, gradients: torch.Tensor) -> torch.Tensor:
        """Back along the legs. A leg whose host is gone is walked forward again by others, who then take its place."""
        legs = list(microbatch.legs)
        counts = microbatch.counts
        patience = Patience(self._swarm.timing.recover_s)
        while legs:
            leg = legs[-1]
            try:
                gradients = await self._pass(leg.hop, counts, (leg.inputs, gradients))
            except SwarmnetError as error:
                await self._recover(patience, error)
                legs[-1:], _ = await self._forward((leg.hop.start, leg.hop.end), leg.inputs, counts)
                continue
            patience.answered()
            legs.pop()
        return gradients

    async def _recover(self, patience: Patience, error: SwarmnetError) -> None:
        """Pause before the next attempt, or raise what stands in the way of any."""
        if patience.lost(asyncio.get_running_loop().time(), idle=False):
            raise _verdict(error) from error
        await asyncio.sleep(patience.pause_s)
        if isinstance(error, NoRoute):
            await self._swarm.refresh()

    async def _pass(
        self, hop: Hop, counts: tuple[int, ...], tensors: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """One pass on one host: forward with one tensor, backward with two."""
        failures = self._failures[hop.peer]
        async with self._rooms[hop.peer]:
            if self._failures[hop.peer] > failures:
                raise PeerUnreachable(f"{hop.peer} has failed others while we waited for it")
            try:
                answer = await self._ask(hop, counts, tensors)
            except SwarmnetError:
                self._failures[hop.peer] += 1
                self._swarm.failed(hop.peer)
                self.report.failovers += 1
                raise
        self._swarm.served(hop.peer)
        return answer

    async def _ask(
        self, hop: Hop, counts: tuple[int, ...], tensors: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        begin = pb.Begin(
            swarm=self._swarm.id,
            manifest=self._swarm.manifest,
            span=pb.Span(start=hop.start, end=hop.end),
            counts=counts,
            backward=len(tensors) > 1,
            wire=wire_code(self._spec.wire),
        )
        timing = self._swarm.timing
        stream = await self._swarm.transport.open(
            hop.peer, PASS, addresses=hop.addresses, deadline_s=timing.open_s
        )
        try:
            async with asyncio.timeout(timing.stall_s) as limit:
                conversation = _Conversation(stream, timing, limit)
                sending = asyncio.create_task(conversation.send(begin, tensors))
                try:
                    return await receive_tensor(
                        conversation.next_part, positions=sum(counts), hidden_size=self._spec.hidden_size
                    )
                finally:
                    await cancel(sending)  # what stopped it, whoever listens has seen as well
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


def _verdict(error: SwarmnetError) -> SwarmnetError:
    """What a person is told after many attempts, the last of which failed so."""
    if isinstance(error, NoRoute | NotAuthorised):
        return error
    if isinstance(error, Refused) and error.reason == pb.REASON_OUT_OF_MEMORY:
        return OutOfResources(
            f"the hosts have no room: {error}", hint="try again later, or start another node: swarmnet join"
        )
    return Unreachable(f"no host computes: {error}", hint="try again; the swarm may be changing")
