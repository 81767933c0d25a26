"""Models of several families, small enough to build in a test, saved as a person would have them on disk."""

from pathlib import Path
from typing import Any

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

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
        },
    ),
    "gpt2": ("GPT2Config", {}),
    "phi3-longrope": (
        "Phi3Config",
        {
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
    """A model with random weights, large enough that its tokens differ; ``changes`` go into its config."""
    import transformers

    name, extra = (FAMILIES | REFUSED)[family]
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
