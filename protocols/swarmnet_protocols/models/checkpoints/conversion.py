"""The names and merges by which transformers loads the tensors of a checkpoint.

``Conversion`` uses transformers' own tables. So names and shapes suffice to predict the errors of
loading.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass
class Misfits:
    """Reasons why tensors do not fit a model."""

    missing: set[str] = field(default_factory=set)
    """Weights without a tensor."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of weights whose tensors have another shape."""
    unused: list[str] = field(default_factory=list)
    """Tensors that belong to no weight."""


class Conversion:
    """The conversion of tensors to the weights of one model, which may be on the meta device."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        mapping = get_model_conversion_mapping(model)
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._renamings = [each for each in mapping if not isinstance(each, WeightConverter)]
        self._of_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._prefix = model.base_model_prefix
        self._shapes = {name: weight.shape for name, weight in model.state_dict().items()}
        self._tied = {*getattr(model, "all_tied_weights_keys", {})}
        self._may_miss = _pattern_of(model._keys_to_ignore_on_load_missing)
        self._may_have = _pattern_of(model._keys_to_ignore_on_load_unexpected)

    def of(self, name: str) -> tuple[str, Any, str]:
        """Return the weight that a tensor becomes, or becomes part of.

        With it comes the converter of transformers, and the pattern in it that matches the tensor;
        None and "" for a tensor that is the whole weight.
        """
        from transformers.core_model_loading import rename_source_key

        weight, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._shapes
        )
        if weight not in self._shapes and name in self._shapes:
            return name, None, ""
        return weight, self._of_pattern[pattern] if pattern is not None else None, pattern or ""

    def misfits(self, shapes: Mapping[str, Sequence[int]]) -> Misfits:
        """Compare tensors of these names and shapes with the model.

        If a weight is made of several tensors, only their total number of values is compared.
        """
        needed = {name for name in self._shapes if not self._may_miss.search(name)}
        found, counts = Misfits(needed - self._tied), Counter[tuple[str, ...]]()
        for name, shape in shapes.items():
            weight, converter, _ = self.of(name)
            if weight not in self._shapes or (converter and _is_beyond(name, self._shapes[weight])):
                if not self._may_have.search(weight):
                    found.unused.append(name)
            elif converter is None:
                found.missing.discard(weight)
                if tuple(shape) != self._shapes[weight]:
                    found.wrong.append(f"{name} is {[*shape]} instead of {[*self._shapes[weight]]}")
            else:
                # a tensor may be split into several weights: then it is renamed to the first one
                first, *others = converter.target_patterns
                made = (weight, *(weight.replace(first, other) for other in others))
                found.missing.difference_update(made)
                counts[made] += math.prod(shape)
        for made, count in counts.items():
            expected = sum(math.prod(self._shapes.get(each, (0,))) for each in made)
            if count != expected:
                found.wrong.append(f"tensors of {made[0]} have {count} values instead of {expected}")
        return found


def _pattern_of(patterns: Iterable[str] | None) -> re.Pattern[str]:
    """Return a pattern that matches names containing one of ``patterns``. Without patterns it
    matches nothing."""
    return re.compile("|".join(f"({each})" for each in patterns or ()) or "(?!)")


def experts_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules of routed experts (``ExpertsModule``) in a model, with their paths."""
    for path, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "down_proj"):
            yield path, module


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a tensor belongs to."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def _is_beyond(name: str, merged: Sequence[int]) -> bool:
    """Return whether a tensor belongs to an expert whose number is beyond the merged weight."""
    expert = expert_of(name)
    return expert is not None and len(merged) > 0 and expert >= merged[0]
