"""A stage in C computes what torch computes with the same weights, and imports torch only for
adapters and gradients."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.exact_stage import ExactStage
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.kernels.torch_backend import TorchBackend
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.engine.torch_layers.torch_stage import TorchStage
from swarmnet_protocols.arrays import as_tensor
from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.llama_shape import LlamaShape
from swarmnet_protocols.quantization.formats import PRECISIONS
from swarmnet_protocols.quantization.products import load_products
from tests.support.models.peft_oracle import random_tensors
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import save_tiny, write_gguf

FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
SIZES = {"hidden_size": 64, "intermediate_size": 96}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-tied", {}),
    "biases": ("llama-tied", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama-untied", {"rope_parameters": LLAMA3}),
    "linear": ("llama-tied", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "sliding_window": None}),
    "qwen3": ("qwen3", {}),
}


def load(family: str, folder: Path) -> tuple[ExactStage, TorchStage]:
    """A stage in C and one in torch, with the same weights of 8 bits."""
    name, changes = FAMILIES[family]
    model = resolve(str(save_tiny(name, folder / "model", **SIZES, **changes)), cache_dir=folder / "cache")
    options = {**FLOAT32, "packed": True, "quantized": PRECISIONS["int8"]}
    exact = load_stage(model, 1, 4, backend=load_backend(default_cache_dir()), **options)
    other = load_stage(model, 1, 4, backend=TorchBackend(load_products(default_cache_dir())), **options)
    assert isinstance(exact, ExactStage)
    assert isinstance(other, TorchStage)
    return exact, other


def random(positions: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(positions, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_c_and_torch_compute_the_same_for_each_family(family: str, tmp_path: Path) -> None:
    exact, other = load(family, tmp_path)
    assert (exact.precision, exact.blocks, exact.hidden_size) == (other.precision, other.blocks, 64)
    assert exact.geometry.bytes_for(70) == other.geometry.bytes_for(70)
    assert exact.weight_bytes == other.weight_bytes
    assert exact.is_exact
    mine, theirs = exact.new_sequence(), other.new_sequence()
    for count in (70, 1, 3):
        inputs = random(count)
        [outputs], [expected] = exact.forward([(mine, inputs)]), other.forward([(theirs, inputs)])
        assert isinstance(outputs, np.ndarray)
        assert_near(as_tensor(outputs), expected)


def test_parts_and_passes_have_the_bits_of_the_whole(tmp_path: Path) -> None:
    exact, _ = load("qwen3", tmp_path)
    inputs = random(9).numpy()
    [whole] = exact.forward([(exact.new_sequence(), inputs)])
    values = inputs
    for span in ((0, 1), (1, 3)):
        part = exact.part(*span)
        [values] = part.forward([(part.new_sequence(), values)])
    assert np.array_equal(values, whole)
    both = exact.run_sequences(np.concatenate([inputs[:4], inputs]), [4, 9])
    assert np.array_equal(both[4:], whole)


def test_adapters_and_gradients_are_those_of_torch(tmp_path: Path) -> None:
    exact, other = load("llama", tmp_path)
    modules = [(path, *shape) for path, shape in other._targets[0].linears.items()]
    tensors = random_tensors(range(3), modules=modules, rank=2, seed=1)
    inputs, grad_outputs = random(7), random(7, seed=1)
    found = []
    for stage in (exact, other):
        adapter = stage.load_adapter(tensors, 0)
        [outputs] = stage.forward([(stage.new_sequence(adapter), inputs)])
        recorded, graph = stage.record_sequences(inputs, [7], adapter)
        found.append((as_tensor(outputs), recorded, *stage.gradients(graph, grad_outputs)))
    (mine, recorded, gradients, own), (theirs, _, expected, of_adapter) = found
    assert_near(mine, theirs)
    assert_near(recorded, theirs)
    assert_near(gradients, expected)
    assert own.keys() == of_adapter.keys() == tensors.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "granite"},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "default"}},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "mistral"},
        {"model_type": "qwen2", "sliding_window": 6, "use_sliding_window": True},
        {"quantization_config": {"quant_method": "fp8"}},
        {"num_hidden_layers": 1 << 40},
        {"hidden_size": "64"},
        {"rms_norm_eps": None},
    ],
    ids=str,
)
def test_settings_that_c_does_not_know_are_left_to_transformers(changes: dict[str, Any]) -> None:
    known = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert LlamaShape.of(known) is not None
    assert LlamaShape.of(known | changes) is None


def opened(folder: Path, **options: Any) -> LocalModel:
    path = folder / "tiny.gguf"
    if not path.exists():
        write_gguf(path, "llama", **options)
    return resolve(str(path), cache_dir=folder / "cache")


def test_weights_of_another_size_than_the_config_has_are_refused(tmp_path: Path) -> None:
    model = opened(tmp_path)
    shape = model.llama_shape
    assert shape is not None
    model.__dict__["llama_shape"] = LlamaShape(**vars(shape) | {"intermediate_size": 64})
    with pytest.raises(IntegrityError):
        load_stage(model, 0, 1, backend=load_backend(default_cache_dir()), packed=True, **FLOAT32)


def test_a_stage_in_c_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    opened(tmp_path)  # the first time, transformers checks the files
    done = subprocess.run(
        [sys.executable, "-c", _COMPUTE, str(tmp_path), str(default_cache_dir())],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


_COMPUTE = """
import sys
from pathlib import Path
import numpy as np
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.machine.devices import CPU
from swarmnet_protocols.models import resolve
folder, cache = map(Path, sys.argv[1:])
model = resolve(str(folder / "tiny.gguf"), cache_dir=folder / "cache")
stage = load_stage(
    model, 0, 3, dtype=np.dtype(np.float32), device=CPU, backend=load_backend(cache), packed=True
)
[outputs] = stage.forward([(stage.new_sequence(), np.ones((5, 64), np.float32))])
assert np.isfinite(outputs).all()
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
