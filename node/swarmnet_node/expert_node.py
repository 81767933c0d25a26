"""A node that hosts routed experts but no whole block.

The node computes rows for hosts of the blocks, and keeps no state of clients. Its life:

1. Choose the rarest experts, unless the owner named some, and load them.
2. Announce them and compute rows.
3. If the owner allows it, load and drop experts when hosts ask.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from swarmnet_node.experts.expert_choice import (
    Followed,
    accepted_drops,
    accepted_loads,
    choose_experts,
    follows,
)
from swarmnet_node.experts.expert_link import ExpertModel
from swarmnet_node.experts.expert_links import ExpertLinks
from swarmnet_node.experts.expert_service import ExpertService
from swarmnet_node.experts.expert_witness import answering, computed_elsewhere
from swarmnet_node.experts.trunk import LoadExperts
from swarmnet_node.hosting.reports import Reporter
from swarmnet_node.running_node import Dependencies, Hosted, RunningNode, Services
from swarmnet_protocols.directory.announcer import Announcement
from swarmnet_protocols.directory.expert_announcements import BlockExperts, ExpertBits, format_experts
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import cancel, loop_time
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import EXPERTS, REPORT
from swarmnet_protocols.quantization.packed_experts import (
    ExpertsModule,
    compute_expert,
    device_of,
    expert_bytes,
)
from swarmnet_protocols.wire import records_pb2 as pb
from swarmnet_protocols.wire import report_pb2

_log = logging.getLogger(__name__)

WITHDRAW_S = 10.0
"""Seconds to compute experts after the node stops announcing them. Hosts hear of it at once, but
may already have sent rows."""
TRIAL_ROWS = 8
"""Rows in the request that measures the time of an expert."""


@dataclass(frozen=True, kw_only=True)
class ExpertHosting(Hosted):
    """The experts that a node hosts.

    The node hosts ``experts``, or the ``capacity`` experts that the fewest peers have. ``load``
    runs on the torch thread for the first experts, and on other threads for later ones.
    """

    hidden_size: int
    dtype: torch.dtype
    precision: str
    load: LoadExperts
    experts: BlockExperts | None = None
    counts: Mapping[int, int] = field(default_factory=dict)
    """Number of experts of each block that has any."""
    capacity: int = 0
    """Most experts that the node holds if hosts may choose them. 0 keeps ``experts``."""

    @property
    def is_chosen(self) -> bool:
        """True if the experts of the node are already known."""
        return self.experts is not None


class ExpertNode(RunningNode):
    """A node that hosts routed experts only."""

    engine = None
    """The node computes no blocks, so it has neither an engine nor a host of sessions."""
    host = None

    def __init__(self, dependencies: Dependencies, hosting: ExpertHosting) -> None:
        super().__init__(dependencies, hosting)
        self._hosting = hosting
        self._state = pb.HOST_STATE_JOINING
        self._shared = ExpertModel(
            dependencies.directory.swarm,
            hosting.manifest,
            hosting.hidden_size,
            hosting.dtype,
            hosting.precision,
        )
        self.experts: BlockExperts = hosting.experts or {}
        """The experts that the node hosts. Empty until they are chosen."""
        self._service: ExpertService | None = None
        self._followed: Followed | None = None
        self._rearranging: asyncio.Task[None] | None = None
        self._weight_bytes = 0

    async def _start(self, services: Services) -> None:
        await self._serve(await self._load(), services)

    async def _stop(self) -> None:
        await cancel(self._rearranging)
        await super()._stop()
        self._service = None

    async def _load(self) -> ExpertService:
        """Choose the experts, unless the owner did, and load them."""
        dependencies, hosting = self.dependencies, self._hosting
        if not self.experts:
            every = {block: ExpertBits.of(range(count)) for block, count in hosting.counts.items()}
            others = await answering(self._links(every))
            self.experts = choose_experts(hosting.counts, others, hosting.capacity)
        loop = asyncio.get_running_loop()
        modules = await loop.run_in_executor(dependencies.executor, self._load_modules)
        row_s = await loop.run_in_executor(dependencies.executor, self._measure, modules)
        self._weight_bytes = sum(
            expert_bytes(modules[block]) * len(experts) for block, experts in self.experts.items()
        )
        system = dependencies.transport.resources.system
        service = ExpertService(modules, dependencies.executor, self._shared, dependencies.timing, system)
        service.row_s, service.capacity = row_s, hosting.capacity
        return service

    async def _serve(self, service: ExpertService, services: Services) -> None:
        hosting = self._hosting
        if hosting.capacity:
            service.on_rearrange = self._on_rearrange
        await EXPERTS.serve(services, service.handle, self.dependencies.timing)
        await self._serve_weights(services, lambda: service.streams > 0)
        self._service = service
        await REPORT.serve(services, Reporter(self.report).handle)
        self._state = pb.HOST_STATE_ONLINE
        await self._announcer.announce()
        self._log("online")

    def describe(self) -> report_pb2.HostReport:
        hosting, service = self._hosting, self._service
        record = pb.HostRecord(manifest=hosting.manifest, state=self._state, precision=hosting.precision)
        report = report_pb2.HostReport(
            record=record, model=self._public_model, total_blocks=hosting.total_blocks
        )
        if service is not None:
            report.forwards = service.requests
            service.describe(report)
        return report

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def report(self) -> report_pb2.NodeReport:
        if self._service is None:
            raise Unreachable("this node is not serving")
        return super().report()

    def hosting_again(self) -> ExpertHosting:
        """Return the hosting of the next run after a pause: the same experts."""
        return replace(self._hosting, experts=self.experts)

    async def _dismiss(self) -> None:
        if self._service is not None:
            await self._service.leave()

    def _load_modules(self) -> dict[int, ExpertsModule]:
        return {block: self._hosting.load(block, self.experts[block]) for block in self.experts}

    def _measure(self, modules: Mapping[int, ExpertsModule]) -> float:
        """Return the seconds for one row through one expert: the best of three trials after a
        warm-up."""
        now = self.dependencies.stopwatch
        block = min(modules)
        rows = torch.zeros(TRIAL_ROWS, self._hosting.hidden_size, dtype=self._hosting.dtype)
        rows = rows.to(device_of(modules[block]))
        times = []
        with torch.inference_mode():
            for _ in range(4):
                started = now()
                compute_expert(modules[block], min(self.experts[block]), rows)
                times.append(now() - started)
        return min(times[1:]) / TRIAL_ROWS

    # ---- other experts --------------------------------------------------------------------------

    def _on_rearrange(self, host: PeerId, loads: BlockExperts, drops: BlockExperts) -> None:
        now, service, last = loop_time(), self._service, self._followed
        is_busy = self._rearranging is not None and not self._rearranging.done()
        if service is None or is_busy:
            return
        hosts = {host, last.host} if last is not None else {host}
        if follows(last, host, now, {each: service.rows_from(each) for each in hosts}):
            self._followed = Followed(host, now)
            self._rearranging = asyncio.create_task(self._rearrange(service, loads, drops))

    async def _rearrange(self, service: ExpertService, loads: BlockExperts, drops: BlockExperts) -> None:
        """Drop experts that other peers compute, then load others, and announce the result."""
        hosting, loop = self._hosting, asyncio.get_running_loop()
        try:
            await self._drop(service, accepted_drops(drops, service.experts))
            wanted = accepted_loads(loads, service.experts, hosting.counts, hosting.capacity)
            for block, experts in wanted.items():
                loaded = await loop.run_in_executor(None, hosting.load, block, experts)
                await service.add(block, loaded)
        except SwarmnetError as error:
            _log.warning("experts not changed: %s", error)
        finally:
            await service.withdraw({})
        self.experts = service.experts
        self._log("rearranged")

    async def _drop(self, service: ExpertService, experts: BlockExperts) -> None:
        """Drop the ``experts`` that other peers compute. Check twice.

        Before the second check, this peer refuses to compute these experts. A peer that secretly
        asked this one for its outputs then fails the check.
        """
        if not (seen := await self._computed_elsewhere(service, experts)):
            return
        await service.withdraw(seen)
        self.experts = service.experts
        await asyncio.sleep(WITHDRAW_S)
        service.withhold()
        await service.withdraw(await self._computed_elsewhere(service, seen))
        await service.drop()

    async def _computed_elsewhere(self, service: ExpertService, experts: BlockExperts) -> BlockExperts:
        if not experts:
            return {}
        return await computed_elsewhere(self._links(experts), service.compute)

    def _links(self, experts: BlockExperts) -> ExpertLinks:
        """Return links to other peers that have some of ``experts``."""
        dependencies = self.dependencies
        return ExpertLinks(
            dependencies.transport,
            dependencies.directory,
            self._shared,
            {block: ExpertBits.of(each) for block, each in experts.items()},
            dependencies.timing,
            dependencies.rng,
            max_round_trip_s=math.inf,
        )

    def _log_fields(self) -> dict[str, object]:
        return {"experts": format_experts(self.experts)[:200]}

    def _facts(self) -> tuple[object, ...]:
        return (self.experts,)

    def _announcements(self) -> Iterable[Announcement]:
        if self._service is not None:
            yield self._service.announcement(self.dependencies, self._hosting, self._state)
