"""Writes small models as gguf files, as llama.cpp's converter does.

``gguf_families.py`` says what the converter does with each family.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.support.models.hub_families import FAMILIES, Family

Tensors = Iterator[tuple[str, torch.Tensor]]
Keys = dict[str, Any]
Quantization = gguf.GGMLQuantizationType | Callable[[str], gguf.GGMLQuantizationType]


def _same(_: Any, name: str, values: torch.Tensor) -> Tensors:
    yield name, values


@dataclass(frozen=True)
class File:
    """How llama.cpp's converter writes a family."""

    architecture: str
    """llama.cpp's name."""
    family: Family
    keys: Callable[[Any], Keys] = field(default=lambda _: {})
    """Keys in addition to ``_common``."""
    tensors: Callable[[Any, str, torch.Tensor], Tensors] = _same
    """Tensors of a weight of transformers."""
    hold: Callable[[Any], Mapping[str, Any]] = field(default=lambda _: {})
    """Tensors that are no weights of transformers."""
    is_fused: bool = False
    """Whether queries, keys and values are one tensor, as ``--fuse-qkv`` writes them."""


def write(
    path: Path,
    file: File,
    model: Any,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    quantized: Quantization | None = None,
    is_expanded: bool = False,
) -> Path:
    """Write the file of a model. ``keys`` and ``tensors`` take the place of its own; None: left
    out.

    ``quantized``: the type of matrices, or the type by name. With ``is_expanded`` their values are
    written as float32.
    """
    writer = gguf.GGUFWriter(path, file.architecture)
    settings = {**_common(model.config), **file.keys(model.config), **(keys or {})}
    for key, value in settings.items():
        add_key(writer, f"{file.architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*(chr(33 + i) for i in range(94)), *(f"!{i}" for i in range(34))])
    writer.add_token_types([1] * 128)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    own = dict(_tensors(file, model))
    if file.is_fused:
        _fuse(own)
    for name, values in {**own, **(tensors or {})}.items():
        if values is None:
            continue
        numbers = np.ascontiguousarray(np.asarray(values, np.float32))
        kind = quantized(name) if callable(quantized) else quantized
        if kind is None or numbers.ndim < 2 or numbers.shape[-1] % 32 or "inp" in name:
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


def _fuse(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".attn_q." in name]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        tensors[name.replace("attn_q", "attn_qkv")] = torch.cat(parts)


def add_key(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """Add a key of the type of its value; None adds nothing."""
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
        "embedding_length": config.hidden_size, "feed_forward_length": _first(config, "intermediate_size"),
        "attention.head_count": config.num_attention_heads, "rope.freq_base": float(full["rope_theta"]),
        "attention.head_count_kv": _global(config, "num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": _first(config, "norm_eps", "rms_norm_eps"),
        "attention.layer_norm_epsilon": _first(config, "layer_norm_eps", "norm_epsilon"),
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


def head_sizes(config: Any) -> Keys:
    """What converters write for a ``head_dim`` in the config."""
    return {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def _tensors(file: File, model: Any) -> Tensors:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[file.architecture], model.config.num_hidden_layers)
    for whole, merged in model.state_dict().items():
        if whole == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for own, own_values in _of_experts(model.config, whole, merged):
            for name, values in file.tensors(model.config, own, own_values):
                if name.startswith("blk."):
                    yield name, values
                    continue
                stem, _, end = name.rpartition(".")
                stem, end = (stem, end) if end in ("weight", "bias", "scale") else (name, "weight")
                yield f"{names.get_name(stem)}.{end}", values
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


def routing_bias(config: Any, name: str, values: torch.Tensor) -> Tensors:
    if name.endswith("e_score_correction_bias"):
        name = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    yield name, values


def family(name: str, *without: str, architecture: str = "", **changes: Any) -> Family:
    """A family of ``FAMILIES`` with other settings."""
    found = FAMILIES[name]
    own = {key: value for key, value in found.config.items() if key not in without}
    return Family(found.models, architecture or found.architecture, {**own, **changes})
