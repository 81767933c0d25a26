"""Layers of the Llama shape, computed with fewer operations than transformers makes of them.

In a forward of one token everything between the matrix products is slow out of proportion: the weights that stream by push
its code and its small tensors out of the caches. Fewer operations are the cure (``tests/bench/decode.py``). The model that
fused layers are made of keeps working, on the same memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from swarmnet_node.engine.adapters import Additions
from swarmnet_node.engine.attention import Batch, Rule
from swarmnet_node.engine.kernels.fused_ops import Angles, Norm, gated, normed, rotated

Linear = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [outputs, inputs] and bias."""

PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The products of a fused layer, and the linear modules whose outputs each has, one after another."""


def fits(model: Any) -> bool:
    """Whether the model is made of parts that fused layers know. What it does with them only a trial can tell."""
    return hasattr(model, "rotary_emb") and all(map(_layer_fits, model.layers))


class FusedLayers:
    """What a decoder stack of transformers computes, if it computes nothing unusual: compare before use."""

    def __init__(self, model: Any, rules: Sequence[Rule]) -> None:
        """``rules`` says of each layer how it attends. The weights of ``model`` become parts of ours."""
        self.rotary = model.rotary_emb
        self.layers = [FusedLayer(layer, rule) for layer, rule in zip(model.layers, rules, strict=True)]

    def part(self, start: int, end: int) -> "FusedLayers":
        """Layers [start, end) of these."""
        part = FusedLayers.__new__(FusedLayers)
        part.rotary, part.layers = self.rotary, self.layers[start:end]
        return part

    def __call__(
        self, inputs: torch.Tensor, positions: torch.Tensor, batch: Batch, additions: Additions | None
    ) -> torch.Tensor:
        """Hidden states [T, D] of new positions [T], in and out."""
        cosines, sines = self.rotary(inputs[None], positions[None])
        first, second = sines.chunk(2, -1)
        angles = cosines[None], torch.cat((-first, second), -1)[None]
        for layer in self.layers:
            inputs = layer(inputs, angles, batch, additions)
        return inputs


class FusedLayer:
    """One decoder layer: what it is made of, and what it computes."""

    def __init__(self, layer: Any, rule: Rule) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = attention.layer_idx
        self.rule = rule
        self.size = attention.head_dim
        self.heads = attention.q_proj.out_features // self.size
        self.key_heads = attention.k_proj.out_features // self.size
        self.qkv = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = attention.o_proj.weight, attention.o_proj.bias
        self.gate_up = _join(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj.weight, mlp.down_proj.bias
        self.attention_norm = _norm(layer.input_layernorm)
        self.mlp_norm = _norm(layer.post_attention_layernorm)
        self.head_norms = [_norm(getattr(attention, name)) for name in _head_norm_names(attention)]

    def __call__(
        self, hidden: torch.Tensor, angles: Angles, batch: Batch, additions: Additions | None
    ) -> torch.Tensor:
        heads, key_heads = self.heads, self.key_heads
        states = self._times("qkv", self.qkv, normed(hidden, self.attention_norm), additions)
        states = states.view(1, len(hidden), heads + 2 * key_heads, self.size).transpose(1, 2)
        if self.head_norms:
            query, key, value = torch.split(states, [heads, key_heads, key_heads], 1)
            query = rotated(normed(query, self.head_norms[0]), angles)
            key = rotated(normed(key, self.head_norms[1]), angles)
        else:
            rotating, value = torch.split(states, [heads + key_heads, key_heads], 1)
            query, key = torch.split(rotated(rotating, angles), [heads, key_heads], 1)
        attended = batch.attend(self.index, query, key, value, self.rule).reshape(len(hidden), -1)
        hidden = hidden + self._times("output", self.output, attended, additions)
        gate_up = self._times("gate_up", self.gate_up, normed(hidden, self.mlp_norm), additions)
        return hidden + self._times("down", self.down, gated(gate_up), additions)

    def _times(
        self, product: str, weights: Linear, inputs: torch.Tensor, additions: Additions | None
    ) -> torch.Tensor:
        outputs = linear(inputs, *weights)
        if additions is not None:
            additions.add(self.index, product, inputs, outputs)
        return outputs


def _layer_fits(layer: Any) -> bool:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    names = {name for name, _ in layer.named_children()}
    if attention is None or names != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    products = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    products += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in _head_norm_names(attention)]
    return (
        all(type(product) is nn.Linear for product in products)
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and hasattr(attention, "head_dim")
        and hasattr(attention, "layer_idx")
    )


def _head_norm_names(attention: Any) -> list[str]:
    return [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]


def _norm(module: Any) -> Norm:
    return tuple(module.weight.shape), module.weight, module.variance_epsilon


def _join(*modules: nn.Linear) -> Linear:
    """Weight and bias that give the outputs of all, one after another; theirs become parts of these."""
    weight = torch.cat([module.weight for module in modules])
    bias = None if modules[0].bias is None else torch.cat([module.bias for module in modules])
    sizes = [module.out_features for module in modules]
    for index, module in enumerate(modules):
        module.weight = nn.Parameter(torch.split(weight, sizes)[index], requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(torch.split(bias, sizes)[index], requires_grad=False)
    return weight, bias
