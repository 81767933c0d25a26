"""Tiny models of the families that people use, in the layout of the hub: a config.json with the fields of a published one, its dimensions
scaled down, and tensors by the names that published checkpoints have.

No hub is reached: the fields follow published configs, and the names are those that transformers' own ``save_pretrained`` writes, which
undoes its conversion of the hub's names.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.utils import logging

VOCABULARY = 128
LAYERS = 4

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


@dataclass(frozen=True)
class Family:
    """A family: models of it on the hub, and the config.json of a tiny one. ``architecture`` is a class of transformers."""

    models: str
    architecture: str
    config: dict[str, Any]

    def save(self, directory: Path, max_shard_size: str = "5GB") -> Path:
        """Write the model with random weights, large enough that its tokens differ."""
        directory.mkdir(parents=True)
        settings = {"architectures": [self.architecture], "dtype": "float32", **self.config}
        (directory / "config.json").write_text(json.dumps(settings))
        logging.disable_progress_bar()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = getattr(transformers, self.architecture)(AutoConfig.from_pretrained(directory))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "A_log" not in name:
                        parameter.normal_(0.0, 0.2)
            model.save_pretrained(directory, max_shard_size=max_shard_size)
        (directory / "config.json").write_text(json.dumps(settings))
        return directory


FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        "Gemma 3 4B, 12B, 27B",
        "Gemma3ForConditionalGeneration",
        {
            "model_type": "gemma3",
            "image_token_index": 120,
            "boi_token_index": 121,
            "eoi_token_index": 122,
            "mm_tokens_per_image": 1,
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "sliding_window": 6,
                "query_pre_attn_scalar": 8,
                "sliding_window_pattern": 2,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        },
    ),
    "mistral3": Family(
        "Mistral Small 3.1 and 3.2 24B",
        "Mistral3ForConditionalGeneration",
        {
            "model_type": "mistral3",
            "image_token_index": 10,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "multimodal_projector_bias": False,
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None, "rope_theta": 1e9},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8, "rope_theta": 1e4},
        },
    ),
    "qwen2_vl": Family(
        "Qwen2-VL 2B, 7B, 72B",
        "Qwen2VLForConditionalGeneration",
        {
            "model_type": "qwen2_vl",
            "image_token_id": 120,
            "video_token_id": 121,
            "text_config": {
                **TEXT,
                "model_type": "qwen2_vl_text",
                "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            },
            "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        },
    ),
    "qwen2_5_vl": Family(
        "Qwen2.5-VL 3B, 7B, 72B",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "model_type": "qwen2_5_vl",
            "image_token_id": 120,
            "video_token_id": 121,
            "text_config": {
                **TEXT,
                "model_type": "qwen2_5_vl_text",
                "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            },
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3_vl": Family(
        "Qwen3-VL 2B, 4B, 8B, 32B",
        "Qwen3VLForConditionalGeneration",
        {
            "model_type": "qwen3_vl",
            "image_token_id": 120,
            "video_token_id": 121,
            "tie_word_embeddings": True,
            "text_config": {
                **TEXT,
                "model_type": "qwen3_vl_text",
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [2, 1, 1],
                    "rope_type": "default",
                },
            },
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3_vl_moe": Family(
        "Qwen3-VL 30B-A3B, 235B-A22B",
        "Qwen3VLMoeForConditionalGeneration",
        {
            "model_type": "qwen3_vl_moe",
            "image_token_id": 120,
            "video_token_id": 121,
            "text_config": {
                **TEXT,
                **EXPERTS,
                "model_type": "qwen3_vl_moe_text",
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [2, 1, 1],
                    "rope_type": "default",
                },
            },
            "vision_config": QWEN_VISION,
        },
    ),
}
