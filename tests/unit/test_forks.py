"""Copies of lanes are made on the torch thread; their bytes are counted all the while."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.kv_cache import GROWTH_POSITIONS, KVGeometry, LaneCache, LayerShape
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.net.resources import ResourceManager, Stock

GEOMETRY = KVGeometry((LayerShape(1, 4, 4),), torch.float32, torch.device("cpu"))
LANE_BYTES = GEOMETRY.bytes_for(GROWTH_POSITIONS)


def with_lane(lanes_of_room: int, use: Callable[[Engine, LaneCache], Awaitable[None]]) -> None:
    """An engine with room for so many lanes, and a lane that takes all of one."""

    async def main() -> None:
        no_stage = cast(Stage, None)
        with ThreadPoolExecutor(1) as executor:
            running = Engine.run(
                no_stage, executor, ResourceManager(), max_cache_bytes=lanes_of_room * LANE_BYTES
            )
            async with running as engine:
                lane = LaneCache(GEOMETRY)
                lane.reserve(GROWTH_POSITIONS)
                lane.length = GROWTH_POSITIONS
                await use(engine, engine.adopt(lane, engine._in_all))

    asyncio.run(main())


def test_without_room_nothing_is_copied() -> None:
    async def use(engine: Engine, lane: LaneCache) -> None:
        with pytest.raises(OutOfResources):
            await engine.fork([lane, lane], engine._in_all)
        assert engine.cache_bytes == LANE_BYTES
        await engine.fork([lane], engine._in_all)
        assert engine.cache_bytes == 2 * LANE_BYTES

    with_lane(2, use)


def test_copies_count_while_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, go_on = threading.Event(), threading.Event()
    fork = LaneCache.fork
    threads: list[str] = []

    def slow(self: LaneCache) -> LaneCache:
        threads.append(threading.current_thread().name)
        copying.set()
        go_on.wait(5.0)
        return fork(self)

    monkeypatch.setattr(LaneCache, "fork", slow)

    async def use(engine: Engine, lane: LaneCache) -> None:
        task: asyncio.Task[Any] = asyncio.create_task(engine.fork([lane], engine._in_all))
        await asyncio.to_thread(copying.wait, 5.0)
        with pytest.raises(OutOfResources):
            engine._in_all.hold(Stock.CACHE)
        go_on.set()
        await task
        with pytest.raises(OutOfResources):
            engine._in_all.hold(Stock.CACHE)
        assert threading.current_thread().name not in threads

    with_lane(2, use)
