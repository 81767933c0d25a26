"""Adapters through chains of hosts: each client gets the outputs of PEFT, whatever other clients do
and whichever hosts fail."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from swarmnet_client.chain import adapter_upload
from swarmnet_client.chain.adapter_upload import ATTEMPTS
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_node.hosting import adapter_store
from swarmnet_protocols.arrays import Array, as_tensor
from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.net.protocol_ids import ADAPTER, LINK, SESSION
from swarmnet_protocols.routing.relocation import Kind, Relocation
from swarmnet_protocols.session.adapters import Adapter
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.models.peft_oracle import lora_tensors, prefix_tensors, with_lora, with_prefix
from tests.support.models.rounding import assert_near
from tests.support.network.memory_network import Delivery
from tests.support.network.virtual_time import TimedExecutor
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

# PEFT 0.21 uses a name that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

LAYOUTS = {
    "1 hop": {"a": (0, 6)},
    "2 hops": {"a": (0, 3), "b": (3, 6)},
    "3 hops": {"a": (0, 2), "b": (2, 4), "c": (4, 6)},
}
TARGETS = ("q_proj", "v_proj", "down_proj")
PREFIX = 5
PROMPT = [5, 6, 7, 8, 9]
TOKENS = 8


class Tuned:
    """The model with an adapter, whole, in this process."""

    def __init__(self, reference: Reference, kind: str, seed: int = 1) -> None:
        plain = reference.local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
        if kind == "lora":
            self.model: Any = with_lora(plain, TARGETS, rank=2 + seed % 4, seed=seed)
            self.adapter = Adapter(lora_tensors(self.model))
        else:
            self.model = with_prefix(plain, PREFIX, seed=seed)
            self.adapter = Adapter(prefix_tensors(self.model))

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids=torch.tensor([list(ids)])).logits[0]
        return found

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module", params=["lora", "prefix"])
def tuned(request: pytest.FixtureRequest, reference: Reference) -> Tuned:
    return Tuned(reference, request.param)


def open_chain(
    lab: Lab,
    swarm: ModelHosts,
    adapter: Adapter | None,
    *,
    max_length: int = 512,
    standby: bool | None = None,
) -> AbstractAsyncContextManager[Chain]:
    spec = ChainSpec(6, 32, max_length, ElementType.FLOAT32, adapter=adapter, standby=standby)
    return Chain(swarm, spec, lab.reference.layers.embed).open()


def kind_of(delivery: Delivery) -> str | None:
    """The kind of a request: "upload", "open" or "step"; None for other protocols."""
    kinds = {ADAPTER.id: pb.AdapterRequest, SESSION.id: pb.SessionRequest, LINK.id: pb.LinkRequest}
    kind = kinds.get(delivery.protocol.id)
    return kind.FromString(delivery.message.header).WhichOneof("kind") if kind else None


def counted(lab: Lab, kind: str, target: str) -> list[Delivery]:
    """A list to which requests of a kind that reach a node are added."""
    found: list[Delivery] = []

    def watch(delivery: Delivery) -> None:
        if delivery.target == lab.peer_id(target) and kind_of(delivery) == kind:
            found.append(delivery)

    lab.network.observers.append(watch)
    return found


def logits_of(reference: Reference, hidden: Array) -> torch.Tensor:
    return as_tensor(reference.layers.logits(hidden))


def test_adapters_give_the_outputs_of_peft_after_blocks_are_dropped(
    reference: Reference, tuned: Tuned
) -> None:
    """The adapter is uploaded again by a second client, and used on: the first client's session
    goes on in the blocks that stay."""
    text = [*PROMPT, *tuned.greedy(PROMPT, TOKENS)]

    async def scenario(lab: Lab) -> None:
        await lab.start_all({"first": (0, 2), "drops": (2, 6)})
        node = lab.nodes["drops"]
        async with lab.client() as swarm, open_chain(lab, swarm, tuned.adapter) as chain:
            hidden = [await chain.forward((Row(0, 0, 5, 5, 0),), np.array(text[:5]))]
            await lab.start("middle", lab.hosting((2, 3)))
            await asyncio.sleep(1.0)
            node.relocation = Relocation(Kind.SHRINK, 3, 6, "a test")
            await node.shrink(30.0)
            assert node.status().weight_bytes < reference.stage(2, 6).weight_bytes
            hidden.append(await chain.forward((Row(0, 5, 8, 8, 0),), np.array(text[5:])))
            assert chain.report.failovers == chain.report.handovers
            assert_near(logits_of(reference, np.concatenate(hidden)), tuned.logits(text))
        async with lab.client("second") as swarm, open_chain(lab, swarm, tuned.adapter) as chain:
            found = await chain.forward((Row(0, 0, 13, 13, 0),), np.array(text))
            assert_near(logits_of(reference, found), tuned.logits(text))

    simulate(reference, scenario)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_an_adapter_through_hops_gives_the_outputs_of_peft(
    reference: Reference, tuned: Tuned, layout: dict[str, tuple[int, int]]
) -> None:
    text = [*PROMPT, *tuned.greedy(PROMPT, TOKENS)]

    async def scenario(lab: Lab) -> None:
        await lab.start_all(layout)
        async with lab.client() as swarm:
            async with open_chain(lab, swarm, tuned.adapter) as chain:
                assert await lab.generate(chain, PROMPT, TOKENS) == text[len(PROMPT) :]
            async with open_chain(lab, swarm, tuned.adapter) as chain:
                hidden = await chain.forward((Row(0, 0, len(text), len(text), 0),), np.array(text))
            assert_near(logits_of(reference, hidden), tuned.logits(text))
            async with open_chain(lab, swarm, None) as chain:
                assert await lab.generate(chain, PROMPT, TOKENS) == reference.greedy(PROMPT, TOKENS)

    simulate(reference, scenario)
    assert text[len(PROMPT) :] != reference.greedy(PROMPT, TOKENS)


def test_clients_with_and_without_adapters_get_their_own_outputs(reference: Reference) -> None:
    all_tuned = [Tuned(reference, "lora" if seed % 4 else "prefix", seed) for seed in range(8)]
    prompts = [[3 + number, *PROMPT] for number in range(10)]
    expected = [each.greedy(prompt, TOKENS) for each, prompt in zip(all_tuned, prompts, strict=False)]
    expected += [reference.greedy(prompt, TOKENS) for prompt in prompts[8:]]

    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS["2 hops"])

        async def talk(number: int, adapter: Adapter | None) -> list[int]:
            async with lab.client(f"client {number}") as swarm, open_chain(lab, swarm, adapter) as chain:
                return await lab.generate(chain, prompts[number], TOKENS)

        adapters = [*(each.adapter for each in all_tuned), None, None]
        answers = await asyncio.gather(*(talk(*each) for each in enumerate(adapters)))
        assert answers == expected
        engine = lab.nodes["a"].engine
        assert engine is not None
        assert engine.counters.forwards < 10 * TOKENS / 2, "their tokens were hardly ever in one batch"

    simulate(reference, scenario)


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("moment", ["upload", "open", "step"])
def test_a_host_may_fail_at_any_time(reference: Reference, tuned: Tuned, victim: str, moment: str) -> None:
    """The replacement, which has more blocks, gets the adapter before its session is opened, and
    computes the same outputs."""

    async def scenario(lab: Lab) -> None:
        await lab.start_all({"a": (0, 3), "b": (3, 6)})
        seen: list[Delivery] = []
        crashed = asyncio.Event()

        def watch(delivery: Delivery) -> None:
            if delivery.target == lab.peer_id(victim) and kind_of(delivery) == moment:
                seen.append(delivery)
                if len(seen) == (4 if moment == "step" else 1):
                    lab.network.crash(delivery.target)
                    crashed.set()

        async with lab.client() as swarm, open_chain(lab, swarm, tuned.adapter) as chain:
            lab.network.observers.append(watch)
            answer = asyncio.create_task(lab.generate(chain, PROMPT, TOKENS))
            await asyncio.wait_for(crashed.wait(), 10.0)
            await lab.start(f"{victim}2", lab.hosting((0, 6)))
            assert await answer == tuned.greedy(PROMPT, TOKENS)

    simulate(reference, scenario)


def test_the_client_uploads_a_lost_adapter_again_to_a_session_host(reference: Reference) -> None:
    """That is no fault of the host: it stays in the chain."""
    tuned = Tuned(reference, "lora")

    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS["2 hops"])
        host = lab.nodes["b"].host
        assert host is not None
        uploads, opened = counted(lab, "upload", "b"), counted(lab, "open", "b")
        lab.once(
            lambda delivery: delivery.target == lab.peer_id("b") and kind_of(delivery) == "open",
            lambda _: host.adapters._kept.clear(),
        )
        async with lab.client() as swarm, open_chain(lab, swarm, tuned.adapter) as chain:
            assert await lab.generate(chain, PROMPT, TOKENS) == tuned.greedy(PROMPT, TOKENS)
            assert chain.report.failovers == 0
        assert (len(uploads), len(opened)) == (2, 2)

    simulate(reference, scenario)


def test_a_host_that_never_keeps_an_uploaded_adapter_is_replaced(reference: Reference) -> None:
    tuned = Tuned(reference, "lora")

    async def scenario(lab: Lab) -> None:
        await lab.start_all({"a": (0, 6)})
        host = lab.nodes["a"].host
        assert host is not None
        asked = asyncio.Event()
        opened = counted(lab, "open", "a")

        def forget(delivery: Delivery) -> None:
            if delivery.target == lab.peer_id("a") and kind_of(delivery) == "open":
                host.adapters._kept.clear()
                asked.set()

        lab.network.observers.append(forget)
        async with lab.client() as swarm, open_chain(lab, swarm, tuned.adapter) as chain:
            answer = asyncio.create_task(lab.generate(chain, PROMPT, TOKENS))
            await asyncio.wait_for(asked.wait(), 10.0)
            await lab.start("b", lab.hosting((0, 6)))
            assert await answer == tuned.greedy(PROMPT, TOKENS)
            assert [peer for peer, _, _ in chain.report.route] == [lab.peer_id("b")]
        assert ATTEMPTS <= len(opened) < 10 * ATTEMPTS

    simulate(reference, scenario)


def test_sequences_with_a_prefix_are_rewound_and_forked_like_others(reference: Reference) -> None:
    tuned = Tuned(reference, "prefix")
    one, other, third = [5, 6, 7, 8, 9, 10], [5, 6, 7, 20, 21], [5, 6, 7, 8, 40]

    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS["2 hops"])
        async with lab.client() as swarm, open_chain(lab, swarm, tuned.adapter) as chain:
            await chain.forward((Row(0, 0, 6, 1, 0),), np.array(one))
            rewound = await chain.forward((Row(0, 3, 2, 2, 0, True),), np.array(other[3:]))
            assert_near(logits_of(reference, rewound), tuned.logits(other)[3:])
            rows = (Row(0, 3, 2, 2, 0, True), Row(1, 3, 2, 2, 0, True))
            forked = await chain.forward(rows, np.array([*third[3:], *other[3:]]))
            expected = torch.cat([tuned.logits(third)[3:], tuned.logits(other)[3:]])
            assert_near(logits_of(reference, forked), expected)
            again = await chain.forward((Row(0, 0, 5, 5, 0, True),), np.array(other))
            assert_near(logits_of(reference, again), tuned.logits(other))

    simulate(reference, scenario)


def test_positions_of_a_prefix_count(reference: Reference) -> None:
    tuned = Tuned(reference, "prefix")

    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS["1 hop"])
        async with (
            lab.client() as swarm,
            open_chain(lab, swarm, tuned.adapter, max_length=PREFIX + 6) as chain,
        ):
            await chain.forward((Row(0, 0, 6, 1, 0),), np.array([5] * 6))
            with pytest.raises(OutOfResources, match=f"{PREFIX + 7} positions"):
                await chain.forward((Row(0, 6, 1, 1, 0),), np.array([5]))

    simulate(reference, scenario)


def test_a_prefix_that_lacks_blocks_is_refused_by_the_client(reference: Reference) -> None:
    tuned = Tuned(reference, "prefix")
    some = {name: tensor for name, tensor in tuned.adapter.tensors.items() if not name.startswith("4.")}

    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS["3 hops"])
        async with lab.client() as swarm, open_chain(lab, swarm, Adapter(some)) as chain:
            with pytest.raises(ConfigError, match="block 4"):
                await chain.forward((Row(0, 0, 1, 1, 0),), np.array([5]))

    simulate(reference, scenario)


def test_hosts_outside_the_blocks_of_an_adapter_do_not_get_it(reference: Reference) -> None:
    tuned = Tuned(reference, "lora")
    some = {name: tensor for name, tensor in tuned.adapter.tensors.items() if name[0] in "01"}

    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS["3 hops"])
        uploads = {name: counted(lab, "upload", name) for name in "abc"}
        async with lab.client() as swarm, open_chain(lab, swarm, Adapter(some)) as chain:
            await lab.generate(chain, PROMPT, 2)
        assert {name: len(each) for name, each in uploads.items()} == {"a": 1, "b": 0, "c": 0}

    simulate(reference, scenario)


def test_a_session_that_ends_while_it_is_copied_leaves_nothing(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS["1 hop"])
        engine = lab.nodes["a"].engine
        assert engine is not None
        async with lab.client() as swarm:
            async with open_chain(lab, swarm, None) as chain:
                await chain.forward((Row(0, 0, 3, 1, 0),), np.array([5, 6, 7]))
                engine._executor = TimedExecutor(2.0)
                rows = (Row(0, 3, 1, 1, 0), Row(1, 3, 1, 1, 0, True))
                forking = asyncio.create_task(chain.forward(rows, np.array([8, 9])))
                await asyncio.sleep(1.0)
                forking.cancel()
            await asyncio.sleep(5.0)
        assert lab.sessions() == {}
        assert lab.cache_bytes() == {}

    simulate(reference, scenario)


def test_a_standby_gets_a_long_adapter_while_the_chain_is_whole(
    reference: Reference, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks extend the deadline of a repair, and none is running."""
    protocol = replace(ADAPTER, max_payload_bytes=256)
    for module in adapter_upload, adapter_store:
        monkeypatch.setattr(module, "ADAPTER", protocol)

    async def scenario(lab: Lab) -> None:
        await lab.start_all({"one": (0, 6), "other": (0, 6)})
        async with lab.client() as swarm, open_chain(lab, swarm, tuned.adapter, standby=True) as chain:
            tokens = await lab.generate(chain, PROMPT, TOKENS)
            assert tokens == tuned.greedy(PROMPT, TOKENS)
            await asyncio.sleep(2.0)
            assert lab.sessions() == {"one": 1, "other": 1}
            assert not swarm.banned

    simulate(reference, scenario)
