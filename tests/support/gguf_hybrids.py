"""Small models with recurrent states, latent attention or shared experts, as a directory and as gguf.

Names, keys, orders and values in a file are those that llama.cpp's converter writes (conversion/qwen.py,
deepseek.py, glm.py, falcon_h1.py).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers.utils import logging

from tests.support.hub_families import EXPERTS, GATED_DELTA, TEXT

Tensors = Iterator[tuple[str, torch.Tensor]]
_LONG = {**TEXT, "max_position_embeddings": 2048}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
_QWEN35 = {
    **_LONG,
    **GATED_DELTA,
    "linear_num_value_heads": 6,
    "rope_parameters": {**_PARTIAL, "mrope_interleaved": True, "mrope_section": [1, 1, 0]},
}
_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
_ROUTED |= {"first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0}
_YARN |= {"beta_slow": 1.0, "rope_theta": 10_000.0, "mscale": 0.707, "mscale_all_dim": 0.707}
_LATENT = {key: value for key, value in _LONG.items() if key != "head_dim"}
_LATENT |= {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8}
_LATENT |= {"qk_rope_head_dim": 4, "v_head_dim": 6, "rope_parameters": _YARN}


@dataclass(frozen=True)
class Written:
    """A family, and how a file has it."""

    architecture: str
    """llama.cpp's name."""
    model: str
    """The name of transformers' class without ``ForCausalLM``."""
    config: Mapping[str, Any]
    keys: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any, str, torch.Tensor], Tensors]
    """Tensors of a weight, which is given by its name within a layer or in the whole model."""


def make(family: str, **changes: Any) -> Any:
    """Return a model with random weights; ``changes`` go into its config."""
    written = FAMILIES[family]
    config = getattr(transformers, f"{written.model}TextConfig", None)
    config = config or getattr(transformers, f"{written.model}Config")
    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        made = config(**{**written.config, **changes})
        model = getattr(transformers, f"{written.model}ForCausalLM")(made)
        with torch.no_grad():
            for name, values in model.state_dict().items():
                _fill(name, values, has_norms_plus_one="Qwen" in written.model)
    return model.eval()


def _fill(name: str, values: torch.Tensor, *, has_norms_plus_one: bool) -> None:
    if name.endswith(("A_log", "dt_bias", ".D")):
        values.copy_(torch.rand_like(values) + 0.1)
    elif values.ndim == 1:
        is_factor = "norm" in name and not (has_norms_plus_one and "linear_attn" not in name)
        values.normal_(0.0, 0.2).add_(1.0 if is_factor else 0.0)
    elif "embed_tokens" in name or "lm_head" in name:
        values.normal_(0.0, 0.3)
    else:
        values.normal_(0.0, values.shape[-1] ** -0.5)


def write(
    path: Path,
    family: str,
    model: Any,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    formats: Callable[[str], gguf.GGMLQuantizationType | None] = lambda name: None,
    is_expanded: bool = False,
) -> Path:
    """Write a file. ``keys`` and ``tensors`` are others than those of the converter; None: left out.

    ``formats``: how llama.cpp quantises each matrix. With ``is_expanded`` its values are written as
    float32.
    """
    written = FAMILIES[family]
    config = model.config
    writer = gguf.GGUFWriter(path, written.architecture)
    rope = config.rope_parameters
    found = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "rope.freq_base": rope["rope_theta"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **({"feed_forward_length": config.intermediate_size} if hasattr(config, "intermediate_size") else {}),
        **written.keys(config), **(keys or {}),
    }  # fmt: skip
    for key, value in found.items():
        _add_key(writer, f"{written.architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*(chr(33 + i) for i in range(config.vocab_size - 1)), "!!"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    own = dict(_tensors(written, model)) | dict(tensors or {})
    for name, values in own.items():
        if values is None:
            continue
        numbers, kind = np.ascontiguousarray(values.float().numpy()), formats(name)
        if kind is None or numbers.ndim < 2 or numbers.shape[-1] % 32 or "conv1d" in name:
            writer.add_tensor(name, numbers)
        elif is_expanded:
            writer.add_tensor(name, gguf.dequantize(gguf.quantize(numbers, kind), kind))
        else:
            writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_key(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)


def _tensors(written: Written, model: Any) -> Tensors:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[written.architecture], model.config.num_hidden_layers)
    for name, values in model.state_dict().items():
        for own_name, own in _of_experts(name, values):
            own_stem = own_name.removesuffix(".weight")
            for given, each in written.tensors(model.config, own_stem, own):
                if given.startswith("blk."):
                    yield given, each
                    continue
                stem, _, end = given.rpartition(".")
                is_parameter = end == "bias"
                known = names.get_name(stem if is_parameter else given)
                file_name = given if known is None else known + ("." + end if is_parameter else ".weight")
                yield file_name, each


def _of_experts(name: str, values: torch.Tensor) -> Tensors:
    """The merged tensors of all experts."""
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        for part, own in zip(("gate_proj", "up_proj"), values.chunk(2, 1), strict=True):
            yield stem + part, own
    else:
        yield name, values


def _qwen_keys(config: Any) -> dict[str, Any]:
    keys = {
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4, "rope.dimension_count": config.head_dim // 2,
    }  # fmt: skip
    if hasattr(config, "num_experts"):
        keys |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }  # fmt: skip
    return keys


def _qwen35_keys(config: Any) -> dict[str, Any]:
    return _qwen_keys(config) | {"rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0]}


def _tiled(config: Any, values: torch.Tensor, size: int) -> torch.Tensor:
    """Value heads of ``size`` rows: the first of each key head, then the second of each."""
    heads, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    return values.view(heads, each, size, *values.shape[1:]).transpose(0, 1).reshape(values.shape)


def _qwen35(config: Any, name: str, values: torch.Tensor) -> Tensors:
    own, size = name.rpartition("linear_attn.")[2], config.linear_value_head_dim
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
    if name.endswith("A_log"):
        values = -values.exp()
    elif name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    elif name.endswith("conv1d"):
        values = values.squeeze(1)
    elif name.endswith("norm") and "linear_attn" not in name:
        values = values + 1
    if name.endswith("A_log"):
        name = f"blk.{name.split('.')[2]}.ssm_a"
    yield name, values


def _qwen3_next(config: Any, name: str, values: torch.Tensor) -> Tensors:
    if not name.endswith("in_proj_qkvz"):
        yield from _gated_delta(config, name, values)
        return
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    each = config.linear_num_value_heads // heads * config.linear_value_head_dim
    parts = values.view(heads, -1, values.shape[1]).split([size, size, each, each], 1)
    block = f"blk.{name.split('.')[2]}"
    *qkv, z = (part.flatten(0, 1) for part in parts)
    yield f"{block}.attn_qkv.weight", torch.cat(qkv)
    yield f"{block}.attn_gate.weight", z


def _routing_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
    }  # fmt: skip


def _deepseek_keys(config: Any) -> dict[str, Any]:
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
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"], "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }  # fmt: skip
    return keys


def _deepseek(config: Any, name: str, values: torch.Tensor) -> Tensors:
    if not name.endswith("kv_b_proj"):
        yield from _with_bias(config, name, values)
        return
    heads, sizes = config.num_attention_heads, [config.qk_nope_head_dim, config.v_head_dim]
    keys, own = values.view(heads, sum(sizes), -1).split(sizes, 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), own


def _with_bias(config: Any, name: str, values: torch.Tensor) -> Tensors:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def _glm_keys(config: Any) -> dict[str, Any]:
    return {
        **_routing_keys(config), "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim // 2, "expert_gating_func": 2, "expert_weights_norm": True,
        "nextn_predict_layers": 0,
    }  # fmt: skip


def _falcon_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
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
    last = name.rpartition(".")[2]
    block = f"blk.{name.split('.')[2]}" if "layers" in name else ""
    names = {"A_log": "ssm_a", "D": "ssm_d", "pre_ff_layernorm": "ffn_norm", "dt_bias": "ssm_dt.bias"}
    if last == "A_log":
        values = -values.exp()
    if last in ("A_log", "D"):
        values = values[:, None]
    if last == "conv1d":
        values = values.squeeze(1)
    if name.endswith("mamba.norm"):
        values = values.view(config.mamba_n_groups, -1)
    yield f"{block}.{names[last]}" if last in names else name, values * multipliers.get(last, 1.0)


_GLM = {**_LONG, **_ROUTED, "n_group": 1, "topk_group": 1, "rope_parameters": {**_PARTIAL, "rope_theta": 1e4}}
_FALCON = {
    **_LONG, "embedding_multiplier": 5.5, "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.9,
    "key_multiplier": 0.5, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.9, 0.8], "ssm_in_multiplier": 0.9,
    "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5], "ssm_out_multiplier": 0.8, "mamba_d_conv": 4,
    "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_n_heads": 4,
    "mamba_chunk_size": 16, "mamba_norm_before_gate": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
}  # fmt: skip
FAMILIES: Mapping[str, Written] = {
    "qwen35": Written("qwen35", "Qwen3_5", _QWEN35, _qwen35_keys, _qwen35),
    "qwen35moe": Written("qwen35moe", "Qwen3_5Moe", {**_QWEN35, **_EXPERTS}, _qwen35_keys, _qwen35),
    "qwen3next": Written(
        "qwen3next", "Qwen3Next",
        {**_LONG, **GATED_DELTA, **_EXPERTS, "rope_parameters": _PARTIAL}, _qwen_keys, _qwen3_next,
    ),
    "deepseek2": Written(
        "deepseek2", "DeepseekV2",
        {**_LATENT, **_ROUTED, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
        _deepseek_keys, _deepseek,
    ),
    "deepseek2-lite": Written(
        "deepseek2", "DeepseekV2", {**_LATENT, **_ROUTED, "n_group": 1, "topk_group": 1, "q_lora_rank": None},
        _deepseek_keys, _deepseek,
    ),
    "deepseek3": Written(
        "deepseek2", "DeepseekV3",
        {**_LATENT, **_ROUTED, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        _deepseek_keys, _deepseek,
    ),
    "glm4moe": Written(
        "glm4moe", "Glm4Moe", {**_GLM, "attention_bias": True, "use_qk_norm": True}, _glm_keys, _with_bias,
    ),
    "falcon-h1": Written("falcon-h1", "FalconH1", _FALCON, _falcon_keys, _falcon),
    "falcon-h1-norm": Written(
        "falcon-h1", "FalconH1", {**_FALCON, "mamba_rms_norm": True}, _falcon_keys, _falcon
    ),
}  # fmt: skip
"""By a name of this project's own."""
