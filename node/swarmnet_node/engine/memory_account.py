"""Staying within ``--max-ram``: what a node takes in any case, how many blocks fit, and what is left for others. Pure.

What a process has resident cannot be known beforehand, only measured: its own heap, p2pd, what allocators keep. So what others
may take is set anew at each look, from what is resident then.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.net.resources import Resource

MIB = 1 << 20
P2PD_BYTES = 96 * MIB
"""What p2pd takes with some dozens of peers."""
LEAST_ROOM_BYTES = 64 * MIB
"""With less for others, a node is of no use to anybody."""
MARGIN = 0.02
"""Of the limit: between two looks, memory comes and goes that nobody accounts for."""
WORK_POSITIONS = 512
WORK_VALUES = 24
"""Values of the hidden size that a forward needs for each of so many positions, besides caches."""
GRAPH_POSITIONS = 1024
GRAPH_VALUES = 30
"""The same of a pass that is kept for its backward, for each block."""
MESSAGES = 4
"""Steps of the largest kind that may be in memory on their way in."""
LEAST_MESSAGES_BYTES = 16 * MIB
SHARES: Mapping[Resource, float] = {Resource.CACHE: 0.6, Resource.LOG: 0.3, Resource.ADAPTER_BYTES: 0.1}
"""Of what is free, how much each may take until the next look."""


@dataclass(frozen=True)
class Footprint:
    """What blocks of a model take, as far as it is known before they are loaded."""

    runtime_bytes: int
    """Resident before any block is, without p2pd."""
    block_bytes: int
    hidden_size: int

    @property
    def message_bytes(self) -> int:
        """For what is on its way in."""
        return max(LEAST_MESSAGES_BYTES, MESSAGES * WORK_POSITIONS * self.hidden_size * 4)

    @property
    def work_bytes(self) -> int:
        """For computing one forward, on top of everything that stays, and for messages."""
        return self.message_bytes + WORK_POSITIONS * WORK_VALUES * self.hidden_size * 4

    def graph_bytes(self, blocks: int) -> int:
        """About what a pass through so many blocks leaves for its backward."""
        return GRAPH_POSITIONS * GRAPH_VALUES * self.hidden_size * 4 * blocks

    def min_ram_bytes(self, blocks: int) -> int:
        """The smallest limit with which so many blocks are of use."""
        needed = self.runtime_bytes + P2PD_BYTES + self.work_bytes + LEAST_ROOM_BYTES
        return int((needed + blocks * self.block_bytes) / (1 - MARGIN)) + 1

    def blocks_within(self, max_ram_bytes: int) -> int:
        """How many blocks fit; 0 or less if none does."""
        free = max_ram_bytes - self.min_ram_bytes(0)
        return int(free * (1 - MARGIN) // self.block_bytes)

    def check(self, max_ram_bytes: int, blocks: int) -> None:
        """Raise ``OutOfResources`` where so many blocks do not fit."""
        least = self.min_ram_bytes(blocks)
        if max_ram_bytes < least:
            fewer = self.blocks_within(max_ram_bytes)
            alternative = f", or host fewer blocks: --num-blocks {fewer}" if fewer > 0 else ""
            raise OutOfResources(
                f"{blocks} blocks do not fit into {max_ram_bytes / MIB:.0f} MiB",
                hint=f"allow at least --max-ram {-(-least // MIB)}MiB{alternative}",
            )


def check_headroom(max_ram_bytes: int, fixed_bytes: int) -> None:
    """Raise ``OutOfResources`` where a node with so much resident, besides what others hold, is to stay within a limit."""
    least = int((fixed_bytes + LEAST_ROOM_BYTES) / (1 - MARGIN)) + 1
    if max_ram_bytes < least:
        raise OutOfResources(
            f"this node has {fixed_bytes / MIB:.0f} MiB in memory besides the sessions of others",
            hint=f"allow at least --max-ram {-(-least // MIB)}MiB, or start it again with fewer blocks",
        )


def resource_limits(
    max_ram_bytes: int, rss_bytes: int, held: Mapping[Resource, int], footprint: Footprint, fixed_bytes: int
) -> dict[Resource, int]:
    """What others may hold of each stock until the next look.

    ``held`` is what they hold now, of ``rss_bytes`` that are resident; ``fixed_bytes`` were resident when they held nothing.
    Memory that was reserved and not yet touched is not resident, so less than that is never taken for fixed.
    """
    holding = {resource: held.get(resource, 0) for resource in SHARES}
    total = sum(holding.values())
    fixed = max(fixed_bytes, rss_bytes - total)
    free = int(max_ram_bytes * (1 - MARGIN)) - footprint.work_bytes - fixed - total
    return {resource: holding[resource] + int(max(0, free) * share) for resource, share in SHARES.items()}
