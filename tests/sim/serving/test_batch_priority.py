"""A caller next to a batch, in pauses and with plain priority (docs/decisions/0189)."""

import asyncio
import itertools
import math
import statistics
from copy import copy
from dataclasses import replace
from typing import Any

from swarmnet_client.batching.continuous_batching import BatchedModel, BatchLimits
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_node.engine.scheduler import Rhythm
from swarmnet_node.engine.stage import Stage
from tests.defences import defence, replacing
from tests.support.network.memory_network import LinkProfile
from tests.support.network.virtual_time import TimedExecutor
from tests.support.swarm.batching import answered, request
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

FORWARD_S, POSITION_S = 0.008, 0.0012
"""Seconds of a forward, and of each of its positions: half of SmolLM2-135M on a core."""
AT_ONCE = 8
TOKENS = 60


async def start(lab: Lab, name: str, blocks: tuple[int, int]) -> None:
    """Start a host whose forwards take time."""
    executor = TimedExecutor(0.0)

    def load(first: int, end: int) -> Stage:
        stage = lab.reference.stage(first, end)
        slow = copy(stage)

        def forward(rows: Any) -> Any:
            executor.owed_s += FORWARD_S + POSITION_S * sum(len(inputs) for _, inputs in rows)
            return stage.forward(rows)

        slow.forward = forward  # type: ignore[method-assign]
        return slow

    await lab.start(name, replace(lab.hosting(blocks), load=load), executor)


def p95_next_to_a_batch(reference: Reference) -> float:
    """The 95th percentile of a caller's times from token to token, relative to a caller alone."""

    async def p95_s(model: BatchedModel) -> float:
        clock, times = asyncio.get_running_loop().time, list[float]()
        await answered(model.batcher, request([5, 6, 7], TOKENS), lambda _: times.append(clock()))
        gaps = [after - before for before, after in itertools.pairwise(times[2:])]
        return statistics.quantiles(gaps, n=20)[-1]

    async def scenario(lab: Lab) -> float:
        await start(lab, "a", (0, 3))
        await start(lab, "b", (3, 6))
        load = LoadOptions.picked("float32", "cpu")
        async with (
            lab.client() as hosts,
            BatchedModel.open(reference.local, hosts, load, BatchLimits(), speculate=False) as model,
        ):
            alone = await p95_s(model)

            async def work(worker: int) -> None:
                for number in itertools.count():
                    prompt = [2 + (worker * 31 + number * 7 + at) % 90 for at in range(24)]
                    await answered(model.for_batches().batcher, request(prompt, 12))

            workers = [asyncio.create_task(work(number)) for number in range(AT_ONCE)]
            await asyncio.sleep(2)
            together = await p95_s(model)
            for worker in workers:
                assert not worker.done()
                worker.cancel()
            return together / alone

    return simulate(reference, scenario, link=LinkProfile(delay_s=0.0005))


@defence(
    "batches compute in pauses that are long enough, not whenever nothing else waits",
    off=replacing(Rhythm, "spare_s", lambda *_, waits: 0.0 if waits else math.inf),
)
def test_a_batch_hardly_delays_the_tokens_of_a_caller(tiny: Reference) -> None:
    assert p95_next_to_a_batch(tiny) <= 1.3
