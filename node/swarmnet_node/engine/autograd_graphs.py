"""What forward passes leave for their backward passes. A cache: without it a backward computes the forward again."""

import asyncio
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.resources import Reservation, Resource, ResourceManager


@dataclass(frozen=True)
class AutogradGraph:
    """One forward, as autograd remembers it. ``leaf`` went in, ``own`` are the adapter's tensors, ``edge`` came out.

    ``nbytes`` are all that it keeps alive.
    """

    leaf: torch.Tensor
    own: Mapping[str, torch.Tensor]
    edge: GradientEdge
    nbytes: int

    def gradients(self, grad_outputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What ``grad_outputs`` come to at ``leaf`` and at ``own``. Once: it consumes the graph."""
        gradients, *own = torch.autograd.grad(self.edge, (self.leaf, *self.own.values()), grad_outputs)
        return gradients, dict(zip(self.own, own, strict=True))


def record_forward(
    forward: Callable[[torch.Tensor], torch.Tensor],
    leaf: torch.Tensor,
    own: Mapping[str, torch.Tensor],
    weights: Iterable[torch.Tensor],
) -> tuple[torch.Tensor, AutogradGraph]:
    """Outputs of ``forward`` at ``leaf``, and the graph of it, in which ``own`` take part. Memory of ``weights`` is not its own."""
    saved: list[weakref.ref[torch.Tensor]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach()  # the tensor itself would hold the graph that holds it
        saved.append(weakref.ref(detached))
        return detached

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = forward(leaf)
    edge = get_gradient_edge(outputs)
    outputs = outputs.detach()
    # What was saved for values that did not lead to the outputs is gone by now.
    alive = [tensor for reference in saved if (tensor := reference()) is not None]
    storages = [tensor.untyped_storage() for tensor in (leaf, *own.values(), *alive)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for weight in weights:
        sizes.pop(weight.untyped_storage().data_ptr(), None)
    return outputs, AutogradGraph(leaf, own, edge, sum(sizes.values()))


class GraphKey(NamedTuple):
    """Whose graph, of which pass. Whoever does not say all of it right does not find it."""

    owner: PeerId
    id: bytes
    span: tuple[int, int]
    counts: tuple[int, ...]
    adapter: bytes


class GraphCache:
    """The graphs that one host keeps, oldest first, each held in the scope of its owner."""

    def __init__(self, resources: ResourceManager) -> None:
        self._resources = resources
        self._kept: dict[GraphKey, tuple[AutogradGraph, Reservation, asyncio.TimerHandle]] = {}

    @property
    def nbytes(self) -> int:
        return self._resources.system.used[Resource.GRAPHS]

    def __contains__(self, name: GraphKey) -> bool:
        return name in self._kept

    def keep(self, name: GraphKey, graph: AutogradGraph, *, room_bytes: int, for_s: float) -> None:
        """Keep a graph for a while, unless there is no room for it.

        Its owner's oldest ones make way for it, then anybody's, where all would take more than ``room_bytes``.
        """
        self.take(name)
        loop = asyncio.get_running_loop()
        scope = self._resources.peer(name.owner, loop.time())
        if graph.nbytes > room_bytes or not scope.can_ever_reserve(Resource.GRAPHS, graph.nbytes):
            return
        self._drop(graph.nbytes - scope.available(Resource.GRAPHS), name.owner)
        self.shrink(room_bytes - graph.nbytes)
        hold = scope.reserve(Resource.GRAPHS, graph.nbytes)
        self._kept[name] = graph, hold, loop.call_later(for_s, self.take, name)

    def take(self, name: GraphKey) -> AutogradGraph | None:
        """The graph, which is not kept any longer, or None if it is not here."""
        if name not in self._kept:
            return None
        graph, hold, timer = self._kept.pop(name)
        timer.cancel()
        hold.release()
        return graph

    def shrink(self, max_bytes: int) -> None:
        """Drop the oldest until no more than ``max_bytes`` of them are left."""
        self._drop(self.nbytes - max_bytes)

    def _drop(self, excess: float, owner: PeerId | None = None) -> None:
        """Drop the oldest, of one owner or of all, that come to ``excess`` bytes or more."""
        for name in [name for name in self._kept if owner in (None, name.owner)]:
            if excess <= 0:
                return
            if graph := self.take(name):
                excess -= graph.nbytes
