"""Finds the weights of decoder layers in transformers' modules, and joins those with the same
inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from swarmnet_node.engine.kernels.backend import AttentionRule, DecoderLayer, Experts, Linear, Norm
from swarmnet_node.engine.kernels.block_shapes import BlockShape, Family, Mixture, block_shapes, family_of
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_experts import PackedExperts
from swarmnet_protocols.quantization.packed_linear import PackedLinear
from swarmnet_protocols.quantization.packed_tensor import PackedTensor

_ULPS = 2.0**-21
"""Largest relative difference of two frequencies of a rotary embedding: a few units in the last
place of float32."""


def decoder_layers(model: Any, rules: Sequence[AttentionRule]) -> list[DecoderLayer] | None:
    """Return the layers of a transformers decoder stack as data.

    ``rules`` has the attention rule of each layer. Returns None if a layer has other modules than
    its shape, or if a rotary embedding differs from that of its shape. A family may use the same
    modules in another way, so callers compare outputs before they use the result.

    Weights with the same inputs are joined. The modules' own weights become views of the joined
    ones. So the model keeps working, and no weight is in memory twice.
    """
    sizes = [getattr(getattr(layer, "self_attn", None), "head_dim", 0) for layer in model.layers]
    if not all(sizes) or not hasattr(model, "rotary_emb"):
        return None
    mixture = family_of(model.config).mixture
    routers = [mixture is not None and _module(layer, mixture.router) is not None for layer in model.layers]
    shapes = block_shapes(model.config, sizes, routers)
    if shapes is None or not all(map(_has_shape, model.layers, shapes)):
        return None
    if not all(_has_frequencies(model.rotary_emb, shape) for shape in set(shapes)):
        return None
    return [
        _decoder_layer(*each, index=each[0].self_attn.layer_idx)
        for each in zip(model.layers, shapes, rules, strict=True)
    ]


def is_llama(layers: Sequence[DecoderLayer]) -> bool:
    """Return whether the layers have the Llama shape: RMSNorms before attention and MLP, one rotary
    embedding of whole heads, and SwiGLU."""
    llama, rotary = Family(), layers[0].shape.rotary
    return rotary is not None and all(
        replace(layer.shape.family, qkv=llama.qkv, gate_up=llama.gate_up) == llama
        and layer.shape.activation in ("silu", "swish")
        and layer.shape.residual == 1.0
        and layer.shape.query_growth is None
        and layer.shape.rotary == rotary
        and 2 * len(rotary.frequencies) == layer.shape.head_size
        and (layer.query_norm is None) == (layer.key_norm is None)
        and (layer.query_norm is None or layer.query_norm.weight.shape == (layer.shape.head_size,))
        for layer in layers
    )


def _products(layer: nn.Module, family: Family) -> dict[str, tuple[str, ...]]:
    qkv = family.qkv
    if family.has_shared_values and _module(layer, qkv[-1]) is None:
        qkv = (*qkv[:-1], qkv[-2])
    return family.products | {"qkv": qkv}


def _norms(layer: nn.Module, family: Family) -> Iterator[tuple[str, str]]:
    """Yield the norms that a layer has: their names in :class:`DecoderLayer`, and their paths."""
    for name in ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"):
        if path := getattr(family, name):
            yield name, path
    for name in ("query_norm", "key_norm", "value_norm"):
        path = getattr(family, name)
        if path and _module(layer, path) is not None:
            yield name, path


def _has_shape(layer: Any, shape: BlockShape) -> bool:
    """Return whether a layer consists of the linear modules and norms of its shape."""
    family, mixture = shape.family, shape.family.mixture
    products = _products(layer, family)
    linears = [path for paths in products.values() for path in paths]
    norms = [path for _, path in _norms(layer, family)]
    others = [mixture.router, mixture.experts] if mixture else []
    packed = {path for path, module in layer.named_modules() if isinstance(module, PackedLinear)}
    tensors = {*dict(layer.named_parameters()), *dict(layer.named_buffers())}
    tensors -= {family.scale, mixture.correction if mixture else ""}
    return (
        packed | {name.rpartition(".")[0] for name in tensors} <= {*linears, *norms, *others}
        and all(type(_module(layer, path)) in (nn.Linear, PackedLinear) for path in linears)
        and all(
            len({_module(layer, path).bias is None for path in paths}) <= 1 for paths in products.values()
        )
        and (mixture is None or _has_experts(layer, mixture))
        and all(_eps(_module(layer, path)) is not None for path in norms)
        and hasattr(getattr(layer, "self_attn", None), "layer_idx")
    )


def _has_experts(layer: nn.Module, mixture: Mixture) -> bool:
    """Return whether all routed experts of a layer are here, as gated MLPs without biases."""
    router, experts = _module(layer, mixture.router), _module(layer, mixture.experts)
    weights = [getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")]
    count = getattr(experts, "num_experts", 0)
    return (
        set(dict(router.named_parameters())) == {"weight"}
        and len(router.weight) == count > 0
        and (experts.has_gate, experts.is_concatenated) == (True, True)
        and not (experts.has_bias or experts.is_transposed or experts.has_post_expert_norm)
        and all(
            set(each.matrices) == set(range(count)) if isinstance(each, PackedExperts) else each is not None
            for each in weights
        )
    )


def _module(layer: nn.Module, path: str) -> Any:
    module: Any = layer
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _eps(norm: Any) -> float | None:
    found: float | None = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found


def _has_frequencies(rotary: nn.Module, shape: BlockShape) -> bool:
    if shape.rotary is None:
        return True
    mine = torch.tensor(shape.rotary.frequencies, dtype=torch.float64)
    return any(
        name.endswith("inv_freq")
        and theirs.shape == mine.shape
        and bool(((theirs.double().cpu() - mine).abs() <= _ULPS * mine).all())
        for name, theirs in rotary.named_buffers()
    )


def _decoder_layer(layer: Any, shape: BlockShape, rule: AttentionRule, index: int) -> DecoderLayer:
    family = shape.family
    parts: dict[str, Any] = {}
    modules = {}
    for product, paths in _products(layer, family).items():
        linears = [layer.get_submodule(path) for path in paths]
        parts[product] = _join(*linears) if linears else None
        modules[product] = tuple(
            (path, linear.out_features) for path, linear in zip(paths, linears, strict=True)
        )
    for name, path in _norms(layer, family):
        parts[name] = _norm(layer.get_submodule(path), shape)
    return DecoderLayer(
        index=index,
        shape=shape,
        rule=rule,
        key_heads=(parts["qkv"].outputs // shape.head_size - shape.heads) // 2,
        modules=modules,
        experts=_experts(layer, family.mixture) if family.mixture else None,
        scale=float(getattr(layer, family.scale)) if family.scale else 1.0,
        **parts,
    )


def _experts(layer: nn.Module, mixture: Mixture) -> Experts:
    module = layer.get_submodule(mixture.experts)

    def linears(name: str) -> tuple[Linear, ...]:
        weight: Any = getattr(module, name)
        matrices = weight.matrices if isinstance(weight, PackedExperts) else weight
        return tuple(Linear(matrices[expert]) for expert in range(len(matrices)))

    router: Any = layer.get_submodule(mixture.router)
    correction = _module(layer, mixture.correction) if mixture.correction else None
    return Experts(Linear(router.weight), linears("gate_up_proj"), linears("down_proj"), correction)


def _norm(module: Any, shape: BlockShape) -> Norm:
    eps, gain, weight = _eps(module), shape.family.gain, getattr(module, "weight", None)
    assert eps is not None  # noqa: S101 - the caller checked the shape
    if weight is None:  # Gemma 4 has such a norm of values
        weight = torch.ones(shape.head_size)
    return Norm(
        weight.detach() + gain if gain else weight,
        eps,
        getattr(module, "bias", None),
        shape.family.is_centred,
    )


def _weight(module: nn.Linear) -> torch.Tensor | PackedTensor:
    return module.packed if isinstance(module, PackedLinear) else module.weight


def _join(*modules: nn.Linear) -> Linear:
    """Return one linear layer with the outputs of all modules, one after another.

    The modules' own weights become views of its weights.
    """
    if len(modules) == 1:
        return Linear(_weight(modules[0]), modules[0].bias)
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
