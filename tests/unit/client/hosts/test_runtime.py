"""The client's event loop: the errors that its callers get when it ends."""

import asyncio
import threading

import pytest

from swarmnet_protocols.errors import NetworkStopped, SwarmnetError
from swarmnet_protocols.net.protocol_ids import LINK
from tests.support.network.memory_network import Delivery
from tests.support.swarm.generation import greedy
from tests.support.swarm.swarm_lab import Reference
from tests.support.swarm.tiny_swarm import load_tiny, tiny_swarm

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


def test_a_client_whose_transport_dies_raises_at_once_with_a_hint(reference: Reference) -> None:
    with tiny_swarm(reference) as tiny:
        assert greedy(tiny.model, [PROMPT], 4) == [reference.greedy(PROMPT, 4)]
        network, me = tiny.lab.network, tiny.lab.peer_id("client")

        def die(delivery: Delivery) -> None:
            if delivery.protocol == LINK:
                network.crash(me)

        network.observers.append(die)
        for _ in range(2):
            with pytest.raises(SwarmnetError, match="the network process stopped") as caught:
                greedy(tiny.model, [PROMPT], 4)
            assert "connect again" in caught.value.hint
            assert type(caught.value) is NetworkStopped


def test_a_closed_client_ends_running_calls_and_refuses_new_ones(reference: Reference) -> None:
    with tiny_swarm(reference) as tiny:
        begun = threading.Event()

        async def wait_for_ever() -> None:
            begun.set()
            await asyncio.Event().wait()

        ended: list[SwarmnetError] = []

        def ask() -> None:
            with pytest.raises(SwarmnetError, match="closed") as caught:
                tiny.model.run(wait_for_ever())
            ended.append(caught.value)

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(10.0)
        tiny.model.close()
        asking.join()
        assert ended
        with pytest.raises(SwarmnetError, match="closed"):
            tiny.model.run(wait_for_ever())
