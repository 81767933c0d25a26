"""Small models of several families, built in a test and saved in the layout that users have on
disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING, FULL = "sliding_attention", "full_attention"
LAYER_TYPES = [SLIDING, SLIDING, FULL, SLIDING, FULL]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-untied": ("LlamaConfig", {"tie_word_embeddings": False}),
    "mistral": ("MistralConfig", {"sliding_window": 6, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "granite": ("GraniteConfig", {"residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 6, "layer_types": LAYER_TYPES}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [1, 3],
        },
    ),
    "starcoder2": ("Starcoder2Config", {}),  # LayerNorm, biases, an MLP without a gate
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": LAYER_TYPES,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {}),
    "arcee": ("ArceeConfig", {}),
    "cohere": ("CohereConfig", {}),
    "ernie4_5": ("Ernie4_5Config", {}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "helium": ("HeliumConfig", {"head_dim": 8}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            "shared_expert_intermediate_size": 24,
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"head_dim": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "phi3": (
        "Phi3Config",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
            },
        },
    ),
}


def save_tiny(family: str, directory: Path, *, max_shard_size: str = "5GB", **changes: Any) -> Path:
    """Save a model with random weights, large enough that its tokens differ; ``changes`` go into
    its config."""
    import transformers

    name, extra = (FAMILIES | OTHERS)[family]
    config = getattr(transformers, name)(**{**SHAPE, **extra, **changes})
    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def write_gguf(
    path: Path,
    architecture: str,
    *,
    blocks: int = 3,
    experts: int = 4,
    expert_width: int = 768,
    extra: Mapping[str, Sequence[int]] | None = None,
    without: str = "",
    tokenizer: tuple[str, str] = ("gpt2", "default"),
) -> Path:
    """Write a random model as gguf: ``blocks`` blocks of width 64, weights quantised to Q8_0.

    ``extra``: shapes of further tensors. ``without``: a tensor that is left out. ``tokenizer``: its
    kind and its way of splitting.
    """
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(blocks)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    kind, splitting = tokenizer
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list([*(chr(33 + i) for i in range(63)), "!!"])
    writer.add_token_types([1] * 64)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, *shape: int) -> None:
        if name == without:
            return
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            q8_0 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, q8_0), raw_dtype=q8_0)

    if architecture == "qwen3moe":
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(expert_width)
        writer.add_key_length(16)
        writer.add_value_length(16)
    add("token_embd.weight", 64, 64)
    add("output_norm.weight", 64)
    for block in range(blocks):
        for name, *shape in (("attn_norm", 64), ("ffn_norm", 64), ("attn_q", 64, 64), ("attn_k", 32, 64), ("attn_v", 32, 64), ("attn_output", 64, 64)):  # fmt: skip
            add(f"blk.{block}.{name}.weight", *shape)
        if architecture == "qwen3moe":
            feed_forward = (("attn_q_norm", 16), ("attn_k_norm", 16), ("ffn_gate_inp", experts, 64), ("ffn_gate_exps", experts, expert_width, 64), ("ffn_up_exps", experts, expert_width, 64), ("ffn_down_exps", experts, 64, expert_width))  # fmt: skip
        else:
            feed_forward = (("ffn_gate", 96, 64), ("ffn_up", 96, 64), ("ffn_down", 64, 96))  # type: ignore[assignment]
        for name, *shape in feed_forward:
            add(f"blk.{block}.{name}.weight", *shape)
    for name, shape in (extra or {}).items():
        add(name, *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
