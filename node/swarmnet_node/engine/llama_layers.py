"""Decoder layers of the Llama shape, computed with a backend instead of transformers' modules.

Query, key and value projections are one product, gate and up projections another. Nothing but this
shape's operations is computed. In a forward of one token, reading the weights evicts code and small
tensors from the processor's caches. So every operation between two products is slow, and fewer
operations are faster (``tests/bench/decode.py``).
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from swarmnet_node.engine.adapters import BatchLora
from swarmnet_node.engine.attention import Batch
from swarmnet_node.engine.kernels.backend import (
    Angles,
    AttentionRule,
    Backend,
    DecoderLayer,
    Linear,
    RmsNorm,
    Rotary,
)
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_linear import PackedLinear
from swarmnet_protocols.quantization.packed_tensor import PackedTensor


def has_llama_shape(model: Any) -> bool:
    """Return whether a transformers decoder stack consists of the modules of the Llama shape.

    A family may use the same modules in another way, so callers compare outputs before they use
    :class:`LlamaLayers`.
    """
    return hasattr(model, "rotary_emb") and all(map(_layer_has_llama_shape, model.layers))


class LlamaLayers:
    """A decoder stack of the Llama shape: llama, qwen2, qwen3, mistral and others."""

    def __init__(
        self,
        model: Any,
        rules: Sequence[AttentionRule],
        backend: Backend,
        devices: Sequence[torch.device],
    ) -> None:
        """``rules`` and ``devices`` have the attention rule and the device of each layer.

        The weights of ``model`` become views of the joined weights. So the model keeps working, and
        no weight is in memory twice.
        """
        self.rotary: Rotary = model.rotary_emb
        self.layers = [_decoder_layer(layer, rule) for layer, rule in zip(model.layers, rules, strict=True)]
        self._backend = backend
        self._devices = devices

    def part(self, start: int, end: int) -> "LlamaLayers":
        """Return layers [start, end) of these, on the same weights."""
        part = LlamaLayers.__new__(LlamaLayers)
        part.rotary, part.layers, part._backend = self.rotary, self.layers[start:end], self._backend
        part._devices = self._devices[start:end]
        return part

    def rotates_whole_heads(self, like: torch.Tensor) -> bool:
        """Return whether the rotary embedding covers all components of a head.

        ``like`` has the dtype and device of inputs.
        """
        cosines, _ = self.rotary(like, torch.zeros(1, 1, dtype=torch.long, device=like.device))
        return all(layer.head_size == cosines.shape[-1] for layer in self.layers)

    def __call__(
        self, inputs: torch.Tensor, positions: torch.Tensor, batch: Batch, lora: BatchLora | None
    ) -> torch.Tensor:
        """Compute the outputs [T, D] of the last layer for new positions [T] with ``inputs``
        [T, D]."""
        cosines, sines = self.rotary(inputs[None], positions[None])
        first, second = sines.chunk(2, -1)
        angles = cosines[None], torch.cat((-first, second), -1)[None]
        device = inputs.device
        for layer, own_device in zip(self.layers, self._devices, strict=True):
            if own_device != device:
                device = own_device
                inputs = inputs.to(device)
                angles = angles[0].to(device), angles[1].to(device)
            # Attention and MLP are separate functions, so that each frees its temporary tensors
            # when it returns.
            inputs = inputs + self._attention(layer, inputs, angles, batch, lora)
            inputs = inputs + self._mlp(layer, inputs, lora)
        return inputs

    def _attention(
        self, layer: DecoderLayer, hidden: torch.Tensor, angles: Angles, batch: Batch, lora: BatchLora | None
    ) -> torch.Tensor:
        backend, heads, key_heads = self._backend, layer.heads, layer.key_heads
        states = self._product(layer, "qkv", backend.rms_norm(hidden, layer.attention_norm), lora)
        states = states.view(1, len(hidden), heads + 2 * key_heads, layer.head_size).transpose(1, 2)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key, value = torch.split(states, [heads, key_heads, key_heads], 1)
            query = backend.rope(backend.rms_norm(query, layer.query_norm), angles)
            key = backend.rope(backend.rms_norm(key, layer.key_norm), angles)
        else:
            rotating, value = torch.split(states, [heads + key_heads, key_heads], 1)
            query, key = torch.split(backend.rope(rotating, angles), [heads, key_heads], 1)
        attended = batch.attend(layer.index, query, key, value, layer.rule).reshape(len(hidden), -1)
        return self._product(layer, "output", attended, lora)

    def _mlp(self, layer: DecoderLayer, hidden: torch.Tensor, lora: BatchLora | None) -> torch.Tensor:
        gate_up = self._product(layer, "gate_up", self._backend.rms_norm(hidden, layer.mlp_norm), lora)
        return self._product(layer, "down", self._backend.swiglu(gate_up), lora)

    def _product(
        self, layer: DecoderLayer, name: str, inputs: torch.Tensor, lora: BatchLora | None
    ) -> torch.Tensor:
        """Compute one of ``PRODUCTS`` with the batch's LoRA updates: [T, inputs] to [T,
        outputs]."""
        outputs = self._backend.linear(inputs, getattr(layer, name))
        if lora is not None:
            lora.add(layer.index, name, inputs, outputs)
        return outputs


def _layer_has_llama_shape(layer: Any) -> bool:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    names = {name for name, _ in layer.named_children()}
    if attention is None or names != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    linears = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    linears += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        all(type(linear) in (nn.Linear, PackedLinear) for linear in linears)
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and hasattr(attention, "q_norm") == hasattr(attention, "k_norm")
        and hasattr(attention, "head_dim")
        and hasattr(attention, "layer_idx")
        # Ministral 3 also scales queries by their positions, from a certain position on.
        and "position_ids" not in signature(attention.forward).parameters
    )


def _decoder_layer(layer: Any, rule: AttentionRule) -> DecoderLayer:
    """Return the weights of a transformers layer, joined where they have the same inputs."""
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        index=attention.layer_idx,
        rule=rule,
        heads=attention.q_proj.out_features // attention.head_dim,
        key_heads=attention.k_proj.out_features // attention.head_dim,
        head_size=attention.head_dim,
        qkv=_join(attention.q_proj, attention.k_proj, attention.v_proj),
        output=Linear(_weight(attention.o_proj), attention.o_proj.bias),
        gate_up=_join(mlp.gate_proj, mlp.up_proj),
        down=Linear(_weight(mlp.down_proj), mlp.down_proj.bias),
        attention_norm=_norm(layer.input_layernorm),
        mlp_norm=_norm(layer.post_attention_layernorm),
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
    )


def _norm(module: Any) -> RmsNorm:
    return RmsNorm(module.weight, module.variance_epsilon)


def _weight(module: nn.Linear) -> torch.Tensor | PackedTensor:
    return module.packed if isinstance(module, PackedLinear) else module.weight


def _join(*modules: nn.Linear) -> Linear:
    """Return one linear layer with the outputs of all modules, one after another.

    The modules' own weights become views of its weights.
    """
    sizes = [module.out_features for module in modules]
    bias = None if modules[0].bias is None else torch.cat([module.bias for module in modules])
    if bias is not None:
        for module, part in zip(modules, torch.split(bias, sizes), strict=True):
            module.bias = nn.Parameter(part, requires_grad=False)
    if any(isinstance(module, PackedLinear) for module in modules):
        packed = PackedTensor.joined([_as_packed(module) for module in modules])
        for module, matrix in zip(modules, packed.split(sizes), strict=True):
            if isinstance(module, PackedLinear):
                module.packed = matrix
        return Linear(packed, bias)
    weight = torch.cat([module.weight for module in modules])
    for module, part in zip(modules, torch.split(weight, sizes), strict=True):
        module.weight = nn.Parameter(part, requires_grad=False)
    return Linear(weight, bias)


def _as_packed(module: nn.Linear) -> PackedTensor:
    if isinstance(module, PackedLinear):
        return module.packed
    return PackedTensor.of(Format.F32, module.weight.detach().float().view(torch.uint8))
