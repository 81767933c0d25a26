"""Memory account: which blocks and clients fit into a node's ``--max-ram``. Pure.

The account has four parts:

1. fixed: the process without blocks, p2pd, and the blocks;
2. working memory: one forward, because only one runs at a time, and messages being received;
3. clients: KV caches, saved autograd graphs, activation logs and adapters, which have limits;
4. a margin for memory that is not counted.

Before the blocks are loaded, :class:`Footprint` estimates the first two parts, and decides how many
blocks fit. Afterwards the node measures its resident set size, and :func:`resource_limits` computes
the limits of the third part from each measurement.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.models.sizes import LayerWidths
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.session.activation_log import REPLAY_POSITIONS
from swarmnet_protocols.session.passes import MAX_POSITIONS

MIB = 1 << 20
GIB = 1 << 30
P2PD_BYTES = 96 * MIB
"""Resident bytes of p2pd with a few dozen peers, measured."""
MIN_CLIENT_BYTES = 64 * MIB
"""Smallest number of bytes for clients. With less, a node cannot serve a session of useful
length."""
MARGIN = 0.02
"""Share of the limit that stays free for memory allocated between two measurements. A smaller share
risks exceeding the limit; a larger one wastes memory."""
GRAPH_VALUES = 30
"""Vectors of the hidden size that autograd saves for each position and block of a pass."""
MESSAGES = 4
"""Messages of the largest size that are received at the same time."""
MIN_MESSAGES_BYTES = 16 * MIB
"""Smallest number of bytes for messages being received."""
SHARES: Mapping[Resource, float] = {Resource.CACHE: 0.6, Resource.LOG: 0.3, Resource.ADAPTER_BYTES: 0.1}
"""Share of the free memory that each resource of clients may take until the next measurement."""


DEVICE_SHARES: Mapping[Resource, float] = {Resource.LOG: 1.0}
"""The shares on a node with an accelerator, whose memory holds caches and adapters."""


def activation_bytes(positions: int, widths: LayerWidths, dtype_bytes: int) -> int:
    """Return the most bytes of temporary tensors in one forward.

    A layer frees its tensors before the next begins. The larger of two peaks counts, in values for
    each position:

    - attention: inputs, residual, norm and projection (4 hidden); joined query, key and value (up
      to 3 attention); rotated query and key and their temporaries (4); the output (1);
    - MLP: inputs, residual, norm, projection and sum, and attention's output where transformers
      computes the layer (8 hidden); gate, up, activation and product (4 intermediate).

    Families with capped scores or attention sinks also allocate scores, which are not included.
    """
    values = max(4 * widths.hidden + 8 * widths.attention, 8 * widths.hidden + 4 * widths.intermediate)
    return positions * values * dtype_bytes


@dataclass(frozen=True)
class Footprint:
    """The memory needs of a model's blocks, as far as they are known before loading."""

    runtime_bytes: int
    """Resident bytes of the process before any block is loaded, without p2pd."""
    block_bytes: int
    """Bytes of the weights of one block. 0 if an accelerator's memory holds them."""
    widths: LayerWidths
    dtype_bytes: int = 4
    """Bytes of one value of weights and activations."""

    @property
    def message_bytes(self) -> int:
        """Bytes for messages being received: a few steps of the largest size, in float32."""
        return max(MIN_MESSAGES_BYTES, MESSAGES * REPLAY_POSITIONS * self.widths.hidden * 4)

    @property
    def work_bytes(self) -> int:
        """Bytes for messages and for the largest forward.

        The largest forward is a pass: steps of sessions are computed in smaller forwards.
        """
        forward = activation_bytes(MAX_POSITIONS, self.widths, self.dtype_bytes)
        return self.message_bytes + forward

    def graph_bytes(self, blocks: int) -> int:
        """Estimate the bytes that autograd saves in the largest pass through ``blocks`` blocks."""
        return MAX_POSITIONS * GRAPH_VALUES * self.widths.hidden * 4 * blocks

    def min_ram_bytes(self, blocks: int) -> int:
        """Return the smallest memory limit that lets a node serve ``blocks`` blocks."""
        needed = self.runtime_bytes + P2PD_BYTES + self.work_bytes + MIN_CLIENT_BYTES
        return int((needed + blocks * self.block_bytes) / (1 - MARGIN)) + 1

    def blocks_within(self, max_ram_bytes: int) -> int:
        """Return the number of blocks that fit in ``max_ram_bytes``. 0 or less if no block fits."""
        free = max_ram_bytes - self.min_ram_bytes(0)
        return int(free * (1 - MARGIN) // self.block_bytes)

    def blocks_allowed(self, held: int, *, most: int, max_ram_bytes: int | None, free_bytes: int) -> int:
        """Return how many blocks, at least 1, a node with ``held`` blocks may hold within a limit.

        - It drops blocks only if the limit leaves too little for clients.
        - It takes more blocks, up to ``most``, if a node with as many could start within the limit
          and they fit into the machine's ``free_bytes``.
        - Otherwise it keeps what it has.
        """
        if not self.block_bytes:
            return held
        fitting = most
        if max_ram_bytes is not None:
            fitting = self.blocks_within(max_ram_bytes)
            if max_ram_bytes < least_limit(self.runtime_bytes + P2PD_BYTES + held * self.block_bytes):
                return min(max(fitting, 1), held)
        return max(held, min(fitting, most, held + max(free_bytes, 0) // self.block_bytes))

    def check(self, max_ram_bytes: int, blocks: int) -> None:
        """Raise ``OutOfResources`` if ``blocks`` blocks do not fit."""
        needed = self.min_ram_bytes(blocks)
        if max_ram_bytes < needed:
            fewer = self.blocks_within(max_ram_bytes) if self.block_bytes else 0
            alternative = f", or host fewer blocks: --num-blocks {fewer}" if fewer > 0 else ""
            what = "a block does" if blocks == 1 else f"{blocks} blocks do"
            if not self.block_bytes:
                what = "a node does"
            raise OutOfResources(
                f"{what} not fit into {max_ram_bytes / MIB:.0f} MiB",
                hint=f"allow at least --max-ram {-(-needed // MIB)}MiB{alternative}",
            )


def least_limit(fixed_bytes: int) -> int:
    """Return the smallest limit that leaves enough for clients of a running node with
    ``fixed_bytes``."""
    return int((fixed_bytes + MIN_CLIENT_BYTES) / (1 - MARGIN)) + 1


def check_headroom(max_ram_bytes: int, fixed_bytes: int) -> None:
    """Raise ``OutOfResources`` if the limit leaves clients too little next to ``fixed_bytes``."""
    needed = least_limit(fixed_bytes)
    if max_ram_bytes < needed:
        raise OutOfResources(
            f"this node needs {fixed_bytes / MIB:.0f} MiB without sessions, which leaves them too little memory",
            hint=f"allow at least --max-ram {-(-needed // MIB)}MiB, or start it again with fewer blocks",
        )


def resource_limits(
    max_ram_bytes: int,
    rss_bytes: int,
    held: Mapping[Resource, int],
    footprint: Footprint,
    fixed_bytes: int,
    shares: Mapping[Resource, float] = SHARES,
) -> dict[Resource, int]:
    """Return the limits of clients' resources in ``shares`` until the next measurement.

    - ``rss_bytes``: resident bytes now.
    - ``held``: bytes that clients hold of each resource.
    - ``fixed_bytes``: resident bytes when clients held none.

    Memory that clients have reserved but not touched is not resident. So the fixed part never
    counts as less than ``fixed_bytes``.
    """
    holding = {resource: held.get(resource, 0) for resource in shares}
    total = sum(holding.values())
    fixed = max(fixed_bytes, rss_bytes - total)
    free = int(max_ram_bytes * (1 - MARGIN)) - footprint.work_bytes - fixed - total
    return {resource: holding[resource] + int(max(0, free) * share) for resource, share in shares.items()}
