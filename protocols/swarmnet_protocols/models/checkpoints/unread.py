"""What a checkpoint in Hugging Face layout has that a class of transformers does not read.

transformers keeps settings that it does not know, and drops tensors that no module has. Most are
notes or heads of other tasks. The rest changes answers: those are refused by name.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from swarmnet_protocols.errors import ConfigError

UNUSED = re.compile(
    r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$|position_ids$"  # computed
    r"|^(score|lm_head)\.weight$|^(model\.)?mtp\."  # heads of other tasks
    # for rounding activations, which are not rounded here
    r"|\.(input|activation|output|[qkv])_(scale|zero_point)$"
)
"""Tensors that do not change what a model computes."""
_TOWERS = re.compile(
    r"(^|[._])(vision|visual|vit|image|audio|speech|sound|video|mm|multi_modal|projectors?|connector|merger|resampler)([._]|$)"
)
"""Tensors of encoders of images and sound, which prompts of text do not need."""
_OF_DRAFTS = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.|\.mtp")
"""Tensors of blocks behind the last, which predict several tokens and are not used."""
_HINT = "use a checkpoint whose model_type is that of its own architecture, or a gguf file of it"
_OFF = (None, False, 0)
_ONE = (None, 1)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), _ONE),
    **dict.fromkeys(("scale_emb", "embedding_scale", "moe_layer_freq", "n_group", "topk_group"), _ONE),
    **dict.fromkeys(("routed_scaling_factor", "route_scale", "partial_rotary_factor", "rotary_pct"), _ONE),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "clip_qkv"), _OFF
    ),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "scale_depth", "swiglu_limit"), _OFF),
    **dict.fromkeys(("alibi", "parallel_attn", "use_parallel_residual", "rope_interleaved"), _OFF),
    **dict.fromkeys(("attention_chunk_size", "attn_temperature_tuning", "use_bidirectional_attention"), _OFF),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "sliding_window"), _OFF),
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
}
"""Settings that change answers although no tensor shows it, and the values that change nothing."""
_IMPLIED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "minimax_m2": {"scoring_func": "sigmoid"},
}
"""By ``model_type``: values of such settings that the class has without reading them."""


def check_settings(config: Any, settings: Mapping[str, Any], build: Callable[[], Any]) -> None:
    """Raise ``ConfigError`` for a setting that changes answers but that the class does not read.

    - ``settings``: the file's settings of the language model alone.
    - ``config``: made of these settings.
    - ``build``: makes the model without values.
    """
    known = type(config)()
    implied = _IMPLIED.get(config.model_type, {})
    for name in settings.keys() & _NEUTRAL.keys():
        value = settings[name]
        is_off = name == "sliding_window" and settings.get("use_sliding_window") is False
        neutral = (None, implied[name]) if name in implied else _NEUTRAL[name]
        is_neutral = is_off or value in neutral
        if not is_neutral and not hasattr(known, name) and name not in _source_of(build()):
            raise ConfigError(
                f"the config has {name} = {str(value)[:100]}, which {type(config).__name__} of transformers does not read",
                hint=_HINT,
            )
    check_routing(config)
    kinds = settings.get("layer_types") or ()
    if "sliding_attention" in kinds and not getattr(config, "sliding_window", None):
        raise ConfigError(
            f"the config has layers of sliding_attention, and {type(config).__name__} has no sliding_window",
            hint=_HINT,
        )


def check_routing(config: Any) -> None:
    """Raise ``ConfigError`` for a number of experts or groups that a router cannot choose."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = next(filter(None, (getattr(config, name, None) for name in names)), None)
    if experts is None:
        return
    used = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 0
    groups, kept = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    size = experts // groups
    if not 0 < used <= size * kept or kept > groups or (groups > 1 and (experts % groups or size < 2)):
        raise ConfigError(
            f"the config has {used} experts for a token, of {kept} of {groups} groups of {experts} experts",
            hint="take config.json and weights from one revision of the model, or download the file again",
        )


def _source_of(model: Any) -> str:
    """The code of a model's decoder stack, which names the settings that it reads."""
    return inspect.getsource(sys.modules[type(model.base_model).__module__])


def check_tensors(others: Iterable[str], *, is_multimodal: bool) -> None:
    """Raise ``ConfigError`` for a tensor outside the language model that is not known to be
    spare."""
    for name in others:
        if not UNUSED.search(name) and not (is_multimodal and _TOWERS.search(name)):
            raise ConfigError(
                f"the checkpoint has the tensor {name[:200]!r}, which is not part of its language model",
                hint="without it answers may be wrong; a newer transformers may know the model",
            )


def check_blocks(blocks: Mapping[int, Iterable[str]], count: int) -> None:
    """Raise ``ConfigError`` for a block behind the last of the ``count`` in the config, unless it
    predicts several tokens."""
    for block, names in sorted(blocks.items()):
        if block >= count and not any(_OF_DRAFTS.search(name) for name in names):
            raise ConfigError(
                f"the checkpoint has block {block}, and its config only {count}: num_hidden_layers",
                hint="take config.json and weights from one revision of the model",
            )
