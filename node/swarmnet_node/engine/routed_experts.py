"""The routed experts in the layers of a stage. Some may be on peers or on disk."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.models.checkpoints.conversion import experts_modules

if TYPE_CHECKING:
    import torch
    from torch import nn

    from swarmnet_protocols.quantization.packed_experts import Elsewhere, ExpertsModule, Outputs


class RoutedExperts:
    """The modules of routed experts of a decoder stack, by number of the layer."""

    def __init__(self, model: Any = None) -> None:
        """``model``: None if no layer has experts."""
        found = () if model is None else experts_modules(model)
        paths = {int(path.split(".")[1]): (path, module) for path, module in found}
        self.modules: dict[int, ExpertsModule] = {layer: module for layer, (_, module) in paths.items()}
        self.blocks: dict[int, tuple[nn.Module, ExpertsModule]] = {
            layer: (model.get_submodule(path.rpartition(".")[0]), module)
            for layer, (path, module) in paths.items()
        }
        """The same modules, each after the module that has its router."""

    @property
    def missing(self) -> dict[int, set[int]]:
        """The experts that are not in memory, by number of the layer. Layers with all experts are
        left out."""
        if not self.modules:
            return {}
        from swarmnet_protocols.quantization.packed_experts import has_expert

        found = {
            layer: {each for each in range(module.num_experts) if not has_expert(module, each)}
            for layer, module in self.modules.items()
        }
        return {layer: experts for layer, experts in found.items() if experts}

    def compute_elsewhere(self, elsewhere: "Callable[[int], Elsewhere]") -> None:
        """Compute the missing experts of each layer by ``elsewhere(layer)``.

        Without this, a forward that needs a missing expert fails.
        """
        for layer in self.missing:
            from swarmnet_protocols.quantization.packed_experts import compute_elsewhere

            compute_elsewhere(self.modules[layer], elsewhere(layer))

    @contextmanager
    def missing_as_zeros(self) -> Iterator[None]:
        """Within the context, missing experts compute zeros.

        Trials compare ways to compute everything else.
        """
        from swarmnet_protocols.quantization.packed_experts import compute_elsewhere

        for module in self.modules.values():
            compute_elsewhere(module, _zeros)
        yield
        for module in self.modules.values():
            compute_elsewhere(module, None)


def _zeros(hidden: "torch.Tensor", rows: "Mapping[int, torch.Tensor]") -> "Callable[[], Outputs]":
    import torch

    return lambda: {expert: torch.zeros_like(hidden[indexes]) for expert, indexes in rows.items()}
