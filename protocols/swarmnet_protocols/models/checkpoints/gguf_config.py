"""The config of a gguf file, completed, and the check that no key is left unread.

A gguf file has keys and a few tensors where a checkpoint of the hub has a config. ``completed``
adds what transformers does not read, and ``check_keys`` compares every key with the config: a key
that the config contradicts, or that is not known here, is refused by name.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.gguf_header import Field

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors by whose values rotary frequencies are divided. They are part of the config, not of the
weights."""
Factors = Mapping[str, Sequence[float]]
_HINT = "use the model in Hugging Face layout"
_HARMLESS = re.compile(r"(general|quantize|split)\..+")
"""Names, authors, and how the file was made. ``general.architecture``, ``.alignment`` and ``.type``
are read."""
_TOKENIZER = re.compile(
    r"tokenizer\.(chat_template(\.\w+|s)?|huggingface\.json|ggml\.("
    r"model|pre|tokens|token_type|token_type_count|scores|merges|\w+_token_id"
    r"|add_(bos|eos|sep)_token|add_space_prefix|remove_extra_whitespaces))"
)
"""Keys that ``gguf_tokenizer.py`` and ``end_tokens.py`` read, and tokens that they need not know.
"""
_PARTIAL_ROTARY = {"phi3", "stablelm", "nemotron"}
"""Architectures whose classes rotate a part of each head."""
_GEMMA_27B_BLOCKS = {"gemma2": 46, "gemma3": 62}
"""No key tells the scale of Gemma's attention. llama.cpp knows the models of 27 billion by their
blocks (llama-model.cpp, ``LLM_TYPE_27B``)."""


def completed(
    config: "PretrainedConfig", architecture: str, fields: Mapping[str, Field]
) -> "PretrainedConfig":
    """Add to a config what transformers does not read of the keys, except rotary scaling."""
    own = _own(architecture, fields)
    heads = config.num_attention_heads
    if getattr(config, "head_dim", None) is not None:
        config.head_dim = own.get("attention.key_length", config.hidden_size // heads)
    if architecture in _PARTIAL_ROTARY and "rope.dimension_count" in own:
        share = own["rope.dimension_count"] / _head_size(config)
        config.partial_rotary_factor = share
        config.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": share}
    if "expert_shared_feed_forward_length" in own and hasattr(config, "shared_expert_intermediate_size"):
        config.shared_expert_intermediate_size = own["expert_shared_feed_forward_length"]
    if hasattr(config, "sliding_window"):  # that of the class is another model's
        config.sliding_window = own.get("attention.sliding_window") or None
        if config.sliding_window is None and "sliding_attention" in (
            getattr(config, "layer_types", None) or []
        ):
            raise ConfigError(f"the file has no key {architecture}.attention.sliding_window", hint=_HINT)
    if architecture in _GEMMA_27B_BLOCKS:
        is_largest = config.num_hidden_layers == _GEMMA_27B_BLOCKS[architecture]
        config.query_pre_attn_scalar = config.hidden_size // heads if is_largest else config.head_dim
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name in own and hasattr(config, name):
            setattr(config, name, own[name])
    return config


def with_rope(
    config: "PretrainedConfig", architecture: str, fields: Mapping[str, Field], factors: Factors
) -> "PretrainedConfig":
    """Add the scaling of rotary frequencies to a config, by keys and the values of
    ``ROPE_TENSORS``.

    Raises ``ConfigError`` for factors that are none.
    """
    own = _own(architecture, fields)
    kind = own.get("rope.scaling.type", "none")
    scaling: dict[str, Any] = {}
    original = own.get("rope.scaling.original_context_length", config.max_position_embeddings)
    if factors:
        scaling = _by_factors(config, factors, original, own.get("rope.scaling.attn_factor"))
    elif kind == "linear":
        scaling = {"rope_type": kind, "factor": own["rope.scaling.factor"]}
    elif kind == "yarn" and architecture != "gpt-oss":
        scaling = {
            "rope_type": kind,
            "factor": own["rope.scaling.factor"],
            "original_max_position_embeddings": original,
            "beta_fast": own.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": own.get("rope.scaling.yarn_beta_slow", 1.0),
        }
    if scaling:
        parameters = config.rope_parameters
        if "full_attention" in parameters:  # by the kind of attention: a sliding window is not scaled
            config.rope_parameters = {
                **parameters,
                "full_attention": {**parameters["full_attention"], **scaling},
            }
        else:
            config.rope_parameters = {**parameters, **scaling}
    return config


def _by_factors(config: Any, factors: Factors, original: int, attention: float | None) -> dict[str, Any]:
    size = _rotary_size(config) // 2
    for name, values in factors.items():
        if len(values) != size or not all(math.isfinite(value) and value > 0 for value in values):
            raise ConfigError(f"{name} has no {size} factors of rotary frequencies", hint=_HINT)
    freqs, long, short = (factors.get(name) for name in ROPE_TENSORS)
    if freqs is not None:
        long = short = freqs
        if (llama := _as_llama3(config, freqs)) is not None:
            return llama
        original, attention = config.max_position_embeddings, 1.0
    if long is None or short is None:
        raise ConfigError("the file has one of two tensors with factors of rotary frequencies", hint=_HINT)
    config.original_max_position_embeddings = original
    scaling: dict[str, Any] = {"rope_type": "longrope", "long_factor": [*long], "short_factor": [*short]}
    scaling["original_max_position_embeddings"] = original
    return scaling if attention is None else {**scaling, "attention_factor": attention}


def _as_llama3(config: Any, factors: Sequence[float]) -> dict[str, Any] | None:
    """The scaling of Llama 3.1 to 3.3 that gives these factors; None if none does.

    All these models have the same bounds.
    """
    factor, low, high, original = max(factors), 1.0, 4.0, 8192
    base = _rope(config)["rope_theta"]
    for index, found in enumerate(factors):
        turns = original / (2 * math.pi * base ** (index / len(factors)))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        if abs(1 / ((1 - smooth) / factor + smooth) / found - 1) > 1e-4:
            return None
    bounds = {"low_freq_factor": low, "high_freq_factor": high}
    return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original, **bounds}


def check_keys(config: "PretrainedConfig", architecture: str, fields: Mapping[str, Field]) -> None:
    """Raise ``ConfigError``, which names the key, unless the config agrees with every key."""
    if fields.get("general.type", "model") != "model":
        raise ConfigError(
            f"the file is no model: its general.type is {fields['general.type']!r}",
            hint="give the model's own file",
        )
    own = _own(architecture, fields)
    for key, value in fields.items():
        suffix = key.removeprefix(f"{architecture}.")
        if suffix == key:
            if not _HARMLESS.fullmatch(key) and not _TOKENIZER.fullmatch(key):
                raise ConfigError(f"the file has the key {key[:200]!r}, which is not read", hint=_HINT)
        elif suffix not in _EXPECTED:
            raise ConfigError(f"the file has the key {key[:200]!r}, which is not read", hint=_HINT)
        elif not _agrees(own[suffix], _EXPECTED[suffix](config)):
            raise ConfigError(
                f"the file has {key} = {str(value)[:100]}, which is not read rightly", hint=_HINT
            )


def _own(architecture: str, fields: Mapping[str, Field]) -> dict[str, Any]:
    prefix = f"{architecture}."
    return {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}


def _agrees(value: Any, expected: Any) -> bool:
    """Whether a key has the expected value, in the precision of float32.

    ``expected`` None: the config has no such setting.
    """
    if isinstance(value, tuple):
        values = expected if isinstance(expected, list) else [expected] * len(value)
        return len(values) == len(value) and all(map(_agrees, value, values))
    if isinstance(expected, list):
        return all(_agrees(value, each) for each in expected)
    if isinstance(value, float) and isinstance(expected, int | float):
        return math.isclose(value, expected, rel_tol=1e-5)
    return bool(value == expected)


def _first(*names: str) -> Callable[[Any], Any]:
    """The first of these attributes that a config has."""
    return lambda config: next(
        (found for name in names if (found := getattr(config, name, None)) is not None), None
    )


def _rope(config: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    full: dict[str, Any] = parameters.get("full_attention", parameters)
    return full


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rotary_size(config: Any) -> int:
    return int(_head_size(config) * _rope(config).get("partial_rotary_factor", 1.0) + 1e-6)


def _is_sliding(config: Any) -> Any:
    return [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []]


def _key_heads(config: Any) -> Any:
    count, kinds = config.num_key_value_heads, getattr(config, "layer_types", None) or []
    return [count if "attention" in kind else 0 for kind in kinds] if "conv" in kinds else count


_RMS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")
_EXPECTED: Mapping[str, Callable[[Any], Any]] = {
    "block_count": _first("num_hidden_layers"),
    "context_length": _first("max_position_embeddings", "n_positions"),
    "embedding_length": _first("hidden_size"),
    "feed_forward_length": _first("intermediate_size", "ffn_hidden_size", "n_inner"),
    "vocab_size": _first("vocab_size"),
    "attention.head_count": _first("num_attention_heads"),
    "attention.head_count_kv": _key_heads,
    "attention.layer_norm_rms_epsilon": _first(*_RMS),
    "attention.layer_norm_epsilon": _first(
        "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"
    ),
    "attention.key_length": _head_size,
    "attention.value_length": _head_size,
    "attention.sliding_window": lambda config: getattr(config, "sliding_window", None) or 0,
    "attention.sliding_window_pattern": _is_sliding,
    "attention.causal": lambda _: True,
    "attn_logit_softcapping": _first("attn_logit_softcapping"),
    "final_logit_softcapping": _first("final_logit_softcapping"),
    "expert_count": _first("num_experts", "num_local_experts"),
    "expert_used_count": _first("num_experts_per_tok"),
    "expert_feed_forward_length": _first("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": _first("shared_expert_intermediate_size"),
    "expert_weights_norm": lambda config: getattr(config, "norm_topk_prob", True),
    "expert_weights_scale": lambda config: getattr(config, "routed_scaling_factor", 1.0),
    "expert_gating_func": lambda config: {"sigmoid": 2}.get(getattr(config, "scoring_func", ""), 1),
    "shortconv.l_cache": _first("conv_L_cache"),
    "use_parallel_residual": _first("use_parallel_residual"),
    "rope.freq_base": lambda config: _rope(config).get("rope_theta"),
    "rope.freq_base_swa": lambda config: config.rope_parameters.get("sliding_attention", {}).get(
        "rope_theta"
    ),
    "rope.dimension_count": _rotary_size,
    "rope.scaling.type": lambda config: {"default": "none"}.get(
        *[_rope(config).get("rope_type", "default")] * 2
    ),
    "rope.scaling.factor": lambda config: _rope(config).get("factor"),
    "rope.scaling.original_context_length": lambda config: _rope(config).get(
        "original_max_position_embeddings", config.max_position_embeddings
    ),
    "rope.scaling.attn_factor": lambda config: _rope(config).get("attention_factor", 1.0),
    "rope.scaling.yarn_beta_fast": lambda config: _rope(config).get("beta_fast"),
    "rope.scaling.yarn_beta_slow": lambda config: _rope(config).get("beta_slow"),
    "rope.scaling.finetuned": lambda _: [],
}
"""What each key means, as the value that it has for a config. An empty list: any value means the
same."""
