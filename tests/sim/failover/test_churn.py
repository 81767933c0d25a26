"""Random swarms under random trouble: right answers or errors with a name, and nothing left
behind."""

import asyncio
import random

import pytest

from swarmnet_protocols.errors import NoRoute, OutOfResources, SwarmnetError, Unreachable
from tests.sim.failover.churn import Trouble, random_links, random_spans, request
from tests.support.swarm.mixed_targets import MixedTargets, load_mixed
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

STEPS = 12


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> MixedTargets:
    return load_mixed(tmp_path_factory.mktemp("mixed"))


async def storm(lab: Lab, *, sheltered: bool) -> list[SwarmnetError | None]:
    """Several clients at work while nodes fail. ``sheltered``: one node of every block never
    does."""
    rng = random.Random(f"{lab.seed}/storm")
    cover, more = random_spans(rng)
    spans = cover + more
    names = [f"node{index}" for index in range(len(spans))]
    clients = [f"client{index}" for index in range(rng.randint(1, 2))]
    random_links(lab, names + clients, rng)
    for name, blocks in zip(names, spans, strict=True):
        await lab.start(name, lab.hosting(blocks))
    spared = frozenset(names[: len(cover)]) if sheltered else frozenset()
    trouble = Trouble(lab, random.Random(f"{lab.seed}/trouble"), spared, faults=8)
    trouble.begin()
    try:
        results = await asyncio.gather(
            *(request(lab, name, random.Random(f"{lab.seed}/{name}"), STEPS) for name in clients)
        )
    except BaseException as error:
        error.add_note("; ".join(trouble.happened))
        raise
    await trouble.end()
    await asyncio.sleep(lab.timing.client_silence_s + lab.timing.link_wait_s)
    assert lab.sessions() == {}, f"sessions outlived their clients: {trouble.happened}"
    assert lab.cache_bytes() == {}, f"caches outlived their sessions: {trouble.happened}"
    return results


def test_every_answer_is_right_while_every_block_has_a_living_node(reference: Reference, seed: int) -> None:
    results = simulate(reference, lambda lab: storm(lab, sheltered=True), seed=seed, limit_s=600.0)
    assert results == [None] * len(results)


def test_every_request_ends_with_right_answers_or_an_error(reference: Reference, seed: int) -> None:
    results = simulate(reference, lambda lab: storm(lab, sheltered=False), seed=seed, limit_s=600.0)
    for result in results:
        assert result is None or isinstance(result, NoRoute | OutOfResources | Unreachable), result


def test_every_bit_is_right_on_hosts_of_different_processors(mixed: MixedTargets, seed: int) -> None:
    """In batches, copies and rewound sequences, through failover and hand-over."""
    own = mixed.from_the_first_turn()
    results = simulate(own, lambda lab: storm(lab, sheltered=True), seed=seed, limit_s=600.0)
    assert results == [None] * len(results)
