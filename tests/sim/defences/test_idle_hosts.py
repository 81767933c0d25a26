"""Machines that answer as hosts and compute nothing keep no block without a host; honest hosts keep
their claims, and stay where they are."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from swarmnet_node.engine.stage import Stage
from swarmnet_node.hosting.host import Host
from swarmnet_protocols.machine.aio import in_background
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.routing.relocation import LOOK_S
from swarmnet_protocols.routing.sightings import PATIENCE_S, PROVEN_S, Sightings
from swarmnet_protocols.wire import records_pb2 as pb
from tests.defences import defence, nothing, replacing, yes
from tests.support.attacks import forgers
from tests.support.attacks.forgers import Forger
from tests.support.attacks.invented_hosts import invented_hosts, refuse, replay
from tests.support.swarm.relocation import PROMPT
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

HOURS_S = 1.25 * PROVEN_S
"""Longer than right outputs count."""
CONVICTED_S = 6 * LOOK_S
"""Within this time a host that computes something else is asked, and its blocks are taken."""
REFUSED_S = PATIENCE_S + CONVICTED_S
"""The same for a host that computes nothing."""
LIES: dict[str, tuple[Forger, float]] = {
    "refuses": (refuse, REFUSED_S),
    "constants": (forgers.constant, CONVICTED_S),
    "random": (forgers.random, CONVICTED_S),
    "inputs": (replay, CONVICTED_S),
}
Spans = Mapping[str, tuple[int, int]]
TWO_ALIKE: Spans = {"a": (0, 3), "b": (0, 3)}


def missing(lab: Lab) -> list[int]:
    """The blocks without an honest host."""
    served = {block for node in lab.nodes.values() for block in range(*node.span)}
    return sorted(set(range(lab.reference.local.manifest.blocks)) - served)


async def stay_served(lab: Lab, within_s: float, for_s: float) -> None:
    """Every block has an honest host after ``within_s``, and from then on."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while clock() < began + for_s:
        await asyncio.sleep(LOOK_S / 2)
        assert clock() < began + within_s or not missing(lab), f"after {clock() - began:.0f} s"


@pytest.mark.parametrize(
    ("spans", "claimed"),
    [
        (TWO_ALIKE, [(3, 6)]),
        (TWO_ALIKE, [(0, 6)]),
        ({"a": (0, 3), "b": (1, 4)}, [(4, 6)]),
        ({"a": (0, 2), "b": (0, 2), "c": (0, 2), "d": (2, 4)}, [(2, 6)]),
    ],
    ids=["one span", "the whole model", "behind a host that must shift", "beside honest hosts"],
)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.matrix
@defence(
    "blocks that only idle machines claim are filled",
    off=replacing(Sightings, "block_to_try", nothing),
    lie="constants",
)
@defence(
    "a machine that refuses all work holds no blocks",
    off=replacing(Sightings, "stands", yes),
    lie="refuses",
)
def test_blocks_that_only_an_idle_machine_claims_get_a_host(
    reference: Reference, lie: str, spans: Spans, claimed: Sequence[tuple[int, int]]
) -> None:
    outputs, within_s = LIES[lie]

    async def scenario(lab: Lab) -> None:
        async with invented_hosts(lab, claimed, answers=outputs):
            await lab.start_all(spans, may_move=True)
            await stay_served(lab, within_s, HOURS_S if lie == "refuses" else within_s + 10 * LOOK_S)
        await asyncio.sleep(100.0)  # its records expire
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            assert await lab.generate(chain, PROMPT, 4) == reference.greedy(PROMPT, 4)

    simulate(reference, scenario, limit_s=2 * HOURS_S)


def test_new_names_of_an_idle_machine_win_it_no_time(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(TWO_ALIKE, may_move=True)

        async def rename() -> None:
            for number in range(1000):
                async with invented_hosts(lab, [(3, 6)], name=f"name {number}", answers=refuse):
                    await asyncio.sleep(5 * LOOK_S)

        async with in_background(rename()):
            await stay_served(lab, REFUSED_S + 10 * LOOK_S, 2 * REFUSED_S)

    simulate(reference, scenario, limit_s=HOURS_S)


def test_an_intent_that_never_ends_holds_no_blocks(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(TWO_ALIKE, may_move=True)
        async with invented_hosts(lab, [(3, 6)], answers=refuse, state=pb.HOST_STATE_CHOOSING):
            await stay_served(lab, REFUSED_S, 2 * REFUSED_S)

    simulate(reference, scenario, limit_s=HOURS_S)


def test_hosts_that_join_after_an_idle_machine_serve_every_block(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        async with invented_hosts(lab, [(0, 6)], answers=forgers.random):
            await asyncio.sleep(10.0)
            for name in "abcd":
                await lab.start(name, lab.hosting(num_blocks=2, may_move=True))
            await stay_served(lab, 2 * CONVICTED_S, HOURS_S)

    simulate(reference, scenario, limit_s=2 * HOURS_S)


def test_honest_hosts_stay_and_load_few_blocks_to_check_others(reference: Reference) -> None:
    loaded: list[tuple[int, int]] = []

    def load(start: int, end: int) -> Stage:
        loaded.append((start, end))
        return reference.stage(start, end)

    async def scenario(lab: Lab) -> None:
        spans = {"a": (0, 3), "b": (1, 4), "c": (3, 6)}
        await lab.start_all(spans, may_move=True, load_on_cpu=load)
        await asyncio.sleep(HOURS_S)
        assert {name: node.span for name, node in lab.nodes.items()} == spans
        # One host could fill the gaps that either of the others would leave. It checks both, and
        # again when that is long ago.
        assert 2 <= len(loaded) <= 2 * (HOURS_S / PROVEN_S + 1)
        assert {end - start for start, end in loaded} == {1}

    simulate(reference, scenario, limit_s=2 * HOURS_S)


@pytest.mark.parametrize("busy_s", [PATIENCE_S / 2, REFUSED_S])
def test_a_busy_host_keeps_its_blocks_or_gets_company(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, busy_s: float
) -> None:
    """A false alarm costs that another host takes the same blocks."""
    until = 0.0
    run_pass = Host._run_pass

    async def busy(host: Host, *arguments: Any) -> None:
        if host.blocks.start == 3 and asyncio.get_running_loop().time() < until:
            raise Refusal.overloaded(30.0)
        await run_pass(host, *arguments)

    monkeypatch.setattr(Host, "_run_pass", busy)

    async def scenario(lab: Lab) -> None:
        nonlocal until
        until = asyncio.get_running_loop().time() + busy_s
        await lab.start_all(TWO_ALIKE, may_move=True)
        await lab.start("c", lab.hosting((3, 6)))
        await asyncio.sleep(busy_s + 10 * LOOK_S)
        moved = [name for name in TWO_ALIKE if lab.nodes[name].span == (3, 6)]
        assert len(moved) == (busy_s > PATIENCE_S)
        assert lab.nodes["c"].span == (3, 6)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            assert await lab.generate(chain, PROMPT, 4) == reference.greedy(PROMPT, 4)

    simulate(reference, scenario, limit_s=HOURS_S)


def test_a_host_without_room_for_a_block_convicts_nobody(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(TWO_ALIKE, may_move=True, has_room=lambda _: False)
        await lab.start("c", lab.hosting((3, 6)))
        await asyncio.sleep(2 * REFUSED_S)
        assert {name: node.span for name, node in lab.nodes.items()} == {**TWO_ALIKE, "c": (3, 6)}

    simulate(reference, scenario, limit_s=HOURS_S)
