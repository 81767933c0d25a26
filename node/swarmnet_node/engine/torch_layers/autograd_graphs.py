"""Autograd graphs that forward passes keep for their backward passes.

Graphs are only a cache: without its graph, a backward pass repeats the forward from its inputs.

1. **Kept.** A client's forward pass may name its graph. The host keeps the graph for some time, in
   memory that KV caches do not use.
2. **Taken.** The backward pass uses the graph once.
3. **Dropped.** The time is over, or KV caches need the memory.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import Reservation, ResourceManager

if TYPE_CHECKING:
    import torch
    from torch.autograd.graph import GradientEdge


@dataclass(frozen=True)
class AutogradGraph:
    """One forward as autograd recorded it.

    It leads from ``inputs`` and the adapter's tensors ``adapter`` to ``outputs``.
    """

    inputs: "torch.Tensor"
    adapter: "Mapping[str, torch.Tensor]"
    outputs: "GradientEdge"
    nbytes: int
    """Bytes of all tensors that the graph keeps alive, without weights."""

    def gradients(self, grad_outputs: "torch.Tensor") -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        """Return the gradients at the inputs and at the adapter's tensors. Uses the graph up.

        ``grad_outputs``: the gradients at the outputs.
        """
        import torch

        gradients, *adapter = torch.autograd.grad(
            self.outputs, (self.inputs, *self.adapter.values()), grad_outputs
        )
        return gradients, dict(zip(self.adapter, adapter, strict=True))


def record_forward(
    forward: "Callable[[torch.Tensor], torch.Tensor]",
    inputs: "torch.Tensor",
    adapter: "Mapping[str, torch.Tensor]",
    weights: "Iterable[torch.Tensor]",
) -> "tuple[torch.Tensor, AutogradGraph]":
    """Call ``forward`` on ``inputs``. Return its outputs and its graph.

    ``inputs`` and ``adapter`` are leaves that require gradients. Memory of ``weights`` does not
    count as the graph's.
    """
    import torch
    from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

    saved: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # A tensor refers to the graph that saves it, so both would keep each other alive.
        detached = tensor.detach()
        saved.append(weakref.ref(detached))
        return detached

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = forward(inputs)
    edge = get_gradient_edge(outputs)
    outputs = outputs.detach()
    # Saved tensors that the outputs do not depend on have been freed by now.
    alive = [tensor for reference in saved if (tensor := reference()) is not None]
    storages = [tensor.untyped_storage() for tensor in (inputs, *adapter.values(), *alive)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for weight in weights:
        sizes.pop(weight.untyped_storage().data_ptr(), None)
    return outputs, AutogradGraph(inputs, adapter, edge, sum(sizes.values()))


class GraphKey(NamedTuple):
    """Identifies a graph by its client and all parameters of the pass.

    A backward pass with any other parameter does not find the graph.
    """

    owner: PeerId
    id: bytes
    span: tuple[int, int]
    counts: tuple[int, ...]
    adapter: bytes


class GraphCache:
    """The graphs that one host keeps, oldest first. Their bytes count in their owners' scopes."""

    def __init__(self, resources: ResourceManager) -> None:
        self._resources = resources
        self._entries: dict[GraphKey, tuple[AutogradGraph, Reservation, asyncio.TimerHandle]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all graphs."""
        return self._resources.system.used[Resource.GRAPHS]

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._entries

    def put(self, key: GraphKey, graph: AutogradGraph, *, max_bytes: int, for_s: float) -> None:
        """Keep a graph for ``for_s`` seconds, unless it exceeds its owner's limit or ``max_bytes``.

        First drop the owner's oldest graphs until its limit has room. Then drop the oldest of all
        until all graphs take at most ``max_bytes``.
        """
        self.pop(key)
        loop = asyncio.get_running_loop()
        scope = self._resources.peer(key.owner, loop.time())
        if graph.nbytes > max_bytes or not scope.can_ever_reserve(Resource.GRAPHS, graph.nbytes):
            return
        self._drop(graph.nbytes - scope.available(Resource.GRAPHS), key.owner)
        self.shrink(max_bytes - graph.nbytes)
        reservation = scope.reserve(Resource.GRAPHS, graph.nbytes)
        self._entries[key] = graph, reservation, loop.call_later(for_s, self.pop, key)

    def pop(self, key: GraphKey) -> AutogradGraph | None:
        """Remove a graph and return it. Return None if it is not here."""
        if key not in self._entries:
            return None
        graph, reservation, timer = self._entries.pop(key)
        timer.cancel()
        reservation.release()
        return graph

    def shrink(self, max_bytes: int) -> None:
        """Drop the oldest graphs until the rest take at most ``max_bytes``."""
        self._drop(self.nbytes - max_bytes)

    def _drop(self, excess_bytes: float, owner: PeerId | None = None) -> None:
        """Drop the oldest graphs, of one owner or of all, until they add up to ``excess_bytes``."""
        for key in [key for key in self._entries if owner in (None, key.owner)]:
            if excess_bytes <= 0:
                return
            if graph := self.pop(key):
                excess_bytes -= graph.nbytes
