"""Announcements of hosts that do not exist change nothing: hosts leave blocks only to hosts that
compute them, and fill what no live host has."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from swarmnet_node.host_checks import HostChecker, Trial
from swarmnet_node.node import Node
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.routing.relocation import CONFIRM_S, LOOK_S, SWITCH_CONFIRM_S
from swarmnet_protocols.routing.sightings import ModelClaims, Sightings
from swarmnet_protocols.routing.throughput import Claim
from tests.defences import Patch, defence, replacing, yes
from tests.support.attacks.invented_hosts import invented_hosts, replay
from tests.support.swarm.fake_machine import FakeMachine
from tests.support.swarm.relocation import GAP_S, PROMPT, LabModels, wait_for_span
from tests.support.swarm.swarm_lab import Lab, Reference, load_reference, simulate

LONG_S = CONFIRM_S + 15 * LOOK_S
"""A host that moves for the invented ones has done so by then: it needs ``CONFIRM_S`` and a few
looks."""
FOUND_S = 4 * LOOK_S
"""Within this time hosts have called enough of a dozen invented hosts."""


async def start_four(lab: Lab) -> dict[str, Node]:
    """Two hosts of the first half of the blocks and two of the second, which may move."""
    spans = {"a": (0, 3), "b": (0, 3), "c": (3, 6), "d": (3, 6)}
    return {
        name: await lab.start(name, lab.hosting(span, num_blocks=3, may_move=True))
        for name, span in spans.items()
    }


def believe_all(patch: Patch) -> None:
    """Count every announced host."""

    def counted(_: Sightings, model: ModelClaims, *, now: float) -> list[Claim]:
        return list(model.claims)

    patch.setattr(Sightings, "counted", counted)


def ask_no_host(patch: Patch) -> None:
    """Leave blocks to hosts that answer, and count every announced host."""
    believe_all(patch)

    async def computing(_: HostChecker, claims: dict[Claim, object], *__: object) -> list[Claim]:
        return list(claims)

    patch.setattr(HostChecker, "computing", computing)


async def stay(lab: Lab, nodes: dict[str, Node]) -> None:
    """Every host has its blocks as long as a host needs that moves, and answers are right then."""
    before = {name: node.span for name, node in nodes.items()}
    until = asyncio.get_running_loop().time() + LONG_S
    while asyncio.get_running_loop().time() < until:
        await asyncio.sleep(LOOK_S / 2)
        assert {name: node.span for name, node in nodes.items()} == before
    async with lab.client() as swarm, lab.chain(swarm) as chain:
        assert await lab.generate(chain, PROMPT, 4) == lab.reference.greedy(PROMPT, 4)


@defence("blocks are not left to hosts that do not exist", off=ask_no_host)
def test_hosts_leave_no_blocks_to_invented_hosts(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        nodes = await start_four(lab)
        async with invented_hosts(lab, [(0, 3)] * 6):
            await stay(lab, nodes)

    simulate(reference, scenario, limit_s=LONG_S + 200.0)


@defence("blocks are left only to hosts that compute them", off=replacing(Trial, "agrees", yes))
def test_hosts_leave_no_blocks_to_one_that_only_answers(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        spans = {"a": (0, 3), "b": (3, 6)}  # nobody else has what either would leave
        nodes = {
            name: await lab.start(name, lab.hosting(span, num_blocks=3, may_move=True))
            for name, span in spans.items()
        }
        async with invented_hosts(lab, [(0, 3)], answers=replay):
            await stay(lab, nodes)

    simulate(reference, scenario, limit_s=LONG_S + 200.0)


@defence("blocks that no host has are filled, whatever is announced", off=believe_all)
def test_blocks_that_only_invented_hosts_have_are_filled(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        mover = await lab.start("mover", lab.hosting((0, 3), num_blocks=3, may_move=True))
        await lab.start_all({"stays": (0, 3), "gone": (3, 6)})
        async with invented_hosts(lab, [(3, 6)] * 12):
            await asyncio.sleep(10.0)
            await lab.stop("gone")
            await wait_for_span(mover, (3, 6), GAP_S + FOUND_S)
            await asyncio.sleep(10.0)
            async with lab.client() as swarm, lab.chain(swarm) as chain:
                assert await lab.generate(chain, PROMPT, 4) == reference.greedy(PROMPT, 4)

    simulate(reference, scenario, limit_s=600.0)


@defence("a joining host takes blocks that no host has, whatever is announced", off=believe_all)
def test_a_joining_host_takes_blocks_that_only_invented_hosts_have(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("stays", lab.hosting((0, 3)))
        async with invented_hosts(lab, [(3, 6)] * 12):
            await asyncio.sleep(1.0)
            joined = await lab.start("joins", lab.hosting(num_blocks=3))
            assert joined.span == (3, 6)

    simulate(reference, scenario, limit_s=200.0)


def test_invented_hosts_do_not_hide_a_live_one(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        nodes = await start_four(lab)
        async with invented_hosts(lab, [(0, 3)] * 40):
            before = {name: node.span for name, node in nodes.items()}
            joined = await lab.start("joins", lab.hosting(num_blocks=3))
            await asyncio.sleep(CONFIRM_S)
            assert {name: node.span for name, node in nodes.items()} == before
            assert joined.status().state == "online"

    simulate(reference, scenario, limit_s=600.0)


@pytest.fixture(scope="module")
def beta(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder: Path = tmp_path_factory.mktemp("beta")
    return load_reference(folder / "model", folder / "cache", blocks=4)


@defence("a model is not left to hosts that do not exist", off=ask_no_host)
def test_hosts_do_not_leave_their_model_to_invented_hosts(reference: Reference, beta: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        other = lab.beside(beta)
        models = LabModels([lab, other])
        async with AsyncExitStack() as stack:
            hosts = [
                await stack.enter_async_context(
                    lab.supervised(name, lab.hosting((0, 6), others=models), FakeMachine(), OwnerLimits())
                )
                for name in ("a", "b")
            ]
            # Their model seems to have many idle hosts, the other one overloaded ones and none.
            await stack.enter_async_context(invented_hosts(lab, [(0, 6)] * 12))
            await stack.enter_async_context(
                invented_hosts(other, [(0, 4)] * 12, name="busy", load=1.0, sessions=100)
            )
            await asyncio.sleep(SWITCH_CONFIRM_S + 10 * LOOK_S)
            assert [host.status().host.record.manifest for host in hosts] == [lab.manifest] * 2

    simulate(reference, scenario, limit_s=4000.0)
