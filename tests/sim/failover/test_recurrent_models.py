"""A model with recurrent states over nodes: a replica continues after a failover, and a client can
go back."""

import asyncio

import numpy as np
import pytest

from swarmnet_client.chain.chain import Chain
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_node.hosting.session import HostedSession
from swarmnet_protocols.session.steps import Row, Step
from tests.defences import defence, replacing
from tests.support.attacks.raw_client import (
    HIDDEN,
    Stranger,
    a_step,
    link_reply,
    session_reply,
    with_stranger,
)
from tests.support.network.deliveries import arrives_at
from tests.support.network.memory_network import Delivery
from tests.support.swarm.swarm_lab import Lab, Reference, load_family, simulate

PROMPT = [5, 6, 7, 8, 9] * 30
TOKENS = 8
LAYOUT = {"a": (0, 2), "b": (2, 4), "b2": (2, 4)}


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_family("qwen3_5", tmp_path_factory.mktemp("recurrent"))


def test_a_replica_rebuilds_recurrent_states_when_a_hop_fails(recurrent: Reference) -> None:
    hit: list[Delivery] = []

    async def scenario(lab: Lab) -> tuple[list[int], int]:
        nonlocal hit
        await lab.start_all(LAYOUT)
        replicas = {lab.peer_id("b"), lab.peer_id("b2")}
        hit = lab.once(arrives_at(replicas, "step 5"), lambda delivery: lab.network.crash(delivery.target))
        chain: Chain
        async with lab.client() as swarm, lab.chain(swarm, max_length=256) as chain:
            tokens = await lab.generate(chain, PROMPT, TOKENS)
            return tokens, chain.report.failovers

    tokens, failovers = simulate(recurrent, scenario)
    assert hit, "the fault was never injected"
    assert failovers == 1
    assert tokens == recurrent.greedy(PROMPT, TOKENS)


@pytest.mark.parametrize("length", [3, 100, 149])
def test_a_client_goes_back_and_says_something_else(length: int, recurrent: Reference) -> None:
    other = [11, 12, 13]

    async def scenario(lab: Lab) -> int:
        for name in ("a", "b"):
            await lab.start(name, lab.hosting(LAYOUT[name]))
        chain: Chain
        async with lab.client() as swarm, lab.chain(swarm, max_length=256) as chain:
            await lab.generate(chain, PROMPT, TOKENS)
            hidden = await chain.forward((Row(0, length, len(other), 1, 0, rewrite=True),), np.array(other))
            return recurrent.next_token(hidden)

    assert [simulate(recurrent, scenario)] == recurrent.greedy(PROMPT[:length] + other, 1)


@defence(
    "positions that are computed again after a rewind count in a client's rate",
    off=replacing(HostedSession, "_behind", lambda *_: 0),
)
def test_positions_computed_again_come_at_the_rate_of_the_client(recurrent: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        session, link = await stranger.send_open(max_length=256), await stranger.link()
        await link_reply(link)
        began = asyncio.get_running_loop().time()
        await stranger.step(link, a_step(1, 0, 130))
        assert (await session_reply(session)).HasField("output")
        back = Step(2, (Row(0, 100, 1, 1, 0, rewrite=True),), np.zeros((1, HIDDEN), np.float32))
        await stranger.step(link, back)
        assert (await session_reply(session)).HasField("output")
        # 131 positions and 100 that are computed again, of which 160 are a burst, at 40 a second.
        assert asyncio.get_running_loop().time() - began == pytest.approx(71 / 40, abs=0.2)

    with_stranger(recurrent, talk, limits=ClientLimits(positions_per_s=40.0))
