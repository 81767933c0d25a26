"""Adapters of clients on one stage: checks their tensors, and applies each to its own rows of a
batch.

The two parts of an adapter are applied in different ways:

- Its prefix is written into the KV caches of its sequences (``caches/kv_cache.py``).
- Its LoRA pairs are joined for each product that the stage computes (:class:`LoraUpdate`). Their
  updates are added to the outputs of the adapter's rows.

Shapes: T positions of a batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from swarmnet_node.engine.caches.kv_cache import LayerShape, Prefix
from swarmnet_node.engine.kernels.backend import Backend, LoraLayers, LoraUpdate
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.session.adapters import BlockTensors, by_block, prefix_positions


@dataclass(frozen=True)
class LayerTargets:
    """The parts of a layer that an adapter may change.

    - ``linears``: (outputs, inputs) of the linear modules, by path.
    - ``products``: for each product of the stage, the linear modules whose outputs it concatenates.
    - ``shape``: the shape of the keys and values of a prefix.
    - ``device``: the device of the layer.
    """

    linears: Mapping[str, tuple[int, int]]
    products: Mapping[str, tuple[str, ...]]
    shape: LayerShape
    device: torch.device


@dataclass(frozen=True, eq=False)
class StageAdapter:
    """An adapter as one stage applies it.

    Layers are numbered from the first layer of the whole stage, which is block ``start``.

    - ``tensors``: all tensors by name, in the stage's dtype. ``lora`` and ``prefix`` share their
      memory.
    - ``prefix``: one entry for each layer, None for a layer without a prefix.
    """

    start: int
    tensors: Mapping[str, torch.Tensor]
    lora: LoraLayers
    prefix: tuple[Prefix | None, ...]
    prefix_positions: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def check_span(self, start: int, end: int) -> None:
        """Raise ``ProtocolViolation`` unless the adapter is only for blocks within [start, end).

        A prefix must cover all of these blocks, or none.
        """
        first, stop = start - self.start, end - self.start
        outside = [*range(first), *range(stop, len(self.prefix))]
        if any(self.lora.layers[index] or self.prefix[index] for index in outside):
            raise ProtocolViolation(f"an adapter for more than the blocks {start}:{end}")
        if self.prefix_positions and None in self.prefix[first:stop]:
            raise ProtocolViolation(f"an adapter with a prefix for some of the blocks {start}:{end}")


def load_adapter(
    tensors: Mapping[str, torch.Tensor], start: int, targets: Sequence[LayerTargets], dtype: torch.dtype
) -> StageAdapter:
    """Make an adapter from tensors by name, for layers with these targets.

    The first layer is block ``start``. The tensors become ``dtype``, each on the device of its
    layer. The adapter's outputs can be differentiated with respect to ``tensors``. Raises
    ``ProtocolViolation`` for tensors that do not fit.
    """
    blocks = by_block(tensors)
    for number in blocks:
        if not start <= number < start + len(targets):
            raise ProtocolViolation(f"an adapter for block {number}, which this host does not have")
    named: dict[str, torch.Tensor] = {}
    layers: list[Mapping[str, LoraUpdate]] = []
    prefix: list[Prefix | None] = []
    for number, target in enumerate(targets, start):
        block = blocks.get(number, BlockTensors())
        _check(number, block, target)
        like = torch.empty(0, dtype=dtype, device=target.device)
        layers.append(_lora_updates(number, block, target, like, named))
        prefix.append(_prefix(number, block, like, named))
    return StageAdapter(start, named, LoraLayers(tuple(layers)), tuple(prefix), prefix_positions(blocks))


def linear_modules(layer: nn.Module, leave_out: Sequence[nn.Module] = ()) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs), by path, of linear modules that a layer applies to a whole batch.

    Leaves out modules in lists, because these are experts, which see only some positions. Also
    leaves out modules inside ``leave_out``.
    """
    others = {id(module) for each in leave_out for module in each.modules()}
    return {
        path: (module.out_features, module.in_features)
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear)
        and id(module) not in others
        and not any(part.isdigit() for part in path.split("."))
    }


class BatchLora:
    """The LoRA updates of a packed batch, each for the rows of its own adapter."""

    def __init__(self, loras: Sequence[LoraLayers | None], counts: Sequence[int], backend: Backend) -> None:
        """Row i has ``counts[i]`` positions and the updates ``loras[i]``.

        Neighbouring rows with the same updates share a product.
        """
        self._backend = backend
        self._segments: list[tuple[LoraLayers, int, int]] = []
        """Updates with their positions [start, end) in the batch."""
        self._positions = sum(counts)
        for lora, end, count in zip(loras, accumulate(counts), counts, strict=True):
            if lora is None or lora.is_empty:
                continue
            start = end - count
            if self._segments and self._segments[-1][0] is lora and self._segments[-1][2] == start:
                start = self._segments.pop()[1]
            self._segments.append((lora, start, end))

    def __bool__(self) -> bool:
        return bool(self._segments)

    def add(self, layer: int, product: str, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add one product's updates: ``inputs`` [T, inputs] change ``outputs`` [T, outputs] in
        place."""
        for lora, start, end in self._segments:
            update = lora.layers[layer].get(product)
            if update is not None:
                self._backend.add_lora(inputs[start:end], outputs[start:end], update)

    @contextmanager
    def hooked(self, layers: Sequence[nn.Module], first: int) -> Iterator[None]:
        """Within the context, add the updates to the outputs of linear modules.

        ``layers`` are transformers' layers, numbered from ``first``.
        """
        with ExitStack() as hooks:
            for index, layer in enumerate(layers, first):
                for path in {path for lora, _, _ in self._segments for path in lora.layers[index]}:
                    hook = partial(self._hook, index, path)
                    hooks.enter_context(layer.get_submodule(path).register_forward_hook(hook))
            yield

    def _hook(self, layer: int, path: str, _: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        inputs, outputs = args[0].flatten(0, -2), output.flatten(0, -2)
        if len(inputs) != self._positions:
            raise RuntimeError(f"{path} was applied to {len(inputs)} of {self._positions} positions")
        self.add(layer, path, inputs, outputs)


def _check(number: int, block: BlockTensors, target: LayerTargets) -> None:
    """Raise ``ProtocolViolation`` unless the tensors of one block have the shapes that the layer
    needs."""
    for path, (down, up) in block.pairs.items():
        if path not in target.linears:
            raise ProtocolViolation(f"block {number} has no linear module {path} that takes every position")
        if (len(up), down.shape[1]) != target.linears[path]:
            raise ProtocolViolation(
                f"a LoRA pair of {down.shape[1]} inputs and {len(up)} outputs for {number}.{path}"
            )
    if block.prefix is not None:
        key, value = block.prefix
        shape = LayerShape(len(key), key.shape[2], value.shape[2])
        if shape != target.shape:
            raise ProtocolViolation(f"a prefix of {shape} for block {number}, which has {target.shape}")


def _lora_updates(
    number: int,
    block: BlockTensors,
    target: LayerTargets,
    like: torch.Tensor,
    named: dict[str, torch.Tensor],
) -> dict[str, LoraUpdate]:
    """Return the updates of one block, by product. Add the converted tensors to ``named``."""
    updates = {}
    for product, paths in target.products.items():
        present = [path for path in paths if path in block.pairs]
        if not present:
            continue
        downs = [block.pairs[path][0].to(like) for path in present]
        ranks = [len(down) for down in downs]
        joined = downs[0] if len(downs) == 1 else torch.cat(downs)
        ends = dict(zip(paths, accumulate(target.linears[path][0] for path in paths), strict=True))
        ups = []
        for path, down, rank_end in zip(present, torch.split(joined, ranks), accumulate(ranks), strict=True):
            up = block.pairs[path][1].to(like)
            columns = slice(ends[path] - len(up), ends[path])
            ups.append((columns, slice(rank_end - len(down), rank_end), up))
            named[f"{number}.{path}.down"], named[f"{number}.{path}.up"] = down, up
        updates[product] = LoraUpdate(joined, tuple(ups))
    return updates


def _prefix(
    number: int, block: BlockTensors, like: torch.Tensor, named: dict[str, torch.Tensor]
) -> Prefix | None:
    """Return the prefix of one block with a batch dimension. Add the converted tensors to
    ``named``."""
    if block.prefix is None:
        return None
    key, value = (tensor.to(like) for tensor in block.prefix)
    named[f"{number}.prefix.key"], named[f"{number}.prefix.value"] = key, value
    return key[None], value[None]
