"""Finds the places of a checkpoint's tensors in modules of routed experts, and makes the matrices.

Checkpoints differ. They have a tensor for each matrix of each expert, or one for all experts. Gate
and up projection are together or apart. Rows or columns come first. transformers' own conversion
tells which of these a family uses, so no family needs code here.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.models.checkpoints.conversion import Conversion, expert_of, experts_modules
from swarmnet_protocols.quantization.packed_tensor import PackedTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swarmnet_protocols.models.llama_shape import EmptyModel
    from swarmnet_protocols.quantization.packed_experts import Matrix

ChosenExperts = Mapping[int, Collection[int]]
"""The numbers of the wanted experts, by block. In blocks that are not listed, all experts are
wanted."""
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertPlace:
    """The place of a tensor in the model.

    - ``parameter``: the merged weight in the model.
    - ``part`` of ``parts``: the share of the weight's rows that the tensor holds.
    - ``expert``: the number of its expert. None if it has the matrices of all ``count`` experts,
      one after another along its first dimension.
    """

    parameter: str
    count: int
    is_transposed: bool
    """True if the matrices of a merged, unquantised tensor are [inputs, outputs]."""
    part: int = 0
    parts: int = 1
    expert: int | None = None
    takes_turns: bool = False
    """True if the rows of the parts take turns. Otherwise they follow one another."""

    @property
    def weight(self) -> str:
        """The name that one expert's matrix, or part of it, has in a linear module: ``up_proj``."""
        path, _, own = self.parameter.rpartition(".")
        parts = own.removesuffix("_proj").split("_")
        return f"{path}.{parts[self.part]}_proj" if self.parts > 1 else self.parameter

    def has(self, wanted: Collection[int]) -> bool:
        """Return whether the tensor has one of these experts."""
        return self.expert is None or self.expert in wanted

    def slices(self, wanted: Collection[int] | None) -> Iterator[tuple[int, slice]]:
        """Yield each wanted expert in the tensor, and its slice of the first dimension. ``wanted``
        None: all experts."""
        if self.expert is not None:
            if wanted is None or self.expert in wanted:
                yield self.expert, slice(None)
            return
        for expert in range(self.count):
            if wanted is None or expert in wanted:
                yield expert, slice(expert, expert + 1)


class ExpertPlaces:
    """The places in one model, which may be on the meta device."""

    def __init__(self, model: "PreTrainedModel | EmptyModel") -> None:
        self._modules = {
            f"{path}.{name}": module
            for path, module in experts_modules(model)
            for name in _WEIGHTS
            if hasattr(module, name)
        }
        self._conversion = Conversion(model) if self._modules else None

    def of(self, name: str) -> ExpertPlace | None:
        """Return the place of a tensor of a safetensors checkpoint.

        None if it holds no weights of experts, or transformers converts it in another way.
        """
        if self._conversion is None:
            return None
        parameter, converter, pattern = self._conversion.of(name)
        module = self._modules.get(parameter)
        if module is None:
            return None
        if converter is None:
            return self._place(parameter, module)
        expert = expert_of(name)
        if expert is None or module.is_transposed or not _only_merges(converter.operations):
            return None
        patterns = converter.source_patterns
        place = self._place(parameter, module, patterns.index(pattern), len(patterns), expert)
        return place if place.expert in range(place.count) else None

    def of_gguf(self, layer: int, which: str, expert: int | None = None) -> ExpertPlace | None:
        """Return the place of a tensor of a layer in a gguf file, or None if the layer has none.

        ``which`` is ``gate``, ``up``, ``down`` or ``gate_up``. ``expert`` None: the tensor has the
        matrices of all experts.
        """
        for parameter, module in self._modules.items():
            own = parameter.rpartition(".")[2].removesuffix("_proj")
            parts = own.split("_")
            if f".layers.{layer}." not in f".{parameter}":
                continue
            if which == own:
                return replace(self._place(parameter, module), expert=expert)
            if which in parts:
                place = self._place(parameter, module, parts.index(which), len(parts), expert)
                return replace(place, takes_turns=not module.is_concatenated)
        return None

    def _place(
        self, parameter: str, module: Any, part: int = 0, parts: int = 1, expert: int | None = None
    ) -> ExpertPlace:
        return ExpertPlace(parameter, module.num_experts, module.is_transposed, part, parts, expert)


def _only_merges(operations: Iterable[Any]) -> bool:
    """Return whether a conversion does no more than stack experts, and join rows within each
    expert."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    match list(operations):
        case [MergeModulelist(dim=0)]:
            return True
        case [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return True
    return False


class ExpertReader:
    """Reads the matrices of the chosen experts. The parts of a matrix are joined as soon as all of
    them have been read."""

    def __init__(
        self,
        places: Mapping[str, ExpertPlace],
        block_of: Callable[[str], int | None],
        chosen: ChosenExperts,
        loaded: "Callable[[PackedTensor], Matrix]",
    ) -> None:
        """``places``: the places of all expert tensors. ``block_of`` returns a tensor's block.

        ``loaded`` brings a matrix into its form and place (``WeightForm.loaded``).
        """
        self._places = places
        self._wanted = {
            name: chosen.get(block) if (block := block_of(name)) is not None else None for name in places
        }
        self._loaded = loaded
        self._parts: dict[tuple[str, int], dict[int, PackedTensor]] = {}
        self._expected: dict[str, set[int]] = {}
        self._found: dict[str, dict[int, Matrix]] = {}
        if chosen:
            for name in places:
                self._expect(name)

    def _expect(self, name: str) -> None:
        place, wanted = self._places[name], self._wanted[name]
        everything = range(place.count)
        self._expected[place.parameter] = {each for each in everything if wanted is None or each in wanted}
        self._found.setdefault(place.parameter, {})

    def has_wanted(self, name: str) -> bool:
        """Return whether a tensor belongs to a wanted expert, or to no expert."""
        return name not in self._places or any(True for _ in self._places[name].slices(self._wanted[name]))

    def read(self, name: str, matrix_of: Callable[[slice], PackedTensor]) -> None:
        """Read the wanted experts of a tensor. ``matrix_of`` returns the matrix in a slice of its
        first dimension.

        Raises ``IntegrityError`` for parts of a matrix that do not fit together.
        """
        self._expect(name)
        place = self._places[name]
        for expert, index in place.slices(self._wanted[name]):
            parts = self._parts.setdefault((place.parameter, expert), {})
            parts[place.part] = matrix_of(index)
            if len(parts) == place.parts:
                del self._parts[place.parameter, expert]
                try:
                    own = [parts[number] for number in range(place.parts)]
                    matrix = PackedTensor.taking_turns(own) if place.takes_turns else PackedTensor.joined(own)
                except ValueError as error:
                    raise IntegrityError(f"expert {expert} of {place.parameter}: {error}") from error
                self._found[place.parameter][expert] = self._loaded(matrix)

    def finish(self) -> "dict[str, dict[int, Matrix]]":
        """Return the matrices, by parameter and number of the expert. Raises ``IntegrityError`` if
        one is missing."""
        for parameter, expected in self._expected.items():
            if missing := expected - self._found[parameter].keys():
                raise IntegrityError(f"the checkpoint lacks expert {min(missing)} of {parameter}")
        return self._found


def wanted_slices(
    places: Mapping[str, ExpertPlace], block_of: Callable[[str], int | None], chosen: ChosenExperts
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return, for each tensor that is only partly wanted, its number of equal slices and the wanted
    ones.
    """
    found = {}
    for name, place in places.items():
        block = block_of(name)
        if block is not None and block in chosen:
            count = place.count if place.expert is None else 1
            slices = tuple(index.start or 0 for _, index in place.slices(chosen[block]))
            if len(slices) < count:
                found[name] = count, slices
    return found
