"""The flow model of clients (``scale/clients.py``) compared with whole nodes, in one swarm: equal
hosts and delays, sessions that never pause."""

import asyncio
import random

import pytest

from swarmnet_protocols.net import PeerId
from tests.sim.scale import clients
from tests.sim.scale.population import Peer
from tests.support.network.memory_network import LinkProfile
from tests.support.network.virtual_time import TimedExecutor
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

SPANS = ((0, 2), (2, 4), (4, 6))
FORWARD_S, DELAY_S = 0.02, 0.01
WARM_S, MEASURED_S = 12.0, 8.0


@pytest.mark.parametrize(
    ("replicas", "sessions", "least", "most"),
    [
        # One session: the delays and forwards alone.
        (1, 1, 0.97, 1.0),
        # Hosts that compute 0.8 of the time: a step waits for the forward that runs, which the flow
        # model leaves out.
        (2, 8, 0.75, 0.95),
        # 1.6 times the work that hosts can do one step after another: they compute several in one
        # forward, which the flow model leaves out.
        pytest.param(2, 16, 1.1, 1.4, marks=pytest.mark.thorough),
    ],
)
def test_whole_nodes_have_about_the_rate_of_the_flow_model(
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    replicas: int,
    sessions: int,
    least: float,
    most: float,
) -> None:
    monkeypatch.setattr(clients, "delay_s", lambda one, other: DELAY_S)
    hosts = [
        clients.Hosted(Peer(PeerId(f"{start}-{replica}"), (end - start) / FORWARD_S, end - start), start, end)
        for start, end in SPANS
        for replica in range(replicas)
    ]
    flow = clients.Clients(hosts, sessions, seed=0, blocks=SPANS[-1][1])
    flow.run(24)
    ratio = rate_of_nodes(reference, replicas, sessions) / flow.tokens_per_s
    assert least <= ratio <= most


def rate_of_nodes(reference: Reference, replicas: int, sessions: int) -> float:
    """Tokens per second of all sessions together."""

    async def scenario(lab: Lab) -> float:
        now = asyncio.get_running_loop().time
        tokens = 0

        def count(_: int) -> None:
            nonlocal tokens
            tokens += WARM_S < now() - began <= WARM_S + MEASURED_S

        async def client(number: int) -> None:
            await asyncio.sleep(random.Random(number).uniform(0.0, 6.0))
            async with lab.client(f"client{number}") as swarm:
                while True:
                    async with lab.chain(swarm) as chain:
                        await lab.generate(chain, [5 + number, 6, 7], 100, count)

        for start, end in SPANS:
            for replica in range(replicas):
                await lab.start(f"{start}-{replica}", lab.hosting((start, end)), TimedExecutor(FORWARD_S))
        began = now()
        running = [asyncio.create_task(client(number)) for number in range(sessions)]
        await asyncio.sleep(WARM_S + MEASURED_S)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return tokens / MEASURED_S

    return simulate(reference, scenario, link=LinkProfile(delay_s=DELAY_S))
