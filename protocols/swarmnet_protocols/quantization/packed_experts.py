"""Routed experts with packed weights, and their computation for every family of transformers.

transformers merges the weights of a layer's experts along a first dimension of one module, and lets
a registered function compute them (``transformers.integrations.moe.ExpertsInterface``). This module
replaces the merged weights with one packed matrix for each expert that this machine holds. Router,
shared experts and norms stay the model's own.

Shapes: T rows of hidden size D, k experts of each row.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from swarmnet_protocols.quantization.packed_linear import linear
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import Products

IMPLEMENTATION = "swarmnet"
"""The name of :func:`compute_experts` among transformers' implementations of experts."""
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
Matrix = PackedTensor | torch.Tensor
"""[outputs, inputs]."""
ExpertMatrices = Mapping[int, Matrix]
"""The matrices of some experts, by the numbers of the experts."""
Outputs = Mapping[int, torch.Tensor]
"""The outputs [n, D] of some experts for their rows, not weighted, by the numbers of the
experts."""
Elsewhere = Callable[[torch.Tensor, Mapping[int, torch.Tensor]], Callable[[], Outputs]]
"""Starts the computation of experts on other machines, from hidden states [T, D] and the indexes of
the rows of each expert; returns a function that waits for the outputs."""


class ExpertsModule(Protocol):
    """A module of experts in transformers, with the attributes that its decorator
    ``use_experts_implementation`` sets, and ``elsewhere``."""

    elsewhere: Elsewhere
    """Computes the experts that are not here. Set by :func:`compute_elsewhere`; without it, such an
    expert is an error."""
    record_choice: Callable[[torch.Tensor], None]
    """While it is set, experts are not computed: it gets their numbers [T, k], and the outputs are
    zeros. See :func:`chosen_experts`."""
    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    is_concatenated: bool
    config: Any
    down_proj: Any
    """``PackedExperts``, or the merged weights of all experts."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def act_fn(self, up: torch.Tensor) -> torch.Tensor: ...

    def post_expert_norm(self, outputs: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """Replaces a merged weight in a module of experts. It is not a parameter."""

    matrices: dict[int, Matrix]
    products: Products

    def linear(self, expert: int, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply rows [n, inputs] by the matrix of one expert: [n, outputs]. Raises
        ``LookupError`` for an expert that is not here."""
        matrix = self.matrices.get(expert)
        if matrix is None:
            raise LookupError(f"expert {expert} is not on this machine")
        if isinstance(matrix, PackedTensor):
            return linear(self.products, rows, matrix, bias)
        return functional.linear(rows, matrix.to(rows.dtype), bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return sum(matrix.nbytes for matrix in self.matrices.values())


def compute_experts(
    module: ExpertsModule, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum [T, D] of the outputs of the chosen experts.

    Row t of ``hidden`` [T, D] goes to the experts ``ids`` [T, k], with ``weights`` [T, k]. Experts
    are added in the order of their numbers, as in transformers' eager forward, whether this machine
    or a peer computes them. The id ``num_experts`` means no expert. Raises ``LookupError`` for an
    expert that neither this machine nor a peer has.
    """
    if hasattr(module, "record_choice"):
        module.record_choice(ids)
        return torch.zeros_like(hidden)
    places = {
        expert: torch.where(ids == expert)
        for expert in sorted({*ids.flatten().tolist()})
        if expert < module.num_experts
    }
    found: dict[int, torch.Tensor] = {}
    away = {expert: rows for expert, (rows, _) in places.items() if not has_expert(module, expert)}
    if away and hasattr(module, "elsewhere"):
        wait = module.elsewhere(hidden, away)
        own = places.keys() - away.keys()
        found = {expert: compute_expert(module, expert, hidden[places[expert][0]]) for expert in own}
        found.update(wait())
    outputs = torch.zeros_like(hidden)
    for expert, (rows, slots) in places.items():
        output = found[expert] if expert in found else compute_expert(module, expert, hidden[rows])
        outputs.index_add_(0, rows, (output * weights[rows, slots, None]).to(outputs.dtype))
    return outputs


def compute_expert(module: ExpertsModule, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one expert for rows [n, D], not weighted: [n, D]. Raises
    ``LookupError`` if it is not here."""
    if module.has_gate:
        inner = module._apply_gate(_product(module, "gate_up_proj", expert, rows))
    else:
        inner = module.act_fn(_product(module, "up_proj", expert, rows))
    outputs = _product(module, "down_proj", expert, inner)
    return module.post_expert_norm(outputs) if module.has_post_expert_norm else outputs


def _product(module: ExpertsModule, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    weight: PackedExperts | torch.Tensor = getattr(module, name)
    if isinstance(weight, PackedExperts):
        return weight.linear(expert, rows, bias)
    matrix = weight[expert]
    return functional.linear(rows, matrix.T if module.is_transposed else matrix, bias)


def has_expert(module: ExpertsModule, expert: int) -> bool:
    """Return whether the weights of an expert are on this machine."""
    weight = module.down_proj
    return not isinstance(weight, PackedExperts) or expert in weight.matrices


def chosen_experts(parent: nn.Module, module: ExpertsModule, hidden: torch.Tensor) -> set[int]:
    """Return the experts that the router of a block would choose for ``hidden``.

    ``parent`` is the module with router and experts; ``hidden`` are its inputs. The experts are not
    computed. Raises ``TypeError`` if ``parent`` takes other inputs.
    """
    found: set[int] = set()

    def record(ids: torch.Tensor) -> None:
        found.update(expert for expert in ids.flatten().tolist() if expert < module.num_experts)

    module.record_choice = record
    try:
        parent(hidden)
    finally:
        del module.record_choice
    return found


def add_experts(module: ExpertsModule, loaded: ExpertsModule) -> None:
    """Add the experts of another module of the same block to ``module``, whose weights are
    ``PackedExperts``."""
    for name in _WEIGHTS:  # the last one says that an expert is here: see has_expert
        if isinstance(more := getattr(loaded, name, None), PackedExperts):
            own: PackedExperts = getattr(module, name)
            own.matrices.update(more.matrices)


def drop_experts(module: ExpertsModule, experts: Collection[int]) -> None:
    """Remove experts from a module whose weights are ``PackedExperts``."""
    for name in _WEIGHTS:
        if isinstance(weight := getattr(module, name, None), PackedExperts):
            for expert in experts:
                weight.matrices.pop(expert, None)


def device_of(module: ExpertsModule) -> torch.device:
    """Return the device of the experts that are on this machine, at least one."""
    weight = module.down_proj
    if isinstance(weight, PackedExperts):
        return next(iter(weight.matrices.values())).device
    device: torch.device = weight.device
    return device


def expert_bytes(module: ExpertsModule) -> int:
    """Return the mean bytes of the matrices of an expert on this machine; 0 if there is none, or if
    they are merged."""
    found = [each for name in _WEIGHTS if isinstance(each := getattr(module, name, None), PackedExperts)]
    return sum(each.nbytes // max(1, len(each.matrices)) for each in found)


def compute_elsewhere(module: ExpertsModule, elsewhere: Elsewhere | None) -> None:
    """Compute the experts that are not here by ``elsewhere``; None: a forward that needs one raises
    an error."""
    if elsewhere is not None:
        module.elsewhere = elsewhere
    elif hasattr(module, "elsewhere"):
        del module.elsewhere


def install_experts(model: nn.Module, weights: Mapping[str, ExpertMatrices], products: Products) -> None:
    """Put matrices of experts in place of the merged weights of these names.

    Raises ``ValueError`` for a matrix of another shape.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute_experts)
    for name, matrices in weights.items():
        path, _, parameter = name.rpartition(".")
        module: Any = model.get_submodule(path)
        _, rows, columns = getattr(module, parameter).shape
        shape = (columns, rows) if module.is_transposed else (rows, columns)
        if any(matrix.shape != shape for matrix in matrices.values()):
            raise ValueError(f"an expert of {name} is no matrix of shape {shape}")
        delattr(module, parameter)
        setattr(module, parameter, PackedExperts(dict(matrices), products))
        module._is_hf_initialized = True  # transformers would initialise the parameter that is gone
        module.config._experts_implementation = IMPLEMENTATION


def packed_experts_bytes(model: nn.Module) -> int:
    """Return the bytes of the packed experts in a model."""
    found = (value for module in model.modules() for value in vars(module).values())
    return sum(value.nbytes for value in found if isinstance(value, PackedExperts))
