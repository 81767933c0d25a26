"""Passes with a client's adapter: loss and gradients equal PEFT's, whichever hosts compute or fail;
other clients are not affected."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from swarmnet_client.chain.adapter_upload import upload_adapter
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.chain.passes import RemoteBatch, split
from swarmnet_protocols.arrays import as_array
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.net import Message, PeerId
from swarmnet_protocols.net.protocol_ids import ADAPTER, PASS
from swarmnet_protocols.session.adapters import Adapter
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.passes import MAX_POSITIONS, pack_tensors, split_tensor
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.attacks.raw_client import Stranger
from tests.support.attacks.refusals import refusal
from tests.support.models.pass_oracle import LocalPass, assert_same, lora_pass, prefix_pass
from tests.support.network.memory_network import Delivery, MemoryStream
from tests.support.swarm.swarm_lab import Lab, Reference, peer, simulate

# PEFT 0.21 uses a name that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

HIDDEN = 32
COUNTS = (100, 128, 7, 60, 90, 128)
"""Lengths of sequences: three microbatches."""
PREFIX = 5
LAYOUTS = {
    "1 hop": {"a": (0, 6)},
    "2 hops": {"a": (0, 3), "b": (3, 6)},
    "3 hops": {"a": (0, 2), "b": (2, 4), "c": (4, 6)},
}
ANOTHER_CUT = {"a": (0, 2), "b": (2, 5), "b2": (2, 3), "b3": (3, 5), "c": (5, 6)}


def states(seed: int, positions: int = sum(COUNTS)) -> torch.Tensor:
    return torch.randn(positions, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=["lora", "prefix"])
def local(request: pytest.FixtureRequest, reference: Reference) -> LocalPass:
    plain = reference.local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    plain.requires_grad_(False)
    if request.param == "lora":
        return lora_pass(plain, ("q_proj", "v_proj", "down_proj"), states(0), COUNTS, states(1))
    return prefix_pass(plain, PREFIX, states(0), COUNTS, states(1))


Prepare = Callable[[Lab], object]


async def train(
    lab: Lab,
    layout: dict[str, tuple[int, int]],
    local: LocalPass,
    prepare: Prepare,
    *,
    keep_graphs: bool = True,
) -> int:
    """Run a forward and a backward through nodes of ``layout`` and check the results. Returns the
    number of failures of hosts."""
    await lab.start_all(layout)
    prepare(lab)
    spec = ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32, adapter=Adapter(local.tensors))
    async with lab.client() as swarm:
        batch = RemoteBatch(swarm, spec, COUNTS)
        outputs = await batch.forward(states(0), keep_graphs=keep_graphs)
        gradients, own = await batch.backward(states(1))
    assert_same((outputs, gradients), own, local)
    return batch.report.failovers


@pytest.mark.matrix
@pytest.mark.parametrize("keep_graphs", [True, False], ids=["graphs kept", "computed again"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_batch_with_an_adapter_gives_the_results_of_one_process(
    reference: Reference, local: LocalPass, layout: dict[str, tuple[int, int]], keep_graphs: bool
) -> None:
    brought: list[Delivery] = []

    def watch(lab: Lab) -> None:
        def note(delivery: Delivery) -> None:
            if delivery.protocol.id == ADAPTER.id and delivery.message.payload:
                brought.append(delivery)

        lab.network.observers.append(note)

    failovers = simulate(reference, lambda lab: train(lab, layout, local, watch, keep_graphs=keep_graphs))
    assert failovers == 0
    assert len(brought) == len(layout)


@pytest.mark.matrix
@pytest.mark.parametrize("keep_graphs", [True, False], ids=["graphs kept", "computed again"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_gradients_are_the_same_when_a_host_is_killed_midway(
    reference: Reference, local: LocalPass, backward: bool, keep_graphs: bool
) -> None:
    """The second pass that one of the hosts in the middle is asked for has its tensors when it
    dies. There are two ways through the middle and three microbatches, so some host is asked
    twice."""
    killed: list[Delivery] = []

    def prepare(lab: Lab) -> None:
        asked: list[str] = []
        candidates = {lab.peer_id(name) for name in ANOTHER_CUT if name.startswith("b")}

        def strike(delivery: Delivery) -> None:
            if killed or delivery.protocol.id != PASS.id or delivery.target not in candidates:
                return
            request = pb.PassRequest.FromString(delivery.message.header)
            if request.HasField("begin") and request.begin.backward == backward:
                asked.append(delivery.target)
            elif request.HasField("part") and asked.count(delivery.target) > 1:
                killed.append(delivery)
                lab.network.crash(delivery.target)

        lab.network.observers.append(strike)

    failovers = simulate(
        reference, lambda lab: train(lab, ANOTHER_CUT, local, prepare, keep_graphs=keep_graphs)
    )
    assert killed
    assert failovers


@pytest.mark.parametrize("keep_graphs", [True, False], ids=["graphs kept", "computed again"])
def test_the_client_uploads_an_adapter_again_to_a_host_that_lost_it(
    reference: Reference, local: LocalPass, keep_graphs: bool
) -> None:
    refused: list[int] = []

    def prepare(lab: Lab) -> None:
        host = lab.nodes["a"].host
        assert host is not None
        store = host.adapters

        def note(delivery: Delivery) -> None:
            if delivery.protocol.id != PASS.id:
                return
            if delivery.target == lab.peer_id("a") and not refused:
                request = pb.PassRequest.FromString(delivery.message.header)
                if request.begin.backward:
                    store._kept.clear()

        lab.network.observers.append(note)
        lab.network.refusal_observers.append(lambda _, refusal: refused.append(refusal.reason))

    layout = LAYOUTS["2 hops"]
    assert not simulate(reference, lambda lab: train(lab, layout, local, prepare, keep_graphs=keep_graphs))
    assert refusal_pb2.REASON_UNKNOWN_ADAPTER in refused


@pytest.mark.parametrize(
    "lie",
    [
        lambda column: column.fill_(float("nan")),
        lambda column: column[1:],
        lambda column: column.reshape(-1, 2),
    ],
    ids=["NaN", "too few", "another shape"],
)
def test_a_host_with_invalid_gradients_of_an_adapter_is_replaced(
    reference: Reference,
    local: LocalPass,
    lie: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, lies = MemoryStream.send, []
    liars: list[PeerId] = []

    async def send(self: MemoryStream, message: Message) -> None:
        sender = self._transport.peer_id
        if sender in {peer("b").peer_id, peer("b2").peer_id} and message.payload:
            shape = list(pb.PassReply.FromString(message.header).part.tensor.shape)
            # the one that the client uses first
            if shape[1:] == [1] and sender in (liars or [sender]):
                liars.append(sender)
                ((part, payload),) = split_tensor(as_array(lie(torch.ones(shape))))
                message = Message(pb.PassReply(part=part).SerializeToString(), payload)
                lies.append(message)
        await honest(self, message)

    monkeypatch.setattr(MemoryStream, "send", send)
    layout = {"a": (0, 3), "b": (3, 6), "b2": (3, 6)}
    failovers = simulate(reference, lambda lab: train(lab, layout, local, lambda lab: None))
    assert failovers == len(lies) > 0


def test_gradients_are_summed_in_the_order_of_the_batch(reference: Reference, local: LocalPass) -> None:
    """Hosts that answer in another order give the same bits."""

    async def scenario(lab: Lab) -> dict[str, torch.Tensor]:
        for name in ("a", "b"):
            await lab.start(name, lab.hosting((0, 6)))
        spec = ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32, adapter=Adapter(local.tensors))
        async with lab.client() as swarm:
            batch = RemoteBatch(swarm, spec, COUNTS)
            await batch.forward(states(0))
            return (await batch.backward(states(1)))[1]

    first, second = (simulate(reference, scenario, seed=seed) for seed in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- strangers ---------------------------------------------------------------------------------


ZEROS = torch.zeros(8, HIDDEN)


def test_a_pass_names_an_adapter_of_its_client_for_its_blocks(reference: Reference, local: LocalPass) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        adapter = Adapter(local.tensors)
        async with lab.client() as swarm, lab.network.transport(lab.peer_id("other")) as other:
            await swarm.refresh()
            (hop,) = swarm.route((0, 6))
            whole = await upload_adapter(swarm, hop, adapter)
            half = await upload_adapter(swarm, replace(hop, end=3), adapter)
            ours, theirs = Stranger(lab, swarm.transport), Stranger(lab, other)
            assert (await ours.ask_pass(ZEROS, adapter=whole)).HasField("part")
            for asking, reason in (
                (theirs.ask_pass(ZEROS, adapter=whole), refusal_pb2.REASON_UNKNOWN_ADAPTER),
                (ours.ask_pass(ZEROS, adapter=bytes(32)), refusal_pb2.REASON_UNKNOWN_ADAPTER),
                (ours.ask_pass(ZEROS, adapter=b"short"), refusal_pb2.REASON_PROTOCOL),
                (
                    ours.ask_pass(ZEROS, adapter=half, span=pb.Span(start=3, end=6)),
                    refusal_pb2.REASON_PROTOCOL,
                ),
                (
                    ours.ask_pass(ZEROS, adapter=whole, span=pb.Span(start=0, end=3)),
                    refusal_pb2.REASON_PROTOCOL,
                ),
            ):
                assert (await refusal(asking)).reason == reason
            common: dict[str, Any] = {"span": pb.Span(start=0, end=3), "graph": bytes(16)}
            first = await ours.ask_pass(ZEROS, adapter=half, **common)
            second = await refusal(ours.ask_pass(ZEROS, backward=True, **common))
            assert first.HasField("part")  # the graph it left is of a pass with the adapter
            assert second.reason == refusal_pb2.REASON_GRAPH_GONE

    simulate(reference, scenario)


def test_positions_of_prefixes_count(reference: Reference) -> None:
    """256 sequences of one token would attend to 256 prefixes."""
    positions = 300
    tensors = {
        f"{block}.prefix.{kind}": torch.zeros(2, positions, 8)
        for block in range(6)
        for kind in ("key", "value")
    }

    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        async with lab.client() as swarm:
            await swarm.refresh()
            (hop,) = swarm.route((0, 6))
            name = await upload_adapter(swarm, hop, Adapter(tensors))
            refused = await refusal(
                Stranger(lab, swarm.transport).ask_pass(ZEROS, adapter=name, counts=[2] * 4)
            )
            assert refused.reason == refusal_pb2.REASON_TOO_LONG

    simulate(reference, scenario)
    assert split([2] * 4, positions) == [(2, 2, 2), (2,)]
    with pytest.raises(OutOfResources, match=f"of {MAX_POSITIONS - positions + 1} positions"):
        split([MAX_POSITIONS - positions + 1], positions)


def test_flattened_gradients_are_in_the_order_of_the_names() -> None:
    column = pack_tensors({"10.b": np.array([3.0, 4.0]), "1.a": np.array([[1.0], [2.0]])})
    assert column.tolist() == [[1.0], [2.0], [3.0], [4.0]]
