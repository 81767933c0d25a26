"""A trunk and peers with its experts in the simulated swarm, computed with tiny models of several
families."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.expert_node import ExpertHosting, ExpertNode
from swarmnet_node.experts.expert_link import ExpertModel
from swarmnet_node.experts.expert_service import ExpertService
from swarmnet_node.experts.trunk import CacheOptions, ExpertOptions
from swarmnet_node.hosted_blocks import Hosting
from swarmnet_node.node import Node
from swarmnet_protocols.arrays import as_array
from swarmnet_protocols.directory.expert_announcements import BlockExperts
from swarmnet_protocols.directory.node_reports import request_report
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import EXPERTS, REPORT
from swarmnet_protocols.session.expert_rows import ExpertRows, ExpertsStream, TrunkStream
from swarmnet_protocols.session.wire_tensors import encode_tensor
from swarmnet_protocols.wire import records_pb2 as pb
from swarmnet_protocols.wire import report_pb2, session_pb2
from tests.support.models.hub_families import FAMILIES
from tests.support.network.memory_network import LinkProfile
from tests.support.network.virtual_time import WaitingExecutor
from tests.support.swarm.swarm_lab import SWARM, Lab, Reference

NUM_EXPERTS = 8
LAN = LinkProfile(delay_s=0.001)
PROMPTS = [[3 + (7 * number + 5 * at) % 90 for at in range(2 + number)] for number in range(20)]
LONG = 12
"""Tokens of an answer during which a peer fails."""
_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")


def save_experts(family: str, folder: Path) -> Path:
    """A tiny model with ``NUM_EXPERTS`` experts in each block that has some."""
    tiny = FAMILIES[family]
    more = {name: NUM_EXPERTS for name in _NAMES if name in tiny.config}
    return replace(tiny, config={**tiny.config, **more}).save(folder)


def load_experts_reference(family: str, folder: Path) -> Reference:
    return Reference(resolve(str(save_experts(family, folder / "model")), cache_dir=folder / "cache"))


@dataclass(frozen=True)
class ExpertLab:
    """Peers that hold experts of the model of ``lab``, and trunks that need them."""

    lab: Lab

    @property
    def model(self) -> LocalModel:
        return self.lab.reference.local

    @property
    def blocks(self) -> Sequence[int]:
        """The blocks with routed experts."""
        whole = self.lab.reference.stage(0, self.model.manifest.blocks)
        return sorted(whole.experts.modules)

    def everywhere(self, experts: Collection[int]) -> BlockExperts:
        return {block: frozenset(experts) for block in self.blocks}

    def load(self, block: int, experts: Collection[int]) -> Any:
        return self.model.load_experts(block, experts, dtype=torch.float32, device=torch.device("cpu"))

    async def peer(self, name: str, experts: BlockExperts) -> ExpertNode:
        """A peer that computes ``experts``."""
        return await self.lab.start_experts(name, self.hosting(experts=experts))

    async def choosing_peer(self, name: str, capacity: int) -> ExpertNode:
        """A peer that chooses its experts, and lets hosts choose others."""
        hosting = self.hosting(counts=self.model.expert_counts(), capacity=capacity)
        return await self.lab.start_experts(name, hosting)

    def hosting(self, **options: Any) -> ExpertHosting:
        return ExpertHosting(
            model="tiny",
            manifest=self.model.manifest.hash,
            total_blocks=self.model.manifest.blocks,
            hidden_size=self.model.manifest.hidden_size,
            dtype=torch.float32,
            precision=self.model.precision,
            load=self.load,
            **options,
        )

    async def trunk(
        self,
        name: str,
        own: Collection[int],
        blocks: tuple[int, int] | None = None,
        *,
        has_room: bool = False,
        in_memory: int | None = None,
        **options: Any,
    ) -> Node:
        """A host of blocks that has the experts ``own`` of each; with ``in_memory``, so many of all
        experts, and reads the others from disk."""
        executor = WaitingExecutor()
        hosting = self.trunk_hosting(own, executor, blocks, has_room=has_room, in_memory=in_memory, **options)
        return await self.lab.start(name, hosting, executor)

    def trunk_hosting(
        self,
        own: Collection[int],
        executor: WaitingExecutor,
        blocks: tuple[int, int] | None = None,
        *,
        has_room: bool = False,
        in_memory: int | None = None,
        **options: Any,
    ) -> Hosting:
        """The hosting of ``trunk``."""

        def load(start: int, end: int) -> Stage:
            wanted = {block: frozenset(own) for block in self.blocks if start <= block < end}
            cpu = torch.device("cpu")
            return load_stage(self.model, start, end, dtype=torch.float32, device=cpu, experts=wanted)

        hosting = self.lab.hosting(blocks or (0, self.model.manifest.blocks), has_room=lambda _: has_room)
        if in_memory is not None:
            reader = partial(self.model.expert_reader, device=torch.device("cpu"))
            options["cache"] = CacheOptions(self.everywhere(range(NUM_EXPERTS)), reader, in_memory, 0)
        sharing = ExpertOptions(self.load, start_on_loop=executor.start_on_loop, **options)
        return replace(hosting, load=load, experts=sharing)

    async def faulty_peer(
        self,
        name: str,
        experts: BlockExperts,
        fault: str,
        kind: "type[FaultyService] | None" = None,
        row_s: float = 0.0,
    ) -> "FaultyService":
        """A peer that announces ``experts`` and does ``fault`` with rows, one of ``FAULTS`` or
        "false", until the lab ends."""
        modules = {block: self.load(block, chosen) for block, chosen in experts.items()}
        serving: asyncio.Future[FaultyService] = asyncio.get_running_loop().create_future()

        async def live() -> None:
            async with self.lab._world(name) as world:
                shared = ExpertModel(
                    world.directory.swarm,
                    self.model.manifest.hash,
                    self.model.manifest.hidden_size,
                    torch.float32,
                    self.model.precision,
                )
                service = (kind or FaultyService)(
                    modules, world.executor, shared, world.timing, world.transport.resources.system
                )
                service.fault, service.lab, service.row_s = fault, self.lab, row_s
                await EXPERTS.serve(world.transport, service.handle)
                lasting = replace(world, timing=replace(world.timing, record_s=3600.0))
                announcement = service.announcement(lasting, self.hosting(), pb.HOST_STATE_ONLINE)
                await announcement.publish(world.directory)
                serving.set_result(service)
                await asyncio.Future()

        self.lab._tasks[name] = asyncio.create_task(live())
        return await serving


FAULTS = ("NaN", "wrong shape", "wrong type", "unknown request", "no reply", "end")


class FaultyService(ExpertService):
    """Answers requests wrongly."""

    lab: Lab
    fault = ""
    asked = 0
    """Requests with rows."""

    async def _answer(self, stream: ExpertsStream, number: int, rows: ExpertRows) -> None:
        if not rows.rows:
            await super()._answer(stream, number, rows)
            return
        self.asked += 1
        right = self._compute(rows)
        wrong = {
            "NaN": torch.full_like(right, float("nan")),
            "wrong shape": right[:, :-1],
            "wrong type": right.bfloat16(),
            "false": torch.zeros_like(right),
        }.get(self.fault, right)
        if self.fault == "no reply":
            return
        if self.fault == "end":
            stream.close()
            return
        tensor, encoded = encode_tensor(as_array(wrong))
        number += 1000 * (self.fault == "unknown request")
        await stream.send(
            session_pb2.ExpertsReply(computed=session_pb2.Computed(id=number, tensor=tensor)), encoded
        )


def spread(count: int, experts: int = NUM_EXPERTS) -> list[set[int]]:
    """All experts, dealt to ``count`` peers."""
    return [{*range(first, experts, count)} for first in range(count)]


@dataclass
class Told:
    """An answer, and the longest wait for one of its tokens."""

    tokens: list[int]
    longest_s: float


async def told(lab: Lab, prompt: list[int] = PROMPTS[3], count: int = LONG) -> Told:
    """Ask for an answer and measure the wait for each token."""
    loop = asyncio.get_running_loop()
    async with lab.client() as swarm, lab.chain(swarm) as chain:
        times = [loop.time()]
        tokens = await lab.generate(chain, prompt, count, lambda _: times.append(loop.time()))
    return Told(tokens, max(after - before for before, after in pairwise(times)))


async def report_of(transport: Transport, peer: PeerId) -> report_pb2.NodeReport:
    stream = await REPORT.open(transport, peer)
    try:
        return await request_report(stream)
    finally:
        stream.close()


async def open_experts(lab: Lab, transport: Transport, peer: str) -> TrunkStream:
    return await EXPERTS.open(transport, lab.peer_id(peer))


def attach(lab: Lab, **changes: bytes) -> session_pb2.ExpertsRequest:
    named = {"swarm": SWARM, "manifest": lab.manifest} | changes
    return session_pb2.ExpertsRequest(attach=session_pb2.Attach(**named))
