"""Chains whose activations travel with 8 or 16 bits: failover and audits as with 32."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.wire_tensors import position_bytes
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.attacks.lying_hosts import THREE_OF_EACH, lying, names, start, used
from tests.support.network.deliveries import arrives_at, request
from tests.support.network.memory_network import Delivery
from tests.support.swarm.interrupted import ONE_REPLICA, PROMPT, TOKENS
from tests.support.swarm.swarm_lab import Lab, Reference, simulate


async def answer(lab: Lab, prompt: Sequence[int] = PROMPT) -> tuple[list[int], Chain]:
    """The tokens of a client, and its chain."""
    async with lab.client() as swarm:
        await asyncio.sleep(0.5)
        async with lab.chain(swarm) as chain:
            return await lab.generate(chain, list(prompt), TOKENS), chain


def undisturbed(reference: Reference) -> list[int]:
    async def scenario(lab: Lab) -> list[int]:
        await start(lab, {name: span for name, span in ONE_REPLICA.items() if name != "b2"})
        return (await answer(lab))[0]

    return simulate(reference, scenario, wire=ElementType.INT8)


@pytest.mark.parametrize("step", ["step 1", "step 2", "step 6"])
def test_a_failover_with_eight_bits_changes_no_token(reference: Reference, step: str) -> None:
    async def scenario(lab: Lab) -> tuple[list[int], Chain]:
        await start(lab, ONE_REPLICA)
        middle = {lab.peer_id("b"), lab.peer_id("b2")}
        lab.once(arrives_at(middle, step), lambda delivery: lab.network.crash(delivery.target))
        return await answer(lab)

    tokens, chain = simulate(reference, scenario, wire=ElementType.INT8)
    assert chain.report.failovers == 1
    assert tokens == undisturbed(reference)


def test_links_carry_eight_bits_and_the_client_gets_the_full_output(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await start(lab, ONE_REPLICA)
        carried: list[tuple[int, int]] = []

        def look(delivery: Delivery) -> None:
            if request(delivery).startswith("step"):
                step = pb.LinkRequest.FromString(delivery.message.header).step
                assert step.tensor.dtype == pb.DTYPE_INT8_BLOCKS
                carried.append((sum(row.count for row in step.rows), len(delivery.message.payload)))

        lab.network.observers.append(look)
        await answer(lab)
        assert carried
        assert all(size == count * position_bytes(ElementType.INT8, 32) for count, size in carried)

    simulate(reference, scenario, wire=ElementType.INT8)


def test_honest_hosts_with_eight_bits_are_audited_and_not_accused(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await start(lab, THREE_OF_EACH)

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert chain.report.audits >= 3
            assert not chain.report.wrong
            assert not swarm.banned

        await used(lab, (), look)

    simulate(reference, scenario, wire=ElementType.INT8)


def test_a_host_that_lies_behind_eight_bits_is_found(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await start(lab, THREE_OF_EACH, ["b1"])

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert names(lab, chain.report.wrong) == ["b1"]

        await used(lab, ["b1"], look)

    simulate(reference, scenario, wire=ElementType.INT8)


def test_a_host_that_computes_with_sixteen_bits_sends_sixteen_bits() -> None:
    spec = ChainSpec(6, 32, 512, ElementType.FLOAT32)
    assert [spec.wire_of(each) for each in ("bf16/bf16", "q4_1/f16", "q4_1", "bf16", "")] == [
        ElementType.BFLOAT16,
        ElementType.FLOAT16,
        *[ElementType.FLOAT32] * 3,
    ]
    assert (
        ChainSpec(6, 32, 512, ElementType.FLOAT32, ElementType.INT8).wire_of("bf16/bf16") is ElementType.INT8
    )


def test_hosts_of_sixteen_bits_exchange_sixteen_and_are_audited(reference: Reference) -> None:
    def rounded(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.bfloat16().float()

    async def scenario(lab: Lab) -> None:
        for name, span in THREE_OF_EACH.items():
            await lab.start(name, lying(lab.hosting(span), rounded, precision="bf16/bf16"))

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert chain.report.precisions == ["bf16/bf16"]
            assert chain.report.audits >= 3
            assert not chain.report.wrong
            assert not swarm.banned

        await used(lab, (), look)

    simulate(reference, scenario)
