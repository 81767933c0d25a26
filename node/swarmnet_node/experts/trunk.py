"""The routed experts of a host of whole blocks. Local experts run here; missing ones run on peers.

Such a host is a trunk. It computes attention, router and shared experts, keeps the KV caches, and
serves its own experts to others. Clients see an ordinary host. It is online only while every expert
of its blocks is within reach.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from swarmnet_node.engine.stage import Stage
from swarmnet_node.experts.expert_choice import MAX_ROUND_TRIP_S
from swarmnet_node.running_node import Dependencies, Services
from swarmnet_protocols.directory.expert_announcements import BlockExperts, ExpertBits
from swarmnet_protocols.directory.node_reports import describe_experts
from swarmnet_protocols.machine.aio import in_background, persist, start_on_loop
from swarmnet_protocols.machine.threads import stay_serial
from swarmnet_protocols.net.protocol_ids import EXPERTS
from swarmnet_protocols.wire import report_pb2

if TYPE_CHECKING:
    from swarmnet_node.experts.expert_cache import ExpertCache, ReadExperts
    from swarmnet_node.experts.expert_dispatcher import ExpertDispatcher, StartOnLoop
    from swarmnet_node.experts.expert_service import ExpertService
    from swarmnet_protocols.quantization.packed_experts import Elsewhere, ExpertsModule

LoadExperts = Callable[[int, Collection[int]], Any]
"""Loads some experts of a block as an ``ExpertsModule``, on any thread."""


@dataclass(frozen=True)
class CacheOptions:
    """Options of a host that reads experts from disk: its ``own`` experts, ``capacity`` of them in
    memory."""

    own: BlockExperts
    reader: "Callable[[int], ReadExperts]"
    """Returns the function that reads experts of a block."""
    capacity: int
    max_bytes: int
    """Bytes of ``capacity`` experts."""


@dataclass(frozen=True)
class ExpertOptions:
    """Options of a host whose missing experts run on peers."""

    load: LoadExperts
    max_round_trip_s: float = MAX_ROUND_TRIP_S
    """Longest round trip to these peers in seconds."""
    notice: Callable[[str], None] = lambda _: None
    """Receives messages for the owner, such as the experts that no peer has."""
    start_on_loop: "StartOnLoop" = start_on_loop
    cache: CacheOptions | None = None


def open_cache(stage: Stage, start: int, options: CacheOptions) -> "ExpertCache":
    """Return a cache of experts for a stage that begins with block ``start``. Call ``install`` to
    use it."""
    from swarmnet_node.experts.expert_cache import ExpertCache

    blocks = stage.experts.blocks
    return ExpertCache(
        blocks,
        {layer: options.own.get(start + layer, frozenset()) for layer in blocks},
        {layer: options.reader(start + layer) for layer in blocks},
        options.capacity,
    )


@dataclass(frozen=True)
class Trunk:
    """The routed experts of a node's blocks. All of a node that has every expert of its blocks are
    None."""

    service: "ExpertService | None" = None
    """Computes own experts for other hosts."""
    dispatcher: "ExpertDispatcher | None" = None
    """Has peers compute the experts that the node lacks."""
    cache: "ExpertCache | None" = None
    """Reads own experts from disk when a token needs them."""

    @classmethod
    @asynccontextmanager
    async def run(  # noqa: PLR0913 - a stage, its place in the model, and what both sides need
        cls,
        stage: Stage,
        start: int,
        options: ExpertOptions,
        dependencies: Dependencies,
        services: Services,
        *,
        manifest: bytes,
        has_room: Callable[[int], bool],
    ) -> AsyncIterator["Trunk"]:
        """Share the experts of ``stage``, which begins with block ``start``, while the context is
        open.

        ``has_room`` returns whether this many bytes of further experts fit into the memory.
        """
        from swarmnet_node.experts.expert_dispatcher import ExpertDispatcher
        from swarmnet_node.experts.expert_link import ExpertModel
        from swarmnet_node.experts.expert_links import ExpertLinks
        from swarmnet_node.experts.expert_planner import ExpertPlanner
        from swarmnet_node.experts.expert_service import ExpertService
        from swarmnet_protocols.machine.devices import torch_dtype

        system = dependencies.transport.resources.system
        model = ExpertModel(
            dependencies.directory.swarm,
            manifest,
            stage.hidden_size,
            torch_dtype(stage.dtype),
            stage.precision,
        )
        service = dispatcher = cache = None
        async with AsyncExitStack() as stack:
            if own := _own_experts(stage, start):
                executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="experts"))
                await asyncio.get_running_loop().run_in_executor(executor, stay_serial)
                service = ExpertService(own, executor, model, dependencies.timing, system)
                await EXPERTS.serve(services, service.handle, dependencies.timing)
            if missing := _missing_experts(stage, start, options.cache):
                links = ExpertLinks(
                    dependencies.transport,
                    dependencies.directory,
                    model,
                    missing,
                    dependencies.timing,
                    dependencies.rng,
                    options.max_round_trip_s,
                )
                load = partial(_load_more, stage, start, options.load, has_room)
                dispatcher = await stack.enter_async_context(
                    ExpertDispatcher(links, load, options.start_on_loop).running()
                )
                stage.experts.compute_elsewhere(partial(_elsewhere, dispatcher, start))
                planner = ExpertPlanner(dispatcher, dependencies.rng)
                modules = {start + layer: module for layer, module in stage.experts.modules.items()}
                for hook in planner.watch(modules):
                    stack.callback(hook.remove)
                await stack.enter_async_context(in_background(persist("the plan of experts", planner.run)))
            if options.cache is not None:
                cache = open_cache(stage, start, options.cache)
                cache.install(partial(_elsewhere, dispatcher, start) if dispatcher is not None else None)
                stack.callback(cache.close)
            yield cls(service, dispatcher, cache)

    @property
    def missing(self) -> BlockExperts:
        """The experts that no peer within reach has."""
        return self.dispatcher.links.missing() if self.dispatcher else {}

    def describe(self, report: report_pb2.HostReport) -> None:
        """Add the experts of both sides to a report."""
        if self.service is not None:
            self.service.describe(report)
        if self.dispatcher is not None:
            report.trunk.CopyFrom(_describe(self.dispatcher))


def _own_experts(stage: Stage, start: int) -> "dict[int, ExpertsModule]":
    """Return the modules that have some of their experts, by block. The stage begins with block
    ``start``."""
    from swarmnet_protocols.quantization.packed_experts import has_expert

    return {
        start + layer: module
        for layer, module in stage.experts.modules.items()
        if any(has_expert(module, each) for each in range(module.num_experts))
    }


def _missing_experts(stage: Stage, start: int, cache: CacheOptions | None) -> dict[int, ExpertBits]:
    """Return the experts, by block, that are neither in memory nor on disk."""
    on_disk = cache.own if cache is not None else {}
    missing = {
        start + layer: experts - on_disk.get(start + layer, frozenset())
        for layer, experts in stage.experts.missing.items()
    }
    return {block: ExpertBits.of(experts) for block, experts in missing.items() if experts}


def _elsewhere(dispatcher: "ExpertDispatcher", start: int, layer: int) -> "Elsewhere":
    return dispatcher.elsewhere(start + layer)


def _describe(dispatcher: "ExpertDispatcher") -> report_pb2.TrunkReport:
    """Report the experts that peers compute for a trunk."""
    counters, links = dispatcher.counters, dispatcher.links
    return report_pb2.TrunkReport(
        lacks=describe_experts({block: experts for block, experts in dispatcher.wanted.items() if experts}),
        missing=describe_experts(links.missing()),
        round_trips_s=sorted(link.round_trip_s for link in links.every if link.is_open),
        far=links.far_peers,
        rows=counters.rows,
        failed=counters.failed,
        hedged=counters.hedged,
        loaded=counters.loaded,
    )


def _load_more(
    stage: Stage,
    start: int,
    load: LoadExperts,
    has_room: Callable[[int], bool],
    block: int,
    experts: Collection[int],
) -> bool:
    """Load experts that no peer has into the stage. Return False if the memory has no room.

    Raises ``SwarmnetError`` if the experts cannot be fetched.
    """
    from swarmnet_protocols.quantization.packed_experts import expert_bytes

    one_bytes = max((expert_bytes(module) for module in stage.experts.modules.values()), default=0)
    if not has_room(one_bytes * len(experts)):
        return False
    stage.add_experts(block - start, load(block, experts))
    return True
