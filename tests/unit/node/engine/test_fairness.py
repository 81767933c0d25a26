"""Fair shares of an engine: what one client waits for, however much others ask."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import torch

from swarmnet_node.engine import engine, scheduler
from swarmnet_node.engine.caches.kv_cache import SequenceCache
from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.scheduler import SHORT_TOKENS, ClientShares, Waiting, schedule
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.net.limits.resources import ResourceManager
from tests.defences import defence, nothing, replacing
from tests.support.network.virtual_time import TimedExecutor, run
from tests.support.swarm.doubling import Doubling

FORWARD_S = 0.5
"""Seconds of every forward, of any number of positions: so many that the engine makes forwards as
small as it may."""


class Sessions:
    """Sessions of clients, each with one sequence, on an engine in virtual time."""

    def __init__(self, engine: Engine, resources: ResourceManager) -> None:
        self.engine = engine
        self._resources = resources

    def open(self, client: str) -> SequenceCache:
        scope = self._resources.peer(client, 0.0).child("session", {})
        return self.engine.register(self.engine.stage.new_sequence(), scope)

    async def step(self, sequence: SequenceCache, positions: int = 1, *, is_batch: bool = False) -> float:
        """Compute a step, and return the seconds that it took."""
        clock = asyncio.get_running_loop().time
        began = clock()
        rows = [(sequence, torch.zeros(positions, 3))]
        await self.engine.compute(self.engine.stage, rows, is_batch=is_batch)
        return clock() - began


def with_sessions(
    use: Callable[[Sessions, Doubling], Coroutine[Any, Any, None]], forward_s: float = FORWARD_S
) -> None:
    async def main() -> None:
        stage, resources = Doubling(), ResourceManager()
        clock = asyncio.get_running_loop().time
        with TimedExecutor(forward_s) as executor:
            running = Engine(
                cast(Stage, stage), executor, resources, max_cache_bytes=1 << 40, stopwatch=clock
            ).running()
            async with running as engine:
                await use(Sessions(engine, resources), stage)

    run(main())


@defence(
    "batches compute in the pauses of others",
    off=replacing(scheduler.Rhythm, "spare_s", lambda *_, waits: 0.0 if waits else math.inf),
    pause_s=0.003,
)
@pytest.mark.parametrize("pause_s", [0.03, 0.003])
def test_batches_hardly_delay_the_steps_of_others(pause_s: float) -> None:
    forward_s = 0.01

    async def use(sessions: Sessions, stage: Doubling) -> None:
        async def batch(client: str) -> None:
            sequence = sessions.open(client)
            await sessions.step(sequence, 300, is_batch=True)
            while True:
                await sessions.step(sequence, is_batch=True)
                await asyncio.sleep(0.007)

        tasks = [asyncio.ensure_future(batch(f"batch {number}")) for number in range(8)]
        sequence, clock = sessions.open("someone"), asyncio.get_running_loop().time
        took_s = []
        for _ in range(400):
            began = clock()
            await sessions.step(sequence)
            await asyncio.sleep(pause_s)
            took_s.append(clock() - began)
        assert sorted(took_s)[380] <= 1.3 * (forward_s + pause_s)
        assert max(took_s) <= 3 * forward_s + pause_s
        others = len(stage.batches) - 400
        before = len(stage.batches)
        await asyncio.sleep(2)
        alone = len(stage.batches) - before
        assert alone > 40, "they compute all the time once nobody else does"
        if pause_s > 2 * forward_s:
            assert others > 300, "each pause has room for a forward"
        for task in tasks:
            assert not task.done()
            task.cancel()

    with_sessions(use, forward_s)


@defence(
    "forwards are short while several sessions have work",
    off=replacing(engine, "shared_tokens", lambda _, max_tokens: max_tokens),
    clients=1,
)
@pytest.mark.parametrize("clients", [1, 8])
def test_a_short_request_among_long_prompts_waits_for_one_forward(clients: int) -> None:
    async def use(sessions: Sessions, stage: Doubling) -> None:
        prompts = [sessions.open(f"client {number % clients}") for number in range(8)]
        reading = [asyncio.ensure_future(sessions.step(prompt, 2000)) for prompt in prompts]
        await asyncio.sleep(9.25 * FORWARD_S)
        before = len(stage.batches)
        took_s = await sessions.step(sessions.open("other"), SHORT_TOKENS // 2)
        assert took_s <= 2 * FORWARD_S
        assert max(map(sum, stage.batches[before - 1 :])) <= SHORT_TOKENS
        for each in reading:
            each.cancel()

    with_sessions(use)


def requests_beside(others: int) -> tuple[int, int]:
    """The requests of one client, one after another, that are computed next to those of another
    client with ``others`` at once; and the latter's."""
    computed = {"modest": 0, "other": 0}

    async def use(sessions: Sessions, stage: Doubling) -> None:
        async def request(client: str) -> None:
            while True:
                session = sessions.open(client)
                await sessions.step(session, SHORT_TOKENS)
                for _ in range(8):
                    await sessions.step(session)
                sessions.engine.release(session)
                computed[client] += 1

        tasks = [asyncio.ensure_future(request(client)) for client in ("modest", *["other"] * others)]
        await asyncio.sleep(800 * FORWARD_S)
        for task in tasks:
            assert not task.done()
            task.cancel()

    with_sessions(use)
    return computed["modest"], computed["other"]


@defence(
    "a client has its share of a host beside one that floods it",
    off=replacing(ClientShares, "charge", nothing),
)
def test_a_client_beside_a_flood_has_as_much_as_beside_an_equal() -> None:
    beside_equal, equal = requests_beside(1)
    beside_flood, flood = requests_beside(10)
    assert abs(beside_equal - equal) <= 2
    assert beside_flood >= beside_equal / 1.3
    assert flood >= beside_flood, "what others leave is used"


@defence(
    "a client that is ahead makes the forwards of others hardly longer",
    off=replacing(scheduler, "AHEAD_SHARE", 1),
)
def test_a_client_that_is_ahead_hardly_delays_the_forwards_of_others() -> None:
    waiting = [*(Waiting(32, 0, "flooding") for _ in range(10)), Waiting(1, 0, "modest")]
    batch = dict(schedule(waiting, 32, {"flooding": 64, "modest": 0}))
    assert batch[10] == 1
    assert sum(batch.values()) == 8


def test_a_pause_is_no_credit_and_being_ahead_is_bounded() -> None:
    shares = ClientShares()
    shares.set_active({"steady", "paused"})
    for _ in range(100):
        shares.charge([("steady", 30)], 32)
    assert shares.served["steady"] - shares.served["paused"] == 64
    shares.set_active({"steady"})
    shares.set_active({"steady", "paused"})
    assert shares.served["steady"] == shares.served["paused"]
