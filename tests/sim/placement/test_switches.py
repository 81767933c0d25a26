"""A node switches to another model of the swarm that lacks hosts: its clients lose no token, and it
comes back if it cannot host the other model."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.relocating import READ_AGAIN_S
from swarmnet_node.supervisor import Supervisor
from swarmnet_protocols.errors import OutOfResources, SwarmnetError, Unreachable
from swarmnet_protocols.routing.relocation import LOOK_S, SWITCH_CONFIRM_S
from tests.support.swarm.fake_machine import FakeMachine
from tests.support.swarm.relocation import PROMPT, LabModels, Reader, wait_until
from tests.support.swarm.swarm_lab import Lab, Reference, load_reference, simulate

FOUND_S = SWITCH_CONFIRM_S + 20 * LOOK_S
"""A need is confirmed, and the switch made, at each look with some chance."""


@pytest.fixture(scope="module")
def beta(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder: Path = tmp_path_factory.mktemp("beta")
    return load_reference(folder / "model", folder / "cache", blocks=4)


async def wait_for_model(node: Supervisor, manifest: bytes, within_s: float) -> None:
    await wait_until(
        lambda: (node.status().host.record.manifest, node.status().state) == (manifest, "online"), within_s
    )


async def check_answer(lab: Lab, client: str) -> None:
    async with lab.client(client) as swarm, lab.chain(swarm) as chain:
        assert await lab.generate(chain, PROMPT, 8) == lab.reference.greedy(PROMPT, 8)


def test_a_spare_host_switches_to_a_broken_model_while_clients_go_on(
    reference: Reference, beta: Reference
) -> None:
    async def scenario(lab: Lab) -> None:
        other = lab.beside(beta)
        await other.start("half", other.hosting((0, 2)))
        models = LabModels([lab, other])
        hosting = lab.hosting((0, 6), others=models)
        async with lab.supervised("spare", hosting, FakeMachine(), OwnerLimits()) as spare:
            said: list[tuple[str, str]] = []
            spare.on_switch(lambda status: said.append((status.former_model, status.model_reason)))
            reader = Reader(lab)
            reading = asyncio.create_task(reader.read())
            await reader.begun.wait()
            assert spare.status().host.record.sessions == 1
            for name in ("a", "b"):
                await lab.start(name, lab.hosting((0, 6)))
            await wait_for_model(spare, other.manifest, FOUND_S)
            status = spare.status()
            assert (status.host.record.start, status.host.record.end) == (1, 4)
            assert said == [("tiny", "no host had 2 of its 4 blocks, and 6 blocks has enough hosts")]
            assert (status.former_model, status.switching_to) == ("tiny", "")
            assert spare.report().host.record.manifest == other.manifest, "what the dashboard shows"
            await check_answer(other, "late")
            await asyncio.sleep(20.0)
            reader.is_enough = True
            await reading
            reader.check()
            assert reader.handovers >= 1
            assert max(reader.waits_s[1:]) <= 2 * max(reader.waits_s[1:20]), "a token waited for the switch"
            assert models.asked == [other.manifest]

    simulate(reference, scenario, limit_s=3000.0)


def test_a_spare_host_switches_to_a_model_whose_hosts_are_overloaded(
    reference: Reference, beta: Reference
) -> None:
    async def scenario(lab: Lab) -> None:
        other = lab.beside(beta)
        busy = await other.start("busy", other.hosting((0, 4)))
        assert busy.engine is not None
        busy.engine.load.at = lambda now: 0.95  # type: ignore[method-assign]  # forwards take no virtual time
        for name in ("a", "b"):
            await lab.start(name, lab.hosting((0, 6)))
        hosting = lab.hosting((0, 6), others=LabModels([lab, other]))
        async with AsyncExitStack() as stack:
            spare = await stack.enter_async_context(
                lab.supervised("spare", hosting, FakeMachine(), OwnerLimits())
            )
            clients = [await stack.enter_async_context(other.client(f"client-{each}")) for each in range(4)]
            chains = [await stack.enter_async_context(other.chain(client)) for client in clients]
            for chain in chains:
                await other.generate(chain, PROMPT, 1)
            assert busy.status().host.record.sessions == 4
            await wait_for_model(spare, other.manifest, FOUND_S)
            assert spare.status().model_reason == "its hosts computed 80% of the time, those of 6 blocks 0%"
            await check_answer(other, "late")

    simulate(reference, scenario, limit_s=3000.0)


def test_a_model_that_cannot_be_read_is_read_again_later(reference: Reference, beta: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        other = lab.beside(beta)
        await other.start("half", other.hosting((0, 2)))
        for name in ("a", "b"):
            await lab.start(name, lab.hosting((0, 6)))
        models = LabModels([lab, other], outline_at=READ_AGAIN_S)
        hosting = lab.hosting((0, 6), others=models)
        async with lab.supervised("spare", hosting, FakeMachine(), OwnerLimits()) as spare:
            await asyncio.sleep(READ_AGAIN_S)
            assert not models.asked
            await wait_for_model(spare, other.manifest, READ_AGAIN_S + FOUND_S)

    simulate(reference, scenario, limit_s=4000.0)


def test_of_several_spare_hosts_one_switches(reference: Reference, beta: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        other = lab.beside(beta)
        await other.start("half", other.hosting((0, 2)))
        models = LabModels([lab, other])
        hosting = lab.hosting((0, 6), others=models)
        async with AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(lab.supervised(name, hosting, FakeMachine(), OwnerLimits()))
                for name in ("a", "b", "c", "d", "e")
            ]
            await wait_until(lambda: bool(models.asked), FOUND_S)
            await asyncio.sleep(FOUND_S)
            assert [node.status().host.record.manifest for node in nodes].count(other.manifest) == 1
            assert models.asked == [other.manifest]

    simulate(reference, scenario, limit_s=3000.0)


@pytest.mark.parametrize(
    "errors",
    [
        {"error": Unreachable("the hub does not answer", hint="")},
        {"load_error": OutOfResources("the blocks do not fit", hint="")},
    ],
    ids=["cannot be read", "cannot be loaded"],
)
def test_a_node_that_cannot_host_another_model_serves_its_own_again(
    reference: Reference, beta: Reference, errors: dict[str, SwarmnetError]
) -> None:
    async def scenario(lab: Lab) -> None:
        other = lab.beside(beta)
        await other.start("half", other.hosting((0, 2)))
        for name in ("a", "b"):
            await lab.start(name, lab.hosting((0, 6)))
        models = LabModels([lab, other], **errors)
        hosting = lab.hosting((0, 6), others=models)
        async with lab.supervised("spare", hosting, FakeMachine(), OwnerLimits()) as spare:
            await wait_until(lambda: bool(models.asked), FOUND_S)
            await asyncio.sleep(65.0)
            await wait_for_model(spare, lab.manifest, 60.0)
            assert (spare.status().host.record.start, spare.status().host.record.end) == (0, 6)
            assert spare.status().former_model == ""
            await lab.stop("a")
            await lab.stop("b")
            await check_answer(lab, "late")
            for name in ("c", "d"):
                await lab.start(name, lab.hosting((0, 6)))
            await asyncio.sleep(FOUND_S)
            assert models.asked == [other.manifest]

    simulate(reference, scenario, limit_s=3000.0)


def test_a_pause_ends_a_switch_and_the_node_keeps_its_model(reference: Reference, beta: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        other = lab.beside(beta)
        for name in ("a", "b"):
            await lab.start(name, lab.hosting((0, 6)))
        models = LabModels([lab, other])
        hosting = lab.hosting((0, 6), others=models)
        async with lab.supervised("spare", hosting, FakeMachine(), OwnerLimits()) as spare:
            await wait_until(lambda: bool(models.asked), FOUND_S)
            spare.pause()
            await asyncio.sleep(5.0)
            assert (spare.status().state, spare.status().host.record.manifest) == ("paused", lab.manifest)
            spare.resume()
            await wait_for_model(spare, lab.manifest, 10.0)

    simulate(reference, scenario, limit_s=3000.0)
