"""Tiny models of the families that people use, in the layout of the hub: a config.json with the
fields of a published one, its dimensions scaled down, and tensors by the names that published
checkpoints have.

No hub is reached: the fields follow published configs, and the names are those that transformers'
own ``save_pretrained`` writes, which undoes its conversion of the hub's names.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.utils import logging

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import resolve

VOCABULARY = 128
LAYERS = 4
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
COHERE: dict[str, Any] = {
    **{name: value for name, value in TEXT.items() if name not in ("rms_norm_eps", "head_dim")},
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GATED_DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
}
QWEN3_VL: dict[str, Any] = {
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"},
}
QWEN3_5: dict[str, Any] = {
    **GATED_DELTA,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
}
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
    """A family: models of it on the hub, and the config.json of a tiny one. ``architecture`` is a
    class of transformers."""

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
                for name, buffer in model.named_buffers():
                    if name.endswith("e_score_correction_bias"):
                        buffer.normal_(0.0, 0.2)
            model.save_pretrained(directory, max_shard_size=max_shard_size)
        (directory / "config.json").write_text(json.dumps(settings))
        return directory


FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        "Gemma 3 4B, 12B, 27B",
        "Gemma3ForConditionalGeneration",
        {
            "model_type": "gemma3",
            "image_token_index": 1000,
            "boi_token_index": 1001,
            "eoi_token_index": 1002,
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
    "gemma4": Family(
        "Gemma 4 26B-A4B, 31B",
        "Gemma4ForConditionalGeneration",
        {
            "model_type": "gemma4",
            "image_token_id": 1000,
            "audio_token_id": 1001,
            "text_config": {
                **TEXT,
                "model_type": "gemma4_text",
                "sliding_window": 6,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "global_head_dim": 16,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "layer_types": [SLIDING, FULL, SLIDING, FULL],
            },
            "vision_config": {**VISION, "head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 8},
        },
    ),
    "mistral3": Family(
        "Mistral Small 3.1 and 3.2 24B",
        "Mistral3ForConditionalGeneration",
        {
            "model_type": "mistral3",
            "image_token_index": 1000,
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
            "image_token_id": 1000,
            "video_token_id": 1001,
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
            "image_token_id": 1000,
            "video_token_id": 1001,
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
            "image_token_id": 1000,
            "video_token_id": 1001,
            "tie_word_embeddings": True,
            "text_config": {
                **TEXT,
                **QWEN3_VL,
                "model_type": "qwen3_vl_text",
            },
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3_vl_moe": Family(
        "Qwen3-VL 30B-A3B, 235B-A22B",
        "Qwen3VLMoeForConditionalGeneration",
        {
            "model_type": "qwen3_vl_moe",
            "image_token_id": 1000,
            "video_token_id": 1001,
            "text_config": {
                **TEXT,
                **QWEN3_VL,
                **EXPERTS,
                "model_type": "qwen3_vl_moe_text",
            },
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3_5": Family(
        "Qwen3.5 and Qwen3.6 dense, 0.8B to 27B",
        "Qwen3_5ForConditionalGeneration",
        {
            "model_type": "qwen3_5",
            "image_token_id": 1000,
            "video_token_id": 1001,
            "text_config": {
                **TEXT,
                **QWEN3_5,
                "model_type": "qwen3_5_text",
            },
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3_5_moe": Family(
        "Qwen3.5 and Qwen3.6 35B-A3B, 397B-A17B",
        "Qwen3_5MoeForConditionalGeneration",
        {
            "model_type": "qwen3_5_moe",
            "image_token_id": 1000,
            "video_token_id": 1001,
            "text_config": {
                **TEXT,
                **QWEN3_5,
                **EXPERTS,
                "shared_expert_intermediate_size": 16,
                "model_type": "qwen3_5_moe_text",
            },
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3_next": Family(
        "Qwen3-Next 80B-A3B, Qwen3-Coder-Next",
        "Qwen3NextForCausalLM",
        {
            **TEXT,
            **GATED_DELTA,
            **EXPERTS,
            "model_type": "qwen3_next",
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 1,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e7,
        },
    ),
    "granitemoehybrid": Family(
        "Granite 4.0 H Micro, Tiny, Small",
        "GraniteMoeHybridForCausalLM",
        {
            **TEXT,
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.125,
            "logits_scaling": 2,
            "position_embedding_type": "nope",
            "mamba_d_conv": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 4,
            "mamba_chunk_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    "granite": Family(
        "Granite 3.x 2B, 8B",
        "GraniteForCausalLM",
        {
            **TEXT,
            "model_type": "granite",
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.125,
            "logits_scaling": 2.0,
        },
    ),
    "falcon_h1": Family(
        "Falcon-H1 0.5B to 34B",
        "FalconH1ForCausalLM",
        {
            **TEXT,
            "model_type": "falcon_h1",
            "embedding_multiplier": 5.5,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.5,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.9, 0.8],
            "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
            "ssm_in_multiplier": 0.9,
            "ssm_out_multiplier": 0.8,
            "mamba_d_conv": 4,
            "mamba_d_head": 16,
            "mamba_d_ssm": 64,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 4,
            "mamba_chunk_size": 16,
        },
    ),
    "lfm2": Family(
        "LFM2 350M to 2.6B",
        "Lfm2ForCausalLM",
        {
            **{name: value for name, value in TEXT.items() if name != "rms_norm_eps"},
            "model_type": "lfm2",
            "norm_eps": 1e-5,
            "block_dim": 32,
            "block_ff_dim": 48,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "conv_bias": False,
            "layer_types": ["conv", "conv", FULL, "conv"],
        },
    ),
    "nemotron_h": Family(
        "Nemotron-H, Nemotron Nano 2 and 3",
        "NemotronHForCausalLM",
        {
            **{name: value for name, value in TEXT.items() if name != "rms_norm_eps"},
            "model_type": "nemotron_h",
            "layer_norm_epsilon": 1e-5,
            "hybrid_override_pattern": "M-E*",
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 24,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 16,
            "expand": 2,
        },
    ),
    "qwen3": Family("Qwen3 0.6B to 32B", "Qwen3ForCausalLM", {**TEXT, "model_type": "qwen3"}),
    "qwen2": Family(
        "Qwen2 and Qwen2.5", "Qwen2ForCausalLM", {**TEXT, "model_type": "qwen2", "use_sliding_window": False}
    ),
    "qwen3_moe": Family(
        "Qwen3 30B-A3B, 235B-A22B, Qwen3-Coder",
        "Qwen3MoeForCausalLM",
        {**TEXT, **EXPERTS, "model_type": "qwen3_moe", "decoder_sparse_step": 1, "norm_topk_prob": True},
    ),
    "llama": Family(
        "Llama 2, 3.x, SmolLM, SmolLM2, DeepSeek-R1-Distill-Llama",
        "LlamaForCausalLM",
        {
            **TEXT,
            "model_type": "llama",
            "rope_theta": 5e5,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
                "rope_type": "llama3",
            },
        },
    ),
    "mistral": Family(
        "Mistral 7B", "MistralForCausalLM", {**TEXT, "model_type": "mistral", "sliding_window": 6}
    ),
    "mixtral": Family(
        "Mixtral 8x7B",
        "MixtralForCausalLM",
        {
            **TEXT,
            "model_type": "mixtral",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
    "gemma2": Family(
        "Gemma 2 2B, 9B, 27B",
        "Gemma2ForCausalLM",
        {
            **TEXT,
            "model_type": "gemma2",
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        "Gemma 3 270M, 1B",
        "Gemma3ForCausalLM",
        {
            **TEXT,
            "model_type": "gemma3_text",
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 8,
        },
    ),
    "phi3": Family(
        "Phi-3 and Phi-4 (mini: up to 4096 positions)",
        "Phi3ForCausalLM",
        {
            **TEXT,
            "model_type": "phi3",
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "sliding_window": 200,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 3.0, 5.0],
            },
        },
    ),
    "gpt_oss": Family(
        "gpt-oss 20B, 120B",
        "GptOssForCausalLM",
        {
            **TEXT,
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_per_token": 2,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "rope_theta": 150000,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "rope_type": "yarn",
                "truncate": False,
            },
        },
    ),
    "deepseek_v2": Family(
        "DeepSeek V2, V2-Lite, Coder V2",
        "DeepseekV2ForCausalLM",
        {
            **{name: value for name, value in TEXT.items() if name != "head_dim"},
            "num_key_value_heads": 4,
            "model_type": "deepseek_v2",
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "scoring_func": "softmax",
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 64,
                "type": "yarn",
            },
        },
    ),
    "deepseek_v3": Family(
        "DeepSeek V3, R1, Kimi-K2",
        "DeepseekV3ForCausalLM",
        {
            **{name: value for name, value in TEXT.items() if name != "head_dim"},
            "num_key_value_heads": 4,
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
                "type": "yarn",
            },
        },
    ),
    "glm4_moe": Family(
        "GLM-4.5, 4.6, 4.7",
        "Glm4MoeForCausalLM",
        {
            **TEXT,
            "model_type": "glm4_moe",
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
        },
    ),
    "granitemoe": Family(
        "Granite 3 MoE 1B, 3B, PowerMoE",
        "GraniteMoeForCausalLM",
        {
            **TEXT,
            "model_type": "granitemoe",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
        },
    ),
    "olmoe": Family(
        "OLMoE 1B-7B",
        "OlmoeForCausalLM",
        {**TEXT, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    ),
    "minimax_m2": Family(
        "MiniMax-M2",
        "MiniMaxM2ForCausalLM",
        {
            **TEXT,
            "model_type": "minimax_m2",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 4,
        },
    ),
    "smollm3": Family(
        "SmolLM3 3B",
        "SmolLM3ForCausalLM",
        {**TEXT, "model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4},
    ),
    "olmo3": Family(
        "OLMo 3 7B, 32B",
        "Olmo3ForCausalLM",
        {
            **TEXT,
            "model_type": "olmo3",
            "sliding_window": 6,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        },
    ),
    "olmo2": Family("OLMo 2 1B to 32B", "Olmo2ForCausalLM", {**TEXT, "model_type": "olmo2"}),
    "cohere": Family("Command-R, Command-R+, Aya", "CohereForCausalLM", {**COHERE, "model_type": "cohere"}),
    "cohere2": Family(
        "Command-R7B, Command A",
        "Cohere2ForCausalLM",
        {**COHERE, "model_type": "cohere2", "sliding_window": 6},
    ),
    "ministral3": Family(
        "Ministral 3 3B, 8B, 14B",
        "Ministral3ForCausalLM",
        {
            **TEXT,
            "model_type": "ministral3",
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "granitemoeshared": Family(
        "Granite MoE with shared experts",
        "GraniteMoeSharedForCausalLM",
        {
            **TEXT,
            "model_type": "granitemoeshared",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
        },
    ),
    "qwen2_moe": Family(
        "Qwen1.5-MoE, Qwen2 57B-A14B",
        "Qwen2MoeForCausalLM",
        {
            **TEXT,
            **EXPERTS,
            "model_type": "qwen2_moe",
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": False,
        },
    ),
    "starcoder2": Family(
        "StarCoder2 3B, 7B, 15B",
        "Starcoder2ForCausalLM",
        {
            **{name: value for name, value in TEXT.items() if name != "rms_norm_eps"},
            "model_type": "starcoder2",
            "norm_epsilon": 1e-5,
            "sliding_window": 4096,
        },
    ),
}


def _with_text(family: Family, models: str, **changes: Any) -> Family:
    text = {**family.config["text_config"], **changes}
    return Family(models, family.architecture, {**family.config, "text_config": text})


REFUSED: dict[str, Family] = {
    "gpt2": Family(
        "GPT-2",
        "GPT2LMHeadModel",
        {
            "model_type": "gpt2",
            "vocab_size": 128,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
        },
    ),
    "opt": Family(
        "OPT 125M to 66B",
        "OPTForCausalLM",
        {
            "model_type": "opt",
            "vocab_size": 128,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 256,
        },
    ),
    "deepseek_v32": Family(
        "DeepSeek V3.2",
        "DeepseekV32ForCausalLM",
        {
            **{name: value for name, value in TEXT.items() if name != "head_dim"},
            "num_key_value_heads": 4,
            "model_type": "deepseek_v32",
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "index_topk": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
        },
    ),
    "deepseek_v4": Family("DeepSeek V4", "DeepseekV4ForCausalLM", {**TEXT, "model_type": "deepseek_v4"}),
    "llama4": Family(
        "Llama 4 Scout, Maverick",
        "Llama4ForConditionalGeneration",
        {
            "model_type": "llama4",
            "boi_token_index": 1000,
            "eoi_token_index": 1001,
            "image_token_index": 1002,
            "text_config": {
                **TEXT,
                "model_type": "llama4_text",
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 64,
                "no_rope_layers": [1, 1, 1, 0],
                "use_qk_norm": True,
            },
            "vision_config": {
                **VISION,
                "model_type": "llama4_vision_model",
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
    ),
    "gemma3n": Family(
        "Gemma 3n",
        "Gemma3nForCausalLM",
        {
            **TEXT,
            "model_type": "gemma3n_text",
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 1,
            "laurel_rank": 4,
            "vocab_size_per_layer_input": 128,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gemma4 with embeddings of each layer": _with_text(
        FAMILIES["gemma4"],
        "Gemma 4 E2B, E4B",
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
}

MOST_USED = (
    *(
        "qwen3",
        "qwen2",
        "llama",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "gemma3",
        "gemma3_text",
    ),
    *(
        "gemma4",
        "gpt_oss",
        "mistral",
        "mistral3",
        "deepseek_v3",
        "phi3",
        "glm4_moe",
        "gpt2",
        "opt",
        "deepseek_v32",
    ),
)
"""The 20 text architectures that people use most, as far as could be found without the hub: by its
lists of downloads in mid-2026, reports about them, and memory. The order means nothing."""

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
_HEAD = """# Families of models

`python -m tests.support.models.family_page` writes this page, and
`tests/unit/protocols/models/test_families.py` tests every row.

Each family is tested with a small model of random weights in float32: as a directory in Hugging
Face layout, and as a gguf file. No hub was reached. A directory has a `config.json` with the fields
of a published one and smaller dimensions, and tensors by the names that transformers'
`save_pretrained` writes. A gguf file has the names, keys and orders that llama.cpp's converter
writes. Which quantised checkpoints are read is on [another
page](../protocols/swarmnet_protocols/models/README.md).

A family that is not listed works as a directory if its decoder consists of embeddings, layers and a
final norm, and if its layers keep keys, values and recurrent states in transformers' cache. Any
other family is refused when its files are read, or when a host loads its blocks. A gguf file of an
architecture that is not listed is refused: use the directory.

If a key, a setting or a tensor changes answers and is not read, the file is refused by its name
([0101](decisions/0101-gguf-completely-or-refused.md),
[0110](decisions/0110-what-transformers-drops.md)). Tests change each setting of each listed
directory: the answer changes as in transformers, or the directory is refused, or the setting is
known to change nothing.

## Families that work

Every row was tested in each layout against `generate` of the class that the checkpoint names:

- Greedy tokens are equal through one, two and three hops, for sequences alone and for several in
  one batch that enter in chunks.
- Logits after 16, 150 and 1,000 positions differ by less than 2e-5 of their norm.
- A sequence that is rewound continues as if the rest had never been.
- Multimodal models run as text-only models: tensors of towers for images and sound are neither in
  the manifest nor read.

The column gguf has llama.cpp's name of the architecture. Where it is empty, use the directory.

"""
_NOTES = {
    "mistral": "Files of Mistral 7B v0.1 do not tell its window: beyond 4096 positions, use the directory",
    "phi3": "Up to `original_max_position_embeddings` (4096) positions: [there its rotary embedding changes](decisions/0061-sequences-end-where-rotary-embeddings-change.md)",
    "gemma4": "Those without embeddings of each layer",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "Keys and values are kept expanded"),
}


def _mark(name: str) -> str:
    return "yes" if name in MOST_USED else ""


def page(reasons: Mapping[str, str], files: Mapping[str, str]) -> str:
    """The text of docs/families.md.

    ``reasons`` has, for each of ``REFUSED``, why it is refused; ``files`` the architecture of gguf
    files.
    """
    lines = [
        "| `model_type` | models | safetensors | gguf | among the 20 most used | recurrent state | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, family in sorted(FAMILIES.items()):
        text = {**family.config, **family.config.get("text_config", {})}
        kept = {"mamba", "conv", LINEAR} & set(text.get("layer_types", ()))
        is_recurrent = bool(kept) or any(key.startswith("mamba") for key in text)
        found = files.get(name) or files.get(text["model_type"])
        gguf = f"`{found}`" if found else ""
        state = "yes" if is_recurrent else ""
        cells = (f"`{name}`", family.models, "yes", gguf, _mark(name), state, _NOTES.get(name, ""))
        lines.append(f"| {' | '.join(cells)} |")
    works = sum(name in FAMILIES for name in MOST_USED)
    lines += ["", f"{works} of the {len(MOST_USED)} most used work.", "", "## Families that are refused", ""]
    lines += ["| family | models | among the 20 most used | refused with |", "|---|---|---|---|"]
    for name in sorted(REFUSED):
        lines.append(f"| {name} | {REFUSED[name].models} | {_mark(name)} | {reasons[name]} |")
    return _HEAD + "\n".join(lines) + "\n"


def reason_for(name: str, directory: Path) -> str:
    """The message with which a family of ``REFUSED`` is refused."""
    path = REFUSED[name].save(directory / "model")
    try:
        resolve(str(path), cache_dir=directory / "cache")
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{name} is not refused")
