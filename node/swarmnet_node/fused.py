"""Layers of the Llama shape, computed with fewer operations.

In a forward of one token the operations between the matrix products are slow out of proportion: the weights that stream
through the caches push their code and their small tensors out. Fewer operations are the cure (``tests/bench/decode.py``).
A fused layer computes what transformers' layer computes, and is only used after both gave the same on a probe; the
layer it came from keeps working, on the same memory.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu

from swarmnet_node.attention import Batch, Rule


class FusedLayer(nn.Module):
    """Stands in for a decoder layer of transformers."""

    def __init__(self, layer: Any, rule: Rule) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.original = layer
        self._index = attention.layer_idx
        self._rule = rule
        self._size = attention.head_dim
        self._heads = attention.q_proj.out_features // self._size
        self._key_heads = attention.k_proj.out_features // self._size
        self._projection = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = _Product(attention.o_proj.weight, attention.o_proj.bias)
        self._gate_and_up = _join(mlp.gate_proj, mlp.up_proj)
        self._down = _Product(mlp.down_proj.weight, mlp.down_proj.bias)
        self._attention_norm = _Norm(layer.input_layernorm)
        self._mlp_norm = _Norm(layer.post_attention_layernorm)
        self._query_norm = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._key_norm = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        packed: Batch,
        **_: Any,
    ) -> torch.Tensor:
        """Hidden states [1, T, D] in and out, as transformers calls its layers."""
        heads, key_heads = self._heads, self._key_heads
        projected = self._projection(self._attention_norm(hidden))
        projected = projected.view(1, hidden.shape[1], heads + 2 * key_heads, self._size).transpose(1, 2)
        value = projected.narrow(1, heads + key_heads, key_heads)
        if self._query_norm is None or self._key_norm is None:
            rotated = _rotate(projected.narrow(1, 0, heads + key_heads), *position_embeddings)
            query, key = rotated.narrow(1, 0, heads), rotated.narrow(1, heads, key_heads)
        else:
            query = _rotate(self._query_norm(projected.narrow(1, 0, heads)), *position_embeddings)
            key = _rotate(self._key_norm(projected.narrow(1, heads, key_heads)), *position_embeddings)
        attended = packed.attend(self._index, query, key, value, self._rule)
        hidden = hidden + self._output(attended.reshape(1, hidden.shape[1], -1))
        gate, up = self._gate_and_up(self._mlp_norm(hidden)).chunk(2, -1)
        return hidden + self._down(silu(gate) * up)


def fits(layer: Any) -> bool:
    """Whether the layer is made of the parts a fused layer knows. What it does with them only a probe can tell."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    names = {name for name, _ in layer.named_children()}
    if attention is None or names != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    products = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    products += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        all(type(product) is nn.Linear for product in products)
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and hasattr(attention, "head_dim")
        and hasattr(attention, "layer_idx")
        and attention.k_proj.out_features == attention.v_proj.out_features
    )


class _Product:
    """A linear map without the cost of a module's call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs, self._weight, self._bias)


class _Norm:
    def __init__(self, module: Any) -> None:
        self._weight = module.weight
        self._shape = tuple(module.weight.shape)
        self._epsilon = module.variance_epsilon

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return rms_norm(inputs, self._shape, self._weight, self._epsilon)


def _join(*modules: nn.Linear) -> _Product:
    """One product that gives the outputs of all, one after another; their weights become parts of its own."""
    weight = torch.cat([module.weight for module in modules])
    bias = None if modules[0].bias is None else torch.cat([module.bias for module in modules])
    sizes = [module.out_features for module in modules]
    for index, module in enumerate(modules):
        module.weight = nn.Parameter(weight.split(sizes)[index], requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias.split(sizes)[index], requires_grad=False)
    return _Product(weight, bias)


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [1, heads, T, size] by angles whose cosines and sines are [1, T, size] (RoFormer, 3.4.2)."""
    first, second = states.chunk(2, -1)
    return states * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
