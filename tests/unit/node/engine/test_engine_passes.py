"""Passes in the engine: sessions go first, for a limited time, and the graphs of passes are dropped
for sessions."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import cast

import pytest
import torch

from swarmnet_node.engine.engine import GRAPH_CLIENT_SHARE, MAX_BATCH_TOKENS, Engine
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.torch_layers.autograd_graphs import AutogradGraph, GraphKey, record_forward
from swarmnet_protocols.errors import OutOfResources, Unreachable
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import ResourceLimitReached, ResourceManager
from swarmnet_protocols.timing import Timing
from tests.support.network.virtual_time import TimedExecutor, run
from tests.support.swarm.doubling import GEOMETRY, Doubling, sequence_of, with_engine


def test_a_pass_waits_until_no_session_has_work() -> None:
    order: list[str] = []

    async def use(engine: Engine, real: Stage) -> None:
        loop, waits = asyncio.get_running_loop(), threading.Event()
        late: list[asyncio.Future[list[torch.Tensor]]] = []

        def first() -> torch.Tensor:
            """While it is computed a session's token comes."""
            order.append("first pass")
            loop.call_soon_threadsafe(come)
            if not waits.wait(10):
                raise TimeoutError
            return torch.zeros(1)

        def come() -> None:
            late.append(
                asyncio.ensure_future(engine.compute(real, [(sequence_of(engine), torch.zeros(1, 3))]))
            )
            loop.call_soon(waits.set)

        def second() -> torch.Tensor:
            order.append("second pass")
            return torch.ones(1)

        passes = [engine.compute_pass(lambda compute=compute: compute, 100) for compute in (first, second)]
        token = engine.compute(real, [(sequence_of(engine), torch.zeros(1, 3))])
        results = await asyncio.gather(*passes, token)
        await late[0]
        assert [float(result[0]) for result in results[:2]] == [0.0, 1.0]

    with_engine(Doubling(lambda: order.append("token")), use)
    assert order == ["token", "first pass", "token", "second pass"]


def test_a_failed_pass_fails_only_for_its_client() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("out of luck")

    async def use(engine: Engine, real: Stage) -> None:
        with pytest.raises(RuntimeError, match="out of luck"):
            await engine.compute_pass(lambda: fail, 1)
        assert len(await engine.compute_pass(lambda: lambda: torch.zeros(2), 1)) == 2

    with_engine(Doubling(), use)


def test_a_pass_whose_client_left_is_not_computed() -> None:
    computed: list[int] = []

    def compute(number: int) -> torch.Tensor:
        computed.append(number)
        return torch.zeros(1)

    async def use(engine: Engine, real: Stage) -> None:
        passes = [
            asyncio.ensure_future(engine.compute_pass(partial(partial, compute, number), 1))
            for number in range(3)
        ]
        await asyncio.sleep(0)
        passes[1].cancel()
        await asyncio.gather(passes[0], passes[2])
        assert computed == [0, 2]

    with_engine(Doubling(), use)


def test_a_pass_whose_client_left_is_freed_while_others_compute() -> None:
    goes_on = threading.Event()

    async def use(engine: Engine, real: Stage) -> None:
        computing = asyncio.ensure_future(engine.compute_pass(lambda: lambda: goes_on.wait(10), 1))
        tensor = torch.zeros(1)
        kept = weakref.ref(tensor)
        leaving = asyncio.ensure_future(engine.compute_pass(lambda it=tensor: lambda: it, 1))
        del tensor
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        del leaving
        gc.collect()
        remains = kept()
        goes_on.set()
        await computing
        assert remains is None

    with_engine(Doubling(), use)


def test_waiting_passes_fail_when_the_engine_stops() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            async with Engine(
                cast(Stage, Doubling()), executor, ResourceManager(), max_cache_bytes=1
            ).running() as engine:
                waiting = asyncio.ensure_future(engine.compute_pass(lambda: lambda: torch.zeros(1), 1))
                await asyncio.sleep(0)
            for late in (waiting, engine.compute_pass(lambda: lambda: torch.zeros(1), 1)):
                with pytest.raises(Unreachable):
                    await late

    asyncio.run(main())


def graph_of(nbytes: int) -> AutogradGraph:
    _, graph = record_forward(lambda leaf: 2 * leaf, torch.zeros(1, requires_grad=True), {}, ())
    return replace(graph, nbytes=nbytes)


def name_of(number: int, owner: str = "one") -> GraphKey:
    return GraphKey(PeerId(owner), bytes([number]), (0, 1), (1,), b"")


def test_the_oldest_graphs_are_dropped_for_sessions() -> None:
    sequence_bytes = GEOMETRY.bytes_for(1)

    async def use(engine: Engine, real: Stage) -> None:
        for number in range(3):
            engine.keep_graph(name_of(number), graph_of(sequence_bytes // 2), for_s=60.0)
        works = [(sequence_of(engine), torch.zeros(1, 3)) for _ in range(4)]
        await engine.compute(real, works[:2])
        assert len([number for number in range(3) if name_of(number) in engine.graph_cache]) == 3
        await engine.compute(real, works[2:3])
        assert [name_of(number) in engine.graph_cache for number in range(3)] == [False, True, True]
        with pytest.raises(OutOfResources):
            # A refused request drops no graph.
            await engine.compute(real, [(works[3][0], torch.zeros(65, 3))])
        assert engine.graph_cache.nbytes == sequence_bytes

    with_engine(Doubling(), use, max_cache_bytes=4 * sequence_bytes)


def test_one_client_takes_at_most_its_share_of_the_caches() -> None:
    sequence_bytes = GEOMETRY.bytes_for(1)

    async def main() -> None:
        stage, resources = cast(Stage, Doubling()), ResourceManager()
        with ThreadPoolExecutor(1) as executor:
            async with Engine(
                stage,
                executor,
                resources,
                max_cache_bytes=8 * sequence_bytes,
                client_cache_bytes=lambda max_bytes: max_bytes // 4,
            ).running() as engine:
                greedy, modest = resources.peer("greedy", 0.0), resources.peer("modest", 0.0)
                sequences = [engine.register(stage.new_sequence(), greedy) for _ in range(3)]
                await engine.compute(stage, [(sequence, torch.zeros(1, 3)) for sequence in sequences[:2]])
                with pytest.raises(OutOfResources, match="of greedy are taken"):
                    await engine.compute(stage, [(sequences[2], torch.zeros(1, 3))])
                await engine.compute(
                    stage, [(engine.register(stage.new_sequence(), modest), torch.zeros(1, 3))]
                )
                for sequence in sequences:
                    engine.release(sequence)
                assert greedy.used[Resource.CACHE] == 0
                assert engine.cache_bytes == sequence_bytes

    asyncio.run(main())


def test_graphs_take_what_caches_leave_free_and_each_client_its_share() -> None:
    async def use(engine: Engine, real: Stage) -> None:
        geometry = real.geometry
        sequence = sequence_of(engine)
        await engine.compute(real, [(sequence, torch.zeros(1, 3))])
        room = engine.max_cache_bytes - sequence.nbytes
        share = engine.max_cache_bytes // GRAPH_CLIENT_SHARE
        assert room < engine.max_cache_bytes == 3 * geometry.bytes_for(1)

        engine.keep_graph(name_of(0), graph_of(share + 1), for_s=60.0)
        assert engine.graph_cache.nbytes == 0
        for number, owner in enumerate(("one", "two", "one")):
            engine.keep_graph(name_of(number, owner), graph_of(share - 1), for_s=60.0)
            assert engine.graph_cache.nbytes <= room
        assert name_of(0) not in engine.graph_cache
        assert name_of(2) in engine.graph_cache

    sequence_bytes = Doubling().geometry.bytes_for(1)
    with_engine(Doubling(), use, max_cache_bytes=3 * sequence_bytes)


def test_an_engine_that_stops_keeps_no_graphs() -> None:
    engines: list[Engine] = []

    async def use(engine: Engine, real: Stage) -> None:
        engine.keep_graph(name_of(0), graph_of(100), for_s=60.0)
        engines.append(engine)

    with_engine(Doubling(), use, max_cache_bytes=1000)
    assert engines[0].graph_cache.nbytes == 0


def test_passes_count_in_the_queue_time() -> None:
    seconds = iter(range(0, 1000, 2))

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            running = Engine(
                cast(Stage, Doubling()),
                executor,
                ResourceManager(),
                max_cache_bytes=1,
                stopwatch=lambda: float(next(seconds)),
            ).running()
            async with running as engine:
                for _ in range(100):  # each takes 2 s for its 10 positions
                    await engine.compute_pass(lambda: lambda: None, 10)
                waiting = [asyncio.ensure_future(engine.compute_pass(lambda: lambda: None, 5)) for _ in "ab"]
                await asyncio.sleep(0)
                # sessions overtake the second
                assert engine.queue_s == pytest.approx(1.0, rel=1e-3)
                await asyncio.gather(*waiting)
                assert engine.queue_s == 0

    asyncio.run(main())


@pytest.mark.parametrize("forward_s", [0.01, 0.5, 4.0])
def test_sessions_overtake_a_pass_for_a_limited_time(forward_s: float) -> None:
    """However long one forward of a session takes: a forward that has begun is finished."""
    passes = 3

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with TimedExecutor(forward_s) as executor:
            running = Engine(
                cast(Stage, Doubling()), executor, ResourceManager(), max_cache_bytes=1 << 40
            ).running()
            async with running as engine:
                # Longer than all passes may have to wait together.
                forwards = round(passes * (Timing.pass_wait_s / forward_s + 3)) + 1
                text = torch.zeros(forwards * MAX_BATCH_TOKENS, 1)
                reading = asyncio.ensure_future(engine.compute(engine.stage, [(sequence_of(engine), text)]))
                await asyncio.sleep(0)
                last = loop.time()
                waiting = [engine.compute_pass(lambda: loop.time, 1) for _ in range(passes)]
                for computed in asyncio.as_completed(waiting):
                    ended = await computed
                    assert Timing.pass_wait_s <= ended - last <= Timing.pass_wait_s + 2 * forward_s
                    last = ended
                assert not reading.done()
                await reading

    run(main())


def test_a_full_device_is_reported_and_its_graphs_are_dropped() -> None:
    """The memory of failed work is free before the next work begins."""
    held: list[weakref.ref[torch.Tensor]] = []

    def fill() -> None:
        computed = torch.zeros(1)
        held.append(weakref.ref(computed))
        raise torch.OutOfMemoryError("CUDA out of memory")

    async def use(engine: Engine, real: Stage) -> None:
        for ask in (
            lambda: engine.compute(real, [(sequence_of(engine), torch.zeros(1, 3))]),
            lambda: engine.compute_pass(lambda: fill, 1),
            lambda: engine.run_on_torch_thread(fill),
        ):
            engine.keep_graph(name_of(0), graph_of(8), for_s=60.0)
            with pytest.raises(ResourceLimitReached) as caught:
                await ask()
            assert caught.value.retry_after_s > 0
            assert engine.graph_cache.nbytes == 0
        await engine.run_on_torch_thread(lambda: None)  # the thread has dropped what failed
        assert [reference() for reference in held] == [None] * 3

    with_engine(Doubling(before=fill), use)
