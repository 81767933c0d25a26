"""Makes the config of a gguf file, and checks that no key is ignored.

A gguf file has keys and a few tensors where a checkpoint of the hub has a config. ``config_of``
makes the config from the keys, and ``with_rope`` adds the scaling that is in tensors.
``check_keys`` compares every key with the config. It refuses a key that the config contradicts, or
that is unknown here, by name.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.gguf.architectures import row_of
from swarmnet_protocols.models.checkpoints.gguf.rows import HINT, LEFT_OUT, Architecture, Header
from swarmnet_protocols.models.checkpoints.unread import check_routing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose values divide rotary frequencies. They belong to the config, not to the weights."""
Factors = Mapping[str, Sequence[float]]

_ANY = object()
"""Stands for any value of a key. Used where all values have the same meaning."""
_HARMLESS = re.compile(r"(general|quantize|split)\..+")
"""Names, authors, and how the file was made. ``general.architecture``, ``.alignment`` and ``.type``
are read."""
_TOKENIZER = re.compile(
    r"tokenizer\.(chat_template(\.\w+|s)?|huggingface\.json|ggml\.("
    r"model|pre|tokens|token_type|token_type_count|scores|merges|\w+_token_id"
    r"|add_(bos|eos|sep)_token|add_space_prefix|remove_extra_whitespaces))"
)
"""Keys of the tokenizer. ``tokenizer.py`` and ``end_tokens.py`` read the keys that they need."""


def config_of(header: Header) -> "PretrainedConfig":
    """Return the config by the row of an architecture, without the scaling of rotary frequencies.

    Raises ``ConfigError`` for an architecture without a row, ``LookupError`` for a key that is
    missing, and the errors of transformers' config classes.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    row = row_of(header.architecture)
    kind = row.model_type if isinstance(row.model_type, str) else row.model_type(header)
    made: Any = CONFIG_MAPPING[kind]
    default, settings = made(), _common(header, row)
    # some classes read this setting only if the config has it
    known = {*dir(default), *default.attribute_map, "head_dim"}
    names = {key: next((name for name in each if name in known), None) for key, each in _SETTINGS.items()}
    settings |= {name: header.own[key] for key, name in names.items() if name and key in header.own}
    settings = {name: value for name, value in settings.items() if name in known}
    settings |= _values(row.settings, header)
    for key, name in names.items():
        # A default of the class may be the value of another model, unless it means "off".
        if name and name not in settings and getattr(default, name) not in (None, 0, 1):
            raise ConfigError(f"the file has no key {header.architecture}.{key}", hint=HINT)
    config: PretrainedConfig = made(**settings)
    check_routing(config)
    if "sliding_attention" in (getattr(config, "layer_types", None) or []) and not config.sliding_window:
        raise ConfigError(f"the file has no key {header.architecture}.attention.sliding_window", hint=HINT)
    return config


def _values(settings: Mapping[str, Any], header: Header) -> dict[str, Any]:
    found = {name: value(header) if callable(value) else value for name, value in settings.items()}
    return {name: value for name, value in found.items() if value is not LEFT_OUT}


def _common(header: Header, row: Architecture) -> dict[str, Any]:
    """Return settings that have the same meaning in all architectures, but are not just the value
    of one key."""
    own = header.own
    key_heads = own.get("attention.head_count_kv", own["attention.head_count"])
    rope = {"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10_000.0)}
    return {
        "vocab_size": header.shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in header.shapes,
        "num_hidden_layers": len(header.blocks),
        "num_key_value_heads": max(key_heads) if isinstance(key_heads, tuple) else key_heads,
        "head_dim": header.head_size,
        "rope_parameters": rope | _values(row.rope, header),
        "sliding_window": own.get("attention.sliding_window") or None,
        "moe_intermediate_size": header.shape_of("ffn_down_exps.weight")[-1],
        **{
            f"{name}_token_id": header.fields.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }


def with_rope(config: Any, header: Header, factors: Factors) -> Any:
    """Add the scaling of rotary frequencies to a config, by keys and the values of
    ``ROPE_TENSORS``.

    Raises ``ConfigError`` for factors of the wrong number, or if only the long or only the short
    factors are there.
    """
    own = header.own
    kind = own.get("rope.scaling.type", "none")
    scaling: dict[str, Any] = {}
    original = own.get("rope.scaling.original_context_length", config.max_position_embeddings)
    if factors:
        scaling = _by_factors(config, factors, original, own.get("rope.scaling.attn_factor"))
    elif kind == "linear":
        scaling = {"rope_type": kind, "factor": own["rope.scaling.factor"]}
    elif kind == "yarn":
        scaling = {
            "rope_type": kind,
            "factor": own["rope.scaling.factor"],
            "original_max_position_embeddings": original,
            "beta_fast": own.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": own.get("rope.scaling.yarn_beta_slow", 1.0),
            **_values(row_of(header.architecture).yarn, header),
        }
        if "rope.scaling.yarn_attn_factor" in own:
            scaling["attention_factor"] = own["rope.scaling.yarn_attn_factor"]
    if scaling:
        parameters = config.rope_parameters
        # parameters differ by the kind of attention: only full attention is scaled
        if "full_attention" in parameters:
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
            raise ConfigError(f"{name} has no {size} factors of rotary frequencies", hint=HINT)
    freqs, long, short = (factors.get(name) for name in ROPE_TENSORS)
    if freqs is not None:
        long = short = freqs
        if (known := _as_llama3(config, freqs) or _as_proportional(freqs)) is not None:
            return known
        original, attention = config.max_position_embeddings, 1.0
    if long is None or short is None:
        raise ConfigError("the file has one of two tensors with factors of rotary frequencies", hint=HINT)
    config.original_max_position_embeddings = original
    scaling: dict[str, Any] = {"rope_type": "longrope", "long_factor": [*long], "short_factor": [*short]}
    scaling["original_max_position_embeddings"] = original
    return scaling if attention is None else {**scaling, "attention_factor": attention}


def _as_llama3(config: Any, factors: Sequence[float]) -> dict[str, Any] | None:
    """Return the scaling of Llama 3.1 to 3.3 that yields these factors, or None.

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


def _as_proportional(factors: Sequence[float]) -> dict[str, Any] | None:
    """Return Gemma 4's scaling: the first frequencies are kept, and large factors make the others
    almost 0."""
    turned = sum(factor == 1.0 for factor in factors)
    if not 0 < turned < len(factors) or any(factor < 1e29 for factor in factors[turned:]):
        return None
    return {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}


def check_keys(config: "PretrainedConfig", header: Header) -> None:
    """Raise ``ConfigError`` unless the config agrees with every key. The error names the key."""
    fields, own = header.fields, header.own
    for key, value in fields.items():
        suffix = key.removeprefix(f"{header.architecture}.")
        if suffix == key:
            if not _HARMLESS.fullmatch(key) and not _TOKENIZER.fullmatch(key):
                raise ConfigError(f"the file has the key {key[:200]!r}, which is not read", hint=HINT)
        elif suffix not in _EXPECTED:
            raise ConfigError(f"the file has the key {key[:200]!r}, which is not read", hint=HINT)
        elif not _agrees(own[suffix], _EXPECTED[suffix](config)):
            raise ConfigError(f"the file has {key} = {str(value)[:100]}, which is not supported", hint=HINT)


def _agrees(value: Any, expected: Any) -> bool:
    """Return whether a key has the expected value, in the precision of float32.

    ``expected`` None: the config has no such setting. A set: any of these values means the same.
    """
    if expected is _ANY:
        return True
    if isinstance(value, tuple):
        values = expected if isinstance(expected, list) else [expected] * len(value)
        return len(values) == len(value) and all(map(_agrees, value, values))
    if isinstance(expected, set):
        return any(_agrees(value, each) for each in expected)
    if isinstance(expected, list):
        return bool(expected) and all(_agrees(value, each) for each in expected)
    if isinstance(value, float) and isinstance(expected, int | float):
        return math.isclose(value, expected, rel_tol=1e-5)
    return bool(value == expected)


def _first(*names: str) -> Callable[[Any], Any]:
    """Return the value of the first of these attributes that a config has."""
    return lambda config: next(
        (found for name in names if (found := getattr(config, name, None)) is not None), None
    )


def _rope(config: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    full: dict[str, Any] = parameters.get("full_attention", parameters)
    return full


def _layer(config: Any, block: int) -> Any:
    """Return the config of a block. In some classes, heads differ in size between blocks."""
    return config.per_layer_config[block] if config.is_heterogeneous else config


def _head_size(config: Any, kind: str = "full_attention") -> int:
    kinds = getattr(config, "layer_types", None) or []
    layer = _layer(config, kinds.index(kind) if kind in kinds else 0)
    return int(getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rotary_size(config: Any) -> int:
    """Return the number of rotated elements in a head: an even number, because they are rotated in
    pairs."""
    rope = _rope(config)
    if rope.get("rope_type") == "proportional":  # huge factors keep the rest of a head from rotating
        return _head_size(config)
    return int(_head_size(config) * rope.get("partial_rotary_factor", 1.0) / 2 + 1e-6) * 2


def _is_sliding(config: Any) -> Any:
    return [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []]


def _latent_sizes(config: Any) -> tuple[Any, Any]:
    """Return the permitted sizes of keys and values with latent attention, compressed or of one
    head. None without latent attention."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank is None:
        return None, None
    return {rank + config.qk_rope_head_dim, config.qk_head_dim}, {rank, config.v_head_dim}


def _inner_size(config: Any) -> Any:
    """Return the width of the outputs of all recurrent heads together."""
    if hasattr(config, "linear_num_value_heads"):
        return config.linear_num_value_heads * config.linear_value_head_dim
    return getattr(config, "mamba_d_ssm", None)


def _key_heads(config: Any) -> Any:
    if getattr(config, "kv_lora_rank", None) is not None:
        return {1, config.num_key_value_heads}
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    counts = [_layer(config, block).num_key_value_heads for block in range(len(kinds))]
    return [0 if kind == "conv" else count for count, kind in zip(counts, kinds, strict=True)]


_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "expert_shared_count": ("n_shared_experts",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "attention.scale": ("attention_multiplier",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "embedding_scale": ("embedding_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "residual_scale": ("residual_multiplier",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv"),
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state"),
    "ssm.time_step_rank": ("linear_num_value_heads", "mamba_n_heads"),
}
"""Maps keys to settings of a config. If there are several, the first that the class has is used."""
_EXPECTED: Mapping[str, Callable[[Any], Any]] = {
    **{key: _first(*names) for key, names in _SETTINGS.items()},
    "attention.head_count_kv": _key_heads,
    "attention.key_length_swa": lambda config: _head_size(config, "sliding_attention"),
    "attention.value_length_swa": lambda config: _head_size(config, "sliding_attention"),
    "attention.key_length": lambda config: _latent_sizes(config)[0] or _head_size(config),
    "attention.value_length": lambda config: _latent_sizes(config)[1] or _head_size(config),
    "attention.key_length_mla": lambda config: config.qk_head_dim,
    "attention.value_length_mla": lambda config: config.v_head_dim,
    "attention.recurrent_layers": lambda config: [
        *(kind == "linear_attention" for kind in config.layer_types),
        *[False] * config.num_nextn_predict_layers,
    ],
    "block_count": lambda config: config.num_hidden_layers + getattr(config, "num_nextn_predict_layers", 0),
    "full_attention_interval": _first("full_attention_interval"),
    "nextn_predict_layers": _first("num_nextn_predict_layers"),
    "ssm.inner_size": _inner_size,
    "attention.sliding_window": lambda config: getattr(config, "sliding_window", None) or 0,
    "attention.sliding_window_pattern": _is_sliding,
    "attention.causal": lambda _: True,
    "attention.temperature_scale": lambda config: _rope(config).get("llama_4_scaling_beta"),
    "n_deepstack_layers": lambda _: _ANY,
    "expert_weights_norm": lambda config: getattr(config, "norm_topk_prob", True),
    "expert_weights_scale": lambda config: getattr(config, "routed_scaling_factor", 1.0),
    "expert_gating_func": lambda config: {"sigmoid": 2}.get(getattr(config, "scoring_func", ""), 1),
    "rope.freq_base": lambda config: _rope(config).get("rope_theta"),
    "rope.freq_base_swa": lambda config: config.rope_parameters.get("sliding_attention", {}).get(
        "rope_theta"
    ),
    "rope.dimension_count": _rotary_size,
    "rope.dimension_count_swa": lambda config: _head_size(config, "sliding_attention"),
    "rope.scaling.type": lambda config: {"default": "none"}.get(
        *[_rope(config).get("rope_type", "default")] * 2
    ),
    "rope.scaling.factor": lambda config: _rope(config).get("factor"),
    "rope.scaling.original_context_length": lambda config: _rope(config).get(
        "original_max_position_embeddings", config.max_position_embeddings
    ),
    "rope.scaling.attn_factor": lambda config: _rope(config).get("attention_factor", 1.0),
    "rope.scaling.yarn_attn_factor": lambda config: _rope(config).get("attention_factor"),
    "rope.scaling.yarn_ext_factor": lambda config: 1.0,
    "rope.scaling.yarn_beta_fast": lambda config: _rope(config).get("beta_fast"),
    "rope.scaling.yarn_beta_slow": lambda config: _rope(config).get("beta_slow"),
    "rope.dimension_sections": lambda config: (
        [*_rope(config)["mrope_section"], 0] if "mrope_section" in _rope(config) else _ANY
    ),
    "rope.scaling.yarn_log_multiplier": lambda config: (
        _rope(config).get("mscale_all_dim", 0) * (1 if config.model_type == "ministral3" else 0.1)
    ),
    "rope.scaling.finetuned": lambda _: _ANY,
}
"""For each key: the value that it must have for a config."""
