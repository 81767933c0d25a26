"""Matrices that are quantised when they are loaded."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.engine.torch_layers.torch_stage import TorchStage
from swarmnet_node.loading.reading import check_quantizable
from swarmnet_protocols.arrays import as_tensor
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import DEFAULT_MODEL, resolve
from swarmnet_protocols.quantization import quantize as module
from swarmnet_protocols.quantization.formats import PRECISIONS, Format
from swarmnet_protocols.quantization.packed_linear import PackedLinear
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.quantize import GROUP, can_be_quantized, quantize
from tests.support.compiled import compiled_backend
from tests.support.gguf.packed_matrices import values_of
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import save_tiny

CPU = torch.device("cpu")
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
FORMATS = (Format.Q8_0, Format.Q5_0, Format.Q4_K, Format.Q5_K, Format.Q6_K)
STEPS = {Format.Q8_0: 254, Format.Q5_0: 31, Format.Q4_K: 15, Format.Q5_K: 31, Format.Q6_K: 63}
"""Number of steps from the smallest code of a format to the largest."""


def matrix(values: torch.Tensor) -> PackedTensor:
    format = {torch.float32: Format.F32, torch.float16: Format.F16, torch.bfloat16: Format.BF16}[values.dtype]
    return PackedTensor.of(format, values.contiguous().view(torch.uint8))


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    values[:, ::50] *= 6.0  # some channels are larger than the rest
    return values


@pytest.fixture
def small_panels(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "_PANEL_WEIGHTS", 512)
    return 512


@pytest.mark.parametrize("format", [Format.Q8_0, Format.Q5_0], ids=lambda format: format.name)
def test_the_error_is_at_most_that_of_gguf(format: Format) -> None:
    values = random(64, 256)
    theirs = gguf.dequantize(gguf.quantize(values.numpy(), format), format)
    error = (quantize(matrix(values), format).dequantize() - values).norm()
    assert error <= 1.001 * np.linalg.norm(theirs - values.numpy())
    assert format == Format.Q8_0 or error <= 0.985 * np.linalg.norm(theirs - values.numpy())


@pytest.mark.parametrize(
    ("format", "other", "ratio"),
    [
        (Format.Q4_K, Format.Q4_1, 1.02),  # 4.5 bits instead of 5
        (Format.Q5_K, Format.Q5_1, 1.04),  # 5.5 instead of 6
        (Format.Q6_K, Format.Q5_1, 0.55),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_k_format_rounds_like_a_format_of_half_a_bit_more(
    format: Format, other: Format, ratio: float
) -> None:
    """gguf has no Python code that quantises to K formats."""
    values = random(64, 512)
    theirs = gguf.dequantize(gguf.quantize(values.numpy(), other), other)
    error = (quantize(matrix(values), format).dequantize() - values).norm()
    assert error <= ratio * np.linalg.norm(theirs - values.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_weights_on_the_grid_of_the_format_stay_as_they_are(format: Format, dtype: torch.dtype) -> None:
    codes = torch.arange(32.0).repeat(3, 2) - 16
    rest = torch.cat([torch.zeros(3, 64), torch.full((3, 64), -0.5), torch.full((3, 64), 0.25)], 1)
    values = torch.cat([codes, rest], 1).to(dtype)
    close = quantize(matrix(values), format).dequantize()
    half_a_step = 32 / STEPS[format] / 2
    errors = (close - values.float()).abs()
    assert errors.max() <= half_a_step * 1.05
    assert torch.equal(close[:, 64:128], torch.zeros(3, 64))
    if format in {Format.Q5_0, Format.Q5_K}:
        assert errors[:, :64].max() <= 0.05


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_rows_are_expanded_a_few_at_a_time_and_rounded_alone(
    format: Format, small_panels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = random(21, 256).bfloat16()
    expanded = []
    real = PackedTensor.dequantize

    def counted(self: PackedTensor) -> torch.Tensor:
        expanded.append(math.prod(self.shape))
        return real(self)

    monkeypatch.setattr(PackedTensor, "dequantize", counted)
    found = quantize(matrix(values), format)
    assert max(expanded) <= small_panels
    monkeypatch.setattr(module, "_PANEL_WEIGHTS", 1 << 20)
    [segment] = found.segments
    assert torch.equal(segment.tensor[7:9], quantize(matrix(values[7:9]), format).segments[0].tensor)


def test_only_whole_groups_of_plain_numbers_can_be_quantized() -> None:
    assert can_be_quantized(matrix(torch.zeros(2, 3 * GROUP)))
    assert not can_be_quantized(matrix(torch.zeros(2, GROUP + 8)))
    assert not can_be_quantized(quantize(matrix(torch.zeros(2, GROUP)), Format.Q8_0))


@pytest.mark.matrix
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama-tied", torch.bfloat16),
        ("llama-tied", torch.float32),
        ("qwen3", torch.bfloat16),
        ("gemma2", torch.float32),
    ],
)
def test_a_stage_computes_with_quantised_weights_as_with_their_values(
    family: str, precision: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path / "model", hidden_size=64, intermediate_size=256)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = resolve(str(folder), cache_dir=tmp_path / "cache")
    options: dict[str, Any] = {**FLOAT32, "backend": compiled_backend()}
    mine = load_stage(model, 1, 3, packed=True, quantized=PRECISIONS[precision], **options)
    assert mine.precision == precision
    span = model.load_span(1, 3, packed=True, quantized=PRECISIONS[precision], **FLOAT32)
    quantised = {name for name, each in span.named_modules() if isinstance(each, PackedLinear)}
    assert {"layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"} <= quantised
    theirs = load_stage(model, 1, 3, **options)
    assert theirs.precision == "f32"
    expected = model.load_span(1, 3, **FLOAT32)
    for name in quantised:
        weight = expected.get_parameter(f"{name}.weight")
        format = PRECISIONS[precision].format_of(name, weight.shape[1])
        weight.data = quantize(matrix(weight.data), format).dequantize()
        assert torch.equal(weight.data, values_of(span.get_submodule(name).packed))
    rounded = TorchStage(expected, 64, options["backend"])
    inputs = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    outputs = [stage.forward([(stage.new_sequence(), inputs)])[0] for stage in (mine, rounded)]
    assert_near(*map(as_tensor, outputs))


def test_what_is_quantised_already_is_refused_with_the_reason() -> None:
    model = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir())
    with pytest.raises(ConfigError, match="already: q4_1"):
        check_quantizable(model)


def test_int4_stores_the_most_sensitive_tensors_in_more_bits() -> None:
    int4 = PRECISIONS["int4"]
    assert int4.format_of("model.layers.3.self_attn.v_proj.weight", 512) == Format.Q6_K
    assert int4.format_of("layers.0.mlp.experts.up_proj", 512) == Format.Q5_K
    assert int4.format_of("layers.0.mlp.down_proj", 512) == Format.Q6_K
    assert int4.format_of("layers.0.mlp.gate_proj.weight", 512) == Format.Q4_K


def test_rows_of_no_multiple_of_256_get_formats_of_smaller_blocks() -> None:
    int4 = PRECISIONS["int4"]
    assert int4.format_of("model.layers.3.self_attn.v_proj.weight", 576) == Format.Q8_0
    assert int4.format_of("layers.0.mlp.up_proj", 576) == Format.Q5_0
    assert int4.format_of("layers.0.mlp.gate_proj.weight", 576) == Format.Q5_0
    assert PRECISIONS["int8"].format_of("layers.0.mlp.down_proj", 576) == Format.Q8_0
