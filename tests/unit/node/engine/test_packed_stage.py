"""Stages with packed weights give the outputs of stages with the same weights dequantised."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import quantize
from safetensors.torch import load_file, save_file
from torch import nn

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.exact_stage import ExactStage
from swarmnet_node.engine.kernels.native_backend import NativeBackend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.engine.torch_layers.adapters import linear_modules
from swarmnet_node.engine.torch_layers.torch_stage import TORCH, TorchStage
from swarmnet_protocols.arrays import as_tensor
from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.models import DEFAULT_MODEL, LocalModel, resolve
from swarmnet_protocols.models.checkpoints.checkpoint import ModelCheckpoint
from swarmnet_protocols.models.checkpoints.conversion import experts_modules
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_linear import PackedLinear, install, packed_bytes
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import Products
from tests.support.compiled import compiled_backend, compiled_products
from tests.support.gguf.packed_matrices import loaded_copy, values_of
from tests.support.models.peft_oracle import random_tensors
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import save_tiny, write_gguf

CPU = torch.device("cpu")
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
FAMILIES = {
    "llama": ("llama-tied", {}),
    "llama, biases everywhere": ("llama-tied", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, biases": ("qwen2", {"use_sliding_window": False}),
    "qwen3, norms of heads": ("qwen3", {}),
    "gemma3, layers of transformers": ("gemma3", {}),
    "mixtral, experts of transformers": ("mixtral", {}),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def packed(weight: torch.Tensor, format: Format) -> PackedTensor:
    data = np.ascontiguousarray(quantize(weight.numpy(), format)).view(np.uint8)
    return PackedTensor.of(format, torch.from_numpy(data.reshape(len(weight), -1)))


def two_stages(
    family: str, folder: Path, products: Products, backend: Any, formats: tuple[Format, Format]
) -> tuple[Stage, Stage]:
    """The same values, packed and dequantised. Every second linear module has the second format."""
    name, changes = FAMILIES[family]
    model = resolve(
        str(save_tiny(name, folder / "model", **{**SIZES, **changes})), cache_dir=folder / "cache"
    )
    spans: list[Any] = [model.load_span(0, 2, **FLOAT32) for _ in range(2)]
    weights, values = {}, {}
    for path, linear in spans[0].named_modules():
        if type(linear) is nn.Linear and linear.in_features % 32 == 0:
            matrix = packed(linear.weight.detach(), formats[len(weights) % 2])
            values[f"{path}.weight"] = matrix.dequantize()
            weights[f"{path}.weight"] = loaded_copy(matrix, products)
    assert weights
    biases = {path: linear.bias for path, linear in spans[0].named_modules() if isinstance(linear, nn.Linear)}
    install(spans[0], weights, products)
    for path, linear in spans[0].named_modules():
        if isinstance(linear, PackedLinear) and biases[path] is not None:
            linear.bias = biases[path]
    for weight, dense in values.items():
        spans[1].get_parameter(weight).data = dense
    one, other = (TorchStage(span, model.manifest.hidden_size, backend) for span in spans)
    return one, other


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    return compiled_backend()


@pytest.mark.matrix
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize(
    "formats",
    [(Format.Q4_1, Format.Q4_1), (Format.Q8_0, Format.Q4_0), (Format.Q5_0, Format.Q5_1)],
    ids=lambda formats: " and ".join(each.name for each in formats),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_compute_as_their_dequantised_values_do(
    family: str, formats: tuple[Format, Format], is_native: bool, native: NativeBackend, tmp_path: Path
) -> None:
    products = compiled_products() if is_native else Products(None)
    backend = native if is_native else TORCH
    mine, theirs = two_stages(family, tmp_path, products, backend, formats)
    assert (mine.method.llama_layers is None) == (theirs.method.llama_layers is None)
    assert mine.weight_bytes < 0.5 * theirs.weight_bytes or "experts" in family
    inputs = torch.randn(200, theirs.hidden_size, generator=torch.Generator().manual_seed(0))
    outputs = []
    for stage in (mine, theirs):
        sequences = [stage.new_sequence(), stage.new_sequence()]
        found = stage.forward([(sequences[0], inputs[:150]), (sequences[1], inputs[150:190])])
        for row in range(190, 200):
            found += stage.forward(
                [(sequences[0], inputs[row : row + 1]), (sequences[1], inputs[row : row + 1])]
            )
        outputs.append(torch.cat(found))
    assert_near(*outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_packed_weights_are_those_of_dequantised_values(
    family: str, native: NativeBackend, tmp_path: Path
) -> None:
    products = compiled_products()
    stages = two_stages(family, tmp_path, products, native, (Format.Q4_1, Format.Q4_1))
    generator = torch.Generator().manual_seed(1)
    inputs, towards = (torch.randn(40, stages[0].hidden_size, generator=generator) for _ in range(2))
    linears = [linear_modules(layer) for layer in stages[1]._model.layers]
    assert [linear_modules(layer) for layer in stages[0]._model.layers] == linears
    modules = [(path, *shape) for path, shape in linears[0].items()]
    tensors = random_tensors(range(2), modules=modules, rank=4, seed=2)
    found = []
    for stage in stages:
        adapter = stage.load_adapter(tensors, 0)
        [session] = stage.forward([(stage.new_sequence(adapter), inputs)])
        outputs, graph = stage.record_sequences(inputs, [25, 15], adapter)
        assert graph.nbytes < 2_000_000
        gradients, own = stage.gradients(graph, towards)
        found.append([session, outputs, gradients, *(own[name] for name in sorted(own))])
    for mine, theirs in zip(*found, strict=True):
        assert_near(mine, theirs)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_matrices_of_a_gguf_file_stay_packed(architecture: str, tmp_path: Path) -> None:
    model = resolve(str(write_gguf(tmp_path / "tiny.gguf", architecture)), cache_dir=tmp_path / "cache")
    mine: Any = model.load_span(1, 3, packed=True, **FLOAT32)
    theirs = dict(model.load_span(1, 3, **FLOAT32).state_dict())
    linears = {path: each for path, each in mine.named_modules() if isinstance(each, PackedLinear)}
    assert "layers.0.self_attn.q_proj" in linears
    for path, linear in linears.items():
        assert torch.equal(values_of(linear.packed), theirs.pop(f"{path}.weight"))
    for path, module in experts_modules(mine):
        for name in ("gate_up_proj", "down_proj"):
            matrices = getattr(module, name).matrices
            merged = torch.stack([values_of(matrices[expert]) for expert in range(4)])
            assert torch.equal(merged, theirs.pop(f"{path}.{name}"))
    assert all(torch.equal(tensor, theirs.pop(name)) for name, tensor in mine.state_dict().items())
    assert not theirs


def test_a_packed_matrix_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: LocalModel = resolve(str(write_gguf(tmp_path / "a.gguf", "llama")), cache_dir=tmp_path / "cache")
    checkpoint: ModelCheckpoint = model._checkpoint
    real = checkpoint.state_dict

    def shorter(*args: Any, **options: Any) -> dict[str, Any]:
        found = real(*args, **options)
        name = next(name for name, each in found.items() if isinstance(each, PackedTensor))
        return {**found, name: found[name].rows(0, 16)}

    monkeypatch.setattr(checkpoint, "state_dict", shorter)
    with pytest.raises(IntegrityError, match="no linear layer or embedding of shape"):
        model.load_span(0, 1, packed=True, **FLOAT32)


def test_the_default_model_is_held_in_the_bytes_of_its_file(native: NativeBackend) -> None:
    model = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir())
    stage = load_stage(model, 10, 14, backend=native, packed=True, **FLOAT32)
    file_bytes = 4 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576) * 20 // 32 + 4 * 2 * 576 * 4
    assert isinstance(stage, ExactStage)
    assert stage.weight_bytes <= 1.01 * file_bytes


def test_local_layers_stay_packed_and_share_tied_weights(native: NativeBackend) -> None:
    model = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir())
    mine: Any = model.load_local_layers(lambda layers: nn.ModuleList(), packed=True, **FLOAT32)
    theirs: Any = model.load_local_layers(lambda layers: nn.ModuleList(), **FLOAT32)
    assert mine.lm_head.packed is mine.model.embed_tokens.packed
    assert packed_bytes(mine) == 49152 * 576 * 34 // 32
    ids = torch.tensor([[5, 49151, 0], [7, 7, 8]])
    assert torch.equal(mine.model.embed_tokens(ids), theirs.model.embed_tokens(ids))
    for rows in 1, 3, 200:
        states = torch.randn(rows, 576, generator=torch.Generator().manual_seed(rows))
        assert_near(mine.lm_head(states), theirs.lm_head(states))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama-tied", torch.float16),
        *(
            (name, torch.bfloat16)
            for name in ("llama-tied", "llama-untied", "qwen2", "qwen3", "gemma2", "mixtral")
        ),
    ],
)
def test_matrices_of_16_bits_stay_so_and_compute_as_float32(
    family: str, dtype: torch.dtype, native: NativeBackend, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path / "model", hidden_size=64)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = resolve(str(folder), cache_dir=tmp_path / "cache")
    mine, theirs = (
        load_stage(model, 1, 4, backend=native, packed=packed, **FLOAT32) for packed in (True, False)
    )
    assert mine.weight_bytes < 0.75 * theirs.weight_bytes
    assert isinstance(mine, ExactStage) == (family in ("llama-tied", "llama-untied", "qwen3"))
    inputs = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    outputs = []
    for stage in (mine, theirs):
        sequence = stage.new_sequence()
        parts = [stage.forward([(sequence, part)])[0] for part in inputs.split([97, 1, 2])]
        outputs.append(torch.cat([*map(as_tensor, parts)]))
    assert_near(*outputs)
    ends: list[Any] = [
        model.load_local_layers(lambda layers: nn.ModuleList(), packed=packed, **FLOAT32)
        for packed in (True, False)
    ]
    ids = torch.tensor([[3, 0, 7]])
    assert torch.equal(*(each.get_input_embeddings()(ids) for each in ends))
    assert_near(*(each.get_output_embeddings()(inputs) for each in ends))
