"""How a stage applies the adapters of its clients, each to its own rows of a packed batch.

Shape legend: T positions of a batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from swarmnet_node.engine.kv_cache import LayerShape, Prefix
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.session.adapters import BlockTensors, by_block, prefix_positions


@dataclass(frozen=True)
class LayerForm:
    """What of a layer an adapter may add to.

    ``linears``: (outputs, inputs) of linear modules by path. ``products``: of each product that the stage computes, the linear
    modules whose outputs it has, one after another. ``shape``: what the layer keeps for each position.
    """

    linears: Mapping[str, tuple[int, int]]
    products: Mapping[str, tuple[str, ...]]
    shape: LayerShape


@dataclass(frozen=True, eq=False)
class Addition:
    """What is added to one product: ``down`` [ranks, inputs] of all its pairs, and each pair's columns, ranks and up."""

    down: torch.Tensor
    ups: tuple[tuple[slice, slice, torch.Tensor], ...]

    def add(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """To ``outputs`` [T, outputs] of ``inputs`` [T, inputs], in place."""
        low = linear(inputs, self.down)
        for columns, ranks, up in self.ups:
            outputs[:, columns].addmm_(low[:, ranks], up.T)


@dataclass(frozen=True, eq=False)
class StageAdapter:
    """An adapter as one stage applies it. Layers are numbered from the first of the whole stage, which is block ``start``.

    ``tensors`` are its tensors by name, in the stage's own element type, on the memory of the others; ``prefix`` has for
    each layer what its lanes begin with.
    """

    start: int
    tensors: Mapping[str, torch.Tensor]
    layers: tuple[Mapping[str, Addition], ...]
    prefix: tuple[Prefix | None, ...]
    prefix_positions: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def adds(self) -> bool:
        """Whether it adds to any product."""
        return any(self.layers)

    def check_span(self, start: int, end: int) -> None:
        """Raise ``ProtocolViolation`` unless it is for some of the blocks [start, end), with a prefix for all or none."""
        first, stop = start - self.start, end - self.start
        outside = [*range(first), *range(stop, len(self.layers))]
        if any(self.layers[index] or self.prefix[index] for index in outside):
            raise ProtocolViolation(f"an adapter for more than the blocks {start}:{end}")
        if self.prefix_positions and None in self.prefix[first:stop]:
            raise ProtocolViolation(f"an adapter with a prefix for some of the blocks {start}:{end}")


def adapt(
    tensors: Mapping[str, torch.Tensor], start: int, forms: Sequence[LayerForm], like: torch.Tensor
) -> StageAdapter:
    """Tensors by name, for layers of these forms of which the first is block ``start``; ``like`` has their element type and device.

    What the result computes can be differentiated with respect to ``tensors``. Raises ``ProtocolViolation`` for tensors that do
    not fit.
    """
    blocks = by_block(tensors)
    for number in blocks:
        if not start <= number < start + len(forms):
            raise ProtocolViolation(f"an adapter for block {number}, which is not here")
    named: dict[str, torch.Tensor] = {}
    layers: list[Mapping[str, Addition]] = []
    prefix: list[Prefix | None] = []
    for number, form in enumerate(forms, start):
        block = blocks.get(number, BlockTensors())
        _check(number, block, form)
        layers.append(_additions(number, block, form, like, named))
        prefix.append(_prefix(number, block, like, named))
    return StageAdapter(start, named, tuple(layers), tuple(prefix), prefix_positions(blocks))


def linear_modules(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear modules that a layer applies to every position, by path.

    Those in a list are left out: a list holds experts, which see only some positions.
    """
    return {
        path: (module.out_features, module.in_features)
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear) and not any(part.isdigit() for part in path.split("."))
    }


class Additions:
    """What the adapters of a packed batch add to the products of its rows."""

    def __init__(self, adapters: Sequence[StageAdapter | None], counts: Sequence[int]) -> None:
        """The i-th row has ``counts[i]`` positions, and an adapter or none. Neighbours with the same one are one product."""
        self._segments: list[tuple[StageAdapter, int, int]] = []
        self._positions = sum(counts)
        for adapter, end, count in zip(adapters, accumulate(counts), counts, strict=True):
            if adapter is None or not adapter.adds:
                continue
            start = end - count
            if self._segments and self._segments[-1][0] is adapter and self._segments[-1][2] == start:
                start = self._segments.pop()[1]
            self._segments.append((adapter, start, end))

    def __bool__(self) -> bool:
        return bool(self._segments)

    def add(self, layer: int, product: str, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """To ``outputs`` [T, outputs] of ``inputs`` [T, inputs], in place."""
        for adapter, start, end in self._segments:
            addition = adapter.layers[layer].get(product)
            if addition is not None:
                addition.add(inputs[start:end], outputs[start:end])

    @contextmanager
    def hooked(self, layers: Sequence[nn.Module], first: int) -> Iterator[None]:
        """While the context is open the linear modules of ``layers``, which are those from ``first`` on, add what is to be added."""
        with ExitStack() as hooks:
            for index, layer in enumerate(layers, first):
                for path in {path for adapter, _, _ in self._segments for path in adapter.layers[index]}:
                    hook = partial(self._hook, index, path)
                    hooks.enter_context(layer.get_submodule(path).register_forward_hook(hook))
            yield

    def _hook(self, layer: int, path: str, _: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        inputs, outputs = args[0].flatten(0, -2), output.flatten(0, -2)
        if len(inputs) != self._positions:
            raise RuntimeError(f"{path} saw {len(inputs)} of {self._positions} positions")
        self.add(layer, path, inputs, outputs)


def _check(number: int, block: BlockTensors, form: LayerForm) -> None:
    for path, (down, up) in block.pairs.items():
        if path not in form.linears:
            raise ProtocolViolation(f"block {number} has no linear module {path} that takes every position")
        if (len(up), down.shape[1]) != form.linears[path]:
            raise ProtocolViolation(
                f"a pair of {down.shape[1]} inputs and {len(up)} outputs for {number}.{path}"
            )
    if block.prefix is not None:
        key, value = block.prefix
        shape = LayerShape(len(key), key.shape[2], value.shape[2])
        if shape != form.shape:
            raise ProtocolViolation(f"a prefix of {shape} for block {number}, which has {form.shape}")


def _additions(
    number: int, block: BlockTensors, form: LayerForm, like: torch.Tensor, named: dict[str, torch.Tensor]
) -> dict[str, Addition]:
    """By product. Puts the tensors into ``named`` as they are used."""
    additions = {}
    for product, paths in form.products.items():
        present = [path for path in paths if path in block.pairs]
        if not present:
            continue
        downs = [block.pairs[path][0].to(like) for path in present]
        ranks = [len(down) for down in downs]
        joined = downs[0] if len(downs) == 1 else torch.cat(downs)
        ends = dict(zip(paths, accumulate(form.linears[path][0] for path in paths), strict=True))
        ups = []
        for path, down, rank_end in zip(present, torch.split(joined, ranks), accumulate(ranks), strict=True):
            up = block.pairs[path][1].to(like)
            columns = slice(ends[path] - len(up), ends[path])
            ups.append((columns, slice(rank_end - len(down), rank_end), up))
            named[f"{number}.{path}.down"], named[f"{number}.{path}.up"] = down, up
        additions[product] = Addition(joined, tuple(ups))
    return additions


def _prefix(
    number: int, block: BlockTensors, like: torch.Tensor, named: dict[str, torch.Tensor]
) -> Prefix | None:
    if block.prefix is None:
        return None
    key, value = (tensor.to(like) for tensor in block.prefix)
    named[f"{number}.prefix.key"], named[f"{number}.prefix.value"] = key, value
    return key[None], value[None]
