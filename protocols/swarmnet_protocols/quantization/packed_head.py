"""A dense lm_head with a packed copy of its weight, as the checkpoint stores it.

Multiplying one hidden state by lm_head is most of a client's work for a token. It takes as long as
reading the weight from memory, and the packed copy takes an eighth to a half of the bytes. The
dense weight stays: embeddings may share it, and training uses it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import Products


class TrackedWeight(nn.Parameter):
    """A weight that records whether ``data`` was used. A change through ``data`` does not raise
    autograd's version of the weight, so it would not be noticed otherwise."""

    is_touched = False

    @property
    def data(self) -> torch.Tensor:
        self.is_touched = True
        values: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return values

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.is_touched = True
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


class PackedHead(nn.Linear):
    """A linear layer that computes with the packed weight until the dense one is changed. Gradients
    flow through the dense one."""

    def __init__(self, weight: nn.Parameter, packed: PackedTensor, products: Products) -> None:
        """``packed`` has the values of ``weight`` [outputs, inputs], which becomes a
        ``TrackedWeight`` in every module that has it."""
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, bias=False, device="meta")
        weight.__class__ = TrackedWeight
        self.weight = weight
        self._packed = packed
        self._products = products
        self._seen = weight, weight._version
        """The weight and its version when they were last compared. In a tuple, because a module
        would register the weight as a parameter once more."""

    @property
    def is_packed(self) -> bool:
        """True if the weight still has the values that were packed."""
        seen, version = self._seen
        return (
            self.weight is seen
            and isinstance(seen, TrackedWeight)
            and not seen.is_touched
            and seen._version == version
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map [..., inputs] to [..., outputs]."""
        learns = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if learns or input.dtype != torch.float32 or not self.is_packed:
            return super().forward(input)
        return self._products.linear(input, self._packed)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """A plain layer: a copy is made to be changed."""
        copy = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        copy.weight = nn.Parameter(self.weight.detach().clone(), requires_grad=self.weight.requires_grad)
        return copy.train(self.training)


def pack_head(model: Any, stored: Mapping[str, PackedTensor], products: Products) -> None:
    """Replace the lm_head of a CausalLM by a ``PackedHead``.

    ``stored``: weights of the model as the checkpoint stores them, by name.

    Nothing is replaced unless lm_head is a plain linear layer without a bias, its weight is stored
    in fewer bytes, and C code multiplies on this machine.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None or not products.is_native:
        return
    weight = head.weight
    if weight.is_inference():  # it has no version, so changes could not be noticed
        return
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if each is weight]
    packed = next((stored[name] for name in names if name in stored), None)
    if packed is not None and packed.nbytes < weight.nbytes:
        model.set_output_embeddings(PackedHead(weight, packed, products).train(head.training))
