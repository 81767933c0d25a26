"""Finds settings and tensors of a checkpoint that transformers silently ignores.

transformers stores settings that it does not know, and drops tensors that belong to no module. Most
of these are notes, or heads of other tasks. All others would change answers, so this module refuses
them by name.
"""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
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
"""Tensors of encoders for images and sound. Prompts of text do not need them."""
_OF_DRAFTS = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.|\.mtp")
"""Tensors of further blocks that predict several tokens ahead. They are not used."""
HARMLESS: Mapping[str, re.Pattern[str]] = {
    reason: re.compile(pattern)
    for reason, pattern in {
        "training": r"\w*(dropout|_pdrop|jitter_noise|aux_loss)\w*|initializer_\w+|init_std"
        r"|rescale_prenorm_residual|time_step_(max|floor)|pretraining_tp|mtp_loss_scaling_factor",
        "drafts": r"num_nextn_predict_layers|num_mtp_layers|mtp_\w+",
        "outputs": r"use_cache|return_dict|output_\w+|num_logits_to_keep|tie_last_hidden_states",
        "tokens": r"\w+_token_(id|index)",
        "tensors": r"tie_(word_)?embeddings?",
        "lengths": r"max_position_embeddings",
        "speed": r"chunk_size_feed_forward|use_mamba_kernels|use_mem_eff_path|moe_shared_expert_overlap",
        "images": r"mrope_\w+",
        "precision": r"residual_in_fp32|mamba_ssm_cache_dtype",
        "notes": r"_name_or_path|architectures|(torch_)?dtype|transformers_version|id2label|label2id|problem_type",
    }.items()
}
"""Settings that never change an answer, grouped by the reason.

- "training", "drafts": for training, or for drafts of several tokens.
- "outputs": for what a call returns in addition to logits.
- "tokens": ids of tokens; the tokenizer has them.
- "tensors": facts that the tensors show, too.
- "lengths": the longest sequence; ``max_positions`` reads it.
- "speed": ways to compute the same result.
- "images": axes of image positions; a token of text has one position.
- "precision": the precision of sums; the host decides it.
- "notes": facts for people.
"""
_NOTES_OF_ROPE = re.compile(
    r"(rope_)?type|rope_theta|finetuned|original_max_position_embeddings|beta_(fast|slow)"
)
"""Parameters that every kind of rotary embedding may have, even if it does not read them."""
_HINT = "use a checkpoint whose model_type is that of its own architecture, or a gguf file of it"
_MIXED = "take config.json and weights from one revision of the model, or download the file again"
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
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "sliding_window", "per_layer_config"), _OFF),
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
    "hidden_act": (None, "silu"),
}
"""Settings that change answers, but that a class need not declare and no tensor shows. Each has the
values that change nothing."""
_IMPLIED: Mapping[str, Mapping[str, Any]] = {
    **{
        kind: {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        for kind in ("deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text")
    },
    "minimax_m2": {"scoring_func": "sigmoid"},
}
"""For some model types: the values of such settings that are fixed in the code of the class."""
_SAME = (
    frozenset({"experts_per_token", "num_experts_per_tok"}),
    frozenset({"hidden_act", "hidden_activation", "mlp_hidden_act"}),
    frozenset({"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"}),
)
"""Sets of names for the same setting. A class reads one name of a set; a file may have another."""
_OBSTACLES = {
    "index_topk": "its sparse attention keeps an index next to keys and values",
    "hidden_size_per_layer_input": "every layer looks up embeddings of its own by the token ids, which hosts do not get",
    "num_kv_shared_layers": "some layers attend to the keys and values of others, which may be on another host",
    "attention_chunk_size": "its layers attend to chunks of the sequence",
    "hc_mult": "several residual streams run between its layers",
    "use_bidirectional_attention": "its tokens attend to later ones",
}
"""Settings that stop a model from being split, and the reason. When such a setting is on, a layer
needs more than the outputs of the layer before it."""
_ACTIVATION = re.compile(r"(\w+_)?act(ivation(_function)?)?")
_LEGACY = (("gelu", "gelu_pytorch_tanh"),)
"""Pairs of a value in published files and the value that the class deliberately uses instead. For
Gemma 1."""
_CHOICES = {"position_embedding_type": ("nope",)}
"""Valid values that appear in no code, because they mean that something is left out."""


def obstacle_in(config: Any) -> str | None:
    """Return why the layers of a model cannot be split among hosts, and the setting that shows it.
    None if they can."""
    for name, reason in _OBSTACLES.items():
        # "vision" is for the tokens of an image
        if (value := getattr(config, name, None)) and value != "vision":
            return f"{reason} ({name})"
    return None


def check_settings(config: Any, settings: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a setting that changes answers, but that the class ignores or reads
    as another value.

    - ``settings``: the file's settings of the language model alone.
    - ``config``: made of these settings. Not checked if no host can compute the model anyway.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING or obstacle_in(config):
        return
    reading = _Reading(config, MODEL_MAPPING[type(config)])
    for name, value in settings.items():
        if not _is_off(name, settings) and not any(each.fullmatch(name) for each in HARMLESS.values()):
            reading.check(name, value)
    _check_rope(config, settings, reading.code)
    check_routing(config)
    check_heads(config)
    kinds = _value(config, "layer_types") or settings.get("layer_types") or ()
    if "sliding_attention" in kinds and not getattr(config, "sliding_window", None):
        raise ConfigError(
            f"the config has layers of sliding_attention, and {reading.own} has no sliding_window",
            hint=_HINT,
        )
    if "sliding_attention" in kinds and "sliding_window=" not in reading.code:
        raise ConfigError(
            "the config has a sliding_window (use_sliding_window, max_window_layers), which the attention of this class ignores",
            hint=_HINT,
        )


def _is_off(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether another setting makes this one ineffective."""
    match name:
        case "sliding_window":
            return settings.get("use_sliding_window") is False
        case "sliding_window_pattern":
            return bool(settings.get("layer_types"))  # which names the kind of each layer
    return False


class _Reading:
    """The settings of a config that a class of transformers reads.

    A setting counts as read if the code of the class or of its config names it. If a class declares
    a setting but never reads it, the class computes as if the setting had its default value.
    """

    def __init__(self, config: Any, stack: type) -> None:
        """``stack``: the decoder stack of the config."""
        self.own = type(config).__name__
        self.code = _code_of(type(config)) | _code_of(stack)
        self._config, self._default = config, type(config)()
        self._declared = {each.name for each in fields(config)}
        implied = _IMPLIED.get(self._default.model_type, {})
        self._neutral = {**_NEUTRAL, **{name: (None, value) for name, value in implied.items()}}

    def check(self, name: str, value: Any) -> None:
        """Raise ``ConfigError`` unless the class computes with this value of a setting."""
        alike: Mapping[str, str] = self._config.attribute_map
        names = {name, alike.get(name, name), *(other for other, meant in alike.items() if meant == name)}
        read = min(names & self.code, default=None) or next(
            (min(each & self.code) for each in _SAME if name in each and each & self.code), None
        )
        usual, is_declared = _value(self._default, name), bool(names & self._declared)
        if name == "model_type":  # the config repeats the model_type of the file, whatever its own class is
            read, made = name, self._default.model_type
        else:
            made = _value(self._config, read or name, value)
        if value is None and (read is None or usual in (None, False) or f"{read}?" in self.code):
            return
        if read is None:
            kept = (usual,) if is_declared else self._neutral.get(name, (value,))
            if value not in kept:
                raise _fault(name, value, f"which {self.own} of transformers does not read", _HINT)
        elif (value, made) in _LEGACY:
            return
        elif made != value and (
            isinstance(value, str) if isinstance(made, str) else _is_number(value) and _is_number(made)
        ):
            raise _fault(name, value, f"which {self.own} of transformers reads as {_shown(made)}", _MIXED)
        elif isinstance(value, str | None) and is_declared and not _is_choice(name, value, self.code):
            hint = "a newer transformers may know the value"
            raise _fault(name, value, f"which {self.own} of transformers does not know", hint)


def _fault(name: str, value: Any, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"the config has {name} = {_shown(value)}, {problem}", hint=hint)


def _check_rope(config: Any, settings: Mapping[str, Any], code: frozenset[str]) -> None:
    """Raise ``ConfigError`` for a kind of rotary embedding that is not known, or a parameter that
    the kind does not read."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    for each in filter(None, kinds):
        kind = str(each.get("rope_type", "default"))
        function = ROPE_INIT_FUNCTIONS.get(kind)
        if function is None and kind != "default" and kind not in code:
            raise _fault(
                "rope_type", kind, "which transformers does not know", "a newer transformers may know it"
            )
        read = code if function is None else code | _code_of(function)
        for name in ("rope_theta", "factor"):
            if name in read and name in each and each[name] is None:
                raise ConfigError(f"the config has no {name} for rotary embeddings", hint=_MIXED)
        for name, value in each.items():
            is_harmless = _NOTES_OF_ROPE.fullmatch(name) or HARMLESS["images"].fullmatch(name)
            if value not in _ONE and name not in read and not is_harmless:
                raise _fault(name, value, f"which rotary embeddings of type {kind} do not read", _HINT)
        sections = each.get("mrope_section")
        if "mrope_section" in each and "mrope_section" in code:
            size = _value(config, "head_dim") or config.hidden_size // config.num_attention_heads
            half = int(size * (each.get("partial_rotary_factor") or 1)) // 2
            if not isinstance(sections, list) or len(sections) != 3 or sum(sections) != half:
                problem = f"not three numbers whose sum is {half}: head_dim = {size}"
                raise _fault("mrope_section", sections, problem, _MIXED)
    for name in ("rope_theta", "partial_rotary_factor"):
        made = [each[name] for each in kinds if name in each]
        if made and settings.get(name) not in (None, *made):
            problem = f"and {_shown(made[0])} in its rope_parameters"
            raise _fault(name, settings[name], problem, _MIXED)


def check_heads(config: Any) -> None:
    """Raise ``ConfigError`` if heads share keys unevenly, or if their sizes do not fit latent
    attention."""
    default, latent = type(config)(), getattr(config, "kv_lora_rank", None)
    pairs = [("num_attention_heads", "num_key_value_heads")]
    if latent and _value(default, "head_dim") == _value(default, "qk_rope_head_dim"):
        pairs.append(("qk_rope_head_dim", "head_dim"))
    for pair in pairs:
        first, second = (_value(config, name) for name in pair)
        if first and second and (first != second if latent else first % second):
            raise ConfigError(f"the config has {pair[0]} = {first} and {pair[1]} = {second}", hint=_MIXED)


def _value(config: Any, name: str, default: Any = None) -> Any:
    """Return the value of a setting. ``default`` if it is not set, or differs between layers."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # it differs between layers
        return default


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _shown(value: Any) -> str:
    return str(value)[:100]


def _is_choice(name: str, value: str | None, code: frozenset[str]) -> bool:
    """Return whether a setting may have this value: the code names the value, or it is an
    activation."""
    from transformers.activations import ACT2FN

    if _ACTIVATION.fullmatch(name):
        return value in ACT2FN
    return value in code or value in _CHOICES.get(name, ())


def _code_of(thing: Any) -> frozenset[str]:
    """Return the names and strings in the code of a function, or in the modules of a class."""
    if inspect.isfunction(thing):
        return _names_in(thing)
    modules = {each.__module__ for each in thing.__mro__}
    found = (_names_in(each) for each in modules if each.startswith("transformers.models."))
    return frozenset().union(*found)


@functools.cache
def _names_in(code: Any) -> frozenset[str]:
    """Return the attributes of configs that a function or a module reads, and its strings.

    Three kinds of names are in the result: ``name`` is read, ``name=`` is passed as a keyword
    argument, and ``name?`` is tested for a value. A setting that is tested may be null.
    """
    is_module = isinstance(code, str)
    owners = ("config", "self") if is_module and ".configuration_" in code else ("config",)
    found: set[str] = set()
    passed: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[code] if is_module else code))):
        found.update(f"{name}?" for name in _asked(node))
        match node:
            case ast.Constant(str(text)):
                found.add(text)
            case ast.Attribute(ast.Name(owner) | ast.Attribute(_, owner), name, ast.Load()) if owner.endswith(
                owners
            ):
                found.add(name)
            case ast.keyword(str(argument), value):
                found.add(f"{argument}=")
                passed += [(argument, name) for name in _named(value)]
    found.update(f"{name}?" for argument, name in passed if f"{argument}?" in found)
    return frozenset(found)


def _asked(node: ast.AST) -> Iterator[str]:
    """Yield the variables and attributes that an expression tests for a value."""
    match node:
        case ast.Compare(left, [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
            yield from _named(left)
        case ast.BoolOp(_, values):
            for value in values:
                yield from _named(value)
        case ast.If(test) | ast.IfExp(test) | ast.UnaryOp(ast.Not(), test):
            yield from _named(test)


def _named(node: ast.AST) -> Iterator[str]:
    """Yield the name of a variable or attribute, also of an attribute that ``getattr`` reads."""
    match node:
        case ast.Name(name) | ast.Attribute(_, name):
            yield name
        case ast.Call(ast.Name("getattr"), [_, ast.Constant(str(name)), *_]):
            yield name


def check_routing(config: Any) -> None:
    """Raise ``ConfigError`` if a router cannot choose this many experts or groups."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    of_all = next((name for name in names if getattr(config, name, None)), None)
    if of_all is None:
        return
    experts = getattr(config, of_all)
    of_token = "top_k_experts" if hasattr(config, "top_k_experts") else "num_experts_per_tok"
    used = getattr(config, of_token, None) or 0
    groups, kept = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    size = experts // groups
    if not 0 < used <= size * kept or kept > groups or (groups > 1 and (experts % groups or size < 2)):
        raise ConfigError(
            f"the config has {of_token} = {used}, topk_group = {kept}, n_group = {groups} and {of_all} = {experts}, which do not fit together",
            hint=_MIXED,
        )


def check_tensors(others: Iterable[str], *, is_multimodal: bool) -> None:
    """Raise ``ConfigError`` for a tensor outside the language model, unless answers are known not
    to need it."""
    for name in others:
        if not UNUSED.search(name) and not (is_multimodal and _TOWERS.search(name)):
            raise ConfigError(
                f"the checkpoint has the tensor {name[:200]!r}, which is not part of its language model",
                hint="without it answers may be wrong; a newer transformers may know the model",
            )


def check_blocks(blocks: Mapping[int, Iterable[str]], count: int) -> None:
    """Raise ``ConfigError`` for a block after the ``count`` blocks of the config, unless it
    predicts several tokens ahead."""
    for block, names in sorted(blocks.items()):
        if block >= count and not any(_OF_DRAFTS.search(name) for name in names):
            raise ConfigError(
                f"the checkpoint has block {block}, and its config only {count}: num_hidden_layers",
                hint="take config.json and weights from one revision of the model",
            )
