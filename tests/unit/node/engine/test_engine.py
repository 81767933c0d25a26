"""The engine: continuous batching, memory limits before allocation, and no work that waits for
ever."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from swarmnet_node.engine.caches.kv_cache import SequenceCache
from swarmnet_node.engine.counters import BUSY_S, BusyShare
from swarmnet_node.engine.engine import MAX_BATCH_TOKENS, RECENT_S, Engine
from swarmnet_node.engine.scheduler import batching_delay_s
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.errors import OutOfResources, Unreachable
from swarmnet_protocols.net.limits.resources import ResourceManager
from tests.support.network.virtual_time import TimedExecutor, run
from tests.support.swarm.doubling import GEOMETRY, Doubling, sequence_of, with_engine


def test_work_that_waits_together_is_computed_together() -> None:
    stage = Doubling()

    async def use(engine: Engine, real: Stage) -> None:
        works = [
            engine.compute(real, [(sequence_of(engine), torch.full((1, 3), float(n)))]) for n in range(5)
        ]
        outputs = await asyncio.gather(*works)
        assert [float(output[0][0, 0]) for output in outputs] == [0.0, 2.0, 4.0, 6.0, 8.0]

    with_engine(stage, use)
    assert stage.batches == [[1] * 5]


FORWARD_S = 0.02


def test_the_time_of_a_position_is_measured_from_the_first_forward_on() -> None:
    """An average that begins at 0 would have a fresh host announce a tenth of its time."""

    async def main() -> None:
        real = cast(Stage, Doubling())
        clock = asyncio.get_running_loop().time
        with TimedExecutor(FORWARD_S) as executor:
            running = Engine(
                real, executor, ResourceManager(), max_cache_bytes=1 << 30, stopwatch=clock
            ).running()
            async with running as engine:
                for _ in range(3):
                    await engine.compute(real, [(sequence_of(engine), torch.zeros(1, 3))])
                    assert engine.token_s == pytest.approx(FORWARD_S)

    run(main())


def in_virtual_time(
    use: Callable[[Engine, Stage, Callable[[], float]], Coroutine[Any, Any, None]],
) -> Doubling:
    """Use an engine whose forwards take ``FORWARD_S`` of virtual time, and which knows that."""
    stage = Doubling()
    real = cast(Stage, stage)

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        with TimedExecutor(FORWARD_S) as executor:
            running = Engine(
                real, executor, ResourceManager(), max_cache_bytes=1 << 30, stopwatch=clock
            ).running()
            async with running as engine:
                sequence = sequence_of(engine)
                for _ in range(50):
                    await engine.compute(real, [(sequence, torch.zeros(1, 3))])
                engine.release(sequence)
                stage.batches.clear()
                await use(engine, real, clock)

    run(main())
    return stage


def test_sequences_that_arrive_closely_share_a_forward() -> None:
    async def use(engine: Engine, real: Stage, clock: Callable[[], float]) -> None:
        sequences = [sequence_of(engine) for _ in range(4)]

        async def step(number: int) -> None:
            for _ in range(5):
                await engine.compute(real, [(sequences[number], torch.zeros(1, 3))])
                await asyncio.sleep(0.001 * number)  # messages arrive one after another

        await asyncio.gather(*(step(number) for number in range(4)))

    assert in_virtual_time(use).batches == [[1] * 4] * 5


def test_a_forward_waits_only_for_sequences_with_recent_work() -> None:
    async def use(engine: Engine, real: Stage, clock: Callable[[], float]) -> None:
        stays, leaves = sequence_of(engine), sequence_of(engine)

        async def kept_s(*sequences: SequenceCache) -> float:
            began = clock()
            await engine.compute(real, [(sequence, torch.zeros(1, 3)) for sequence in sequences])
            return pytest.approx(clock() - began - FORWARD_S, abs=1e-6)

        delay_s = batching_delay_s(1, 2, FORWARD_S)
        assert [await kept_s(stays), await kept_s(stays, leaves), await kept_s(stays)] == [0, 0, delay_s]
        await asyncio.sleep(RECENT_S)
        assert [await kept_s(stays), await kept_s(stays, leaves), await kept_s(stays)] == [0, 0, delay_s]
        engine.release(leaves)
        assert await kept_s(stays) == 0

    in_virtual_time(use)


def test_a_forward_waits_no_longer_than_it_takes() -> None:
    async def use(engine: Engine, real: Stage, clock: Callable[[], float]) -> None:
        sequences = [sequence_of(engine) for _ in range(100)]
        await engine.compute(real, [(sequence, torch.zeros(1, 3)) for sequence in sequences])
        began = clock()

        async def step(number: int) -> float:
            await asyncio.sleep(0.001 * number)
            await engine.compute(real, [(sequences[number], torch.zeros(1, 3))])
            return clock() - began

        ends = await asyncio.gather(*(step(number) for number in range(100)))
        assert ends[0] <= 2.2 * FORWARD_S

    in_virtual_time(use)


def test_long_work_is_split_into_batches_and_joined_again() -> None:
    stage = Doubling()
    inputs = torch.arange(2 * MAX_BATCH_TOKENS + 10, dtype=torch.float32)[:, None]

    async def use(engine: Engine, real: Stage) -> None:
        sequence = sequence_of(engine)
        (output,) = await engine.compute(real, [(sequence, inputs)])
        assert torch.equal(output, 2 * inputs)
        assert sequence.length == len(inputs)
        assert engine.counters.positions == len(inputs)

    with_engine(stage, use)
    assert stage.batches == [[MAX_BATCH_TOKENS], [MAX_BATCH_TOKENS], [10]]


def test_the_cache_limit_is_enforced_before_memory_is_allocated() -> None:
    async def use(engine: Engine, real: Stage) -> None:
        sequence = sequence_of(engine)
        with pytest.raises(OutOfResources):
            await engine.compute(real, [(sequence, torch.zeros(65, 3))])
        assert (sequence.length, engine.cache_bytes) == (0, 0)
        await engine.compute(real, [(sequence, torch.zeros(64, 3))])
        assert engine.cache_bytes == GEOMETRY.bytes_for(64)
        engine.release(sequence)
        assert engine.cache_bytes == 0

    with_engine(Doubling(), use, max_cache_bytes=GEOMETRY.bytes_for(64))


def test_waiting_work_counts_against_the_cache_limit() -> None:
    async def use(engine: Engine, real: Stage) -> None:
        works = [engine.compute(real, [(sequence_of(engine), torch.zeros(64, 3))]) for _ in range(3)]
        results = await asyncio.gather(*works, return_exceptions=True)
        assert sum(isinstance(result, OutOfResources) for result in results) == 1

    with_engine(Doubling(), use, max_cache_bytes=2 * GEOMETRY.bytes_for(64))


def test_a_failed_forward_fails_only_its_own_work() -> None:
    failures = [RuntimeError("out of luck")]

    def before() -> None:
        if failures:
            raise failures.pop()

    async def use(engine: Engine, real: Stage) -> None:
        with pytest.raises(RuntimeError, match="out of luck"):
            await engine.compute(real, [(sequence_of(engine), torch.zeros(1, 3))] * 2)
        assert len(await engine.compute(real, [(sequence_of(engine), torch.zeros(1, 3))])) == 1

    with_engine(Doubling(before), use)


def test_waiting_work_fails_when_the_engine_stops() -> None:
    async def main() -> None:
        real = cast(Stage, Doubling())
        with ThreadPoolExecutor(1) as executor:
            async with Engine(real, executor, ResourceManager(), max_cache_bytes=1 << 30).running() as engine:
                row = (sequence_of(engine), torch.zeros(1, 3))
                waiting = asyncio.ensure_future(engine.compute(real, [row]))
                await asyncio.sleep(0)
            with pytest.raises(Unreachable):
                await waiting
            with pytest.raises(Unreachable):
                await engine.compute(real, [row])

    asyncio.run(main())


def test_the_busy_share_rises_while_an_engine_computes_and_then_falls() -> None:
    busy = BusyShare()
    assert busy.at(1e6) == 0.0
    for number in range(1, 101):  # half of the time
        busy.computed(0.1, now=0.2 * number)
    assert busy.at(20.0) == pytest.approx(0.5, abs=0.02)
    assert busy.at(20.0 + BUSY_S) == pytest.approx(0.5 / math.e, abs=0.02)
    busy.computed(100 * BUSY_S, now=30.0 + 100 * BUSY_S)
    assert busy.at(30.0 + 100 * BUSY_S) == pytest.approx(1.0)
