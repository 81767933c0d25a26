"""A stage without a model, and engines that run it."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch

from swarmnet_node.engine.caches.kv_cache import KVGeometry, LayerShape, SequenceCache
from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.net.limits.resources import ResourceManager

GEOMETRY = KVGeometry((LayerShape(1, 4, 4),), torch.float32, torch.device("cpu"))
Rows = Sequence[tuple[SequenceCache, torch.Tensor]]


class Doubling:
    """A stage without a model: it doubles its inputs, and records how many positions each forward
    had."""

    geometry = GEOMETRY
    blocks = 1
    is_on_accelerator = False

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.batches: list[list[int]] = []
        self._before = before

    def new_sequence(self) -> SequenceCache:
        return SequenceCache(self.geometry)

    def forward(self, rows: Rows) -> list[torch.Tensor]:
        self._before()
        self.batches.append([len(inputs) for _, inputs in rows])
        for sequence, inputs in rows:
            sequence.reserve(sequence.length + len(inputs))
            sequence.length += len(inputs)
        return [2 * inputs for _, inputs in rows]


def with_engine(
    stage: Doubling, use: Callable[[Engine, Stage], Any], *, max_cache_bytes: int = 1 << 30
) -> Any:
    async def main() -> Any:
        real = cast(Stage, stage)
        with ThreadPoolExecutor(1) as executor:
            async with Engine(
                real, executor, ResourceManager(), max_cache_bytes=max_cache_bytes
            ).running() as engine:
                return await use(engine, real)

    return asyncio.run(main())


def sequence_of(engine: Engine) -> SequenceCache:
    return engine.register(engine.stage.new_sequence(), engine._resources.system)
