"""Recipes: how to make each weight of transformers from tensors of a gguf file.

``recipes`` lists the recipes of a model, by the row of its architecture.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS
from swarmnet_protocols.models.checkpoints.gguf.architectures import row_of
from swarmnet_protocols.models.checkpoints.gguf.rows import Header, Weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swarmnet_protocols.arrays import Array
    from swarmnet_protocols.models.llama_shape import EmptyModel
    from swarmnet_protocols.quantization.packed_tensor import PackedTensor

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_FUSED = ("attn_q", "attn_k", "attn_v")
"""Parts of the rows of ``attn_qkv``, in their order."""
_PROJECTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj"}


@dataclass(frozen=True)
class Recipe:
    """A weight of transformers, made of tensors of a file."""

    tensors: tuple[str, ...]
    make: "Callable[..., Array]"
    """Makes the weight from the values of the tensors."""
    count: int
    """Number of values in all tensors together."""

    def packed(self, matrices: "Sequence[PackedTensor]") -> "PackedTensor | None":
        """Return the weight made from packed tensors. None unless the recipe only picks whole rows,
        or reorders the columns of one tensor."""
        import numpy as np

        from swarmnet_protocols.quantization.packed_tensor import PackedTensor

        joined = PackedTensor.joined(matrices)
        rows = self._order([matrix.shape[0] for matrix in matrices], 0)
        if rows is not None:
            is_same = np.array_equal(rows, np.arange(joined.shape[0]))
            return joined if is_same else joined.select(rows)
        columns = self._order([joined.shape[1]], 1) if len(matrices) == 1 else None
        return None if columns is None else joined.select_columns(columns)

    def _order(self, counts: Sequence[int], axis: int) -> "Array | None":
        """Return the place in the concatenated tensors of each row (``axis`` 0) or column (1) of
        the weight. None if the weight is not made of whole rows or columns.

        To find the order, make the weight from matrices with one column or row of random values.
        """
        import numpy as np

        values = np.random.default_rng(0).permutation(np.linspace(1.0, 2.0, sum(counts)))
        parts = [np.expand_dims(part, 1 - axis) for part in np.split(values, np.cumsum(counts)[:-1])]
        try:
            made = np.asarray(self.make(*parts))
        except CONFIG_FAULTS:  # the recipe works on real values only
            return None
        if made.ndim != 2 or made.shape[1 - axis] != 1:
            return None
        found = made.ravel()
        if np.array_equal(found, values):
            return np.arange(len(values))
        order = np.argsort(values)
        places: Array = np.searchsorted(values[order], found).clip(max=len(values) - 1)
        if not np.array_equal(values[order[places]], found):
            return None
        found_order: Array = order[places]
        return found_order


def recipes(header: Header, model: "PreTrainedModel | EmptyModel", first_block: int) -> dict[str, Recipe]:
    """Return the recipe of each weight that the file may have, by transformers' name in the whole
    CausalLM.

    ``model``, which may be on the meta device, has blocks from ``first_block``.

    Raises ``ConfigError`` for an architecture without a row.
    """
    prefix = f"{model.base_model_prefix}." if model.base_model is model else ""
    makers = _Makers(header, model, first_block, prefix)
    found = {name: makers.recipe_of(name) for name in makers.shapes}
    return {name: recipe for name, recipe in found.items() if recipe is not None}


def tensors_of(found: Mapping[str, Recipe]) -> set[str]:
    """Return the names of all tensors in these recipes."""
    return {tensor for recipe in found.values() for tensor in recipe.tensors}


class _Makers:
    """Makes recipes by the row of an architecture."""

    def __init__(
        self, header: Header, model: "PreTrainedModel | EmptyModel", first_block: int, prefix: str
    ) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        from swarmnet_protocols.models.checkpoints.conversion import experts_modules

        self._header, self._config, self._first = header, model.config, first_block
        self._row = row_of(header.architecture)
        [kind] = [each for each, name in MODEL_ARCH_NAMES.items() if name == header.architecture]
        self._names = get_tensor_name_map(kind, 1)
        self.shapes = {prefix + name: tuple(each.shape) for name, each in model.state_dict().items()}
        self._experts = {prefix + path: module for path, module in experts_modules(model)}

    def recipe_of(self, name: str) -> Recipe | None:
        """Return the recipe of a weight, or None if the file has no tensor for it."""
        if match := _LAYER.fullmatch(name):
            return self._in_layer(name, int(match[1]), match[2])
        stem, end = _split(name)
        own = self._names.get_name(stem)
        if own is None:
            return None
        return self._recipe(name, (own + end,), self._weight(stem.rpartition(".")[2]))

    def _in_layer(self, name: str, layer: int, own: str) -> Recipe | None:
        block = f"blk.{layer + self._first}."
        path, _, last = name.rpartition(".")
        if path in self._experts:
            return self._of_experts(block, last, self._experts[path])
        stem, end = _split(own)
        weight = self._weight(stem)
        tensors = tuple(block + each for each in weight.tensors)
        known = self._names.get_name(f"model.layers.0.{stem}")
        if tensors and (known is None or self._header.shapes.keys() >= {*tensors}):
            return self._recipe(name, tensors, weight)
        if tensors:  # files of older converters have the weight itself
            weight = Weight()
        if known is None:
            return None
        tensor = known.removeprefix("blk.0.")
        fused = f"{block}attn_qkv{end}"
        if tensor in _FUSED and fused in self._header.shapes:
            start, stop, rows = self._place(name, tensor)
            count = rows * math.prod(self.shapes[name][1:])
            return replace(self._recipe(name, (fused,), weight, partial(_cut, start, stop)), count=count)
        return self._recipe(name, (f"{block}{tensor}{end}",), weight)

    def _weight(self, stem: str) -> Weight:
        rows = self._row.weights
        return next((rows[each] for each in rows if re.fullmatch(each, stem)), Weight())

    def _recipe(
        self,
        name: str,
        tensors: tuple[str, ...],
        weight: Weight,
        before: "Callable[[Array], Array] | None" = None,
    ) -> Recipe:
        shape = self.shapes[name]

        def make(*values: "Array") -> "Array":
            if before is not None:
                values = tuple(map(before, values))
            [made] = [weight.made(self._config, *values)] if weight.made else values
            return _shaped(made, shape)

        return Recipe(tensors, make, math.prod(shape))

    def _place(self, name: str, tensor: str) -> tuple[int, int, int]:
        """Return the rows [first, end) of a part within ``attn_qkv``, and the number of all
        rows."""
        own = _PROJECTION[tensor]
        sizes = [self.shapes[name.replace(f".{own}.", f".{_PROJECTION[each]}.")][0] for each in _FUSED]
        start = sum(sizes[: _FUSED.index(tensor)])
        return start, start + self.shapes[name][0], sum(sizes)

    def _of_experts(self, block: str, name: str, module: Any) -> Recipe:
        """Return the recipe of the merged weights or biases of all experts."""
        own, end = name.removesuffix("_bias"), ".bias" if name.endswith("_bias") else ".weight"
        parts = own.removesuffix("_proj").split("_")
        fused = f"{block}ffn_{'_'.join(parts)}_exps{end}"
        tensors = tuple(f"{block}ffn_{part}_exps{end}" for part in parts)
        if fused in self._header.shapes and module.is_concatenated:
            tensors = (fused,)
        make = partial(
            _merged,
            name,
            takes_turns=len(tensors) > 1 and not module.is_concatenated,
            is_transposed=module.is_transposed and end == ".weight",
        )
        # Older files have a tensor for each expert.
        count = module.num_experts
        single = [f"{block}ffn_{part}.{expert}{end}" for part in parts for expert in range(count)]
        merged = getattr(module, name).numel()
        if single[0] in self._header.shapes:
            return Recipe(tuple(single), lambda *values: make(*_stacked(count, values)), merged)
        return Recipe(tensors, make, merged)


def _split(name: str) -> tuple[str, str]:
    """Return a name without its ending, and the ending in files. Files call parameters weights,
    too."""
    stem, _, end = name.rpartition(".")
    return (stem, f".{end}") if end in ("weight", "bias") else (name, ".weight")


def _cut(start: int, end: int, rows: "Array") -> "Array":
    return rows[start:end]


def _shaped(values: "Array", shape: tuple[int, ...]) -> "Array":
    """Return values with the dimensions of size 1 that transformers expects."""
    is_same = [size for size in shape if size > 1] == [size for size in values.shape if size > 1]
    return values.reshape(shape) if is_same and values.ndim != len(shape) else values


def _merged(name: str, *parts: "Array", takes_turns: bool, is_transposed: bool) -> "Array":
    """Return the weights [E, rows, D], or biases [E, rows], of E experts, from their parts."""
    import numpy as np

    if len({part.shape for part in parts}) > 1:
        raise IntegrityError(
            f"the parts of {name} have the shapes {' and '.join(str(part.shape) for part in parts)}"
        )
    made = parts[0]
    if takes_turns:
        made = np.stack(parts, 2).reshape(len(made), -1, *made.shape[2:])
    elif len(parts) > 1:
        made = np.concatenate(parts, 1)
    return made.swapaxes(1, 2) if is_transposed else made


def _stacked(count: int, matrices: "Sequence[Array]") -> "Iterator[Array]":
    """Merge the matrices of each part, one for each of ``count`` experts."""
    import numpy as np

    return (np.stack(matrices[start : start + count]) for start in range(0, len(matrices), count))
