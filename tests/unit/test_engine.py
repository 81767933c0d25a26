"""The engine: batches form by themselves, memory is bounded before it is taken, and nobody waits for ever."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch

from swarmnet_node.engine import BUDGET_TOKENS, Engine
from swarmnet_node.stage import Stage
from swarmnet_protocols.errors import OutOfResources, Unreachable
from swarmnet_protocols.resources import ResourceManager
from tests.support.doubling import GEOMETRY, Doubling, lane_of, with_engine


def test_work_that_waits_together_is_computed_together() -> None:
    stage = Doubling()

    async def use(engine: Engine, real: Stage) -> None:
        works = [engine.compute(real, [(lane_of(engine), torch.full((1, 3), float(n)))]) for n in range(5)]
        outputs = await asyncio.gather(*works)
        assert [float(output[0][0, 0]) for output in outputs] == [0.0, 2.0, 4.0, 6.0, 8.0]

    with_engine(stage, use)
    assert stage.batches == [[1] * 5]


def test_long_work_is_cut_to_the_budget_and_put_together_again() -> None:
    stage = Doubling()
    inputs = torch.arange(2 * BUDGET_TOKENS + 10, dtype=torch.float32)[:, None]

    async def use(engine: Engine, real: Stage) -> None:
        lane = lane_of(engine)
        (output,) = await engine.compute(real, [(lane, inputs)])
        assert torch.equal(output, 2 * inputs)
        assert lane.length == len(inputs)
        assert engine.tokens == len(inputs)

    with_engine(stage, use)
    assert stage.batches == [[BUDGET_TOKENS], [BUDGET_TOKENS], [10]]


def test_caches_are_bounded_before_anything_is_allocated() -> None:
    async def use(engine: Engine, real: Stage) -> None:
        lane = lane_of(engine)
        with pytest.raises(OutOfResources):
            await engine.compute(real, [(lane, torch.zeros(65, 3))])
        assert (lane.length, engine.cache_bytes) == (0, 0)
        await engine.compute(real, [(lane, torch.zeros(64, 3))])
        assert engine.cache_bytes == GEOMETRY.bytes_for(64)
        engine.release(lane)
        assert engine.cache_bytes == 0

    with_engine(Doubling(), use, max_cache_bytes=GEOMETRY.bytes_for(64))


def test_work_that_waits_counts_against_the_bound() -> None:
    async def use(engine: Engine, real: Stage) -> None:
        works = [engine.compute(real, [(lane_of(engine), torch.zeros(64, 3))]) for _ in range(3)]
        results = await asyncio.gather(*works, return_exceptions=True)
        assert sum(isinstance(result, OutOfResources) for result in results) == 1

    with_engine(Doubling(), use, max_cache_bytes=2 * GEOMETRY.bytes_for(64))


def test_a_forward_that_fails_fails_its_own_work_only() -> None:
    failures = [RuntimeError("out of luck")]

    def before() -> None:
        if failures:
            raise failures.pop()

    async def use(engine: Engine, real: Stage) -> None:
        with pytest.raises(RuntimeError, match="out of luck"):
            await engine.compute(real, [(lane_of(engine), torch.zeros(1, 3))] * 2)
        assert len(await engine.compute(real, [(lane_of(engine), torch.zeros(1, 3))])) == 1

    with_engine(Doubling(before), use)


def test_whoever_waits_when_the_engine_stops_is_told() -> None:
    async def main() -> None:
        real = cast(Stage, Doubling())
        with ThreadPoolExecutor(1) as executor:
            async with Engine.run(real, executor, ResourceManager(), max_cache_bytes=1 << 30) as engine:
                row = (lane_of(engine), torch.zeros(1, 3))
                waiting = asyncio.ensure_future(engine.compute(real, [row]))
                await asyncio.sleep(0)
            with pytest.raises(Unreachable):
                await waiting
            with pytest.raises(Unreachable):
                await engine.compute(real, [row])

    asyncio.run(main())
