"""Blame for a pass that cannot be computed: the input of the client, or the host that refuses
it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_client.chain.failures import Blame
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.chain.passes import RemoteBatch
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import resolve
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import PASS
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.wire import refusal_pb2
from tests.defences import Patch, defence
from tests.support.attacks.faulty_adapters import HIDDEN, HUGE, pair, unknown_module
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import save_tiny
from tests.support.network.memory_network import LinkProfile, MemoryStream
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

COUNTS = (20, 30)
MANY = (256,) * 8
"""Lengths of sequences, each of which fills a microbatch."""
REPLICAS = {"a": (0, 2), "a2": (0, 2), "b": (2, 4), "b2": (2, 4), "c": (4, 6), "c2": (4, 6)}
LAYOUTS: dict[str, Mapping[str, tuple[int, int]]] = {
    "one host": {"a": (0, 6)},
    "two hosts": {"a": (0, 6), "b": (0, 6)},
    "a chain": {"a": (0, 2), "b": (2, 4), "c": (4, 6)},
    "a chain with a second first": {"a": (0, 2), "a2": (0, 2), "b": (2, 4), "c": (4, 6)},
    "two chains": REPLICAS,
}


def states(seed: int, counts: Sequence[int] = COUNTS) -> torch.Tensor:
    return torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.matrix
@pytest.mark.parametrize("counts", [COUNTS, MANY], ids=["one microbatch", "many"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_an_adapter_that_no_host_can_compute_is_named_without_blame(
    reference: Reference, layout: Mapping[str, tuple[int, int]], backward: bool, counts: Sequence[int]
) -> None:
    # The adapter multiplies its inputs by zero, and makes their gradients as large as the layers
    # behind it allow.
    adapter = pair(0.0, HUGE) if backward else pair(HUGE, HUGE)

    async def scenario(lab: Lab) -> None:
        await lab.start_all(layout)
        async with lab.client() as swarm:
            spec = ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32, adapter=adapter)
            batch = RemoteBatch(swarm, spec, counts)
            started = asyncio.get_running_loop().time()
            if backward:
                await batch.forward(states(0, counts))
            with pytest.raises(ConfigError, match="not finite") as caught:
                await (
                    batch.backward(HUGE * states(1, counts)) if backward else batch.forward(states(0, counts))
                )
            assert "learning rate" in caught.value.hint
            assert asyncio.get_running_loop().time() - started < swarm.timing.recover_s / 4
            assert not swarm._view().banned
            for _ in range(10):  # the same hosts are asked again
                await RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32), COUNTS).forward(
                    states(0)
                )
            assert not swarm._view().banned

    simulate(reference, scenario)


@dataclass(frozen=True)
class Lies:
    """One host returns the largest finite numbers; honest hosts notice it in a ``found`` pass."""

    family: str
    liar: str
    of: str
    """The method of the liar's stage that lies."""
    found: str


LARGEST = torch.finfo(torch.float32).max
"""RMSNorm turns it into zeros, LayerNorm into NaN; gradients overflow in both."""
LIES = {
    "outputs": Lies("starcoder2", "a", "record_sequences", "forward"),
    "gradients": Lies("llama-tied", "c", "gradients", "backward"),
    "outputs that only gradients overflow at": Lies("llama-tied", "a", "record_sequences", "backward"),
}


class _Liar:
    """A stage that gives finite numbers that are too large."""

    def __init__(self, stage: Any, method: str) -> None:
        self._stage = stage
        self._method = method

    def part(self, start: int, end: int) -> "_Liar":
        return self

    def __getattr__(self, name: str) -> Any:
        honest = getattr(self._stage, name)
        if name != self._method:
            return honest

        def lie(*arguments: Any) -> tuple[torch.Tensor, object]:
            true, other = honest(*arguments)
            return torch.where(true > 0, LARGEST, -LARGEST), other

        return lie


def suspect_only_the_failing_host(patch: Patch) -> None:
    """Suspect only the host that fails."""
    attribute = Blame.attribute
    patch.setattr(Blame, "attribute", lambda self, error, hop, **_: attribute(self, error, hop))


@defence(
    "a host whose outputs overflow at others is suspected with them",
    off=suspect_only_the_failing_host,
    lies=LIES["gradients"],
)
@pytest.mark.parametrize("lies", LIES.values(), ids=LIES.keys())
def test_a_host_whose_numbers_overflow_at_others_is_replaced(
    lies: Lies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that cannot compute with its numbers refuse, one after another. The liar took part each
    time, each of them only once."""
    directory = save_tiny(lies.family, tmp_path / "model", num_hidden_layers=6)
    reference = Reference(resolve(str(directory), cache_dir=tmp_path / "cache"))
    refused: dict[str, set[PeerId]] = {"forward": set(), "backward": set()}

    async def scenario(lab: Lab) -> None:
        await lab.start_all(REPLICAS)
        engine = lab.nodes[lies.liar].engine
        assert engine is not None
        monkeypatch.setattr(engine, "stage", _Liar(engine.stage, lies.of))
        # Clients prefer this host.
        lab.network.set_link(lab.peer_id("client"), lab.peer_id(f"{lies.liar}2"), LinkProfile(delay_s=0.2))
        kind = "forward"

        def watch(stream: MemoryStream, _: Refusal) -> None:
            if stream.protocol.id == PASS.id:
                refused[kind].add(stream.peer)

        lab.network.refusal_observers.append(watch)
        expected = reference.train(states(0, MANY), MANY, states(1, MANY))
        async with lab.client() as swarm:
            await asyncio.sleep(2.0)  # the client knows how far they are
            batch = RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32), MANY)
            outputs = await batch.forward(states(0, MANY), keep_graphs=True)
            kind = "backward"
            gradients, _ = await batch.backward(states(1, MANY))
            assert lab.peer_id(lies.liar) in swarm._view().banned
        pairs = [(outputs, expected[0]), (gradients, expected[1])]
        for found, wanted in pairs if lies.found == "forward" else pairs[1:]:
            assert_near(found, wanted)
        honest = {lab.peer_id(name) for name in REPLICAS if name != lies.liar}
        assert len(refused[lies.found] & honest) > 1

    simulate(reference, scenario)


def test_an_adapter_that_fits_no_block_is_refused_at_once(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        async with lab.client() as swarm:
            spec = ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32, adapter=unknown_module())
            started = asyncio.get_running_loop().time()
            with pytest.raises(ConfigError, match="no_such_proj"):
                await RemoteBatch(swarm, spec, COUNTS).forward(states(0))
            assert asyncio.get_running_loop().time() - started < swarm.timing.recover_s / 4

    simulate(reference, scenario)


def test_a_host_whose_device_memory_is_full_is_left_for_another_one(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two hosts has a full device."""
    refusals: list[int] = []

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async def scenario(lab: Lab) -> None:
        for name in ("a", "b"):
            await lab.start(name, lab.hosting((0, 6)))
        engine = lab.nodes["a"].engine
        assert engine is not None
        monkeypatch.setattr(engine, "stage", _Full(engine.stage, no_memory))

        def watch(stream: MemoryStream, refusal: Refusal) -> None:
            if stream.protocol.id == PASS.id and stream.peer == lab.peer_id("a"):
                refusals.append(refusal.reason)
                assert refusal.retry_after_s > 0

        lab.network.refusal_observers.append(watch)
        async with lab.client() as swarm:
            expected, _ = reference.train(states(0), COUNTS, states(1))
            while not refusals:  # the router chooses the first host at random
                batch = RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32), COUNTS)
                assert_near(await batch.forward(states(0)), expected)

    simulate(reference, scenario)
    assert set(refusals) == {refusal_pb2.REASON_OUT_OF_RESOURCES}


class _Full:
    """A stage on a device that has no room for a forward."""

    def __init__(self, stage: object, fail: object) -> None:
        self._stage = stage
        self.run_sequences = self.record_sequences = fail

    def part(self, start: int, end: int) -> "_Full":
        return self

    def __getattr__(self, name: str) -> object:
        return getattr(self._stage, name)
