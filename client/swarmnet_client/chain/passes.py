"""A training batch through all blocks and back: forward and backward passes, one host after another.

The batch is split into microbatches that follow each other through the hosts, so that all hosts compute at the same time. The client keeps
the inputs of every pass: any other host of the same blocks can compute the gradients from them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import torch

from swarmnet_client.chain.blame import CLIENT_FAULTS
from swarmnet_client.chain.hops import ChainReport, ChainSpec
from swarmnet_client.chain.pass_calls import GraphGone, HopPass, InDoubt, PassClient
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
from swarmnet_protocols.wire import refusal_pb2

MICROBATCHES = 8
"""Least number of microbatches of a batch that is large enough: three hops then idle for a fifth of the time."""
MIN_POSITIONS = 256
"""Least positions of a microbatch. 1,024 positions take an eighth longer in microbatches of 256, a third longer in those of 128."""


def split(counts: Sequence[int], prefix_positions: int = 0) -> list[tuple[int, ...]]:
    """Microbatches, as tuples of sequence lengths, in order. Raises ``OutOfResources`` for a sequence that is too long for a host.

    ``prefix_positions`` of an adapter count for every sequence.
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

    Both wait through failures as long as every block is hosted, and the result is the same. They raise ``NoRoute`` when a block has no host
    for ``recover_s``, ``OutOfResources`` when the hosts are full, ``Unreachable`` when every attempt fails, ``ConfigError`` when independent
    hosts refuse what the client sends.
    """

    def __init__(self, swarm: Swarm, spec: ChainSpec, counts: Sequence[int]) -> None:
        """Raises ``OutOfResources`` for a sequence that is too long."""
        self.report = ChainReport()
        self._swarm = swarm
        self._spec = spec
        self._parts = split(counts, spec.prefix_positions)
        self._walked: list[list[HopPass]] = []
        self._hosts = PassClient(swarm, spec, self.report)

    async def forward(self, inputs: torch.Tensor, *, keep_graphs: bool = False) -> torch.Tensor:
        """Hidden states [P, D] through all blocks. Raises ``ConfigError`` for values that are not finite.

        With ``keep_graphs`` hosts keep autograd graphs for the backward passes, if they have memory.
        """
        parts = await self._cut(inputs)
        done = await all_of(
            *(
                self._forward(values, counts, keep_graphs=keep_graphs)
                for counts, values in zip(self._parts, parts, strict=True)
            )
        )
        self._walked = [hop_passes for hop_passes, _ in done]
        self.report.route = [
            (hop_pass.hop.peer, hop_pass.hop.start, hop_pass.hop.end) for hop_pass in self._walked[-1]
        ]
        return torch.cat([outputs for _, outputs in done])

    async def backward(self, gradients: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The gradients of the inputs of ``forward`` and of the adapter's tensors, from those of its outputs [P, D].

        They are summed in a fixed order, so the result does not depend on which host answers first. Raises ``ConfigError`` as ``forward`` does.
        """
        values = await self._cut(gradients)
        walked = self._walked
        self._walked = [
            [replace(hop_pass, graph=b"") for hop_pass in hop_passes] for hop_passes in walked
        ]  # used up
        done = await all_of(*map(self._backward, walked, values))
        adapter_gradients: dict[str, torch.Tensor] = {}
        for _, part in done:
            for name, numbers in part.items():
                adapter_gradients[name] = (
                    adapter_gradients[name] + numbers if name in adapter_gradients else numbers
                )
        return torch.cat([found for found, _ in done]), adapter_gradients

    async def _cut(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The microbatches in their wire type, checked. Yields to the event loop in between: a batch may be large."""
        parts = []
        for part in torch.split(values, [sum(counts) for counts in self._parts]):
            if not torch.isfinite(part).all():
                raise ConfigError(
                    "hidden states or gradients are not finite",
                    hint=CLIENT_FAULTS[refusal_pb2.REASON_NOT_FINITE],
                )
            parts.append(part.to(self._spec.wire))
            await asyncio.sleep(0)
        return parts

    async def _forward(
        self, values: torch.Tensor, counts: tuple[int, ...], *, keep_graphs: bool
    ) -> tuple[list[HopPass], torch.Tensor]:
        """A microbatch through all blocks; from the start again when outputs of hosts are in doubt."""
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
    ) -> tuple[list[HopPass], torch.Tensor]:
        """Through the blocks of ``span`` on their present hosts; ``values`` are outputs of ``before``. Raises ``InDoubt``."""
        hop_passes: list[HopPass] = []
        reached = span[0]
        retries = RetryPolicy(self._swarm.timing.recover_s)
        while reached < span[1]:
            try:
                hop = self._swarm.route((reached, span[1]))[0]
                hop_pass = HopPass(
                    hop, before, counts, values, self._swarm.new_session() if keep_graphs else b""
                )
                outputs = await self._hosts.forward(hop_pass)
            except InDoubt:
                raise
            except SwarmnetError as error:
                await self._recover(retries, error)
                continue
            retries.answered()
            hop_passes.append(hop_pass)
            reached, values, before = hop.end, outputs, (*before, hop)
        return hop_passes, values

    async def _backward(
        self, walked: Sequence[HopPass], gradients: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Backward through the passes; when outputs of hosts are in doubt, forward again on other hosts first."""
        retries = RetryPolicy(self._swarm.timing.recover_s)
        while True:
            try:
                return await self._walk_back(walked, gradients)
            except InDoubt as error:
                await self._recover(retries, error)
                walked, _ = await self._forward(walked[0].inputs, walked[0].counts, keep_graphs=True)

    async def _walk_back(
        self, walked: Sequence[HopPass], gradients: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Backward through the passes. A pass whose host failed is computed again by other hosts, which then take its place."""
        hop_passes, after = list(walked), list[HopPass]()
        adapter_gradients: dict[str, torch.Tensor] = {}
        retries = RetryPolicy(self._swarm.timing.recover_s)
        while hop_passes:
            hop_pass = hop_passes[-1]
            try:
                gradients, part = await self._hosts.backward(hop_pass, gradients, after)
            except GraphGone:
                hop_passes[-1] = replace(hop_pass, graph=b"")
                continue
            except InDoubt:
                raise
            except SwarmnetError as error:
                await self._recover(retries, error)
                span = hop_pass.hop.start, hop_pass.hop.end
                hop_passes[-1:], _ = await self._walk(
                    span, hop_pass.inputs, hop_pass.counts, hop_pass.before, keep_graphs=True
                )
                continue
            retries.answered()
            adapter_gradients |= part
            after.append(hop_passes.pop())
        return gradients, adapter_gradients

    async def _recover(self, retries: RetryPolicy, error: SwarmnetError) -> None:
        """Pause before the next attempt, or raise the error if there is none."""
        if isinstance(error, ConfigError):
            raise error
        if retries.is_given_up(asyncio.get_running_loop().time(), idle=False):
            raise explain(error) from error
        await asyncio.sleep(retries.pause_s(error))
        if isinstance(error, NoRoute):
            await self._swarm.refresh()
