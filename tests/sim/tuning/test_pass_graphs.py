"""Hosts keep autograd graphs for a while, within limits; gradients are the same with and without
them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.chain.passes import RemoteBatch
from swarmnet_node.engine import engine
from swarmnet_node.engine.engine import GRAPH_CLIENT_SHARE, Engine
from swarmnet_protocols.net.protocol_ids import PASS
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import defence, replacing
from tests.support.attacks.raw_client import Stranger
from tests.support.attacks.refusals import refusal
from tests.support.models.rounding import assert_near
from tests.support.network.memory_network import Delivery
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

HIDDEN = 32
COUNTS = (256,) * 4
SPANS = {"a": (0, 3), "b": (3, 6)}
ONE_GRAPH = b"sixteen bytes..."


def states(seed: int, positions: int = sum(COUNTS)) -> torch.Tensor:
    return torch.randn(positions, HIDDEN, generator=torch.Generator().manual_seed(seed))


def engine_of(lab: Lab, name: str) -> Engine:
    engine = lab.nodes[name].engine
    assert engine is not None
    return engine


def buffered_bytes(lab: Lab) -> dict[str, int]:
    return {name: engine_of(lab, name).graph_cache.nbytes for name in lab.nodes}


class Watch:
    """The messages of passes between clients and hosts."""

    def __init__(self, lab: Lab) -> None:
        self.sent_bytes = 0
        self.refusals: list[int] = []
        self.backwards: list[bool] = []
        """For each backward pass, whether it named a graph."""
        self._hosts = {lab.peer_id(name) for name in lab.nodes}
        lab.network.observers.append(self._note)
        lab.network.refusal_observers.append(lambda _, refusal: self.refusals.append(refusal.reason))

    def _note(self, delivery: Delivery) -> None:
        if delivery.protocol.id != PASS.id:
            return
        if delivery.source in self._hosts:
            return
        self.sent_bytes += len(delivery.message.payload)
        request = pb.PassRequest.FromString(delivery.message.header)
        if request.HasField("begin") and request.begin.backward:
            self.backwards.append(bool(request.begin.graph))


Between = Callable[[Lab, RemoteBatch], Awaitable[None]]


async def nothing(lab: Lab, batch: RemoteBatch) -> None:
    pass


def train(
    reference: Reference, between: Between = nothing, *, keep_graphs: bool = True, **hosting: Any
) -> Watch:
    """Run a forward, ``between``, and a backward: the results equal those of one process, nothing
    fails, and nothing is left on hosts."""

    async def scenario(lab: Lab) -> Watch:
        await lab.start_all(SPANS, **hosting)
        watch = Watch(lab)
        expected = reference.train(states(0), COUNTS, states(1))
        async with lab.client() as swarm:
            batch = RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32), COUNTS)
            outputs = await batch.forward(states(0), keep_graphs=keep_graphs)
            await between(lab, batch)
            gradients, _ = await batch.backward(states(1))
            assert batch.report.failovers == 0
        for found, wanted in zip((outputs, gradients), expected, strict=True):
            assert_near(found, wanted)
        assert not any(buffered_bytes(lab).values())
        return watch

    return simulate(reference, scenario, limit_s=1000.0)


def test_a_backward_pass_sends_gradients_only(reference: Reference) -> None:
    async def all_kept(lab: Lab, batch: RemoteBatch) -> None:
        assert all(buffered_bytes(lab).values())

    kept, again = train(reference, all_kept), train(reference, keep_graphs=False)
    assert all(kept.backwards)
    assert not any(again.backwards)
    assert not kept.refusals
    assert 3 * kept.sent_bytes == 2 * again.sent_bytes


def test_a_second_backward_computes_the_forward_again(reference: Reference) -> None:
    async def backward(lab: Lab, batch: RemoteBatch) -> None:
        (found, _), (_, wanted) = (
            await batch.backward(states(2)),
            reference.train(states(0), COUNTS, states(2)),
        )
        assert_near(found, wanted)

    watch = train(reference, backward)
    assert watch.backwards.count(True) == watch.backwards.count(False) == len(COUNTS) * len(SPANS)
    assert not watch.refusals


def test_each_missing_graph_costs_one_refusal(reference: Reference) -> None:
    async def drop(lab: Lab, batch: RemoteBatch) -> None:
        engine_of(lab, "a").graph_cache.shrink(0)

    watch = train(reference, drop)
    assert watch.refusals == [refusal_pb2.REASON_GRAPH_GONE] * len(COUNTS)
    assert watch.backwards.count(False) == len(COUNTS)
    # The inputs of two hosts, the gradients of two, and the inputs of one again: a client that is
    # refused has sent nothing.
    assert watch.sent_bytes == 5 * states(0).nbytes


def test_graphs_are_not_kept_for_long(reference: Reference) -> None:
    async def wait(lab: Lab, batch: RemoteBatch) -> None:
        await asyncio.sleep(lab.timing.graph_s - 1)
        assert all(buffered_bytes(lab).values())
        await asyncio.sleep(2)
        assert not any(buffered_bytes(lab).values())

    watch = train(reference, wait)
    assert watch.refusals == [refusal_pb2.REASON_GRAPH_GONE] * len(COUNTS) * len(SPANS)


@defence("the memory for graphs of one client is limited", off=replacing(engine, "GRAPH_CLIENT_SHARE", 1))
def test_graphs_of_one_client_take_at_most_its_share(reference: Reference) -> None:
    """This client has room for two of the four graphs."""
    _, graph = reference.stage(0, 3).record_sequences(states(0, COUNTS[0]), COUNTS[:1])
    room = GRAPH_CLIENT_SHARE * (2 * graph.nbytes + 1)

    async def look(lab: Lab, batch: RemoteBatch) -> None:
        assert buffered_bytes(lab) == {"a": 2 * graph.nbytes, "b": 2 * graph.nbytes}

    watch = train(reference, look, max_cache_bytes=room)
    assert watch.refusals == [refusal_pb2.REASON_GRAPH_GONE] * 4


def test_a_backward_whose_graph_was_dropped_meanwhile_is_refused(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients have been sent when a session takes the room."""

    async def prepare(lab: Lab, batch: RemoteBatch) -> None:
        engine = engine_of(lab, "b")
        honest, behind = engine.compute_pass, []

        async def slow(start: Any, positions: int, **options: Any) -> Any:
            behind.append(start)
            if len(behind) == 1:
                engine.graph_cache.shrink(0)
            return await honest(start, positions, **options)

        monkeypatch.setattr(engine, "compute_pass", slow)

    watch = train(reference, prepare)
    assert refusal_pb2.REASON_GRAPH_GONE in watch.refusals


# ---- strangers ---------------------------------------------------------------------------------


def ask(client: Stranger, values: torch.Tensor, **changes: Any) -> Awaitable[pb.PassReply]:
    """The answer to a pass of a host of three blocks that keeps its graph."""
    wanted = {"span": pb.Span(start=0, end=3), "counts": [8], "graph": ONE_GRAPH}
    return client.ask_pass(values, **wanted | changes)


def with_clients(reference: Reference, talk: Callable[[Lab, Stranger, Stranger], Awaitable[None]]) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 3)))
        async with (
            lab.network.transport(lab.peer_id("one")) as one,
            lab.network.transport(lab.peer_id("other")) as other,
        ):
            await talk(lab, Stranger(lab, one), Stranger(lab, other))

    simulate(reference, scenario)


def test_another_client_neither_uses_nor_replaces_a_graph(reference: Reference) -> None:
    async def talk(lab: Lab, one: Stranger, other: Stranger) -> None:
        assert (await ask(one, states(0, 8))).HasField("part")
        stolen = await refusal(ask(other, states(1, 8), backward=True))
        assert stolen.reason == refusal_pb2.REASON_GRAPH_GONE
        assert (await ask(other, states(3, 8))).HasField("part")
        assert (await ask(one, states(1, 8), backward=True)).HasField("part")
        assert (await refusal(ask(one, states(1, 8), backward=True))).reason == refusal_pb2.REASON_GRAPH_GONE

    with_clients(reference, talk)


@pytest.mark.parametrize("other", [{"counts": [4, 4]}, {"counts": [9]}, {"span": pb.Span(start=0, end=2)}])
def test_a_graph_is_of_one_pass(reference: Reference, other: dict[str, Any]) -> None:
    async def talk(lab: Lab, one: Stranger, _: Stranger) -> None:
        assert (await ask(one, states(0, 8))).HasField("part")
        refused = await refusal(ask(one, states(1, sum(other.get("counts", [8]))), backward=True, **other))
        assert refused.reason == refusal_pb2.REASON_GRAPH_GONE

    with_clients(reference, talk)


def test_the_id_of_a_graph_has_a_fixed_size(reference: Reference) -> None:
    async def talk(lab: Lab, one: Stranger, _: Stranger) -> None:
        refused = await refusal(ask(one, states(0, 8), graph=b"short"))
        assert refused.reason == refusal_pb2.REASON_PROTOCOL
        assert not any(buffered_bytes(lab).values())

    with_clients(reference, talk)


def test_an_id_that_is_used_again_names_the_newer_pass(reference: Reference) -> None:
    async def talk(lab: Lab, one: Stranger, _: Stranger) -> None:
        sizes = []
        for _ in range(2):
            assert (await ask(one, states(0, 8))).HasField("part")
            sizes.append(buffered_bytes(lab)["a"])
        assert sizes[0] == sizes[1]

    with_clients(reference, talk)
