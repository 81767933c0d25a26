"""Batches go forward and backward through hosts that fail, and give the same results as without
failures."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from swarmnet_client.chain.failures import CLIENT_FAULTS
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.chain.passes import PASSES_PER_HOST, RemoteBatch, split
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_protocols.arrays import as_array
from swarmnet_protocols.errors import ConfigError, NoRoute, OutOfResources
from swarmnet_protocols.net import Message, PeerId
from swarmnet_protocols.net.protocol_ids import PASS
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.passes import MAX_POSITIONS
from swarmnet_protocols.session.wire_tensors import encode_tensor
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.models.rounding import assert_near
from tests.support.network.memory_network import Delivery, LinkProfile, MemoryStream
from tests.support.swarm.swarm_lab import Lab, Reference, peer, simulate

HIDDEN = 32
COUNTS = (40, 128, 7, 128, 128, 90, 1, 60, 128)
LAYOUTS: dict[str, Mapping[str, tuple[int, int]]] = {
    "1 hop": {"a": (0, 6)},
    "2 hops": {"a": (0, 3), "b": (3, 6)},
    "3 hops": {"a": (0, 2), "b": (2, 4), "c": (4, 6)},
}
TWO_OF_B = {"a": (0, 2), "b": (2, 4), "b2": (2, 4), "c": (4, 6)}
ANOTHER_CUT = {"a": (0, 2), "b": (2, 5), "b2": (2, 3), "b3": (3, 5), "c": (5, 6)}


def random_states(seed: int) -> torch.Tensor:
    return torch.randn(sum(COUNTS), HIDDEN, generator=torch.Generator().manual_seed(seed))


@dataclass
class Outcome:
    outputs: torch.Tensor
    gradients: torch.Tensor
    failovers: int
    took_s: float
    served: dict[str, set[PeerId]] = field(default_factory=dict)
    """The hosts that were asked for a "forward" and those that were asked for a "backward"."""


def kind_of(delivery: Delivery) -> str:
    """The kind of a message: "forward", "backward", "part", "answer", or "" for any other."""
    if delivery.protocol.id != PASS.id:
        return ""
    request = pb.PassRequest.FromString(delivery.message.header)
    if delivery.message.payload:
        return "part"
    if request.HasField("begin") and request.begin.counts:
        return "backward" if request.begin.backward else "forward"
    return ""


async def train(
    lab: Lab,
    layout: Mapping[str, tuple[int, int]],
    prepare: Callable[[], object],
    *,
    keep_graphs: bool = True,
) -> Outcome:
    """A forward and a backward pass through nodes of ``layout``."""
    await lab.start_all(layout)
    served: dict[str, set[PeerId]] = {"forward": set(), "backward": set()}

    def note(delivery: Delivery) -> None:
        if (kind := kind_of(delivery)) in served:
            served[kind].add(delivery.target)

    lab.network.observers.append(note)
    prepare()
    async with lab.client() as swarm:
        batch = RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32), COUNTS)
        await asyncio.sleep(2.0)  # the client knows how far they are
        started = asyncio.get_running_loop().time()
        outputs = await batch.forward(random_states(0), keep_graphs=keep_graphs)
        gradients, _ = await batch.backward(random_states(1))
        took_s = asyncio.get_running_loop().time() - started
    return Outcome(outputs, gradients, batch.report.failovers, took_s, served)


def check(reference: Reference, outcome: Outcome) -> None:
    """Check that the outcome equals that of the whole model in one process, up to 1e-5 of its
    norm."""
    outputs, gradients = reference.train(random_states(0), COUNTS, random_states(1))
    assert_near(outcome.outputs, outputs)
    assert_near(outcome.gradients, gradients)


@pytest.mark.parametrize("keep_graphs", [True, False], ids=["graphs kept", "computed again"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_batch_gives_the_results_of_one_process(
    reference: Reference, layout: Mapping[str, tuple[int, int]], keep_graphs: bool
) -> None:
    outcome = simulate(reference, lambda lab: train(lab, layout, lambda: None, keep_graphs=keep_graphs))
    check(reference, outcome)
    assert outcome.failovers == 0


@pytest.mark.matrix
@pytest.mark.parametrize("keep_graphs", [True, False], ids=["graphs kept", "computed again"])
@pytest.mark.parametrize("fault", ["crash", "hang", "isolate"])
@pytest.mark.parametrize("moment", ["forward", "backward"])
@pytest.mark.parametrize("layout", [TWO_OF_B, ANOTHER_CUT], ids=["a replica", "hosts that are cut otherwise"])
def test_the_result_is_the_same_when_a_host_fails_in_the_middle(
    reference: Reference, layout: Mapping[str, tuple[int, int]], moment: str, fault: str, keep_graphs: bool
) -> None:
    hit: list[Delivery] = []

    async def scenario(lab: Lab) -> Outcome:
        candidates = {lab.peer_id(name) for name in layout if name.startswith("b")}

        def prepare() -> None:
            """The fault hits the first of the candidates that is asked for a second time, when the
            tensors arrive there."""
            asked: list[PeerId] = []

            def strike(delivery: Delivery) -> None:
                if hit or delivery.target not in candidates:
                    return
                if kind_of(delivery) == moment:
                    asked.append(delivery.target)
                elif kind_of(delivery) == "part" and asked.count(delivery.target) > 1:
                    hit.append(delivery)
                    getattr(lab.network, fault)(delivery.target)

            lab.network.observers.append(strike)

        return await train(lab, layout, prepare, keep_graphs=keep_graphs)

    outcome = simulate(reference, scenario)
    check(reference, outcome)
    assert hit
    assert outcome.failovers
    assert outcome.took_s < 10.0
    assert outcome.served["backward"] - {hit[0].target}


def test_backward_may_run_where_forward_did_not(reference: Reference) -> None:
    """If a host ends before the first backward, a replica repeats the forward of its blocks; no
    other work is repeated."""

    async def scenario(lab: Lab) -> tuple[Outcome, PeerId]:
        gone: list[PeerId] = []
        candidates = {lab.peer_id("b"), lab.peer_id("b2")}

        def stop(delivery: Delivery) -> None:
            if not gone and kind_of(delivery) == "backward" and delivery.target in candidates:
                gone.append(delivery.target)
                lab.network.crash(delivery.target)

        outcome = await train(lab, TWO_OF_B, lambda: lab.network.observers.append(stop))
        return outcome, gone[0]

    outcome, gone = simulate(reference, scenario)
    check(reference, outcome)
    assert gone in outcome.served["forward"]


def answer_of(values: torch.Tensor) -> Message:
    tensor, payload = encode_tensor(as_array(values))
    return Message(pb.PassReply(part=pb.Part(tensor=tensor)).SerializeToString(), payload)


LIES: dict[str, Callable[[torch.Tensor], Message | Refusal]] = {
    "NaN": lambda values: answer_of(values.fill_(float("nan"))),
    "too few positions": lambda values: answer_of(values[1:]),
    "another width": lambda values: answer_of(values[:, 1:]),
    "a shape without values": lambda values: Message(answer_of(values).header),
    "garbage": lambda _: Message(b"\xff\xff"),
    "nothing that we know": lambda _: Message(b""),
    **{
        f"a refusal for {refusal_pb2.Reason.Name(reason)}": lambda _, reason=reason: Refusal(reason, "")
        for reason in (refusal_pb2.REASON_INTERNAL, *CLIENT_FAULTS)
    },
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_host_that_sends_invalid_results_is_replaced(
    reference: Reference, lie: Callable[[torch.Tensor], Message | Refusal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two hosts always lies. No client asks it again, not even a client that waited for
    it."""
    honest = MemoryStream.send
    lies: list[Message] = []

    async def send(self: MemoryStream, message: Message) -> None:
        if self._transport.peer_id == peer("b").peer_id and message.payload:
            shape = pb.PassReply.FromString(message.header).part.tensor.shape
            message = lie(torch.ones(list(shape)))
            lies.append(message)
        await honest(self, message)

    monkeypatch.setattr(MemoryStream, "send", send)

    async def scenario(lab: Lab) -> Outcome:
        # The liar is the nearer host, so clients prefer it.
        lab.network.set_link(lab.peer_id("client"), lab.peer_id("b2"), LinkProfile(delay_s=0.2))
        return await train(lab, {"b": (0, 6), "b2": (0, 6)}, lambda: None)

    outcome = simulate(reference, scenario)
    check(reference, outcome)
    assert outcome.failovers == len(lies)
    assert 1 <= len(lies) <= PASSES_PER_HOST


def test_a_host_that_sends_heartbeats_but_no_results_is_replaced(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(lab: Lab) -> Outcome:
        def prepare() -> None:
            engine = lab.nodes["b"].engine
            assert engine is not None
            monkeypatch.setattr(engine, "compute_pass", never)

        return await train(lab, TWO_OF_B, prepare)

    async def never(*_: object, **__: object) -> torch.Tensor:
        return await asyncio.get_running_loop().create_future()

    outcome = simulate(reference, scenario, limit_s=1000.0)
    check(reference, outcome)
    assert outcome.failovers


def test_every_hop_has_work_at_the_same_time(reference: Reference) -> None:
    """While a microbatch is at the second hop the next one is at the first."""
    busy: list[set[str]] = []

    async def scenario(lab: Lab) -> None:
        names = {lab.peer_id(name): name for name in "abc"}
        here: dict[str, int] = dict.fromkeys("abc", 0)

        def watch(delivery: Delivery) -> None:
            if delivery.protocol.id != PASS.id:
                return
            if kind_of(delivery) == "forward":
                here[names[delivery.target]] += 1
            elif delivery.message.payload and delivery.source in names:
                here[names[delivery.source]] -= 1
            busy.append({name for name, passes in here.items() if passes})
            assert max(here.values()) <= PASSES_PER_HOST

        await train(lab, LAYOUTS["3 hops"], lambda: lab.network.observers.append(watch))

    simulate(reference, scenario)
    assert {"a", "b", "c"} in busy


def test_blocks_without_a_host_are_named(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        with pytest.raises(NoRoute, match="4:6"):
            await train(lab, {"a": (0, 2), "b": (2, 4)}, lambda: None)

    simulate(reference, scenario)


def test_hosts_out_of_resources_are_named_and_sent_nothing(reference: Reference) -> None:
    sent: list[Delivery] = []

    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6), limits=ClientLimits(passes=0)))
        lab.network.observers.append(
            lambda delivery: sent.append(delivery) if kind_of(delivery) == "part" else None
        )
        async with lab.client() as swarm:
            batch = RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32), COUNTS)
            with pytest.raises(OutOfResources, match="no room"):
                await batch.forward(random_states(0))

    simulate(reference, scenario)
    assert not sent


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_client_sends_only_finite_values(reference: Reference, value: float) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        async with lab.client() as swarm:
            batch = RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32), COUNTS)
            await batch.forward(random_states(0))
            gradients = random_states(1)
            gradients[17, 3] = value
            with pytest.raises(ConfigError, match="finite") as caught:
                await batch.backward(gradients)
            assert "learning rate" in caught.value.hint
            assert batch.report.failovers == 0

    simulate(reference, scenario)


@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ((128,) * 8, [(128, 128)] * 4),
        ((10, 10, 10), [(10, 10, 10)]),
        ((100, 150, 20, 500, 3), [(100, 150), (20,), (500,), (3,)]),
        ((512,) * 32, [(512, 512)] * 16),
    ],
)
def test_microbatches_are_whole_sequences(counts: tuple[int, ...], parts: list[Any]) -> None:
    assert split(counts) == parts


def test_a_sequence_too_long_for_every_host_is_refused_by_the_client() -> None:
    with pytest.raises(OutOfResources, match=str(MAX_POSITIONS + 1)):
        split([5, MAX_POSITIONS + 1])
