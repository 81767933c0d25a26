"""The routed experts of a host of whole blocks: peers compute those that it lacks, and it computes those that it has for others.

Such a host is a trunk: it computes attention, router and shared experts, and keeps the KV caches. For clients it is a host like others, which is
online only while every expert of its blocks is within reach.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from swarmnet_node.engine.stage import Stage
from swarmnet_node.experts.expert_dispatcher import MAX_ROUND_TRIP_S, StartOnLoop
from swarmnet_protocols.machine.aio import start_on_loop
from swarmnet_protocols.quantization.packed_experts import ExpertsModule, expert_bytes, has_expert

LoadExperts = Callable[[int, Collection[int]], ExpertsModule]
"""Loads some experts of a block, on any thread."""


@dataclass(frozen=True)
class ExpertOptions:
    """Options of a host whose experts peers compute."""

    load: LoadExperts
    max_round_trip_s: float = MAX_ROUND_TRIP_S
    """Longest round trip to these peers in seconds."""
    notice: Callable[[str], None] = lambda _: None
    """Receives messages for the owner, such as the experts that no peer has."""
    start_on_loop: StartOnLoop = start_on_loop


def own_experts(stage: Stage, start: int) -> dict[int, ExpertsModule]:
    """The modules of a stage that have some of their experts, by block; the stage begins with block ``start``."""
    return {
        start + layer: module
        for layer, module in stage.experts.items()
        if any(has_expert(module, each) for each in range(module.num_experts))
    }


class ExpertLoader:
    """Loads experts that no peer has into a stage that begins with block ``start``, while ``has_room`` for their bytes."""

    def __init__(self, stage: Stage, start: int, load: LoadExperts, has_room: Callable[[int], bool]) -> None:
        self._stage = stage
        self._start = start
        self._load = load
        self._has_room = has_room
        self._bytes = max((expert_bytes(module) for module in stage.experts.values()), default=0)
        """Bytes of one expert; 0: none has been loaded yet."""

    def load(self, block: int, experts: Collection[int]) -> bool:
        """Load some experts of a block; False if the memory has no room. Raises ``SwarmnetError`` if they cannot be fetched."""
        if not self._has_room(self._bytes * len(experts)):
            return False
        loaded = self._load(block, experts)
        self._bytes = max(self._bytes, expert_bytes(loaded))
        self._stage.add_experts(block - self._start, loaded)
        return True
