"""A text that hosts have no room for is refused before anything is computed; one that does not fit
at the moment is tried again."""

import asyncio
import math
from itertools import pairwise

import numpy as np
import pytest

from swarmnet_client.chain import failures
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import NoRoom, OutOfResources
from swarmnet_protocols.net.protocol_ids import LINK
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import defence, replacing
from tests.support.network.memory_network import Delivery
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

POSITIONS = 128
"""Positions that the small host keeps for one client."""
PROMPT = [5, 6, 7, 8, 9] * 40
SHORT = PROMPT[:100]


def cache_bytes(reference: Reference, positions: int, blocks: tuple[int, int] = (0, 6)) -> int:
    """The limit on caches of a host that keeps this many positions for one client: a quarter of it
    is one client's."""
    return 4 * reference.stage(*blocks).geometry.bytes_for(positions)


def computed(lab: Lab) -> dict[str, int]:
    return {name: node.status().host.positions for name, node in lab.nodes.items()}


@defence(
    "no host computes a prompt that never fits",
    off=replacing(ModelHosts, "room", lambda *_: math.inf),
    knows=True,
)
@pytest.mark.parametrize("knows", [True, False], ids=["hosts known", "hosts not known yet"])
def test_a_prompt_that_never_fits_is_refused_before_any_computation(
    reference: Reference, *, knows: bool
) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 3)))
        await lab.start(
            "small", lab.hosting((3, 6), max_cache_bytes=cache_bytes(reference, POSITIONS, (3, 6)))
        )
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            if knows:
                await asyncio.sleep(1.0)
            began = asyncio.get_running_loop().time()
            with pytest.raises(
                NoRoom, match=f"200 positions are needed, and the hosts keep {POSITIONS} "
            ) as caught:
                await lab.generate(chain, PROMPT, 4)
            assert (caught.value.positions, caught.value.room) == (200, POSITIONS)
            assert asyncio.get_running_loop().time() - began <= 1.0
            assert sum(computed(lab).values()) == 0

    simulate(reference, scenario)


def test_hosts_with_room_are_chosen_although_others_are_nearer(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        for number in range(3):
            hosting = lab.hosting((0, 6), max_cache_bytes=cache_bytes(reference, POSITIONS))
            await lab.start(f"small{number}", hosting)
        await lab.start("large", lab.hosting((0, 6)))
        async with lab.client() as swarm:
            await asyncio.sleep(1.0)
            async with lab.chain(swarm) as chain:
                tokens = await lab.generate(chain, PROMPT, 4)
                assert [hop for hop, _, _ in chain.report.route] == [lab.peer_id("large")]
        assert {count for name, count in computed(lab).items() if name != "large"} == {0}
        return tokens

    assert simulate(reference, scenario) == reference.greedy(PROMPT, 4)


def test_a_session_moves_to_a_host_with_room_when_its_own_is_full(reference: Reference) -> None:
    async def scenario(lab: Lab) -> tuple[list[int], list[str]]:
        await lab.start("small", lab.hosting((0, 6), max_cache_bytes=cache_bytes(reference, POSITIONS)))
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            tokens = await lab.generate(chain, SHORT, 4)
            await lab.start("large", lab.hosting((0, 6)))
            await asyncio.sleep(lab.timing.refresh_s + 1.0)
            ids = [*SHORT, *tokens, *PROMPT]
            start = len(SHORT) + len(tokens) - 1
            hidden = await chain.forward((Row(0, start, len(ids) - start, 1, 0),), np.array(ids[start:]))
            tokens.append(reference.next_token(hidden))
            names = [
                name for name in lab.nodes for hop, _, _ in chain.report.route if hop == lab.peer_id(name)
            ]
        return tokens, names

    tokens, names = simulate(reference, scenario)
    first = reference.greedy(SHORT, 4)
    assert tokens == [*first, *reference.greedy([*SHORT, *first, *PROMPT], 1)]
    assert names == ["large"]


@defence(
    "a host without room is not asked to compute a prompt again and again",
    off=replacing(failures, "OUT_OF_RESOURCES_ATTEMPTS", failures.ATTEMPTS),
)
def test_a_host_that_is_full_is_asked_again_after_a_growing_pause(reference: Reference) -> None:
    """Its caches are taken by another client, or it announced more than it has: each attempt
    computes the prompt again."""
    attempts: list[float] = []

    def watch(delivery: Delivery) -> None:
        if delivery.protocol.id == LINK.id:
            request = pb.LinkRequest.FromString(delivery.message.header)
            if request.HasField("step") and request.step.rows[0].start == 0:
                attempts.append(delivery.time_s)

    async def scenario(lab: Lab) -> None:
        node = await lab.start("a", lab.hosting((0, 6)))
        lab.network.observers.append(watch)
        async with lab.client() as swarm:
            await asyncio.sleep(1.0)
            async with lab.chain(swarm) as chain:
                node.engine.limit_caches(cache_bytes(reference, POSITIONS))
                with pytest.raises(OutOfResources, match="no room"):
                    await lab.generate(chain, PROMPT, 4)

    simulate(reference, scenario)
    pauses = [after - before for before, after in pairwise(attempts)]
    assert len(attempts) <= 4
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 2.0
