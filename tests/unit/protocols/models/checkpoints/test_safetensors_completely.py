"""Nothing of a checkpoint in Hugging Face layout is dropped that changes its answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.checkpoints import safetensors_file
from swarmnet_protocols.models.partial_model import ModelBuilder
from tests.defences import defence, nothing, replacing
from tests.support.models.hub_families import FAMILIES

Tensors = dict[str, torch.Tensor]


def opened(family: str, folder: Path, change: Callable[[dict[str, Any], Tensors], object]) -> LocalModel:
    """The model with a changed config or changed tensors."""
    path = FAMILIES[family].save(folder / "model")
    config, weights = path / "config.json", next(path.glob("*.safetensors"))
    settings, tensors = json.loads(config.read_text()), load_file(weights)
    change(settings, tensors)
    config.write_text(json.dumps(settings))
    save_file(tensors, weights, {"format": "pt"})
    return resolve(str(path), cache_dir=folder / "cache")


def with_settings(**settings: Any) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda config, _: config.get("text_config", config).update(settings)


def with_tensor(name: str, size: int = 8) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda _, tensors: tensors.update({name: torch.ones(size)})


@defence(
    "a setting of a checkpoint that the class does not read is refused",
    off=replacing(safetensors_file, "check_settings", nothing),
    family="llama",
    name="embedding_multiplier",
)
@pytest.mark.parametrize(("family", "name", "value"), [
    ("llama", "embedding_multiplier", 2.0), ("llama", "residual_multiplier", 0.5), ("llama", "logits_scaling", 2.0),
    ("llama", "final_logit_softcapping", 30.0), ("llama", "attn_logit_softcapping", 50.0), ("llama", "sliding_window", 8),
    ("llama", "scoring_func", "sigmoid"), ("llama", "no_rope_layers", [0, 1, 0, 1]), ("llama", "alibi", True),
    ("llama", "clip_qkv", 8.0), ("qwen3_moe", "partial_rotary_factor", 0.5), ("qwen3_moe", "routed_scaling_factor", 2.0),
    ("deepseek_v3", "scoring_func", "softmax"), ("deepseek_v3", "topk_method", "greedy_of_next_year"), ("llama", "swiglu_limit", 3.0),
    ("gemma3", "attention_multiplier", 0.3), ("deepseek_v3", "moe_layer_freq", 2),
])  # fmt: skip
def test_a_setting_that_the_class_does_not_read_is_refused(
    family: str, name: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"the config has {name} = ") as caught:
        opened(family, tmp_path, with_settings(**{name: value}))
    assert caught.value.hint


@pytest.mark.parametrize(("family", "settings"), [
    ("llama", {"sliding_window": None, "clip_qkv": None, "logit_scale": 1.0, "alibi": False, "attention_chunk_size": None}),
    ("llama", {"sliding_window": 4096, "use_sliding_window": False}),
    ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
    ("gpt_oss", {"swiglu_limit": 3.0}),
    ("granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5}),
    ("glm4_moe", {"partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5}),
])  # fmt: skip
def test_settings_that_do_nothing_or_are_read_are_accepted(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert opened(family, tmp_path, with_settings(**settings)).manifest.blocks == 4


def test_layers_with_a_window_that_the_class_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sliding_window"):
        opened("llama", tmp_path, with_settings(layer_types=["sliding_attention"] * 4))


def test_windows_that_attention_does_not_get_are_refused(tmp_path: Path) -> None:
    """Qwen2-MoE has them in its masks only, which hosts do not use."""
    with pytest.raises(ConfigError, match="attention of this class ignores"):
        opened("qwen2_moe", tmp_path, with_settings(use_sliding_window=True, sliding_window=6))


@pytest.mark.parametrize(("family", "settings"), [
    ("qwen3_moe", {"num_experts_per_tok": 99}), ("deepseek_v3", {"topk_group": 3}), ("deepseek_v3", {"n_group": 4}),
])  # fmt: skip
def test_experts_that_no_router_can_choose_are_refused(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="do not fit together"):
        opened(family, tmp_path, with_settings(**settings))


@defence(
    "a tensor beside the language model is refused",
    off=replacing(safetensors_file, "check_tensors", nothing),
    name="extra.weight",
)
@pytest.mark.parametrize("name", ["extra.weight", "transformer.h.weight", "visual.blocks.0.weight"])
def test_a_tensor_beside_the_language_model_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        opened("llama", tmp_path, with_tensor(name))


def test_a_multimodal_model_may_have_towers_and_nothing_else(tmp_path: Path) -> None:
    opened("gemma3", tmp_path / "tower", with_tensor("model.vision_tower.extra.weight"))
    with pytest.raises(ConfigError, match=r"extra\.weight"):
        opened("gemma3", tmp_path / "other", with_tensor("extra.weight"))


def test_a_multimodal_config_may_have_no_part_for_text(tmp_path: Path) -> None:
    """As published ones of Qwen2-VL: its settings are those of the whole."""

    def flatten(config: dict[str, Any], _: Tensors) -> None:
        config |= config.pop("text_config") | {"model_type": "qwen2_vl"}
        config["vision_config"].pop("model_type", None)

    opened("qwen2_vl", tmp_path / "flat", flatten)
    with pytest.raises(ConfigError, match="the config has clip_qkv = "):
        opened(
            "qwen2_vl", tmp_path / "other", lambda config, _: config.update(clip_qkv=8) or flatten(config, _)
        )


@pytest.mark.parametrize(("family", "name", "value"), [
    ("deepseek_v2", "norm_topk_prob", True), ("gpt_oss", "hidden_act", "gelu"), ("gpt_oss", "experts_per_token", 1),
    ("llama", "hidden_act", "silux"), ("deepseek_v2", "topk_method", "noaux_tc"), ("gemma3", "model_type", "llama"),
    ("deepseek_v3", "head_dim", 8), ("deepseek_v3", "num_key_value_heads", 2), ("llama", "is_encoder_decoder", True),
    ("gemma3", "use_bidirectional_attention", True), ("granitemoehybrid", "attention_multiplier", None),
])  # fmt: skip
def test_a_setting_that_a_class_takes_otherwise_is_refused(
    family: str, name: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=name):
        opened(family, tmp_path, with_settings(**{name: value}))


@pytest.mark.parametrize("name", ["lm_head.bias", "lm_head.scale"])
def test_a_head_that_the_class_does_not_compute_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        opened("llama", tmp_path / "headers", with_tensor(name))
    monkeypatch.setattr(ModelBuilder, "check", nothing)
    model = opened("llama", tmp_path / "loaded", with_tensor(name))
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        model.load_local_layers(lambda layers: layers, dtype=torch.float32, device=torch.device("cpu"))


@defence(
    "a block behind the last is refused unless it predicts several tokens",
    off=replacing(safetensors_file, "check_blocks", nothing),
)
def test_blocks_behind_the_last_predict_several_tokens_or_are_refused(tmp_path: Path) -> None:
    opened("deepseek_v3", tmp_path / "draft", with_tensor("model.layers.4.eh_proj.weight"))
    with pytest.raises(ConfigError, match="has block 4, and its config only 4"):
        opened("deepseek_v3", tmp_path / "other", with_tensor("model.layers.4.input_layernorm.weight"))


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_an_expert_that_is_missing_is_refused(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"model.layers.1.mlp.experts.0.{part}_proj.weight"
    with pytest.raises(IntegrityError, match=r"does not fit .*layers\.1\.mlp\.experts"):
        opened("qwen3_moe", tmp_path / "headers", lambda _, tensors: tensors.pop(name))
    monkeypatch.setattr(ModelBuilder, "check", nothing)
    model = opened("qwen3_moe", tmp_path / "loaded", lambda _, tensors: tensors.pop(name))
    with pytest.raises(IntegrityError):
        model.load_span(1, 2, dtype=torch.float32, device=torch.device("cpu"))


@defence(
    "tensors have the shapes of the config",
    off=replacing(ModelBuilder, "check", nothing),
    family="llama",
    name="model.layers.1.mlp.up_proj.weight",
)
@pytest.mark.parametrize(("family", "name"), [
    ("llama", "model.layers.1.mlp.up_proj.weight"), ("llama", "model.embed_tokens.weight"), ("llama", "model.norm.weight"),
    ("qwen3_moe", "model.layers.1.mlp.experts.0.up_proj.weight"), ("gpt_oss", "model.layers.1.mlp.experts.down_proj"),
    ("gemma3", "language_model.model.layers.1.self_attn.q_proj.weight"), ("nemotron_h", "backbone.layers.0.mixer.A_log"),
])  # fmt: skip
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_tensor_that_does_not_fit_is_refused_from_its_header(
    family: str, name: str, is_missing: bool, tmp_path: Path
) -> None:
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        tensor = tensors.pop(name)
        if not is_missing:
            tensors[name] = tensor[: len(tensor) // 2].clone()

    with pytest.raises(IntegrityError, match="does not fit"):
        opened(family, tmp_path, change)


def test_a_sequence_classifier_needs_no_other_head(tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        tensors["score.weight"] = tensors.pop("lm_head.weight")[:2].clone()

    opened("llama", tmp_path, change)
