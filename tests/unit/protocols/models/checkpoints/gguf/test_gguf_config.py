"""A gguf file is read completely or refused: every key agrees with the config, every tensor is
used."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.checkpoints.gguf import file as gguf_file
from swarmnet_protocols.models.checkpoints.gguf.file import GgufCheckpoint
from tests.defences import defence, nothing, replacing
from tests.support.gguf.writing import add_key
from tests.support.models.tiny_models import write_gguf

BASE: dict[str, Any] = {
    "block_count": 2, "context_length": 16_384, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500_000.0, "rope.dimension_count": 16,
    "vocab_size": 64,
}  # fmt: skip


def write_header(path: Path, architecture: str, fields: dict[str, Any], tensors: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        name = key if key.startswith(("tokenizer.", "general.", "adapter.")) else f"{architecture}.{key}"
        add_key(writer, name, value)
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), np.float32))
    for name, values in tensors.items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(folder: Path, architecture: str, tensors: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The config of a file with these keys; ``_`` in a name stands for a dot where no key has
    one."""
    given = BASE | {key.replace("__", "."): value for key, value in fields.items()}
    given = {key: value for key, value in given.items() if value is not None}
    path = write_header(folder / "model.gguf", architecture, given, tensors or {})
    return GgufCheckpoint([path], folder / "metadata").config()


def llama3_factors(factor: float, size: int = 16, base: float = 500_000.0) -> list[float]:
    """As llama.cpp's converter writes them (convert_hf_to_gguf.py,
    ``LlamaModel.generate_extra_tensors``)."""
    found = []
    for index in range(size // 2):
        wavelength = 2 * math.pi * base ** (2 * index / size)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3_become_its_scaling(factor: float, tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", {"rope_freqs.weight": llama3_factors(factor)})
    assert config.rope_parameters == {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_any_other_factors_divide_the_frequencies(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = [1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 7.5, 9.0]
    config = config_of(tmp_path, "llama", {"rope_freqs.weight": factors})
    frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=100_000)
    plain = 500_000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert scale == 1.0
    expected = plain / torch.tensor(factors)
    assert ((frequencies - expected).abs() <= 2.0**-21 * expected).all()


@pytest.mark.parametrize("tensors", [
    {"rope_freqs.weight": [0.0] * 8},
    {"rope_freqs.weight": [float("nan")] * 8},
    {"rope_freqs.weight": [-1.0] * 8},
    {"rope_freqs.weight": [2.0] * 7},
    {"rope_factors_long.weight": [2.0] * 8},
])  # fmt: skip
def test_factors_that_are_none_are_refused(tensors: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="factors"):
        config_of(tmp_path, "llama", tensors)


def test_linear_and_yarn_scaling_are_read(tmp_path: Path) -> None:
    (tmp_path / "yarn").mkdir()
    linear = config_of(tmp_path, "llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert (linear.rope_parameters["rope_type"], linear.rope_parameters["factor"]) == ("linear", 4.0)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 4096}
    config = config_of(
        tmp_path / "yarn", "qwen2", **{f"rope__scaling__{key}": value for key, value in yarn.items()}
    )
    found = config.rope_parameters
    assert (found["rope_type"], found["factor"]) == ("yarn", 4.0)
    assert (found["original_max_position_embeddings"], found["beta_fast"], found["beta_slow"]) == (
        4096,
        32.0,
        1.0,
    )


def test_gemma_3_scales_full_attention_only_and_27b_its_queries(tmp_path: Path) -> None:
    for blocks, expected in ((12, 32), (62, 16)):
        folder = tmp_path / str(blocks)
        folder.mkdir()
        config = config_of(
            folder, "gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0, block_count=blocks,
            attention__key_length=32, attention__value_length=32, attention__sliding_window=512, rope__dimension_count=None,
        )  # fmt: skip
        assert config.rope_parameters["full_attention"]["rope_type"] == "linear"
        assert config.rope_parameters["full_attention"]["factor"] == 8.0
        assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"
        assert (config.query_pre_attn_scalar, config.head_dim, config.sliding_window) == (expected, 32, 512)


def test_phi_3_has_two_kinds_of_factors_and_rotates_a_part_of_a_head(tmp_path: Path) -> None:
    long, short = [2.0 + index for index in range(6)], [1.0] * 6
    config = config_of(
        tmp_path, "phi3", {"rope_factors_long.weight": long, "rope_factors_short.weight": short},
        rope__dimension_count=12, rope__scaling__original_context_length=4096, rope__scaling__attn_factor=1.25,
        attention__sliding_window=2048,
    )  # fmt: skip
    found = config.rope_parameters
    assert (found["rope_type"], found["long_factor"], found["short_factor"]) == ("longrope", long, short)
    assert (found["attention_factor"], found["original_max_position_embeddings"]) == (1.25, 4096)
    assert (found["partial_rotary_factor"], config.sliding_window) == (0.75, 2048)


def test_a_window_is_that_of_the_file_not_of_the_class(tmp_path: Path) -> None:
    """transformers' own window is 4096 in the classes of Mistral and Qwen2."""
    assert config_of(tmp_path, "qwen2").sliding_window is None
    (tmp_path / "gemma").mkdir()
    with pytest.raises(ConfigError, match=r"gemma3\.attention\.sliding_window"):
        config_of(tmp_path / "gemma", "gemma3")


@defence(
    "a key of a gguf file that is not known is refused",
    off=replacing(gguf_file, "check_keys", nothing),
    key="logit_scale",
)
@pytest.mark.parametrize("key", [
    "attention.of_next_year", "rope.scale_linear", "logit_scale", "attention.scale", "tokenizer.ggml.suppress_tokens",
    "adapter.type", "nextn_predict_layers", "attention.temperature_length",
])  # fmt: skip
def test_a_key_that_is_not_known_is_refused_by_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")) as caught:
        config_of(tmp_path, "llama", **{key: 2})
    assert caught.value.hint == "use the model's Hugging Face layout"


MORE = {
    "attention.key_length": 16, "attention.value_length": 16, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": 1.0, "attention.causal": True, "expert_weights_scale": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(BASE | MORE))
def test_no_key_can_change_without_the_config_or_a_refusal(key: str, tmp_path: Path) -> None:
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    value = (BASE | MORE)[key]
    changed = not value if isinstance(value, bool) else "linear" if isinstance(value, str) else value * 2
    before = config_of(tmp_path / "before", "qwen2", **MORE)
    try:
        after = config_of(tmp_path / "after", "qwen2", **MORE | {key: changed})
    except ConfigError:  # which names this key, or another one that contradicts it
        return
    assert after.to_dict() != before.to_dict()


@defence("every tensor of a gguf file is used", off=replacing(GgufCheckpoint, "check_complete", nothing))
def test_a_tensor_that_the_model_does_not_use_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", extra={"blk.1.attn_sinks.weight": (4,)})
    with pytest.raises(ConfigError, match=r"blk\.1\.attn_sinks\.weight"):
        resolve(str(path), cache_dir=tmp_path / "cache")


@defence("the sizes of tensors fit the config", off=replacing(GgufCheckpoint, "_check_sizes", nothing))
@pytest.mark.parametrize("shape", [(48, 64), (96, 32), None])
def test_a_tensor_that_is_missing_or_of_another_size_is_named(
    shape: tuple[int, int] | None, tmp_path: Path
) -> None:
    name = "blk.1.ffn_gate.weight"
    extra = {name: shape} if shape else {}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", extra=extra, without=name)
    with pytest.raises(IntegrityError, match=r"blk\.1\.ffn_gate\.weight .* for .*gate_proj"):
        resolve(str(path), cache_dir=tmp_path / "cache")


def test_a_tensor_that_is_missing_is_named_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GgufCheckpoint, "_check_sizes", nothing)
    path = write_gguf(tmp_path / "tiny.gguf", "llama", without="blk.1.ffn_gate.weight")
    model = resolve(str(path), cache_dir=tmp_path / "cache")
    with pytest.raises(IntegrityError, match="gate_proj"):
        model.load_span(1, 2, dtype=torch.float32, device=torch.device("cpu"))
