"""Maps each architecture of gguf files to transformers: one row of ``ARCHITECTURES`` for each.

gguf_config.py makes a config by a row, and gguf_tensors.py finds the tensors of each weight. What
most architectures share needs no mention here: gguf_config.py knows the keys, and the package
``gguf`` has llama.cpp's names of tensors.

To add an architecture, add a row: the ``model_type``, settings that no key gives, and weights whose
tensors have other names, another order or other values. The loader refuses what a row forgets: it
compares every key with the config, and every tensor must be used.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.gguf_hybrids import HYBRIDS
from swarmnet_protocols.models.checkpoints.gguf_rows import (
    BIASES,
    HINT,
    LEFT_OUT,
    NORMS_PLUS_ONE,
    Architecture,
    Header,
    Setting,
    Weight,
    dense_blocks,
    key,
    rotated_share,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def _heads(count: str) -> Weight:
    """Rows of queries or keys in llama.cpp's order for rotary embeddings that turn neighbours.

    transformers has the first halves of all pairs of a head before the second halves.
    """

    def made(config: Any, rows: "Array") -> "Array":
        heads = getattr(config, count)
        return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    return Weight(made=made)


_NEIGHBOURS = {
    r"self_attn\.q_proj": _heads("num_attention_heads"),
    r"self_attn\.k_proj": _heads("num_key_value_heads"),
}


def _gemma_query_scale(blocks_of_27b: int) -> Setting:
    """No key tells the scale of Gemma's attention. llama.cpp knows the models of 27 billion by
    their blocks (llama-model.cpp, ``LLM_TYPE_27B``)."""

    def scale(header: Header) -> int:
        is_largest = len(header.blocks) == blocks_of_27b
        own = header.own
        return int(own["embedding_length"] // own["attention.head_count"] if is_largest else header.head_size)

    return scale


def _rope_by_kind(sliding_base: float | None) -> Setting:
    """Rotary parameters of each kind of attention.

    ``sliding_base`` is the base for sliding windows in files that have no key for it. None: the
    base of full attention.
    """

    def parameters(header: Header) -> dict[str, Any]:
        base = header.own.get("rope.freq_base", 10_000.0)
        default = base if sliding_base is None else sliding_base
        sliding = header.own.get("rope.freq_base_swa", default)
        return {
            "full_attention": {"rope_type": "default", "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
        }

    return parameters


def _conv_types(header: Header) -> list[str]:
    """Blocks without key heads are convolutions."""
    heads = header.own["attention.head_count_kv"]
    return ["full_attention" if count else "conv" for count in heads]


_QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": dense_blocks}


def _sliding(period: int) -> Setting:
    """Kinds of attention by ``attention.sliding_window_pattern``.

    Files that do not say have full attention in every ``period``-th block.
    """

    def kinds(header: Header) -> list[str]:
        default = [(block + 1) % period != 0 for block in header.blocks]
        found = header.own.get("attention.sliding_window_pattern", default)
        return ["sliding_attention" if sliding else "full_attention" for sliding in found]

    return kinds


def _if_windows(setting: Setting) -> Setting:
    """The setting for files with sliding windows; others have none."""
    return lambda header: setting(header) if "attention.sliding_window" in header.own else LEFT_OUT


def _needs(tensor: str, setting: Setting) -> Setting:
    """The setting of files that have a tensor; others are refused."""

    def checked(header: Header) -> Any:
        if tensor not in header.shapes:
            raise ConfigError(f"the file has no tensor {tensor}", hint=HINT)
        return setting(header)

    return checked


def _key_heads(kind: str) -> Setting:
    """Heads of keys in blocks with this kind of attention."""

    def heads(header: Header) -> int:
        counts, block = header.own["attention.head_count_kv"], _sliding(6)(header).index(kind)
        return int(counts[block] if isinstance(counts, tuple) else counts)

    return heads


def _has_full_values(header: Header) -> bool:
    """Whether blocks with full attention have values that are not their keys."""
    block = _sliding(6)(header).index("full_attention")
    return f"blk.{block}.attn_v.weight" in header.shapes


def _joined(_: Any, *parts: "Array") -> "Array":
    import numpy as np

    return np.concatenate(parts)


ARCHITECTURES: Mapping[str, Architecture] = {
    **HYBRIDS,
    "cohere2": Architecture("cohere2", {"layer_types": _sliding(4)}),
    "command-r": Architecture("cohere", {"use_qk_norm": lambda header: header.has("attn_q_norm.weight")}),
    "gemma2": Architecture("gemma2", {"query_pre_attn_scalar": _gemma_query_scale(46)}, NORMS_PLUS_ONE),
    "gemma3": Architecture(
        "gemma3_text",
        {
            "query_pre_attn_scalar": _gemma_query_scale(62),
            "layer_types": _sliding(6),
            "rope_parameters": _rope_by_kind(10_000.0),
        },
        NORMS_PLUS_ONE,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            "layer_types": _sliding(6),
            "head_dim": lambda header: header.own["attention.key_length_swa"],
            "global_head_dim": lambda header: header.own["attention.key_length"],
            "num_key_value_heads": _key_heads("sliding_attention"),
            "num_global_key_value_heads": _key_heads("full_attention"),
            "attention_k_eq_v": lambda header: not _has_full_values(header),
            "enable_moe_block": lambda header: "expert_count" in header.own,
            "rope_parameters": _needs("rope_freqs.weight", _rope_by_kind(10_000.0)),
        },
        {
            r"router\.scale": Weight(("ffn_gate_inp.scale",)),
            r"router\.per_expert_scale": Weight(("ffn_down_exps.scale",)),
        },
    ),
    "gpt-oss": Architecture("gpt_oss", {"layer_types": _sliding(2)}, yarn={"truncate": False}),
    "granite": Architecture("granite", BIASES, _NEIGHBOURS),
    "granitemoe": Architecture(
        lambda header: "granitemoeshared" if header.has("ffn_up_shexp.weight") else "granitemoe",
        BIASES,
        {
            **_NEIGHBOURS,
            r"block_sparse_moe\.router": Weight(("ffn_gate_inp.weight",)),
            r"shared_mlp\.input_linear": Weight(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), _joined),
            r"shared_mlp\.output_linear": Weight(("ffn_down_shexp.weight",)),
        },
    ),
    "lfm2": Architecture(
        "lfm2",
        {"block_auto_adjust_ff_dim": False, "layer_types": _conv_types},
    ),
    "llama": Architecture(
        lambda header: "mixtral" if "expert_count" in header.own else "llama", BIASES, _NEIGHBOURS
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {"scoring_func": "sigmoid"},
        {r"mlp\.e_score_correction_bias": Weight(("exp_probs_b.bias",))},
        {"partial_rotary_factor": rotated_share},
    ),
    "mistral3": Architecture(
        lambda header: "ministral3" if "attention.temperature_scale" in header.own else "mistral",
        weights=_NEIGHBOURS,
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
            "layer_types": _if_windows(_sliding(4)),
            "rope_parameters": _if_windows(_rope_by_kind(None)),
            **BIASES,
        },
    ),
    "olmoe": Architecture("olmoe", {**BIASES, "norm_topk_prob": False}),
    "phi3": Architecture("phi3", rope={"partial_rotary_factor": rotated_share}),
    "qwen2": Architecture("qwen2"),
    "qwen2vl": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", {**_QWEN_MOE, "norm_topk_prob": False}),
    "qwen3": Architecture("qwen3", BIASES),
    "qwen3moe": Architecture("qwen3_moe", {**BIASES, **_QWEN_MOE, "norm_topk_prob": True}),
    "qwen3vl": Architecture("qwen3", BIASES),
    "qwen3vlmoe": Architecture("qwen3_moe", {**BIASES, **_QWEN_MOE, "norm_topk_prob": True}),
    "smollm3": Architecture("smollm3", {**BIASES, "no_rope_layer_interval": 4}, _NEIGHBOURS),
    "starcoder2": Architecture(
        "starcoder2",
        {
            "use_bias": lambda header: header.has("attn_q.bias"),
            "sliding_window": 4096,  # of every published config; files do not say
        },
    ),
}
"""By ``general.architecture``. Models for images and text are read as models for text, in which all
axes of a position are the same."""


def row_of(architecture: str) -> Architecture:
    """Return the row of an architecture. Raises ``ConfigError`` if there is none."""
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"models of the architecture {architecture[:100]!r} are not read from gguf", hint=HINT
        )
    return ARCHITECTURES[architecture]
