"""A batch on its way through the swarm and back, for training: forward and backward passes, one host after another.

The batch is cut into microbatches, which go through the hosts one behind the other, so that every host has work. What each
host was sent stays here: whoever hosts the same blocks later can compute the gradients from it.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swarmnet_client.chain import ChainReport
from swarmnet_client.hops import ChainSpec
from swarmnet_client.pass_calls import GraphGone, ask
from swarmnet_client.patience import Patience
from swarmnet_client.swarm import Swarm
from swarmnet_protocols.aio import all_of
from swarmnet_protocols.errors import NoRoute, OutOfResources, PeerUnreachable, SwarmnetError, Unreachable
from swarmnet_protocols.routing import Hop
from swarmnet_protocols.session.link import Refused
from swarmnet_protocols.session.passes import MAX_POSITIONS, MAX_SEQUENCES
from swarmnet_protocols.session.steps import wire_code
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.wire import session_pb2 as pb

MICROBATCHES = 8
"""A batch is cut into so many or more where it can be: three hops are idle for a fifth of the time then."""
MIN_POSITIONS = 128
"""Smaller microbatches are not worth their trip."""
PASSES_PER_HOST = 2
"""At once: one is computed while the tensors of the other travel."""


@dataclass(frozen=True)
class Leg:
    """One host's share of a forward, what it was sent [P, D], and under which name it may have kept the graph (empty: none)."""

    hop: Hop
    inputs: torch.Tensor
    graph: bytes


@dataclass(frozen=True)
class Microbatch:
    """Sequences of these lengths, and the legs of their forward from the first block to the last."""

    counts: tuple[int, ...]
    legs: tuple[Leg, ...]

    def without_graphs(self) -> "Microbatch":
        """The same, for whom the graphs are used up."""
        return replace(self, legs=tuple(replace(leg, graph=b"") for leg in self.legs))


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

    async def forward(self, inputs: torch.Tensor, *, keep_graphs: bool = False) -> torch.Tensor:
        """Hidden states [P, D] through all blocks. Raises ``ValueError`` for values that are not finite.

        With ``keep_graphs`` the hosts keep what makes a ``backward`` soon after it cheaper, where they have room.
        """
        span = (0, self._spec.blocks)
        done = await all_of(
            *(
                self._forward(span, values, counts, keep_graphs=keep_graphs)
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
        values = self._cut(gradients)
        microbatches, self._done = self._done, [microbatch.without_graphs() for microbatch in self._done]
        return torch.cat(await all_of(*map(self._backward, microbatches, values)))

    def _cut(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        if not torch.isfinite(values).all():
            raise ValueError("hidden states or gradients that are not finite: no host computes with them")
        return torch.split(values.to(self._spec.wire), [sum(counts) for counts in self._parts])

    async def _forward(
        self, span: tuple[int, int], values: torch.Tensor, counts: tuple[int, ...], *, keep_graphs: bool
    ) -> tuple[list[Leg], torch.Tensor]:
        """Through the blocks of ``span``, by whoever hosts them now."""
        legs: list[Leg] = []
        reached = span[0]
        patience = Patience(self._swarm.timing.recover_s)
        while reached < span[1]:
            try:
                hop = self._swarm.route((reached, span[1]))[0]
                leg = Leg(hop, values, self._swarm.new_session() if keep_graphs else b"")
                outputs = await self._pass(hop, self._begin(leg, counts), (values,))
            except SwarmnetError as error:
                await self._recover(patience, error)
                continue
            patience.answered()
            legs.append(leg)
            reached, values = hop.end, outputs
        return legs, values

    async def _backward(self, microbatch: Microbatch, gradients: torch.Tensor) -> torch.Tensor:
        """Back along the legs. A leg whose host is gone is walked forward again by others, who then take its place."""
        legs = list(microbatch.legs)
        counts = microbatch.counts
        patience = Patience(self._swarm.timing.recover_s)
        while legs:
            leg = legs[-1]
            begin = self._begin(leg, counts, backward=True)
            tensors = (gradients,) if leg.graph else (leg.inputs, gradients)
            try:
                gradients = await self._pass(leg.hop, begin, tensors)
            except GraphGone:
                legs[-1] = replace(leg, graph=b"")
                continue
            except SwarmnetError as error:
                await self._recover(patience, error)
                span = (leg.hop.start, leg.hop.end)
                legs[-1:], _ = await self._forward(span, leg.inputs, counts, keep_graphs=True)
                continue
            patience.answered()
            legs.pop()
        return gradients

    def _begin(self, leg: Leg, counts: tuple[int, ...], *, backward: bool = False) -> pb.Begin:
        return pb.Begin(
            swarm=self._swarm.id,
            manifest=self._swarm.manifest,
            span=pb.Span(start=leg.hop.start, end=leg.hop.end),
            counts=counts,
            backward=backward,
            wire=wire_code(self._spec.wire),
            graph=leg.graph,
        )

    async def _recover(self, patience: Patience, error: SwarmnetError) -> None:
        """Pause before the next attempt, or raise what stands in the way of any."""
        if patience.lost(asyncio.get_running_loop().time(), idle=False):
            raise _verdict(error) from error
        await asyncio.sleep(patience.pause_s)
        if isinstance(error, NoRoute):
            await self._swarm.refresh()

    async def _pass(self, hop: Hop, begin: pb.Begin, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """One pass on one host."""
        failures = self._failures[hop.peer]
        async with self._rooms[hop.peer]:
            if self._failures[hop.peer] > failures:
                raise PeerUnreachable(f"{hop.peer} has failed others while we waited for it")
            try:
                answer = await ask(self._swarm, hop, begin, tensors)
            except GraphGone:
                raise
            except SwarmnetError:
                self._failures[hop.peer] += 1
                self._swarm.failed(hop.peer)
                self.report.failovers += 1
                raise
        self._swarm.served(hop.peer)
        return answer


def _verdict(error: SwarmnetError) -> SwarmnetError:
    """What a person is told after many attempts, the last of which failed so."""
    if isinstance(error, NoRoute):
        return error
    if isinstance(error, Refused) and error.reason == pb.REASON_OUT_OF_MEMORY:
        return OutOfResources(
            f"the hosts have no room: {error}", hint="try again later, or start another node: swarmnet join"
        )
    return Unreachable(f"no host computes: {error}", hint="try again; the swarm may be changing")
