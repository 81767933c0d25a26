"""Safetensors checkpoints whose weights are quantised: their values are those of transformers, or
of the published equations."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.checkpoints.quantized_weights import scheme_of
from swarmnet_protocols.models.partial_model import ModelBuilder
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_linear import PackedLinear
from tests.defences import nothing
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import save_tiny

FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
SIZES = {"hidden_size": 128, "intermediate_size": 256}
Tensors = dict[str, torch.Tensor]


def rewritten(
    folder: Path, settings: Mapping[str, Any], change: Callable[[str, torch.Tensor], Tensors], suffix: str
) -> Path:
    """The tiny checkpoint in ``folder`` with other tensors in place of those of the blocks whose
    names end so."""
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_changed = ".layers." in name and name.endswith(suffix)
        tensors |= change(name, tensor) if is_changed else {name: tensor}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": dict(settings)}))
    return folder


def fp8(scale_name: str, block: tuple[int, int] | None) -> Callable[[str, torch.Tensor], Tensors]:
    """E4M3 with a scale for each block; without ``block`` one for each row."""

    def change(name: str, weight: torch.Tensor) -> Tensors:
        rows, columns = block or (1, weight.shape[1])
        grid = torch.rand(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) / 100 + 0.01
        scales = grid.repeat_interleave(rows, 0)[: weight.shape[0]]
        scales = scales.repeat_interleave(columns, 1)[:, : weight.shape[1]]
        return {
            name: (weight / scales).to(torch.float8_e4m3fn),
            name.removesuffix("weight") + scale_name: grid,
        }

    return change


def nibbles(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Rows [n, 8 m] of digits as int32 [n, m]: digit ``order[i]`` of each eight is at bit 4 i."""
    packed = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for place, digit in enumerate(order):
        packed |= codes[:, digit::8].long() << 4 * place
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def int4(
    method: str, values: Tensors, *, group: int = 64, by_activation: bool = False
) -> Callable[[str, torch.Tensor], Tensors]:
    """AWQ or GPTQ of 4 bits with random codes; ``values`` gets what they stand for."""

    def change(name: str, weight: torch.Tensor) -> Tensors:
        rows, columns = weight.shape
        codes = torch.randint(0, 16, (rows, columns))
        zeros = torch.randint(1, 16, (rows, columns // group))
        scales = (torch.rand(rows, columns // group) / 20 + 0.01).half()
        of_columns = torch.arange(columns) // group
        if by_activation:
            of_columns = of_columns[torch.randperm(columns)]
        values[name] = scales.float()[:, of_columns] * (codes - zeros[:, of_columns])
        stem = name.removesuffix("weight")
        if method == "awq":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            packed = {"qweight": nibbles(codes.T, order), "qzeros": nibbles(zeros.T, order)}
        else:
            plain = tuple(range(8))
            packed = {"qweight": nibbles(codes, plain).T, "qzeros": nibbles((zeros - 1).T, plain)}
            packed["g_idx"] = of_columns.to(torch.int32)
        return {stem + part: tensor for part, tensor in (packed | {"scales": scales.T}).items()}

    return change


def theirs(folder: Path) -> Any:
    """The model as transformers loads it on a CPU, dequantised."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check(folder: Path, cache: Path, expected: Tensors, *, format: Format | None, precision: str) -> None:
    """The checkpoint has these weights, dense and in a stage, whose linear modules stay packed in
    ``format``."""
    model = resolve(str(folder), cache_dir=cache)
    assert model.precision == precision
    whole = model.load_whole(**FLOAT32).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(whole[name], tensor), name
    backend = load_backend(default_cache_dir())
    mine = load_stage(model, 1, 3, backend=backend, packed=True, **FLOAT32)
    dense = load_stage(model, 1, 3, backend=backend, **FLOAT32)
    linears = {name: each for name, each in mine._model.named_modules() if isinstance(each, PackedLinear)}
    if format is not None:
        assert {each.format for linear in linears.values() for each in linear.packed.segments} == {format}
        file_bytes = (folder / "model.safetensors").stat().st_size
        assert mine.weight_bytes < 0.4 * dense.weight_bytes
        assert file_bytes < sum(tensor.nbytes for tensor in whole.values())
    inputs = torch.randn(90, mine.hidden_size, generator=torch.Generator().manual_seed(0))
    outputs = []
    for stage in (mine, dense):
        sequence = stage.new_sequence()
        outputs.append(torch.cat([stage.forward([(sequence, part)])[0] for part in inputs.split([80, 1, 9])]))
    assert_near(outputs[0], outputs[1])
    sizes = model.sizes(1, 2)
    assert bool(sizes.formats) is (format is None and precision in ("awq", "gptq"))
    if sizes.formats:  # weights of norms are float32 in the file and in memory
        assert sizes.in_memory(4) == mine.weight_bytes


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe"])
def test_fp8_with_scales_of_blocks_has_the_values_of_transformers(family: str, tmp_path: Path) -> None:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    sizes = SIZES | ({"moe_intermediate_size": 128} if family == "qwen3-moe" else {"head_dim": 32})
    folder = save_tiny(family, tmp_path / "model", **sizes)
    rewritten(folder, settings, fp8("weight_scale_inv", (128, 128)), "proj.weight")
    expected = theirs(folder).state_dict()
    check(
        folder,
        tmp_path / "cache",
        expected,
        format=Format.FP8 if family == "llama-tied" else None,
        precision="fp8",
    )


@pytest.mark.parametrize("columns", [128, 96])
def test_fp8_with_scales_of_rows_is_code_times_scale(columns: int, tmp_path: Path) -> None:
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    folder = save_tiny(
        "llama-tied", tmp_path / "model", hidden_size=columns, intermediate_size=256, head_dim=32
    )
    rewritten(folder, settings, fp8("weight_scale", None), "proj.weight")
    stored = load_file(folder / "model.safetensors")
    expected = {
        name: tensor.float() * stored[f"{name}_scale"]
        for name, tensor in stored.items()
        if f"{name}_scale" in stored
    }
    is_packed = columns % 128 == 0
    check(folder, tmp_path / "cache", expected, format=Format.FP8 if is_packed else None, precision="fp8")


def test_mxfp4_has_the_values_of_transformers(tmp_path: Path) -> None:
    def change(name: str, weight: torch.Tensor) -> Tensors:
        experts, columns, rows = weight.shape
        shape = (experts, rows, columns // 32)
        return {
            f"{name}_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8),
            f"{name}_scales": torch.randint(118, 126, shape, dtype=torch.uint8),
        }

    folder = save_tiny("gpt-oss", tmp_path / "model", hidden_size=64, intermediate_size=96)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    rewritten(folder, settings, change, "_proj")
    expected = theirs(folder).state_dict()
    check(folder, tmp_path / "cache", expected, format=None, precision="mxfp4")


@pytest.mark.parametrize("method", ["awq", "gptq", "gptq by activation"])
@pytest.mark.parametrize("group", [64, 32])
def test_4_bit_weights_are_scale_times_code_less_zero_point(method: str, group: int, tmp_path: Path) -> None:
    values: Tensors = {}
    settings = {
        "quant_method": method.split(maxsplit=1)[0],
        "bits": 4,
        "group_size": group,
        "version": "gemm",
    }
    by_activation = "by activation" in method
    change = int4(method.split(maxsplit=1)[0], values, group=group, by_activation=by_activation)
    folder = save_tiny("llama-tied", tmp_path / "model", **SIZES)
    rewritten(folder, settings | {"desc_act": by_activation}, change, "proj.weight")
    is_packed = group == 64 and not by_activation
    check(
        folder,
        tmp_path / "cache",
        values,
        format=Format.INT4 if is_packed else None,
        precision=method.split(maxsplit=1)[0],
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 8}, r"gptq \(bits 8\)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format pack-quantized"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype fp4"),
        ({}, "unnamed method"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "not two sizes"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "not two sizes"),
    ],
)
def test_other_methods_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        scheme_of(settings)


@pytest.fixture(scope="module", params=["fp8", "awq", "gptq"])
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid checkpoint of the method."""
    method = request.param
    folder = save_tiny("llama-tied", tmp_path_factory.mktemp(method) / "model", **SIZES)
    if method == "fp8":
        settings: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        return rewritten(folder, settings, fp8("weight_scale_inv", (128, 128)), "proj.weight")
    return rewritten(folder, {"quant_method": method, "bits": 4}, int4(method, {}), "proj.weight")


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("packed", [True, False])
def test_tensors_of_other_shapes_or_types_are_refused(
    quantised: Path, part: int, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(quantised, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    parts = sorted(name for name in tensors if "layers.2.mlp.down_proj" in name and "g_idx" not in name)
    name = parts[part % len(parts)]
    tensors[name] = tensors[name][:-1].contiguous() if part < 2 else tensors[name].to(torch.float16)[:, :-1]
    save_file(
        {k: v.contiguous() for k, v in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(IntegrityError, match="down_proj"):
        resolve(str(folder), cache_dir=tmp_path / "cache").load_span(2, 3, packed=packed, **FLOAT32)
    monkeypatch.setattr(ModelBuilder, "check", nothing)
    model = resolve(str(folder), cache_dir=tmp_path / "cache")
    with pytest.raises(IntegrityError, match="down_proj"):
        model.load_span(2, 3, packed=packed, **FLOAT32)
