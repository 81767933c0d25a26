"""One pass on one host, for a client that trains.

A pass sends whole sequences through some blocks, forward or backward.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.torch_layers.autograd_graphs import AutogradGraph, GraphKey
from swarmnet_node.hosting.slots import IDLE_S, Slot
from swarmnet_protocols.arrays import Array, as_array
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.session.arrays import are_finite, rounded
from swarmnet_protocols.session.passes import (
    MAX_POSITIONS,
    check_counts,
    pack_tensors,
    receive_tensor,
    split_tensor,
)
from swarmnet_protocols.session.wire_tensors import wire_type
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

if TYPE_CHECKING:
    import torch

    from swarmnet_node.engine.torch_layers.adapters import StageAdapter

GRAPH_ID_BYTES = 16

PassStream = TypedStream[pb.PassReply, pb.PassRequest]

T = TypeVar("T")


class HostedPass:
    """An admitted pass. Passes do not depend on earlier passes.

    The autograd graph of a forward pass may be kept. It saves the backward pass a second forward.
    """

    def __init__(
        self,
        wanted: pb.Begin,
        stage: Stage,
        engine: Engine,
        stream: PassStream,
        timing: Timing,
        adapter: "StageAdapter | None" = None,
    ) -> None:
        """Raises ``ProtocolViolation`` for invalid lengths.

        Raises ``Refusal`` for too many positions, or if the named graph is not here.
        """
        check_counts(wanted.counts)
        self._counts = tuple(wanted.counts)
        self._positions = sum(self._counts)
        prefix = adapter.prefix_positions if adapter else 0
        attended = self._positions + prefix * len(self._counts)
        if attended > MAX_POSITIONS:
            raise Refusal(refusal_pb2.REASON_TOO_LONG, f"{attended} positions, {MAX_POSITIONS} is the most")
        self._adapter = adapter
        self._backward = wanted.backward
        self._wire = wire_type(wanted.wire)
        self._stage = stage
        self._engine = engine
        self._stream = stream
        self.slot = Slot.of(stream.stream, IDLE_S)
        self._timing = timing
        self._graph = graph_key(wanted, stream.peer)
        if self._backward and self._graph is not None and self._graph not in engine.graph_cache:
            raise _graph_gone()

    async def run(self) -> None:
        """Receive the tensors, compute when sessions leave time for it, and answer.

        Send heartbeats meanwhile. Raises:

        - ``StreamEnded`` when the client is gone, ``DeadlineExceeded`` when it is too slow.
        - ``ProtocolViolation`` for tensors that differ from their announcement.
        - ``Refusal`` if the graph or the slot has been evicted, or the answer contains infinity or
          NaN.
        - ``OutOfResources`` if there is no memory for the computation.
        """
        await race(
            self._answer(),
            self._stream.send_heartbeats(
                self._timing.heartbeat_s, lambda: pb.PassReply(heartbeat=pb.Heartbeat())
            ),
            self.slot.eviction(),
        )

    async def _answer(self) -> None:
        for tensor in await (self._gradients() if self._backward else self._outputs()):
            for part, payload in split_tensor(tensor):
                await self._stream.send(pb.PassReply(part=part), payload)
                self.slot.moved(len(payload))

    async def _outputs(self) -> list[Array]:
        arguments = await self._receive(), self._counts, self._adapter
        if self._graph is None:
            return [await self._compute(lambda: self._sent(self._stage.run_sequences(*arguments)))]

        def compute() -> tuple[Array, AutogradGraph]:
            outputs, graph = self._stage.record_sequences(*arguments)
            return self._sent(outputs), graph

        outputs, graph = await self._compute(compute)
        self._engine.keep_graph(self._graph, graph, for_s=self._timing.graph_s)
        return [outputs]

    async def _gradients(self) -> list[Array]:
        """Return the gradients of the inputs and, with an adapter, of all its values."""
        if self._graph is not None:
            grad_outputs = await self._receive()
            return await self._start(lambda: partial(self._differentiate, self._take_graph(), grad_outputs))
        inputs, grad_outputs = await self._receive(), await self._receive()

        def compute() -> list[Array]:
            _, graph = self._stage.record_sequences(inputs, self._counts, self._adapter)
            return self._differentiate(graph, grad_outputs)

        return await self._compute(compute)

    def _differentiate(self, graph: AutogradGraph, grad_outputs: Array) -> list[Array]:
        gradients, of_adapter = self._stage.gradients(graph, grad_outputs)
        arrays = {name: as_array(values) for name, values in of_adapter.items()}
        return [self._sent(gradients), *([finite(pack_tensors(arrays))] if arrays else [])]

    def _sent(self, values: "Array | torch.Tensor") -> Array:
        return finite(rounded(as_array(values), self._wire))

    async def _compute(self, work: Callable[[], T]) -> T:
        return await self._start(lambda: work)

    async def _start(self, start: Callable[[], Callable[[], T]]) -> T:
        """Call ``start`` when sessions leave time for the pass, and compute what it returns."""
        self.slot.at_work = True
        computed = await self._engine.compute_pass(
            start, self._positions, blocks=self._stage.blocks, max_delay_s=self._timing.pass_wait_s
        )
        self.slot.at_work = False
        self.slot.worked()
        return computed

    def _take_graph(self) -> AutogradGraph:
        graph = self._engine.graph_cache.pop(self._graph) if self._graph is not None else None
        if graph is None:
            raise _graph_gone()
        return graph

    async def _receive(self) -> Array:
        return await receive_tensor(
            self._next_part, positions=self._positions, hidden_size=self._stage.hidden_size
        )

    async def _next_part(self) -> tuple[pb.Part, Buffer]:
        request, payload = await self._stream.receive()
        if not request.HasField("part"):
            raise ProtocolViolation("a second Begin in one pass")
        self.slot.moved(len(payload))
        return request.part, payload


def graph_key(wanted: pb.Begin, client: PeerId) -> GraphKey | None:
    """Return the key of the graph that a pass keeps or uses, or None if the pass names no graph.

    Raises ``ProtocolViolation`` for an id of the wrong size.
    """
    if not wanted.graph:
        return None
    if len(wanted.graph) != GRAPH_ID_BYTES:
        raise ProtocolViolation("a graph's id is 16 bytes")
    span = wanted.span.start, wanted.span.end
    return GraphKey(client, wanted.graph, span, tuple(wanted.counts), wanted.adapter)


def finite(values: Array) -> Array:
    """Return ``values``. Raises ``Refusal`` for infinity or NaN.

    The next receiver could not tell which host caused them.
    """
    if not are_finite(values):
        raise Refusal(refusal_pb2.REASON_NOT_FINITE, "the outputs of these blocks are not finite")
    return values


def _graph_gone() -> Refusal:
    return Refusal(
        refusal_pb2.REASON_GRAPH_GONE, "the autograd graph of the forward pass is not here: send its inputs"
    )
