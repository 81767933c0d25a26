"""Keeps a host below its memory limit: sets how much KV cache, log and adapter memory clients may use."""

from collections.abc import Mapping

from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.memory_account import Footprint, resource_limits
from swarmnet_node.node import Hosting
from swarmnet_protocols.net.resources import Resource, ResourceManager


class Governor:
    """Limits what clients hold while one ``Node`` runs."""

    def __init__(self, resources: ResourceManager, hosting: Hosting, fixed_bytes: int) -> None:
        """``fixed_bytes``: resident memory without clients."""
        self._resources = resources
        self._most: Mapping[Resource, int] = {
            Resource.CACHE: hosting.max_cache_bytes,
            Resource.LOG: hosting.limits.log_bytes_in_all,
            Resource.ADAPTER_BYTES: hosting.limits.adapter_bytes,
            Resource.PASSES: hosting.limits.passes,
        }
        self._message_bytes = resources.snapshot().resources[Resource.MEMORY].system
        self._fixed_bytes = fixed_bytes
        self._is_limited = False

    def look(self, engine: Engine, max_ram_bytes: int | None, rss_bytes: int) -> None:
        """Limit KV caches, logs and adapters to the memory that is left, given the resident memory, and refuse passes that would not fit."""
        if max_ram_bytes is None:
            if self._is_limited:
                self._set(engine, self._most)
                self._resources.limit(Resource.MEMORY, system=self._message_bytes)
            self._is_limited = False
            return
        stage = engine.stage
        footprint = Footprint(
            0,
            stage.weight_bytes // stage.blocks,
            stage.widths,
            stage.dtype.itemsize,
        )
        held = dict(self._resources.system.used)
        held[Resource.CACHE] = held.get(Resource.CACHE, 0) + engine.graph_cache.nbytes
        found = resource_limits(max_ram_bytes, rss_bytes, held, footprint, self._fixed_bytes)
        free_bytes = found[Resource.CACHE] - held[Resource.CACHE]
        found[Resource.PASSES] = free_bytes // footprint.graph_bytes(stage.blocks)
        self._set(engine, {resource: min(room, self._most[resource]) for resource, room in found.items()})
        if not self._is_limited:
            self._resources.limit(Resource.MEMORY, system=footprint.message_bytes)
        self._is_limited = True

    def _set(self, engine: Engine, limits: Mapping[Resource, int]) -> None:
        engine.limit_caches(limits[Resource.CACHE])
        for resource in (Resource.LOG, Resource.ADAPTER_BYTES, Resource.PASSES):
            self._resources.limit(resource, system=limits[resource])
