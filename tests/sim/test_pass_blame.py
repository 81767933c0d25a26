"""Whose fault it is that a pass cannot be computed: that of what the client sends, or of the host that says so."""

import asyncio
from collections.abc import Mapping

import pytest
import torch

from swarmnet_client.hops import ChainSpec
from swarmnet_client.passes import RemoteBatch
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.protocol_ids import PASS
from swarmnet_protocols.transport.memory import Delivery
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.faulty_adapters import HIDDEN, HUGE, pair, unknown_module
from tests.support.swarm_lab import Lab, Reference, simulate

COUNTS = (20, 30)
LAYOUTS: dict[str, Mapping[str, tuple[int, int]]] = {
    "nobody else": {"a": (0, 6)},
    "somebody else": {"a": (0, 6), "b": (0, 6)},
}


def states(seed: int) -> torch.Tensor:
    return torch.randn(sum(COUNTS), HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_an_adapter_that_no_host_can_compute_is_named_at_once_and_no_host_blamed(
    reference: Reference, layout: Mapping[str, tuple[int, int]], backward: bool
) -> None:
    # Of inputs times zero nothing comes, and their gradients are as large as what follows lets them be.
    adapter = pair(0.0, HUGE) if backward else pair(HUGE, HUGE)

    async def scenario(lab: Lab) -> None:
        for name, blocks in layout.items():
            await lab.start(name, lab.hosting(blocks))
        await asyncio.sleep(1.0)
        async with lab.client() as swarm:
            spec = ChainSpec(6, HIDDEN, 512, torch.float32, adapter=adapter)
            batch = RemoteBatch(swarm, spec, COUNTS)
            started = asyncio.get_running_loop().time()
            if backward:
                await batch.forward(states(0))
            with pytest.raises(ConfigError, match="not finite") as caught:
                await (batch.backward(HUGE * states(1)) if backward else batch.forward(states(0)))
            assert "learning rate" in caught.value.hint
            assert asyncio.get_running_loop().time() - started < swarm.timing.recover_s / 4
            for _ in range(10):  # whoever was asked is asked again
                await RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, torch.float32), COUNTS).forward(states(0))
            assert not swarm._view().banned

    simulate(reference, scenario)


def test_an_adapter_that_fits_no_block_is_refused_at_once(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        await asyncio.sleep(1.0)
        async with lab.client() as swarm:
            spec = ChainSpec(6, HIDDEN, 512, torch.float32, adapter=unknown_module())
            started = asyncio.get_running_loop().time()
            with pytest.raises(ConfigError, match="no_such_proj"):
                await RemoteBatch(swarm, spec, COUNTS).forward(states(0))
            assert asyncio.get_running_loop().time() - started < swarm.timing.recover_s / 4

    simulate(reference, scenario)


def test_a_device_without_memory_is_a_shortage_and_another_host_is_asked(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two hosts one has a device that is full."""
    refusals: list[int] = []

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async def scenario(lab: Lab) -> None:
        for name in ("a", "b"):
            await lab.start(name, lab.hosting((0, 6)))
        await asyncio.sleep(1.0)
        engine = lab.nodes["a"]._engine
        assert engine is not None
        monkeypatch.setattr(engine, "stage", _Full(engine.stage, no_memory))

        def watch(delivery: Delivery) -> None:
            if delivery.protocol.id == PASS.id and delivery.source == lab.peer_id("a"):
                reply = pb.PassReply.FromString(delivery.message.header)
                if reply.HasField("refused"):
                    refusals.append(reply.refused.reason)
                    assert reply.refused.retry_after_s > 0

        lab.network.observers.append(watch)
        async with lab.client() as swarm:
            expected, _ = reference.train(states(0), COUNTS, states(1))
            while not refusals:  # whom the router takes first is a matter of chance
                batch = RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, torch.float32), COUNTS)
                assert (await batch.forward(states(0)) - expected).norm() <= 1e-5 * expected.norm()

    simulate(reference, scenario)
    assert set(refusals) == {pb.REASON_OUT_OF_MEMORY}


class _Full:
    """A stage on a device that has no room for a forward."""

    def __init__(self, stage: object, fail: object) -> None:
        self._stage = stage
        self.run_sequences = self.record_sequences = fail

    def part(self, start: int, end: int) -> "_Full":
        return self

    def __getattr__(self, name: str) -> object:
        return getattr(self._stage, name)
