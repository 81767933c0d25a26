"""Keeps a node below its owner's memory limit.

The program and the blocks take a part of the limit. The rest is for clients: their KV caches,
activation logs, adapters and autograd graphs.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NoReturn

from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.memory_account import (
    DEVICE_SHARES,
    P2PD_BYTES,
    SHARES,
    Footprint,
    check_headroom,
    resource_limits,
)
from swarmnet_node.engine.stage import Stage
from swarmnet_node.hosted_blocks import Hosting
from swarmnet_node.node import Node
from swarmnet_node.owner.limits import Machine, OwnerLimits
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import ResourceManager

GOVERN_S = 0.5
"""Seconds between two measurements of resident memory, if it is limited."""
UNLIMITED_S = 5.0
"""Seconds between two checks whether the owner has limited the memory."""
RELEASE_ABOVE = 0.97
"""Share of the memory limit at which freed memory is returned to the system."""
SPARE_BYTES = 256 << 20
"""Memory of the machine that stays free when a node loads other blocks next to its own."""


class MemoryLimit:
    """The memory limit of a node, and the memory needs of the blocks that it serves."""

    def __init__(self, machine: Machine, limits: Callable[[], OwnerLimits]) -> None:
        """``limits`` returns the limits in force."""
        self._limits = limits
        self._machine = machine
        self._footprint: Footprint | None = None
        """The memory needs of the blocks, measured before clients came. None until the node has
        served."""

    def forget_blocks(self) -> None:
        """Forget the memory needs of the blocks: the node is about to load others."""
        self._footprint = None

    @property
    def max_ram_bytes(self) -> int | None:
        return self._limits().max_ram_bytes

    def check(self, limits: OwnerLimits, engine: Engine | None, *, may_drop: bool) -> None:
        """Raise ``OutOfResources`` if the node could not keep the memory limit in new ``limits``.

        ``may_drop``: the node may drop blocks to keep it.
        """
        max_ram_bytes = limits.max_ram_bytes
        if max_ram_bytes is None or max_ram_bytes == self.max_ram_bytes:
            return
        held = 0 if engine is None or engine.stage.is_on_accelerator else engine.cache_bytes
        try:
            check_headroom(max_ram_bytes, self._machine.ram_bytes() - held)
        except OutOfResources:
            if not may_drop or self._footprint is None or not self._footprint.block_bytes:
                raise
            self._footprint.check(max_ram_bytes, 1)  # the node drops the others

    def has_room(self, more_bytes: int) -> bool:
        """Return whether ``more_bytes`` fit into the machine's memory and below the limit."""
        limit_bytes = self.max_ram_bytes
        within_limit = (
            limit_bytes is None or self._machine.ram_bytes() + more_bytes <= limit_bytes * RELEASE_ABOVE
        )
        return within_limit and more_bytes + SPARE_BYTES <= self._machine.free_bytes()

    def fitting(self, most: int, held: int) -> int:
        """Return how many blocks, up to ``most``, the limit allows a node that has ``held``."""
        if self._footprint is None:
            return held
        return self._footprint.blocks_allowed(
            held,
            most=most,
            max_ram_bytes=self.max_ram_bytes,
            free_bytes=self._machine.free_bytes() - SPARE_BYTES,
        )

    async def govern(self, node: Node) -> NoReturn:
        """Limit the memory of clients while ``node`` runs.

        Over the limit, end one session at each measurement.
        """
        if node.engine is None:
            raise RuntimeError("the node does not serve")
        hosting = node.hosting
        cache = hosting.experts.cache if hosting.experts is not None else None
        footprint = self._footprint = footprint_of(node.engine.stage, self._machine.ram_bytes())
        bare_bytes = footprint.runtime_bytes + P2PD_BYTES + (0 if cache is None else cache.max_bytes)
        governor = Governor(node.dependencies.transport.resources, hosting, bare_bytes)
        while True:
            limit_bytes = self.max_ram_bytes
            if limit_bytes is not None:
                # Blocks that the node is about to drop stay in memory until their sessions have
                # left. Until then they are allowed on top of the limit.
                limit_bytes += node.blocks_to_drop * footprint.block_bytes
            rss_bytes = 0 if limit_bytes is None else self._machine.ram_bytes()
            if node.engine is not None:
                governor.adjust(node.engine, limit_bytes, rss_bytes)
            if limit_bytes is not None and rss_bytes > limit_bytes * RELEASE_ABOVE:
                await asyncio.get_running_loop().run_in_executor(None, self._machine.release)
                if self._machine.ram_bytes() > limit_bytes and node.host is not None:
                    node.host.shed()
            await asyncio.sleep(UNLIMITED_S if limit_bytes is None else GOVERN_S)


def footprint_of(stage: Stage, ram_bytes: int) -> Footprint:
    """Return the memory needs of the blocks of ``stage``.

    ``ram_bytes``: resident memory of this process, including p2pd and these blocks.
    """
    block_bytes = 0 if stage.is_on_accelerator else stage.weight_bytes // stage.blocks
    runtime_bytes = ram_bytes - P2PD_BYTES - stage.blocks * block_bytes
    return Footprint(runtime_bytes, block_bytes, stage.widths, stage.dtype.itemsize)


class Governor:
    """Keeps one ``Node`` below its memory limit.

    Sets how much KV cache, log and adapter memory clients may use.
    """

    def __init__(self, resources: ResourceManager, hosting: Hosting, bare_bytes: int) -> None:
        """``bare_bytes``: resident memory without clients and blocks. All experts that will be
        loaded count, even if they are not in memory yet."""
        self._resources = resources
        self._configured: Mapping[Resource, int] = {
            Resource.CACHE: hosting.max_cache_bytes,
            Resource.LOG: hosting.limits.total_log_bytes,
            Resource.ADAPTER_BYTES: hosting.limits.adapter_bytes,
            Resource.PASSES: hosting.limits.passes,
        }
        self._message_bytes = resources.system.limits[Resource.MEMORY]
        self._bare_bytes = bare_bytes
        self._is_limited = False

    def adjust(self, engine: Engine, max_ram_bytes: int | None, rss_bytes: int) -> None:
        """Limit KV caches, logs and adapters to the memory that is left, and passes likewise.

        ``rss_bytes``: resident memory now.
        """
        if max_ram_bytes is None:
            if self._is_limited:
                self._set(engine, self._configured)
                self._resources.limit(Resource.MEMORY, system=self._message_bytes)
            self._is_limited = False
            return
        stage = engine.stage
        is_elsewhere = stage.is_on_accelerator
        footprint = footprint_of(stage, rss_bytes)
        fixed_bytes = self._bare_bytes + stage.blocks * footprint.block_bytes
        held = dict(self._resources.system.used)
        held[Resource.CACHE] = held.get(Resource.CACHE, 0) + engine.graph_cache.nbytes
        shares = DEVICE_SHARES if is_elsewhere else SHARES
        found = resource_limits(max_ram_bytes, rss_bytes, held, footprint, fixed_bytes, shares)
        # Graphs of passes take what caches leave free.
        free_bytes = found.get(Resource.CACHE, self._configured[Resource.CACHE]) - held[Resource.CACHE]
        found[Resource.PASSES] = free_bytes // footprint.graph_bytes(stage.blocks)
        limits = {resource: min(limit, self._configured[resource]) for resource, limit in found.items()}
        self._set(engine, {**self._configured, **limits})
        if not self._is_limited:
            self._resources.limit(Resource.MEMORY, system=footprint.message_bytes)
        self._is_limited = True

    def _set(self, engine: Engine, limits: Mapping[Resource, int]) -> None:
        engine.limit_caches(limits[Resource.CACHE])
        for resource in (Resource.LOG, Resource.ADAPTER_BYTES, Resource.PASSES):
            self._resources.limit(resource, system=limits[resource])
