"""Small models of families as gguf files, with the names, keys, orders and values that llama.cpp's
converter writes.

``FILES`` says for each family what its converter does (conversion/*.py in llama.cpp).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.support.gguf.hybrids import HYBRIDS
from tests.support.gguf.writing import File, Keys, Tensors, family, head_sizes, routing_bias
from tests.support.models.hub_families import FAMILIES, Family


def _llama(config: Any) -> Keys:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"vocab_size": config.vocab_size, "rope.dimension_count": size}


def _neighbours(config: Any, name: str, values: torch.Tensor) -> Tensors:
    """Rows of queries and keys in the order of a rotary embedding that turns neighbours."""
    counts = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    for part, heads in counts.items():
        if part in name:
            values = values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    yield name, values


def _each_expert(config: Any, name: str, values: torch.Tensor) -> Tensors:
    """A tensor for each expert, as converters wrote until April 2024."""
    if not name.endswith("_exps.weight"):
        yield from _neighbours(config, name, values)
        return
    for expert, matrix in enumerate(values):
        yield name.replace("_exps", f".{expert}"), matrix


def _plus_one(config: Any, name: str, values: torch.Tensor) -> Tensors:
    yield name, values + 1 if name.endswith("norm.weight") else values


def _granite_moe(config: Any, name: str, values: torch.Tensor) -> Tensors:
    block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if "router" in name:
        yield f"{block}.ffn_gate_inp.weight", values
    elif "shared_mlp.input" in name:
        for part, rows in zip(("gate", "up"), values.chunk(2), strict=True):
            yield f"{block}.ffn_{part}_shexp.weight", rows
    elif "shared_mlp.output" in name:
        yield f"{block}.ffn_down_shexp.weight", values
    else:
        yield from _neighbours(config, name, values)


def _gemma4(config: Any, name: str, values: torch.Tensor) -> Tensors:
    block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    own = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    found = next((f"{block}.{own[end]}" for end in own if name.endswith(end)), name)
    yield found, values


def _conv(config: Any, name: str, values: torch.Tensor) -> Tensors:
    yield name, values.squeeze(1) if name.endswith("conv.conv.weight") else values


def _llama3_factors(config: Any) -> Mapping[str, Any]:
    rope, size = config.rope_parameters, config.head_dim
    if rope["rope_type"] != "llama3":
        return {}
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    found = []
    for index in range(size // 2):
        turns = original / (2 * math.pi * rope["rope_theta"] ** (2 * index / size))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": found}


def _longrope(config: Any) -> Mapping[str, Any]:
    rope = config.rope_parameters
    return {f"rope_factors_{kind}.weight": rope[f"{kind}_factor"] for kind in ("long", "short")}


def _phi3(config: Any) -> Keys:
    original, longest = config.original_max_position_embeddings, config.max_position_embeddings
    return {
        "rope.dimension_count": 6, "attention.sliding_window": config.sliding_window,
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(longest / original) / math.log(original)),
    }  # fmt: skip


def _proportional(config: Any) -> Mapping[str, Any]:
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    size = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
    turned = int(size * share)
    return {"rope_freqs.weight": [1.0] * turned + [1e30] * (size - turned)}


def _gemma4_keys(config: Any) -> Keys:
    kinds = config.layer_types
    full = config.per_layer_config[kinds.index("full_attention")]
    sliding = config.per_layer_config[kinds.index("sliding_attention")]
    counts = [(full if kind == "full_attention" else sliding).num_key_value_heads for kind in kinds]
    return {
        **{f"attention.{each}_length": full.head_dim for each in ("key", "value")},
        **{f"attention.{each}_length_swa": sliding.head_dim for each in ("key", "value")},
        "rope.dimension_count": full.head_dim, "rope.dimension_count_swa": sliding.head_dim,
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "attention.head_count_kv": counts, "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": config.final_logit_softcapping, **_windows(config),
        "expert_feed_forward_length": config.moe_intermediate_size,
    }  # fmt: skip


def _windows(config: Any) -> Keys:
    pattern = [kind == "sliding_attention" for kind in config.layer_types]
    return {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": pattern}


def _granite(config: Any) -> Keys:
    shared = getattr(config, "shared_intermediate_size", None)
    return {
        **_llama(config), "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier, "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling, "expert_shared_feed_forward_length": shared,
    }  # fmt: skip


def _experts(config: Any) -> Keys:
    shared = getattr(config, "shared_expert_intermediate_size", None)
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    return {"expert_feed_forward_length": width, "expert_shared_feed_forward_length": shared}


def _windowed(config: Any) -> Keys:
    """Windows in files that do not say which blocks have them."""
    return {"attention.sliding_window": config.sliding_window}


def _gemma2(config: Any) -> Keys:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {**head_sizes(config), **_windowed(config), **{cap: getattr(config, cap) for cap in caps}}


def _gemma3(config: Any) -> Keys:
    return {**head_sizes(config), **_windowed(config), "rope.freq_base_swa": 10_000.0}


def _olmo3(config: Any) -> Keys:
    return {**_windows(config), "rope.freq_base_swa": float(_rope_of_windows(config)["rope_theta"])}


def _rope_of_windows(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = config.rope_parameters["sliding_attention"]
    return found


def _lfm2(config: Any) -> Keys:
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    own = {"vocab_size": config.vocab_size, "shortconv.l_cache": config.conv_L_cache}
    return {**own, "attention.head_count_kv": heads}


def _cohere(config: Any) -> Keys:
    return {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}


def _cohere2(config: Any) -> Keys:
    return {**_llama(config), **_cohere(config), **_windowed(config)}


def _minimax(config: Any) -> Keys:
    own = {"rope.dimension_count": 4, "expert_gating_func": 2}
    return {**head_sizes(config), **_experts(config), **own}


def _ministral(config: Any) -> Keys:
    rope = config.rope_parameters
    return {
        **_llama(config), **head_sizes(config), "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
    }  # fmt: skip


def _axes(config: Any) -> Keys:
    """Positions in images, of which texts have one."""
    return {"rope.dimension_sections": [2, 1, 1, 0], "n_deepstack_layers": 1}


def _with(*keys: Callable[[Any], Keys]) -> Callable[[Any], Keys]:
    return lambda config: {key: value for each in keys for key, value in each(config).items()}


_NO_HEADS = ("head_dim",)
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
FILES: Mapping[str, File] = {
    **HYBRIDS,
    "cohere": File("command-r", FAMILIES["cohere"], _cohere),
    "cohere with norms of heads": File("command-r", family("cohere", use_qk_norm=True), _cohere),
    "cohere2": File("cohere2", FAMILIES["cohere2"], _cohere2),
    "gemma2": File("gemma2", FAMILIES["gemma2"], _gemma2, _plus_one),
    "gemma3_text": File(
        "gemma3",
        family(
            "gemma3_text",
            sliding_window_pattern=6,
            num_hidden_layers=6,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        _gemma3,
        _plus_one,
    ),
    **{
        name: File(
            "gemma4",
            Family("Gemma 4", "Gemma4ForCausalLM", FAMILIES[name].config["text_config"]),
            _gemma4_keys,
            _gemma4,
            _proportional,
        )
        for name in ("gemma4", "gemma4 with experts")
    },
    "gpt_oss": File("gpt-oss", FAMILIES["gpt_oss"], _with(head_sizes, _experts, _windowed)),
    "granite": File("granite", family("granite", *_NO_HEADS), _granite, _neighbours),
    "granitemoe": File("granitemoe", family("granitemoe", *_NO_HEADS), _granite, _granite_moe),
    "granitemoeshared": File("granitemoe", family("granitemoeshared", *_NO_HEADS), _granite, _granite_moe),
    "lfm2": File("lfm2", FAMILIES["lfm2"], _lfm2, _conv),
    "llama": File("llama", FAMILIES["llama"], _with(_llama, head_sizes), _neighbours, _llama3_factors),
    "llama with biases": File(
        "llama",
        family("llama", "rope_scaling", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        _with(_llama, head_sizes),
        _neighbours,
    ),
    "llama with fused queries, keys and values": File(
        "llama", FAMILIES["llama"], _with(_llama, head_sizes), _neighbours, _llama3_factors, is_fused=True
    ),
    "minimax_m2": File("minimax-m2", FAMILIES["minimax_m2"], _minimax, routing_bias),
    "mistral": File(
        "llama", family("mistral", sliding_window=None, head_dim=16), _with(_llama, head_sizes), _neighbours
    ),
    "mixtral": File("llama", FAMILIES["mixtral"], _with(_llama, head_sizes), _neighbours),
    "mixtral with a tensor for each expert": File(
        "llama", FAMILIES["mixtral"], _with(_llama, head_sizes), _each_expert
    ),
    "ministral3": File("mistral3", FAMILIES["ministral3"], _ministral, _neighbours),
    "mistral3": File(
        "mistral3", family("mistral", sliding_window=None), _with(_llama, head_sizes), _neighbours
    ),
    "olmo2": File("olmo2", family("olmo2", *_NO_HEADS)),
    "olmo3": File("olmo2", family("olmo3", *_NO_HEADS, rope_scaling=_YARN), _olmo3),
    "olmoe": File("olmoe", family("olmoe", *_NO_HEADS, num_key_value_heads=4)),
    "phi3": File("phi3", FAMILIES["phi3"], _phi3, hold=_longrope),
    "qwen2": File("qwen2", family("qwen2", *_NO_HEADS)),
    "qwen2 with fused queries, keys and values": File("qwen2", family("qwen2", *_NO_HEADS), is_fused=True),
    "qwen2_5_vl": File("qwen2vl", family("qwen2", *_NO_HEADS), _axes),
    "qwen2_vl": File("qwen2vl", family("qwen2", *_NO_HEADS), _axes),
    "qwen2_moe": File("qwen2moe", family("qwen2_moe", *_NO_HEADS), _experts),
    "qwen3": File("qwen3", FAMILIES["qwen3"], head_sizes),
    "qwen3 with larger heads": File(
        "qwen3", family("qwen3", head_dim=32, tie_word_embeddings=True), head_sizes
    ),
    "qwen3_moe": File("qwen3moe", FAMILIES["qwen3_moe"], _with(head_sizes, _experts)),
    "qwen3_vl": File("qwen3vl", FAMILIES["qwen3"], _with(head_sizes, _axes)),
    "qwen3_vl_moe": File("qwen3vlmoe", FAMILIES["qwen3_moe"], _with(head_sizes, _experts, _axes)),
    "smollm3": File("smollm3", FAMILIES["smollm3"], _llama, _neighbours),
    "starcoder2": File("starcoder2", family("starcoder2", *_NO_HEADS)),
}
"""By transformers' ``model_type``, and what differs in the file."""
