"""A batch on its way through the swarm and back, for training: forward and backward passes, one host after another.

The batch is cut into microbatches, which go through the hosts one behind the other, so that every host has work. What each
host was sent stays here: whoever hosts the same blocks later can compute the gradients from it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import torch

from swarmnet_client.chain.blame import CLIENT_FAULTS
from swarmnet_client.chain.hops import ChainReport, ChainSpec
from swarmnet_client.chain.pass_calls import GraphGone, Hosts, InDoubt, Leg
from swarmnet_client.chain.retry_policy import RetryPolicy, explain
from swarmnet_client.swarm.swarm import Swarm
from swarmnet_protocols.errors import (
    ConfigError,
    NoRoute,
    OutOfResources,
    SwarmnetError,
)
from swarmnet_protocols.machine.aio import all_of
from swarmnet_protocols.routing.chain_search import Hop
from swarmnet_protocols.session.passes import MAX_POSITIONS, MAX_SEQUENCES
from swarmnet_protocols.wire import session_pb2 as pb

MICROBATCHES = 8
"""A batch is cut into so many or more where it can be: three hops are idle for a fifth of the time then."""
MIN_POSITIONS = 256
"""A host computes small microbatches more slowly: with 1024 positions in those of 256 by an eighth, in those of 128 by a third."""


def split(counts: Sequence[int], prefix_positions: int = 0) -> list[tuple[int, ...]]:
    """Sequences of these lengths as microbatches, in order. Raises ``OutOfResources`` for one that no host takes.

    A host counts the prefix that each begins with as well.
    """
    if max(counts) + prefix_positions > MAX_POSITIONS:
        longest = MAX_POSITIONS - prefix_positions
        raise OutOfResources(
            f"a sequence of {max(counts)} positions", hint=f"train on sequences of {longest} at most"
        )
    size = min(max(sum(counts) // MICROBATCHES, MIN_POSITIONS), MAX_POSITIONS)
    parts: list[list[int]] = [[]]
    for count in counts:
        attended = sum(parts[-1]) + count + prefix_positions * (len(parts[-1]) + 1)
        is_full = attended > MAX_POSITIONS or len(parts[-1]) == MAX_SEQUENCES
        if parts[-1] and (is_full or sum(parts[-1]) + count > size):
            parts.append([])
        parts[-1].append(count)
    return [tuple(part) for part in parts]


class RemoteBatch:
    """Sequences of ``counts`` positions, laid one after another: forward once, then backward as often as wanted.

    Both wait through failures as long as somebody hosts every block, with the same result. They raise ``NoRoute`` when nobody
    does for ``recover_s``, ``OutOfResources`` when the hosts have no room, ``Unreachable`` when every attempt fails, ``ConfigError``
    when hosts agree that it is what we send.
    """

    def __init__(self, swarm: Swarm, spec: ChainSpec, counts: Sequence[int]) -> None:
        """Raises ``OutOfResources`` for a sequence that is too long."""
        self.report = ChainReport()
        self._swarm = swarm
        self._spec = spec
        self._parts = split(counts, spec.prefix_positions)
        self._walked: list[list[Leg]] = []
        self._hosts = Hosts(swarm, spec, self.report)

    async def forward(self, inputs: torch.Tensor, *, keep_graphs: bool = False) -> torch.Tensor:
        """Hidden states [P, D] through all blocks. Raises ``ConfigError`` for values that are not finite.

        With ``keep_graphs`` the hosts keep what makes a ``backward`` soon after it cheaper, where they have room.
        """
        parts = await self._cut(inputs)
        done = await all_of(
            *(
                self._forward(values, counts, keep_graphs=keep_graphs)
                for counts, values in zip(self._parts, parts, strict=True)
            )
        )
        self._walked = [legs for legs, _ in done]
        self.report.route = [(leg.hop.peer, leg.hop.start, leg.hop.end) for leg in self._walked[-1]]
        return torch.cat([outputs for _, outputs in done])

    async def backward(self, gradients: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """From gradients of the outputs of ``forward`` [P, D] to those of its inputs and of the adapter's tensors.

        Whoever answers first, the bits are the same where the hosts' are. Raises ``ConfigError`` as ``forward`` does.
        """
        values = await self._cut(gradients)
        walked = self._walked
        self._walked = [[replace(leg, graph=b"") for leg in legs] for legs in walked]  # used up
        done = await all_of(*map(self._backward, walked, values))
        own: dict[str, torch.Tensor] = {}
        for _, part in done:
            for name, numbers in part.items():
                own[name] = own[name] + numbers if name in own else numbers
        return torch.cat([found for found, _ in done]), own

    async def _cut(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The microbatches as they are sent, all of them checked. Others have the loop in between: a batch may be large."""
        parts = []
        for part in torch.split(values, [sum(counts) for counts in self._parts]):
            if not torch.isfinite(part).all():
                raise ConfigError(
                    "hidden states or gradients are not finite: no host computes with them",
                    hint=CLIENT_FAULTS[pb.REASON_NOT_FINITE],
                )
            parts.append(part.to(self._spec.wire))
            await asyncio.sleep(0)
        return parts

    async def _forward(
        self, values: torch.Tensor, counts: tuple[int, ...], *, keep_graphs: bool
    ) -> tuple[list[Leg], torch.Tensor]:
        """A microbatch through all blocks; from the start again whenever what hosts have made of it is in doubt."""
        retries = RetryPolicy(self._swarm.timing.recover_s)
        while True:
            try:
                return await self._walk((0, self._spec.blocks), values, counts, keep_graphs=keep_graphs)
            except InDoubt as error:
                await self._recover(retries, error)

    async def _walk(
        self,
        span: tuple[int, int],
        values: torch.Tensor,
        counts: tuple[int, ...],
        before: tuple[Hop, ...] = (),
        *,
        keep_graphs: bool,
    ) -> tuple[list[Leg], torch.Tensor]:
        """From the outputs of ``before`` through the blocks of ``span``, by whoever hosts them now. Raises ``InDoubt``."""
        legs: list[Leg] = []
        reached = span[0]
        retries = RetryPolicy(self._swarm.timing.recover_s)
        while reached < span[1]:
            try:
                hop = self._swarm.route((reached, span[1]))[0]
                leg = Leg(hop, before, counts, values, self._swarm.new_session() if keep_graphs else b"")
                outputs = await self._hosts.forward(leg)
            except InDoubt:
                raise
            except SwarmnetError as error:
                await self._recover(retries, error)
                continue
            retries.answered()
            legs.append(leg)
            reached, values, before = hop.end, outputs, (*before, hop)
        return legs, values

    async def _backward(
        self, walked: Sequence[Leg], gradients: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Back along the legs; along others, walked anew, whenever what hosts have made of the microbatch is in doubt."""
        retries = RetryPolicy(self._swarm.timing.recover_s)
        while True:
            try:
                return await self._walk_back(walked, gradients)
            except InDoubt as error:
                await self._recover(retries, error)
                walked, _ = await self._forward(walked[0].inputs, walked[0].counts, keep_graphs=True)

    async def _walk_back(
        self, walked: Sequence[Leg], gradients: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Back along the legs. A leg whose host is gone is walked forward again by others, who then take its place."""
        legs, after = list(walked), list[Leg]()
        own: dict[str, torch.Tensor] = {}
        retries = RetryPolicy(self._swarm.timing.recover_s)
        while legs:
            leg = legs[-1]
            try:
                gradients, part = await self._hosts.backward(leg, gradients, after)
            except GraphGone:
                legs[-1] = replace(leg, graph=b"")
                continue
            except InDoubt:
                raise
            except SwarmnetError as error:
                await self._recover(retries, error)
                span = leg.hop.start, leg.hop.end
                legs[-1:], _ = await self._walk(span, leg.inputs, leg.counts, leg.before, keep_graphs=True)
                continue
            retries.answered()
            own |= part
            after.append(legs.pop())
        return gradients, own

    async def _recover(self, retries: RetryPolicy, error: SwarmnetError) -> None:
        """Pause before the next attempt, or raise what stands in the way of any."""
        if isinstance(error, ConfigError):
            raise error
        if retries.is_given_up(asyncio.get_running_loop().time(), idle=False):
            raise explain(error) from error
        await asyncio.sleep(retries.pause_s(error))
        if isinstance(error, NoRoute):
            await self._swarm.refresh()
