"""Rows of ``ARCHITECTURES`` with recurrent states, latent attention, or experts chosen by groups.

Sources are llama.cpp's converter, for what a file has (conversion/qwen.py, deepseek.py, glm.py,
falcon_h1.py), and its graphs, for what that means (src/models).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.gguf_rows import (
    BIASES,
    HINT,
    LEFT_OUT,
    NORMS_PLUS_ONE,
    Architecture,
    Header,
    Weight,
    dense_blocks,
    key,
    rotated_share,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def _log_of_decay(values: "Array") -> "Array":
    """Logarithms of decays, which files have negated."""
    import numpy as np

    if not (values < 0).all():
        raise ValueError("a decay of a recurrent state is not positive")
    found: Array = np.log(-values)
    return found


# Gated delta net. K key heads, and V value heads: V / K for each key head.


def _layer_types(header: Header) -> list[str]:
    """Which blocks are recurrent. Without a list, every n-th is not (src/models/qwen35.cpp)."""
    interval = header.own.get("full_attention_interval", 4)
    recurrent = header.own.get("attention.recurrent_layers")
    if not isinstance(recurrent, tuple):
        recurrent = [bool((block + 1) % interval) for block in header.blocks]
    return ["linear_attention" if recurrent[block] else "full_attention" for block in header.blocks]


def _value_head_size(header: Header) -> int:
    return int(header.own["ssm.inner_size"] // header.own["ssm.time_step_rank"])


def _by_key_head(config: Any, rows: "Array") -> "Array":
    """Rows of value heads in transformers' order: those of the first key head come first.

    Files have the first value head of every key head, then the second of every key head.
    """
    heads = config.linear_num_key_heads
    each = config.linear_num_value_heads // heads
    return rows.reshape(each, heads, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def _values_by_key_head(config: Any, rows: "Array") -> "Array":
    """``_by_key_head`` for the rows of values, which follow the rows of queries and keys."""
    import numpy as np

    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([rows[:keys], _by_key_head(config, rows[keys:])])


def _joined_by_key_head(config: Any, qkv: "Array", z: "Array") -> "Array":
    """The rows of each key head: its queries, keys, values and gates."""
    import numpy as np

    heads, keys = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    parts = [*np.split(qkv, [keys, 2 * keys]), z]
    rows = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(rows, 1).reshape(-1, *qkv.shape[1:])


_DELTA_SETTINGS = {
    "full_attention_interval": key("full_attention_interval", LEFT_OUT),
    "layer_types": _layer_types,
    "linear_value_head_dim": _value_head_size,
    "num_nextn_predict_layers": key("nextn_predict_layers", 0),
}
_DELTA_WEIGHTS = {
    r"linear_attn\.A_log": Weight(("ssm_a",), lambda _, values: _log_of_decay(values)),
    r"linear_attn\.dt_bias": Weight(("ssm_dt.bias",)),
    r"linear_attn\.norm": Weight(),
    **NORMS_PLUS_ONE,
}
_TILED_WEIGHTS = {
    r"linear_attn\.A_log": Weight(
        ("ssm_a",), lambda config, values: _by_key_head(config, _log_of_decay(values))
    ),
    r"linear_attn\.dt_bias": Weight(("ssm_dt.bias",), _by_key_head),
    r"linear_attn\.(conv1d|in_proj_qkv)": Weight(made=_values_by_key_head),
    r"linear_attn\.in_proj_[zab]": Weight(made=_by_key_head),
    r"linear_attn\.out_proj": Weight(made=lambda config, values: _by_key_head(config, values.T).T),
    r"linear_attn\.norm": Weight(),
    **NORMS_PLUS_ONE,
}
_ROTATES_PART = {"partial_rotary_factor": rotated_share}
_QWEN35_ROPE = {
    **_ROTATES_PART,
    "mrope_section": lambda header: [*header.own["rope.dimension_sections"][:3]],
    "mrope_interleaved": True,
}

# Latent attention of DeepSeek.

_GROUPS = {(61, 256): (8, 4), (60, 160): (8, 3), (27, 64): (1, 1)}
"""Groups of experts, and groups that a token uses, by the numbers of blocks and of routed experts:
DeepSeek V3 and R1, V2 (arXiv 2405.04434, section 2.2), and V2-Lite. Older converters wrote no keys
for groups."""


def _groups(which: int) -> Any:
    def value(header: Header) -> int:
        own = header.own
        name = ("expert_group_count", "expert_group_used_count")[which]
        if name in own:
            return int(own[name])
        found = _GROUPS.get((len(header.blocks), own.get("expert_count", 0)))
        if found is None:
            raise ConfigError(
                f"the file has no key {header.architecture}.{name}",
                hint=f"{HINT}, or a file that a newer llama.cpp converted",
            )
        return found[which]

    return value


def _is_third(header: Header) -> bool:
    """Whether experts are chosen as in DeepSeek V3: by sigmoids with a bias.

    Files of GLM-4.7-Flash do not say so. llama.cpp knows them by their blocks and vocabulary
    (src/models/deepseek2.cpp).
    """
    is_flash = len(header.blocks) in (47, 48) and header.shapes["token_embd.weight"][0] == 154_880
    return bool(header.own.get("expert_gating_func", 2 if is_flash else 1) == 2)


def _is_compressed(header: Header) -> bool:
    """Whether heads are described as one head of the compressed keys, as newer converters do."""
    return "attention.key_length_mla" in header.own


def _head_sizes(header: Header) -> tuple[int, int]:
    """The sizes of a query head and of a value head."""
    end = "_mla" if _is_compressed(header) else ""
    return header.own[f"attention.key_length{end}"], header.own[f"attention.value_length{end}"]


def _mscale(header: Header) -> Any:
    """llama.cpp writes a tenth of it, and takes it for ``mscale``, too (llama-context.cpp)."""
    found = header.own.get("rope.scaling.yarn_log_multiplier")
    return LEFT_OUT if found is None else round(10 * found, 6)


def _keys_and_values(config: Any, keys: "Array", values: "Array") -> "Array":
    """The rows of keys and of values of each head: [H, rank, keys] and [H, values, rank] joined."""
    import numpy as np

    return np.concatenate([keys.swapaxes(1, 2), values], 1).reshape(-1, config.kv_lora_rank)


_ROUTING_BIAS = {r"mlp\.gate\.e_score_correction_bias": Weight(("exp_probs_b.bias",))}
_ROUTED_SETTINGS = {
    "num_nextn_predict_layers": key("nextn_predict_layers", 0),
    "first_k_dense_replace": key("leading_dense_block_count", 0),
    "n_shared_experts": key("expert_shared_count", 0),
    "routed_scaling_factor": key("expert_weights_scale", 1.0),
}


# Falcon-H1.


def _untied(header: Header) -> bool:
    """Embeddings and head have different multipliers, which a file has multiplied into each."""
    if "output.weight" not in header.shapes:
        raise ConfigError(
            "the file has no tensor 'output.weight', and no key tells the scale of a head that is tied",
            hint=HINT,
        )
    return False


HYBRIDS: Mapping[str, Architecture] = {
    "deepseek2": Architecture(
        lambda header: "deepseek_v3" if _is_third(header) else "deepseek_v2",
        {
            **_ROUTED_SETTINGS,
            "n_group": _groups(0),
            "topk_group": _groups(1),
            "topk_method": lambda header: "group_limited_greedy" if _groups(0)(header) > 1 else "greedy",
            "norm_topk_prob": lambda header: (
                _is_third(header) and header.own.get("expert_weights_norm", False)
            ),
            "scoring_func": lambda header: "sigmoid" if _is_third(header) else "softmax",
            "head_dim": key("rope.dimension_count"),
            "num_key_value_heads": key("attention.head_count"),
            "q_lora_rank": key("attention.q_lora_rank", None),
            "qk_rope_head_dim": key("rope.dimension_count"),
            "qk_nope_head_dim": lambda header: _head_sizes(header)[0] - header.own["rope.dimension_count"],
            "v_head_dim": lambda header: _head_sizes(header)[1],
        },
        {r"self_attn\.kv_b_proj": Weight(("attn_k_b.weight", "attn_v_b.weight"), _keys_and_values)}
        | _ROUTING_BIAS,
        yarn={"mscale": _mscale, "mscale_all_dim": _mscale},
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        {
            **BIASES,
            "tie_word_embeddings": _untied,
            "mamba_d_ssm": key("ssm.inner_size"),
            "mamba_d_head": _value_head_size,
            "mamba_conv_bias": lambda header: header.has("ssm_conv1d.bias"),
            "mamba_proj_bias": lambda header: header.has("ssm_in.bias"),
            "projectors_bias": lambda header: header.has("ssm_out.bias"),
            "mamba_rms_norm": lambda header: header.has("ssm_norm.weight"),
            "mamba_norm_before_gate": False,
        },
        {
            r"mamba\.A_log": Weight(("ssm_a",), lambda _, values: _log_of_decay(values)),
            r"mamba\.D": Weight(("ssm_d",)),
            r"mamba\.dt_bias": Weight(("ssm_dt.bias",)),
            r"mamba\.norm": Weight(made=lambda _, values: values.reshape(-1)),
            r"pre_ff_layernorm": Weight(("ffn_norm",)),
        },
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {
            **_ROUTED_SETTINGS,
            "n_group": key("expert_group_count", 1),
            "topk_group": key("expert_group_used_count", 1),
            "norm_topk_prob": key("expert_weights_norm", False),
            "scoring_func": "sigmoid",
            "attention_bias": lambda header: header.has("attn_q.bias"),
            "use_qk_norm": lambda header: header.has("attn_q_norm.weight"),
        },
        _ROUTING_BIAS,
        _ROTATES_PART,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        _DELTA_SETTINGS,
        _TILED_WEIGHTS,
        _QWEN35_ROPE,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        _DELTA_SETTINGS
        | {
            "intermediate_size": key("feed_forward_length", None),
        },
        _TILED_WEIGHTS,
        _QWEN35_ROPE,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        _DELTA_SETTINGS
        | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense_blocks,
            "norm_topk_prob": True,
        },
        {r"linear_attn\.in_proj_qkvz": Weight(("attn_qkv.weight", "attn_gate.weight"), _joined_by_key_head)}
        | _DELTA_WEIGHTS,
        _ROTATES_PART,
    ),
}
