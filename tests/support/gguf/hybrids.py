"""Files of families with recurrent states, latent attention or routed experts, as llama.cpp's
converter writes them.

Sources are conversion/qwen.py, deepseek.py, glm.py and falcon_h1.py in llama.cpp.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tests.support.gguf.writing import File, Keys, Tensors, family, head_sizes, routing_bias
from tests.support.models.hub_families import EXPERTS, FAMILIES, GATED_DELTA, QWEN3_5, TEXT, Family


def _qwen_keys(config: Any) -> Keys:
    keys = {
        **head_sizes(config),
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4, "rope.dimension_count": config.head_dim // 2,
    }  # fmt: skip
    if hasattr(config, "num_experts"):
        keys |= {
                "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }  # fmt: skip
    return keys


def _qwen35_keys(config: Any) -> Keys:
    return _qwen_keys(config) | {"rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0]}


def _tiled(config: Any, values: torch.Tensor, size: int) -> torch.Tensor:
    """Value heads of ``size`` rows: the first of each key head, then the second of each."""
    heads, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    return values.view(heads, each, size, *values.shape[1:]).transpose(0, 1).reshape(values.shape)


def _qwen35(config: Any, name: str, values: torch.Tensor) -> Tensors:
    own = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    size = config.linear_value_head_dim
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if own in ("in_proj_qkv", "conv1d"):
        values = torch.cat([values[:keys], _tiled(config, values[keys:], size)])
    elif own == "in_proj_z":
        values = _tiled(config, values, size)
    elif own in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        values = _tiled(config, values, 1)
    elif own == "out_proj":
        values = _tiled(config, values.T, size).T
    yield from _gated_delta(config, name, values)


def _gated_delta(config: Any, name: str, values: torch.Tensor) -> Tensors:
    block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("A_log"):
        yield f"{block}.ssm_a", -values.exp()
    elif name.endswith("dt_bias"):
        yield f"{block}.ssm_dt.bias", values
    elif name.endswith("conv1d.weight"):
        yield name, values.squeeze(1)
    else:
        is_summed = name.endswith("norm.weight") and "linear_attn" not in name
        yield name, values + 1 if is_summed else values


def _qwen3_next(config: Any, name: str, values: torch.Tensor) -> Tensors:
    if not name.endswith("in_proj_qkvz.weight"):
        yield from _gated_delta(config, name, values)
        return
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    each = config.linear_num_value_heads // heads * config.linear_value_head_dim
    parts = values.view(heads, -1, values.shape[1]).split([size, size, each, each], 1)
    block = f"blk.{name.split('.')[2]}"
    *qkv, z = (part.flatten(0, 1) for part in parts)
    yield f"{block}.attn_qkv.weight", torch.cat(qkv)
    yield f"{block}.attn_gate.weight", z


def _routing_keys(config: Any) -> Keys:
    return {
        "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
    }  # fmt: skip


def _deepseek_keys(config: Any) -> Keys:
    is_third = config.model_type == "deepseek_v3"
    keys = {
        **_routing_keys(config), "vocab_size": config.vocab_size, "expert_gating_func": 2 if is_third else 1,
        "attention.head_count_kv": 1, "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank, "rope.dimension_count": config.qk_rope_head_dim,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank, "attention.value_length_mla": config.v_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "expert_weights_norm": True if is_third else None,
    }  # fmt: skip
    scale = config.rope_parameters.get("mscale_all_dim")
    return {**keys, "rope.scaling.yarn_log_multiplier": None if scale is None else 0.1 * scale}


def _deepseek(config: Any, name: str, values: torch.Tensor) -> Tensors:
    if not name.endswith("kv_b_proj.weight"):
        yield from routing_bias(config, name, values)
        return
    heads, sizes = config.num_attention_heads, [config.qk_nope_head_dim, config.v_head_dim]
    keys, own = values.view(heads, sum(sizes), -1).split(sizes, 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), own


def _glm_keys(config: Any) -> Keys:
    return {
        **_routing_keys(config), **head_sizes(config),
        "rope.dimension_count": config.head_dim // 2, "expert_gating_func": 2, "expert_weights_norm": True,
        "nextn_predict_layers": 0,
    }  # fmt: skip


def _falcon_keys(config: Any) -> Keys:
    return {
        **head_sizes(config),
        "vocab_size": config.vocab_size, "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_d_ssm, "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_n_heads, "ssm.group_count": config.mamba_n_groups,
    }  # fmt: skip


def _falcon(config: Any, name: str, values: torch.Tensor) -> Tensors:
    """Multipliers are multiplied into the weights of a file."""
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = [inner, inner, state, state, config.mamba_n_heads]
    of_rows = torch.cat(
        [torch.full((size,), each) for size, each in zip(sizes, config.ssm_multipliers, strict=True)]
    )
    gate, down = config.mlp_multipliers
    multipliers = {
        "down_proj": down, "gate_proj": gate, "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier, "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "in_proj": of_rows[:, None] * config.ssm_in_multiplier, "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    last = name.removesuffix(".weight").rpartition(".")[2]
    block = f"blk.{name.split('.')[2]}" if "layers" in name else ""
    names = {"A_log": "ssm_a", "D": "ssm_d", "pre_ff_layernorm": "ffn_norm", "dt_bias": "ssm_dt.bias"}
    if last == "A_log":
        values = -values.exp()
    if last in ("A_log", "D"):
        values = values[:, None]
    if last == "conv1d":  # not its bias
        values = values.squeeze(1)
    if name.endswith("mamba.norm.weight"):
        values = values.view(config.mamba_n_groups, -1)
    yield f"{block}.{names[last]}" if last in names else name, values * multipliers.get(last, 1.0)


_DELTA = {**TEXT, **GATED_DELTA, "linear_num_value_heads": 6}
_QWEN35 = {**TEXT, **QWEN3_5, "linear_num_value_heads": 6}
_SHARED = {**EXPERTS, "shared_expert_intermediate_size": 24}
_LITE = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "q_lora_rank": None}
_FALCON = {"mamba_norm_before_gate": False, "mamba_n_groups": 2}

HYBRIDS: Mapping[str, File] = {
    "deepseek_v2": File("deepseek2", FAMILIES["deepseek_v2"], _deepseek_keys, _deepseek),
    "deepseek_v2 lite": File("deepseek2", family("deepseek_v2", **_LITE), _deepseek_keys, _deepseek),
    "deepseek_v3": File(
        "deepseek2",
        family("deepseek_v3", n_routed_experts=8, n_group=4, topk_group=2),
        _deepseek_keys,
        _deepseek,
    ),
    "falcon_h1": File("falcon-h1", family("falcon_h1", **_FALCON), _falcon_keys, _falcon),
    "falcon_h1 with a norm": File(
        "falcon-h1", family("falcon_h1", **_FALCON, mamba_rms_norm=True), _falcon_keys, _falcon
    ),
    "glm4_moe": File("glm4moe", FAMILIES["glm4_moe"], _glm_keys, routing_bias),
    "glm4_moe with biases": File(
        "glm4moe", family("glm4_moe", attention_bias=True, use_qk_norm=False), _glm_keys, routing_bias
    ),
    "qwen3_5": File(
        "qwen35",
        Family("Qwen3.5", "Qwen3_5ForCausalLM", {**_QWEN35, "model_type": "qwen3_5_text"}),
        _qwen35_keys,
        _qwen35,
    ),
    "qwen3_5_moe": File(
        "qwen35moe",
        Family("Qwen3.5", "Qwen3_5MoeForCausalLM", {**_QWEN35, **_SHARED, "model_type": "qwen3_5_moe_text"}),
        _qwen35_keys,
        _qwen35,
    ),
    "qwen3_next": File("qwen3next", family("qwen3_next", **_DELTA), _qwen_keys, _qwen3_next),
}
"""By transformers' ``model_type``, and what differs in the file."""
