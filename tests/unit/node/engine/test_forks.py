"""Copies of sequences are made on the torch thread, and their bytes are reserved before."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from swarmnet_node.engine.caches.kv_cache import GROWTH_POSITIONS, KVGeometry, LayerShape, SequenceCache
from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import ResourceManager

GEOMETRY = KVGeometry((LayerShape(1, 4, 4),), torch.float32, torch.device("cpu"))
SEQUENCE_BYTES = GEOMETRY.bytes_for(GROWTH_POSITIONS)


def with_sequence(sequences_of_room: int, use: Callable[[Engine, SequenceCache], Awaitable[None]]) -> None:
    """An engine with room for ``sequences_of_room`` sequences, and one such sequence."""

    async def main() -> None:
        no_stage = cast(Stage, None)
        with ThreadPoolExecutor(1) as executor:
            running = Engine(
                no_stage, executor, ResourceManager(), max_cache_bytes=sequences_of_room * SEQUENCE_BYTES
            ).running()
            async with running as engine:
                sequence = SequenceCache(GEOMETRY)
                sequence.reserve(GROWTH_POSITIONS)
                sequence.length = GROWTH_POSITIONS
                await use(engine, engine.register(sequence, engine._resources.system))

    asyncio.run(main())


def test_nothing_is_copied_beyond_the_limit() -> None:
    async def use(engine: Engine, sequence: SequenceCache) -> None:
        with pytest.raises(OutOfResources):
            await engine.fork([(sequence, GROWTH_POSITIONS)] * 2, engine._resources.system)
        assert engine.cache_bytes == SEQUENCE_BYTES
        await engine.fork([(sequence, GROWTH_POSITIONS)], engine._resources.system)
        assert engine.cache_bytes == 2 * SEQUENCE_BYTES

    with_sequence(2, use)


def test_copies_are_reserved_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, go_on = threading.Event(), threading.Event()
    fork = SequenceCache.fork
    threads: list[str] = []

    def slow(self: SequenceCache, length: int) -> SequenceCache:
        threads.append(threading.current_thread().name)
        copying.set()
        go_on.wait(5.0)
        return fork(self, length)

    monkeypatch.setattr(SequenceCache, "fork", slow)

    async def use(engine: Engine, sequence: SequenceCache) -> None:
        task: asyncio.Task[Any] = asyncio.create_task(
            engine.fork([(sequence, GROWTH_POSITIONS)], engine._resources.system)
        )
        await asyncio.to_thread(copying.wait, 5.0)
        with pytest.raises(OutOfResources):
            engine._resources.system.reserve(Resource.CACHE)
        go_on.set()
        await task
        with pytest.raises(OutOfResources):
            engine._resources.system.reserve(Resource.CACHE)
        assert threading.current_thread().name not in threads

    with_sequence(2, use)
