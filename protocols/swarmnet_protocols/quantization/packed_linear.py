"""Modules with packed weights in place of ``nn.Linear`` and ``nn.Embedding``, and their
gradients."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import Products


def linear(
    products: Products, inputs: torch.Tensor, weight: PackedTensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``inputs`` [..., columns] times the matrix [rows, columns], plus ``bias`` [rows].
    Gradients flow to the inputs; weights are frozen."""
    if torch.is_grad_enabled() and inputs.requires_grad:
        # Autograd forbids changes in place, such as LoRA's, to a view that a function returns.
        flat = inputs.reshape(-1, weight.shape[1])
        outputs: torch.Tensor = _Linear.apply(products, flat, weight, bias)  # type: ignore[no-untyped-call]
        return outputs.view(*inputs.shape[:-1], -1)
    return products.linear(inputs, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, products: Products, inputs: torch.Tensor, weight: PackedTensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.products, ctx.weight = products, weight
        return products.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        return None, ctx.products.back(gradients, ctx.weight), None, None


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight, which is not a parameter: it has no ``weight``."""

    def __init__(self, products: Products, packed: PackedTensor, *, has_bias: bool) -> None:
        rows, columns = packed.shape
        super().__init__(columns, rows, bias=has_bias, device="meta")
        self.register_parameter("weight", None)
        self.packed = packed
        self._products = products

    @property
    def qweight(self) -> torch.Tensor:
        """An empty tensor on the device of the weight: PEFT puts adapters there."""
        return torch.empty(0, dtype=torch.uint8, device=self.packed.device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map [..., columns] to [..., rows]."""
        return linear(self._products, input, self.packed, self.bias)


class PackedEmbedding(nn.Module):
    """An embedding whose table is packed. It is not an ``nn.Embedding``, because transformers would
    initialise the ``weight`` of one."""

    def __init__(self, products: Products, packed: PackedTensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = packed.shape
        self.packed = packed
        self._products = products

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ids [...] to embeddings [..., columns], float32."""
        return self._products.select(self.packed, input.flatten()).view(*input.shape, -1)


def install(model: nn.Module, weights: Mapping[str, PackedTensor], products: Products) -> None:
    """Replace the linear modules and embeddings of ``model`` whose weights have these names. The
    caller loads biases afterwards.

    Raises ``ValueError`` for a weight of another module, or of another shape.
    """
    for name, packed in weights.items():
        path = name.removesuffix(".weight")
        module = model.get_submodule(path)
        if not can_be_packed(module) or module.weight.shape != packed.shape:
            raise ValueError(f"{name} is no linear layer or embedding of shape {tuple(packed.shape)}")
        parent, _, child = path.rpartition(".")
        replacement = (
            PackedLinear(products, packed, has_bias=module.bias is not None)
            if isinstance(module, nn.Linear)
            else PackedEmbedding(products, packed)
        )
        setattr(model.get_submodule(parent), child, replacement.train(module.training))


def can_be_packed(module: nn.Module | None) -> TypeGuard[nn.Linear | nn.Embedding]:
    """Return whether a module is a plain linear layer or embedding. Subclasses may compute
    something else."""
    return type(module) in (nn.Linear, nn.Embedding)


def packed_bytes(model: nn.Module) -> int:
    """Return the bytes of the packed weights in a model. A matrix that several modules share counts
    once."""
    packed = (each.packed for each in model.modules() if isinstance(each, PackedLinear | PackedEmbedding))
    return sum(matrix.nbytes for matrix in {id(matrix): matrix for matrix in packed}.values())
