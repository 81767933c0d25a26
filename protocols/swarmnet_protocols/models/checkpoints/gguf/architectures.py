"""Maps each architecture of gguf files to transformers: one row of ``ARCHITECTURES`` for each.

From a row, config.py makes a config and tensors.py finds the tensors of each weight. A row lists
only what is special about its architecture. The usual keys are in config.py, and the package
``gguf`` has llama.cpp's names of tensors.

To add an architecture, add a row. It has the ``model_type``, settings that no key gives, and
weights whose tensors have unusual names, order or values. The loader notices if a row forgets
something: it compares every key with the config, and requires that every tensor is used.
"""

from collections.abc import Mapping

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.gguf.attention import (
    NEIGHBOURS,
    QWEN35_ROPE,
    gemma_query_scale,
    has_full_values,
    head_sizes,
    if_windows,
    key_heads,
    keys_and_values,
    mscale,
    rope_by_kind,
    sliding_except,
)
from swarmnet_protocols.models.checkpoints.gguf.experts import (
    QWEN_MOE,
    ROUTED_SETTINGS,
    ROUTING_BIAS,
    group_count,
    groups_used,
    is_deepseek_v3,
    joined,
)
from swarmnet_protocols.models.checkpoints.gguf.recurrent import (
    DELTA_SETTINGS,
    DELTA_WEIGHTS,
    TILED_WEIGHTS,
    conv_types,
    joined_by_key_head,
    log_of_decay,
    untied,
    value_head_size,
)
from swarmnet_protocols.models.checkpoints.gguf.rows import (
    BIASES,
    HINT,
    LEFT_OUT,
    NORMS_PLUS_ONE,
    ROTATES_PART,
    Architecture,
    Weight,
    key,
    needs,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "cohere2": Architecture("cohere2", {"layer_types": sliding_except(4)}),
    "command-r": Architecture("cohere", {"use_qk_norm": lambda header: header.has("attn_q_norm.weight")}),
    "deepseek2": Architecture(
        lambda header: "deepseek_v3" if is_deepseek_v3(header) else "deepseek_v2",
        {
            **ROUTED_SETTINGS,
            "n_group": group_count,
            "topk_group": groups_used,
            "topk_method": lambda header: "group_limited_greedy" if group_count(header) > 1 else "greedy",
            "norm_topk_prob": lambda header: (
                is_deepseek_v3(header) and header.own.get("expert_weights_norm", False)
            ),
            "scoring_func": lambda header: "sigmoid" if is_deepseek_v3(header) else "softmax",
            "head_dim": key("rope.dimension_count"),
            "num_key_value_heads": key("attention.head_count"),
            "q_lora_rank": key("attention.q_lora_rank", None),
            "qk_rope_head_dim": key("rope.dimension_count"),
            "qk_nope_head_dim": lambda header: head_sizes(header)[0] - header.own["rope.dimension_count"],
            "v_head_dim": lambda header: head_sizes(header)[1],
        },
        {
            r"self_attn\.kv_b_proj": Weight(("attn_k_b.weight", "attn_v_b.weight"), keys_and_values),
            **ROUTING_BIAS,
        },
        yarn={"mscale": mscale, "mscale_all_dim": mscale},
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        {
            **BIASES,
            "tie_word_embeddings": untied,
            "mamba_d_ssm": key("ssm.inner_size"),
            "mamba_d_head": value_head_size,
            "mamba_conv_bias": lambda header: header.has("ssm_conv1d.bias"),
            "mamba_proj_bias": lambda header: header.has("ssm_in.bias"),
            "projectors_bias": lambda header: header.has("ssm_out.bias"),
            "mamba_rms_norm": lambda header: header.has("ssm_norm.weight"),
            "mamba_norm_before_gate": False,
        },
        {
            r"mamba\.A_log": Weight(("ssm_a",), lambda _, values: log_of_decay(values)),
            r"mamba\.D": Weight(("ssm_d",)),
            r"mamba\.dt_bias": Weight(("ssm_dt.bias",)),
            r"mamba\.norm": Weight(made=lambda _, values: values.reshape(-1)),
            r"pre_ff_layernorm": Weight(("ffn_norm",)),
        },
    ),
    "gemma2": Architecture("gemma2", {"query_pre_attn_scalar": gemma_query_scale(46)}, NORMS_PLUS_ONE),
    "gemma3": Architecture(
        "gemma3_text",
        {
            "query_pre_attn_scalar": gemma_query_scale(62),
            "layer_types": sliding_except(6),
            "rope_parameters": rope_by_kind(10_000.0),
        },
        NORMS_PLUS_ONE,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            "layer_types": sliding_except(6),
            "head_dim": lambda header: header.own["attention.key_length_swa"],
            "global_head_dim": lambda header: header.own["attention.key_length"],
            "num_key_value_heads": key_heads("sliding_attention"),
            "num_global_key_value_heads": key_heads("full_attention"),
            "attention_k_eq_v": lambda header: not has_full_values(header),
            "enable_moe_block": lambda header: "expert_count" in header.own,
            "rope_parameters": needs("rope_freqs.weight", rope_by_kind(10_000.0)),
        },
        {
            r"router\.scale": Weight(("ffn_gate_inp.scale",)),
            r"router\.per_expert_scale": Weight(("ffn_down_exps.scale",)),
        },
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {
            **ROUTED_SETTINGS,
            "n_group": key("expert_group_count", 1),
            "topk_group": key("expert_group_used_count", 1),
            "norm_topk_prob": key("expert_weights_norm", False),
            "scoring_func": "sigmoid",
            "attention_bias": lambda header: header.has("attn_q.bias"),
            "use_qk_norm": lambda header: header.has("attn_q_norm.weight"),
        },
        ROUTING_BIAS,
        ROTATES_PART,
    ),
    "gpt-oss": Architecture("gpt_oss", {"layer_types": sliding_except(2)}, yarn={"truncate": False}),
    "granite": Architecture("granite", BIASES, NEIGHBOURS),
    "granitemoe": Architecture(
        lambda header: "granitemoeshared" if header.has("ffn_up_shexp.weight") else "granitemoe",
        BIASES,
        {
            **NEIGHBOURS,
            r"block_sparse_moe\.router": Weight(("ffn_gate_inp.weight",)),
            r"shared_mlp\.input_linear": Weight(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), joined),
            r"shared_mlp\.output_linear": Weight(("ffn_down_shexp.weight",)),
        },
    ),
    "lfm2": Architecture(
        "lfm2",
        {"block_auto_adjust_ff_dim": False, "layer_types": conv_types},
    ),
    "llama": Architecture(
        lambda header: "mixtral" if "expert_count" in header.own else "llama", BIASES, NEIGHBOURS
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {"scoring_func": "sigmoid"},
        ROUTING_BIAS,
        ROTATES_PART,
    ),
    "mistral3": Architecture(
        lambda header: "ministral3" if "attention.temperature_scale" in header.own else "mistral",
        weights=NEIGHBOURS,
        yarn={
            # No key has it: llama.cpp takes 1 (llama-context.cpp).
            "mscale": lambda header: 1.0 if "rope.scaling.yarn_log_multiplier" in header.own else LEFT_OUT,
            "mscale_all_dim": key("rope.scaling.yarn_log_multiplier", LEFT_OUT),
            "llama_4_scaling_beta": key("attention.temperature_scale", LEFT_OUT),
        },
    ),
    "olmo2": Architecture(
        lambda header: "olmo3" if "attention.sliding_window" in header.own else "olmo2",
        {
            "layer_types": if_windows(sliding_except(4)),
            "rope_parameters": if_windows(rope_by_kind(None)),
            **BIASES,
        },
    ),
    "olmoe": Architecture("olmoe", {**BIASES, "norm_topk_prob": False}),
    "phi3": Architecture("phi3", rope=ROTATES_PART),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", {**QWEN_MOE, "norm_topk_prob": False}),
    "qwen2vl": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", BIASES),
    "qwen35": Architecture(
        "qwen3_5_text",
        DELTA_SETTINGS,
        TILED_WEIGHTS,
        QWEN35_ROPE,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {**DELTA_SETTINGS, "intermediate_size": key("feed_forward_length", None)},
        TILED_WEIGHTS,
        QWEN35_ROPE,
    ),
    "qwen3moe": Architecture("qwen3_moe", {**BIASES, **QWEN_MOE, "norm_topk_prob": True}),
    "qwen3next": Architecture(
        "qwen3_next",
        {**DELTA_SETTINGS, **QWEN_MOE, "norm_topk_prob": True},
        {
            r"linear_attn\.in_proj_qkvz": Weight(("attn_qkv.weight", "attn_gate.weight"), joined_by_key_head),
            **DELTA_WEIGHTS,
        },
        ROTATES_PART,
    ),
    "qwen3vl": Architecture("qwen3", BIASES),
    "qwen3vlmoe": Architecture("qwen3_moe", {**BIASES, **QWEN_MOE, "norm_topk_prob": True}),
    "smollm3": Architecture("smollm3", {**BIASES, "no_rope_layer_interval": 4}, NEIGHBOURS),
    "starcoder2": Architecture(
        "starcoder2",
        {
            "use_bias": lambda header: header.has("attn_q.bias"),
            "sliding_window": 4096,  # the value of all published models; no key gives it
        },
    ),
}
"""Architectures by ``general.architecture``.

Models for images and text run as text-only models. Their positions have several axes, which are
equal for text.
"""


def row_of(architecture: str) -> Architecture:
    """Return the row of an architecture. Raises ``ConfigError`` if there is none."""
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"models of the architecture {architecture[:100]!r} are not supported in gguf", hint=HINT
        )
    return ARCHITECTURES[architecture]
