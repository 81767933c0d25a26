"""Small models of families as gguf files, with the names, keys, orders and values that llama.cpp's converter writes.

``FILES`` says for each family what its converter does (conversion/*.py in llama.cpp).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.support.hub_families import EXPERTS, FAMILIES, TEXT, Family

Tensors = Iterator[tuple[str, torch.Tensor]]
Keys = dict[str, Any]


def _same(_: Any, name: str, values: torch.Tensor) -> Tensors:
    yield name, values


@dataclass(frozen=True)
class File:
    """How llama.cpp's converter writes a family."""

    architecture: str
    """llama.cpp's name."""
    family: Family
    keys: Callable[[Any], Keys] = field(default=lambda _: {})
    """Keys beside ``_common``."""
    tensors: Callable[[Any, str, torch.Tensor], Tensors] = _same
    """Tensors of a weight of transformers."""
    hold: Callable[[Any], Mapping[str, Any]] = field(default=lambda _: {})
    """Tensors that are no weights of transformers."""


def write(
    path: Path,
    file: File,
    model: Any,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    quantized: gguf.GGMLQuantizationType | None = None,
    is_expanded: bool = False,
) -> Path:
    """Write the file of a model. ``keys`` and ``tensors`` take the place of its own; None: left out.

    ``quantized``: the type of matrices. With ``is_expanded`` their values are written as float32.
    """
    writer = gguf.GGUFWriter(path, file.architecture)
    settings = {**_common(model.config), **file.keys(model.config), **(keys or {})}
    for key, value in settings.items():
        _add_key(writer, f"{file.architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*(chr(33 + i) for i in range(94)), *(f"!{i}" for i in range(34))])
    writer.add_token_types([1] * 128)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in {**dict(_tensors(file, model)), **(tensors or {})}.items():
        if values is None:
            continue
        numbers = np.ascontiguousarray(np.asarray(values, np.float32))
        if quantized is None or numbers.ndim < 2 or numbers.shape[-1] % 32 or "inp" in name:
            writer.add_tensor(name, numbers)
        elif is_expanded:
            writer.add_tensor(name, gguf.dequantize(gguf.quantize(numbers, quantized), quantized))
        else:
            writer.add_tensor(name, gguf.quantize(numbers, quantized), raw_dtype=quantized)
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


def _common(config: Any) -> Keys:
    """What the base class of all converters writes."""
    rope: dict[str, Any] = config.rope_parameters
    full = rope.get("full_attention", rope)
    found = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "rope.freq_base": float(full["rope_theta"]),
        "attention.head_count_kv": _global(config, "num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": _first(config, "norm_eps", "rms_norm_eps"),
        "attention.layer_norm_epsilon": _first(config, "layer_norm_eps"),
        "expert_count": _first(config, "num_local_experts", "num_experts"),
        "expert_used_count": _first(config, "num_experts_per_tok", "top_k_experts"),
    }  # fmt: skip
    if full["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
    if full["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        for name in ("beta_fast", "beta_slow"):
            found[f"rope.scaling.yarn_{name}"] = float(full[name])
    return found


def _first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _global(config: Any, name: str) -> Any:
    """A setting of the blocks without full attention, where blocks differ."""
    return getattr(config.per_layer_config[0] if config.is_heterogeneous else config, name)


def _heads(config: Any) -> Keys:
    """What converters write for a ``head_dim`` in the config."""
    return {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def _llama(config: Any) -> Keys:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"vocab_size": config.vocab_size, "rope.dimension_count": size}


def _tensors(file: File, model: Any) -> Tensors:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[file.architecture], model.config.num_hidden_layers)
    for whole, merged in model.state_dict().items():
        if whole == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for own, own_values in _of_experts(model.config, whole, merged):
            for name, values in file.tensors(model.config, own, own_values):
                stem, _, end = name.rpartition(".")
                stem, end = (stem, end) if end in ("weight", "bias", "scale") else (name, "weight")
                known = stem if stem.startswith("blk.") else names.get_name(stem)
                yield f"{known}.{end}", values
    for name, hold in file.hold(model.config).items():
        yield name, torch.tensor(hold)


def _of_experts(config: Any, name: str, values: torch.Tensor) -> Tensors:
    """The merged tensors of all experts: gate and up projection apart, outputs first."""
    stem, _, own = name.rpartition(".experts.")
    if not stem:
        yield name, values
        return
    block, end = f"blk.{name.split('.')[2]}", "bias" if own.endswith("_bias") else "weight"
    is_gpt_oss = config.model_type == "gpt_oss"
    if is_gpt_oss and end == "weight":
        values = values.transpose(1, 2)
    if own.startswith("down"):
        yield f"{block}.ffn_down_exps.{end}", values
        return
    if config.model_type == "gemma4_text":
        yield f"{block}.ffn_gate_up_exps.{end}", values
        return
    parts = (values[:, ::2], values[:, 1::2]) if is_gpt_oss else values.chunk(2, 1)
    for part, rows in zip(("gate", "up"), parts, strict=True):
        yield f"{block}.ffn_{part}_exps.{end}", rows


def _neighbours(config: Any, name: str, values: torch.Tensor) -> Tensors:
    """Rows of queries and keys in the order of a rotary embedding that turns neighbours."""
    counts = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    for part, heads in counts.items():
        if part in name:
            values = values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    yield name, values


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


def _routing_bias(config: Any, name: str, values: torch.Tensor) -> Tensors:
    if name.endswith("e_score_correction_bias"):
        name = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    yield name, values


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
    return {**_heads(config), **_windowed(config), **{cap: getattr(config, cap) for cap in caps}}


def _gemma3(config: Any) -> Keys:
    return {**_heads(config), **_windowed(config), "rope.freq_base_swa": 10_000.0}


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
    return {**_heads(config), **_experts(config), **own}


def _with(*keys: Callable[[Any], Keys]) -> Callable[[Any], Keys]:
    return lambda config: {key: value for each in keys for key, value in each(config).items()}


def _family(name: str, *without: str, architecture: str = "", **changes: Any) -> Family:
    """A family of ``FAMILIES`` with other settings."""
    found = FAMILIES[name]
    own = {key: value for key, value in found.config.items() if key not in without}
    return Family(found.models, architecture or found.architecture, {**own, **changes})


_NO_HEADS = ("head_dim",)
_COHERE = {
    **{key: value for key, value in TEXT.items() if key not in ("rms_norm_eps", "head_dim")},
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
_QWEN2_MOE = {
    **{key: value for key, value in TEXT.items() if key != "head_dim"},
    **EXPERTS,
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": False,
}

FILES: Mapping[str, File] = {
    "cohere": File(
        "command-r",
        Family("Command-R", "CohereForCausalLM", {**_COHERE, "model_type": "cohere"}),
        _cohere,
    ),
    "cohere with norms of heads": File(
        "command-r",
        Family("Command-R+", "CohereForCausalLM", {**_COHERE, "use_qk_norm": True, "model_type": "cohere"}),
        _cohere,
    ),
    "cohere2": File(
        "cohere2",
        Family(
            "Command-R 7B",
            "Cohere2ForCausalLM",
            {**_COHERE, "model_type": "cohere2", "sliding_window": 6},
        ),
        _cohere2,
    ),
    "gemma2": File("gemma2", FAMILIES["gemma2"], _gemma2, _plus_one),
    "gemma3_text": File(
        "gemma3",
        _family(
            "gemma3_text",
            sliding_window_pattern=6,
            num_hidden_layers=6,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        _gemma3,
        _plus_one,
    ),
    "gemma4": File(
        "gemma4",
        Family("Gemma 4", "Gemma4ForCausalLM", FAMILIES["gemma4"].config["text_config"]),
        _gemma4_keys,
        _gemma4,
        _proportional,
    ),
    "gpt_oss": File("gpt-oss", FAMILIES["gpt_oss"], _with(_heads, _experts, _windowed)),
    "granite": File("granite", _family("granite", *_NO_HEADS), _granite, _neighbours),
    "granitemoe": File("granitemoe", _family("granitemoe", *_NO_HEADS), _granite, _granite_moe),
    "granitemoeshared": File(
        "granitemoe",
        _family(
            "granitemoe",
            *_NO_HEADS,
            architecture="GraniteMoeSharedForCausalLM",
            model_type="granitemoeshared",
            shared_intermediate_size=24,
        ),
        _granite,
        _granite_moe,
    ),
    "lfm2": File("lfm2", FAMILIES["lfm2"], _lfm2, _conv),
    "llama": File("llama", FAMILIES["llama"], _with(_llama, _heads), _neighbours, _llama3_factors),
    "llama with biases": File(
        "llama",
        _family("llama", "rope_scaling", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        _with(_llama, _heads),
        _neighbours,
    ),
    "minimax_m2": File("minimax-m2", FAMILIES["minimax_m2"], _minimax, _routing_bias),
    "mistral": File(
        "llama", _family("mistral", sliding_window=None, head_dim=16), _with(_llama, _heads), _neighbours
    ),
    "mixtral": File("llama", FAMILIES["mixtral"], _with(_llama, _heads), _neighbours),
    "olmo2": File(
        "olmo2",
        _family(
            "olmo3",
            *_NO_HEADS,
            "sliding_window",
            "layer_types",
            architecture="Olmo2ForCausalLM",
            model_type="olmo2",
        ),
    ),
    "olmo3": File("olmo2", _family("olmo3", *_NO_HEADS, rope_scaling=_YARN), _olmo3),
    "phi3": File("phi3", FAMILIES["phi3"], _phi3, hold=_longrope),
    "qwen2": File("qwen2", _family("qwen2", *_NO_HEADS)),
    "qwen2_moe": File("qwen2moe", Family("Qwen2-MoE", "Qwen2MoeForCausalLM", _QWEN2_MOE), _experts),
    "qwen3": File("qwen3", FAMILIES["qwen3"], _heads),
    "qwen3 with larger heads": File("qwen3", _family("qwen3", head_dim=32, tie_word_embeddings=True), _heads),
    "qwen3_moe": File("qwen3moe", FAMILIES["qwen3_moe"], _with(_heads, _experts)),
    "smollm3": File("smollm3", FAMILIES["smollm3"], _llama, _neighbours),
}
"""By transformers' ``model_type``, and what differs in the file."""
