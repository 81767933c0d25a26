"""Training passes: a batch goes forward through all blocks and back, one host after another.

1. The batch is split into microbatches that follow each other through the hosts, so that all hosts
   compute at the same time.
2. :class:`RemoteBatch` leads the batch through the hosts, and decides what to compute again after a
   failure. :class:`PassClient` runs one pass at one host.
3. The client keeps the inputs of every pass, so any other host of the same blocks can compute the
   gradients.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from swarmnet_client.chain.adapter_upload import AdapterUploader
from swarmnet_client.chain.failures import CLIENT_FAULTS, Blame, RetryPolicy, explain
from swarmnet_client.chain.hops import ChainReport, ChainSpec, GraphGone, ask_pass
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.arrays import Array, as_array, as_tensor
from swarmnet_protocols.errors import (
    ConfigError,
    NoRoute,
    OutOfResources,
    PeerUnreachable,
    SwarmnetError,
)
from swarmnet_protocols.machine.aio import all_of, loop_time
from swarmnet_protocols.machine.devices import torch_dtype
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session.adapters import block_of
from swarmnet_protocols.session.passes import MAX_POSITIONS, MAX_SEQUENCES, unpack_tensors
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

MICROBATCHES = 8
"""Least number of microbatches of a batch that is large enough: three hops then idle for a fifth of
the time."""
MIN_POSITIONS = 256
"""Least positions of a microbatch.

1,024 positions take an eighth longer in microbatches of 256, and a third longer in microbatches of
128.
"""
PASSES_PER_HOST = 2
"""Passes of a batch at one host at a time: one computes while the tensors of the other travel."""
T = TypeVar("T")


class InDoubt(SwarmnetError):
    """A host failed, perhaps because of other hosts' outputs for the same sequences.

    The outputs of all hosts must be computed again.
    """


@dataclass(frozen=True)
class HopPass:
    """The forward pass of some sequences at one host, with its inputs [P, D].

    - ``before``: the hosts whose outputs led to ``inputs``.
    - ``graph``: the id of the autograd graph that the host may have kept; empty for none.
    """

    hop: Hop
    before: tuple[Hop, ...]
    counts: tuple[int, ...]
    inputs: torch.Tensor
    graph: bytes


def split(counts: Sequence[int], prefix_positions: int = 0) -> list[tuple[int, ...]]:
    """Cut the batch into microbatches: tuples of sequence lengths, in order.

    ``prefix_positions`` of an adapter count for every sequence. Raises ``OutOfResources`` for a
    sequence that is too long for a host.
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
    """Sequences of ``counts`` positions, one after another: forward once, then backward any number
    of times.

    Both wait out failures as long as every block is hosted; the result is the same. They raise:

    - ``NoRoute`` when a block has no host for ``recover_s``.
    - ``OutOfResources`` when the hosts are full.
    - ``Unreachable`` when every attempt fails.
    - ``ConfigError`` when independent hosts refuse what the client sends.
    """

    def __init__(self, hosts: ModelHosts, spec: ChainSpec, counts: Sequence[int]) -> None:
        """Raises ``OutOfResources`` for a sequence that is too long."""
        self.report = ChainReport()
        self._hosts = hosts
        self._spec = spec
        self._parts = split(counts, spec.prefix_positions)
        self._walked: list[list[HopPass]] = []
        self._passes = PassClient(hosts, spec, self.report)

    async def forward(self, inputs: torch.Tensor, *, keep_graphs: bool = False) -> torch.Tensor:
        """Return hidden states [P, D] through all blocks. Raises ``ConfigError`` for values that
        are not finite.

        With ``keep_graphs`` hosts keep autograd graphs for the backward passes, if they have
        memory.
        """
        parts = await self._cut(inputs)
        done = await all_of(
            *(
                self._forward(values, counts, keep_graphs=keep_graphs)
                for counts, values in zip(self._parts, parts, strict=True)
            )
        )
        self._walked = [hop_passes for hop_passes, _ in done]
        self.report.set_route([hop_pass.hop for hop_pass in self._walked[-1]])
        return torch.cat([outputs for _, outputs in done])

    async def backward(self, gradients: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the gradients of the inputs and of the adapter's tensors, from output gradients
        [P, D].

        They are summed in a fixed order, so the result does not depend on which host answers first.
        Raises ``ConfigError`` as ``forward`` does.
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
        """Return the microbatches in their wire type, checked. Yields to the event loop in between:
        a batch may be large."""
        parts = []
        for part in torch.split(values, [sum(counts) for counts in self._parts]):
            if not torch.isfinite(part).all():
                raise ConfigError(
                    "hidden states or gradients are not finite",
                    hint=CLIENT_FAULTS[refusal_pb2.REASON_NOT_FINITE],
                )
            parts.append(part.to(torch_dtype(self._spec.dtype.decoded)))
            await asyncio.sleep(0)
        return parts

    async def _forward(
        self, values: torch.Tensor, counts: tuple[int, ...], *, keep_graphs: bool
    ) -> tuple[list[HopPass], torch.Tensor]:
        """Send a microbatch through all blocks. Start over when outputs of hosts are in doubt."""
        retries = RetryPolicy(self._hosts.timing.recover_s)
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
        """Send ``values`` through the blocks of ``span`` on their present hosts. Raises
        ``InDoubt``.

        ``before``: the hosts that computed ``values``.
        """
        hop_passes: list[HopPass] = []
        reached = span[0]
        retries = RetryPolicy(self._hosts.timing.recover_s)
        while reached < span[1]:
            try:
                precision = before[-1].precision if before else None
                hop = self._hosts.route((reached, span[1]), precision=precision)[0]
                hop_pass = HopPass(
                    hop, before, counts, values, self._hosts.new_session() if keep_graphs else b""
                )
                outputs = await self._passes.forward(hop_pass)
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
        """Go backward through the passes. When outputs are in doubt, first go forward again on
        other hosts.
        """
        retries = RetryPolicy(self._hosts.timing.recover_s)
        while True:
            try:
                return await self._walk_back(walked, gradients)
            except InDoubt as error:
                await self._recover(retries, error)
                walked, _ = await self._forward(walked[0].inputs, walked[0].counts, keep_graphs=True)

    async def _walk_back(
        self, walked: Sequence[HopPass], gradients: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Go backward through the passes. Other hosts recompute a pass whose host failed, and
        replace it.
        """
        hop_passes, after = list(walked), list[HopPass]()
        adapter_gradients: dict[str, torch.Tensor] = {}
        retries = RetryPolicy(self._hosts.timing.recover_s)
        while hop_passes:
            hop_pass = hop_passes[-1]
            try:
                gradients, part = await self._passes.backward(hop_pass, gradients, after)
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
        if retries.is_given_up(loop_time(), idle=False):
            raise explain(error) from error
        await asyncio.sleep(retries.pause_s(error))
        if isinstance(error, NoRoute):
            await self._hosts.refresh()


class PassClient:
    """Runs the passes of one batch, at most ``PASSES_PER_HOST`` at a time on each host.

    A pass is not run on a host that failed in the meantime.
    """

    def __init__(self, hosts: ModelHosts, spec: ChainSpec, report: ChainReport) -> None:
        self._hosts = hosts
        self._spec = spec
        self._report = report
        self._uploader = AdapterUploader(hosts, spec.adapter)
        self._rooms: defaultdict[PeerId, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(PASSES_PER_HOST)
        )
        self._failures: Counter[PeerId] = Counter()
        self._blame = Blame(hosts)

    async def forward(self, hop_pass: HopPass) -> torch.Tensor:
        """Return the outputs [P, D] of a forward pass.

        Raises:

        - ``ConfigError`` if no host would compute it.
        - ``InDoubt`` if the host cannot compute with the outputs of the hosts before it.
        - another ``SwarmnetError`` if it fails otherwise.
        """

        async def question(adapter: bytes) -> torch.Tensor:
            begin = self._begin(hop_pass, adapter, backward=False)
            inputs = as_array(hop_pass.inputs)
            (outputs,) = await ask_pass(self._hosts, hop_pass.hop, begin, (inputs,), [inputs.shape])
            return as_tensor(outputs)

        return await self._answer(hop_pass.hop, question, hop_pass.before)

    async def backward(
        self, hop_pass: HopPass, grad_outputs: torch.Tensor, after: Sequence[HopPass]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the gradients of a pass's inputs and of its blocks' adapter tensors, from output
        gradients.

        ``grad_outputs`` [P, D] came back through the passes ``after`` it. Raises ``GraphGone`` if
        the host has dropped its graph, ``SwarmnetError`` as ``forward`` does.
        """
        adapter_tensors = self._adapter_tensors(hop_pass.hop)
        shapes: list[tuple[int, int]] = [(len(hop_pass.inputs), self._spec.hidden_size)]
        if adapter_tensors:
            shapes.append((sum(tensor.numel() for tensor in adapter_tensors.values()), 1))
        given = (grad_outputs,) if hop_pass.graph else (hop_pass.inputs, grad_outputs)
        tensors = [as_array(each) for each in given]

        async def question(adapter: bytes) -> list[Array]:
            begin = self._begin(hop_pass, adapter, backward=True)
            return await ask_pass(self._hosts, hop_pass.hop, begin, tensors, shapes)

        made_by = [*hop_pass.before, *(hop for each in after for hop in (*each.before, each.hop))]
        gradients, *column = await self._answer(hop_pass.hop, question, made_by)
        like = {name: tuple(tensor.shape) for name, tensor in adapter_tensors.items()}
        unpacked = unpack_tensors(column[0], like) if column else {}
        return as_tensor(gradients), {name: as_tensor(values) for name, values in unpacked.items()}

    def _adapter_tensors(self, hop: Hop) -> Mapping[str, torch.Tensor]:
        tensors = self._spec.adapter.tensors if self._spec.adapter is not None else {}
        return {name: tensor for name, tensor in tensors.items() if hop.start <= block_of(name) < hop.end}

    def _begin(self, hop_pass: HopPass, adapter: bytes, *, backward: bool) -> pb.Begin:
        return pb.Begin(
            swarm=self._hosts.swarm_id,
            manifest=self._hosts.manifest,
            span=pb.Span(start=hop_pass.hop.start, end=hop_pass.hop.end),
            counts=hop_pass.counts,
            backward=backward,
            wire=self._spec.dtype.value,
            adapter=adapter,
            graph=hop_pass.graph,
        )

    async def _answer(self, hop: Hop, question: Callable[[bytes], Awaitable[T]], made_by: Sequence[Hop]) -> T:
        failures = self._failures[hop.peer]
        async with self._rooms[hop.peer]:
            if self._failures[hop.peer] > failures:
                raise PeerUnreachable(f"{hop.peer} has failed another pass meanwhile")
            try:
                answer = await self._uploader.with_adapter(hop, question)
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
            self._hosts.answered(hop.peer)
        return answer
