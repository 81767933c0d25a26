"""The routed experts of a host of whole blocks. Local experts run here; missing ones run on peers.

Such a host is a trunk. It computes attention, router and shared experts, keeps the KV caches, and
serves its own experts to others. Clients see an ordinary host. It is online only while every expert
of its blocks is within reach.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from swarmnet_node.engine.stage import Stage
from swarmnet_node.experts.expert_cache import ExpertCache, ReadExperts
from swarmnet_node.experts.expert_dispatcher import ExpertDispatcher, StartOnLoop
from swarmnet_node.experts.expert_links import MAX_ROUND_TRIP_S
from swarmnet_protocols.directory.expert_announcements import BlockExperts
from swarmnet_protocols.directory.node_reports import describe_experts
from swarmnet_protocols.machine.aio import start_on_loop
from swarmnet_protocols.quantization.packed_experts import ExpertsModule, expert_bytes, has_expert
from swarmnet_protocols.wire import report_pb2

LoadExperts = Callable[[int, Collection[int]], ExpertsModule]
"""Loads some experts of a block, on any thread."""


@dataclass(frozen=True)
class CacheOptions:
    """Options of a host that reads experts from disk: its ``own`` experts, ``capacity`` of them in
    memory."""

    own: BlockExperts
    reader: Callable[[int], ReadExperts]
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
    start_on_loop: StartOnLoop = start_on_loop
    cache: CacheOptions | None = None


def open_cache(stage: Stage, start: int, options: CacheOptions) -> ExpertCache:
    """Return a cache of experts for a stage that begins with block ``start``. Call ``install`` to
    use it."""
    blocks = stage.experts.blocks
    return ExpertCache(
        blocks,
        {layer: options.own.get(start + layer, frozenset()) for layer in blocks},
        {layer: options.reader(start + layer) for layer in blocks},
        options.capacity,
    )


def own_experts(stage: Stage, start: int) -> dict[int, ExpertsModule]:
    """Return the modules that have some of their experts, by block. The stage begins with block
    ``start``."""
    return {
        start + layer: module
        for layer, module in stage.experts.modules.items()
        if any(has_expert(module, each) for each in range(module.num_experts))
    }


def describe_trunk(dispatcher: ExpertDispatcher) -> report_pb2.TrunkReport:
    """Report the experts that peers compute for a trunk."""
    counters = dispatcher.counters
    return report_pb2.TrunkReport(
        lacks=describe_experts(_lacks(dispatcher)),
        missing=describe_experts(dispatcher.links.missing()),
        round_trips_s=_round_trips_s(dispatcher),
        far=dispatcher.links.far,
        rows=counters.rows,
        failed=counters.failed,
        hedged=counters.hedged,
        loaded=counters.loaded,
    )


def _lacks(dispatcher: ExpertDispatcher) -> BlockExperts:
    return {block: experts for block, experts in dispatcher.wanted.items() if experts}


def _round_trips_s(dispatcher: ExpertDispatcher) -> tuple[float, ...]:
    return tuple(sorted(link.round_trip_s for link in dispatcher.links.every if link.is_open))


class ExpertLoader:
    """Loads experts that no peer has into a stage while ``has_room`` for their bytes."""

    def __init__(self, stage: Stage, start: int, load: LoadExperts, has_room: Callable[[int], bool]) -> None:
        self._stage = stage
        self._start = start
        self._load = load
        self._has_room = has_room
        self._bytes = max((expert_bytes(module) for module in stage.experts.modules.values()), default=0)
        """Bytes of one expert. 0 until an expert has been loaded."""

    def load(self, block: int, experts: Collection[int]) -> bool:
        """Load some experts of a block. Return False if the memory has no room.

        Raises ``SwarmnetError`` if the experts cannot be fetched.
        """
        if not self._has_room(self._bytes * len(experts)):
            return False
        loaded = self._load(block, experts)
        self._bytes = max(self._bytes, expert_bytes(loaded))
        self._stage.add_experts(block - self._start, loaded)
        return True
