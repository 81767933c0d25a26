"""Tiny models of the families that people use, in the layout of the hub: a config.json with the
fields of a published one, its dimensions scaled down, and tensors by the names that published
checkpoints have.

No hub is reached: the fields follow published configs, and the names are those that transformers'
own ``save_pretrained`` writes, which undoes its conversion of the hub's names.
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
WITHOUT_HEAD_DIM: dict[str, Any] = {name: value for name, value in TEXT.items() if name != "head_dim"}
WITHOUT_EPS: dict[str, Any] = {name: value for name, value in TEXT.items() if name != "rms_norm_eps"}
COHERE: dict[str, Any] = {
    **{name: value for name, value in WITHOUT_EPS.items() if name != "head_dim"},
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
LATENT: dict[str, Any] = {
    **WITHOUT_HEAD_DIM,
    **ROUTED_EXPERTS,
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}
"""Attention over latent keys and values, as in DeepSeek V2 and later."""
MAMBA: dict[str, Any] = {
    **{"mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2},
    **{"mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_chunk_size": 16},
}
GRANITE_EXPERTS: dict[str, Any] = {
    **TEXT,
    **LOCAL_EXPERTS,
    **{"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "residual_multiplier": 0.5,
}
GATED_DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
}
MROPE: dict[str, Any] = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
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
YARN: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0}
DEEPSEEK_ROPE: dict[str, Any] = {
    **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 64, "type": "yarn"},
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


def _text(models: str, architecture: str, name: str, base: dict[str, Any] = TEXT, **settings: Any) -> Family:
    """A model for text alone."""
    return Family(models, f"{architecture}ForCausalLM", {**base, "model_type": name, **settings})


def _multimodal(
    models: str, architecture: str, name: str, text: dict[str, Any], vision: dict[str, Any], **settings: Any
) -> Family:
    config = {"model_type": name, **settings, "text_config": TEXT | text, "vision_config": vision}
    return Family(models, f"{architecture}ForConditionalGeneration", config)


def _qwen(
    models: str,
    architecture: str,
    name: str,
    text: dict[str, Any],
    vision: dict[str, Any] = QWEN_VISION,
    **settings: Any,
) -> Family:
    text = {**text, "model_type": f"{name}_text"}
    ids = {"image_token_id": 1000, "video_token_id": 1001}
    return _multimodal(models, architecture, name, text, vision, **ids, **settings)


def _by_type(*families: Family) -> dict[str, Family]:
    return {family.config["model_type"]: family for family in families}


FAMILIES: dict[str, Family] = _by_type(
    _multimodal(
        "Gemma 3 4B, 12B, 27B",
        "Gemma3",
        "gemma3",
        {
            "model_type": "gemma3_text",
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "sliding_window_pattern": 2,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        {**VISION, "model_type": "siglip_vision_model"},
        image_token_index=1000,
        boi_token_index=1001,
        eoi_token_index=1002,
        mm_tokens_per_image=1,
    ),
    _multimodal(
        "Gemma 4 31B",
        "Gemma4",
        "gemma4",
        {
            "model_type": "gemma4_text",
            "sliding_window": 6,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
        },
        {**VISION, "head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 8},
        image_token_id=1000,
        audio_token_id=1001,
    ),
    _multimodal(
        "Mistral Small 3.1 and 3.2 24B",
        "Mistral3",
        "mistral3",
        {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e9},
        {**VISION, "model_type": "pixtral", "head_dim": 8, "rope_theta": 1e4},
        image_token_index=1000,
        projector_hidden_act="gelu",
        spatial_merge_size=2,
        vision_feature_layer=-1,
        multimodal_projector_bias=False,
    ),
    _qwen(
        "Qwen2-VL 2B, 7B, 72B",
        "Qwen2VL",
        "qwen2_vl",
        MROPE,
        {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    ),
    _qwen("Qwen2.5-VL 3B, 7B, 72B", "Qwen2_5_VL", "qwen2_5_vl", MROPE),
    _qwen("Qwen3-VL 2B, 4B, 8B, 32B", "Qwen3VL", "qwen3_vl", QWEN3_VL, tie_word_embeddings=True),
    _qwen("Qwen3-VL 30B-A3B, 235B-A22B", "Qwen3VLMoe", "qwen3_vl_moe", QWEN3_VL | EXPERTS),
    _qwen("Qwen3.5 and Qwen3.6 dense, 0.8B to 27B", "Qwen3_5", "qwen3_5", QWEN3_5),
    _qwen(
        "Qwen3.5 and Qwen3.6 35B-A3B, 397B-A17B",
        "Qwen3_5Moe",
        "qwen3_5_moe",
        {**QWEN3_5, **EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    _text(
        "Qwen3-Next 80B-A3B, Qwen3-Coder-Next",
        "Qwen3Next",
        "qwen3_next",
        TEXT | GATED_DELTA | EXPERTS,
        shared_expert_intermediate_size=16,
        decoder_sparse_step=1,
        partial_rotary_factor=0.5,
        rope_theta=1e7,
    ),
    _text(
        "Granite 4.0 H Micro, Tiny, Small",
        "GraniteMoeHybrid",
        "granitemoehybrid",
        TEXT | MAMBA | LOCAL_EXPERTS,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        embedding_multiplier=12,
        residual_multiplier=0.22,
        attention_multiplier=0.125,
        logits_scaling=2,
        position_embedding_type="nope",
        shared_intermediate_size=24,
    ),
    _text(
        "Granite 3.x 2B, 8B",
        "Granite",
        "granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.125,
        logits_scaling=2.0,
    ),
    _text(
        "Falcon-H1 0.5B to 34B",
        "FalconH1",
        "falcon_h1",
        TEXT | MAMBA,
        embedding_multiplier=5.5,
        attention_in_multiplier=0.9,
        attention_out_multiplier=0.9,
        key_multiplier=0.5,
        lm_head_multiplier=0.5,
        mlp_multipliers=[0.9, 0.8],
        ssm_multipliers=[0.9, 0.8, 0.7, 0.6, 0.5],
        ssm_in_multiplier=0.9,
        ssm_out_multiplier=0.8,
        mamba_d_ssm=64,
    ),
    _text(
        "LFM2 350M to 2.6B",
        "Lfm2",
        "lfm2",
        WITHOUT_EPS,
        norm_eps=1e-5,
        block_dim=32,
        block_ff_dim=48,
        block_auto_adjust_ff_dim=False,
        conv_L_cache=3,
        conv_bias=False,
        layer_types=["conv", "conv", FULL, "conv"],
    ),
    _text(
        "Nemotron-H, Nemotron Nano 2 and 3",
        "NemotronH",
        "nemotron_h",
        WITHOUT_EPS,
        layer_norm_epsilon=1e-5,
        hybrid_override_pattern="M-E*",
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=24,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        conv_kernel=4,
        chunk_size=16,
        expand=2,
    ),
    _text("Qwen3 0.6B to 32B", "Qwen3", "qwen3"),
    _text("Qwen2 and Qwen2.5", "Qwen2", "qwen2", use_sliding_window=False),
    _text(
        "Qwen3 30B-A3B, 235B-A22B, Qwen3-Coder",
        "Qwen3Moe",
        "qwen3_moe",
        TEXT | EXPERTS,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    ),
    _text(
        "Llama 2, 3.x, SmolLM, SmolLM2, DeepSeek-R1-Distill-Llama",
        "Llama",
        "llama",
        rope_theta=5e5,
        rope_scaling={
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
    ),
    _text("Mistral 7B", "Mistral", "mistral", sliding_window=6),
    _text("Mixtral 8x7B", "Mixtral", "mixtral", TEXT | LOCAL_EXPERTS, sliding_window=None),
    _text(
        "Gemma 2 2B, 9B, 27B",
        "Gemma2",
        "gemma2",
        sliding_window=6,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    _text(
        "Gemma 3 270M, 1B",
        "Gemma3",
        "gemma3_text",
        sliding_window=6,
        sliding_window_pattern=2,
        query_pre_attn_scalar=8,
    ),
    _text(
        "Phi-3 and Phi-4 (mini: up to 4096 positions)",
        "Phi3",
        "phi3",
        original_max_position_embeddings=64,
        partial_rotary_factor=0.75,
        sliding_window=200,
        rope_scaling={"type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 3.0, 5.0]},
    ),
    _text(
        "gpt-oss 20B, 120B",
        "GptOss",
        "gpt_oss",
        TEXT | LOCAL_EXPERTS,
        experts_per_token=2,
        sliding_window=6,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        rope_theta=150000,
        rope_scaling={
            **YARN,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "rope_type": "yarn",
            "truncate": False,
        },
    ),
    _text(
        "DeepSeek V2, V2-Lite, Coder V2",
        "DeepseekV2",
        "deepseek_v2",
        LATENT,
        v_head_dim=6,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        routed_scaling_factor=2.5,
        scoring_func="softmax",
        rope_scaling={**DEEPSEEK_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    _text(
        "DeepSeek V3, R1, Kimi-K2",
        "DeepseekV3",
        "deepseek_v3",
        LATENT,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        rope_scaling={**DEEPSEEK_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    _text(
        "GLM-4.5, 4.6, 4.7",
        "Glm4Moe",
        "glm4_moe",
        TEXT | ROUTED_EXPERTS,
        n_group=1,
        n_shared_experts=1,
        partial_rotary_factor=0.5,
        use_qk_norm=True,
    ),
    _text("Granite 3 MoE 1B, 3B, PowerMoE", "GraniteMoe", "granitemoe", GRANITE_EXPERTS),
    _text("OLMoE 1B-7B", "Olmoe", "olmoe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=False),
    _text("MiniMax-M2", "MiniMaxM2", "minimax_m2", TEXT | LOCAL_EXPERTS, rotary_dim=4),
    _text("SmolLM3 3B", "SmolLM3", "smollm3", no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4),
    _text(
        "OLMo 3 7B, 32B", "Olmo3", "olmo3", sliding_window=6, layer_types=[SLIDING, SLIDING, SLIDING, FULL]
    ),
    _text("OLMo 2 1B to 32B", "Olmo2", "olmo2"),
    _text("Command-R, Command-R+, Aya", "Cohere", "cohere", COHERE),
    _text("Command-R7B, Command A", "Cohere2", "cohere2", COHERE, sliding_window=6),
    _text(
        "Ministral 3 3B, 8B, 14B",
        "Ministral3",
        "ministral3",
        sliding_window=None,
        rope_parameters={
            **YARN,
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    _text(
        "Granite MoE with shared experts",
        "GraniteMoeShared",
        "granitemoeshared",
        GRANITE_EXPERTS,
        shared_intermediate_size=24,
    ),
    _text(
        "Qwen1.5-MoE, Qwen2 57B-A14B",
        "Qwen2Moe",
        "qwen2_moe",
        TEXT | EXPERTS,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=24,
        norm_topk_prob=False,
    ),
    _text(
        "StarCoder2 3B, 7B, 15B",
        "Starcoder2",
        "starcoder2",
        WITHOUT_EPS,
        norm_epsilon=1e-5,
        sliding_window=4096,
    ),
)


def _with_text(family: Family, models: str, **changes: Any) -> Family:
    text = {**family.config["text_config"], **changes}
    return Family(models, family.architecture, {**family.config, "text_config": text})


FAMILIES["gemma4 with experts"] = _with_text(
    FAMILIES["gemma4"],
    "Gemma 4 26B-A4B",
    enable_moe_block=True,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=16,
)

REFUSED: dict[str, Family] = _by_type(
    Family(
        "GPT-2",
        "GPT2LMHeadModel",
        {
            **{"model_type": "gpt2", "vocab_size": 128},
            **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
        },
    ),
    _text(
        "OPT 125M to 66B",
        "OPT",
        "opt",
        {},
        vocab_size=128,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=256,
    ),
    _text(
        "DeepSeek V3.2",
        "DeepseekV32",
        "deepseek_v32",
        LATENT,
        index_topk=8,
        index_n_heads=2,
        index_head_dim=8,
    ),
    _text("DeepSeek V4", "DeepseekV4", "deepseek_v4"),
    _multimodal(
        "Llama 4 Scout, Maverick",
        "Llama4",
        "llama4",
        {
            "model_type": "llama4_text",
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 1, 1, 0],
            "use_qk_norm": True,
        },
        {
            **VISION,
            "model_type": "llama4_vision_model",
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        boi_token_index=1000,
        eoi_token_index=1001,
        image_token_index=1002,
    ),
) | {
    "gemma3n": _text(
        "Gemma 3n",
        "Gemma3n",
        "gemma3n_text",
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=1,
        laurel_rank=4,
        vocab_size_per_layer_input=128,
        sliding_window=6,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4 with embeddings of each layer": _with_text(
        FAMILIES["gemma4"],
        "Gemma 4 E2B, E4B",
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
}
