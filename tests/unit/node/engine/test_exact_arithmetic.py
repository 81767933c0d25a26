"""The arithmetic that hosts announce as ``exact-1``: where it holds, and that its bits stay."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.models import resolve
from swarmnet_protocols.quantization.formats import PRECISIONS
from swarmnet_protocols.routing import host_info
from tests.support.compiled import compiled_backend
from tests.support.models.tiny_models import save_tiny

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
POSITIONS = 40
EXACT_1 = {
    "int8": "b6c23e0cca9e6d8135f97a974899445f7482d2232593b9aa812f06d57693ab10",
    "int4": "4a099c04a2240468f0fe9dbe069a65ff1a4282429967a83896c0be7fb1b8a1b3",
}
"""SHA-256 of outputs of the arithmetic ``exact-1``, by precision."""


def load(folder: Path, weights: str, family: str = "llama-tied", target: str | None = None) -> Stage:
    native = compiled_backend(target)
    if not (folder / "model").exists():
        save_tiny(family, folder / "model", **SIZES)
    return load_stage(
        resolve(str(folder / "model"), cache_dir=folder / "cache"),
        *(0, 2),
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=native,
        packed=weights in PRECISIONS,
        quantized=PRECISIONS.get(weights),
    )


@pytest.mark.parametrize(
    ("family", "weights", "arithmetic"),
    [
        ("llama-tied", "int8", host_info.EXACT),
        ("llama-tied", "float32", host_info.EXACT),
        ("gemma3", "int8", host_info.EXACT),
        ("mixtral", "int8", host_info.EXACT),
        ("gpt-oss", "float32", host_info.TORCH),
    ],
)
def test_a_stage_is_exact_if_no_session_needs_torch(
    family: str, weights: str, arithmetic: str, tmp_path: Path
) -> None:
    stage = load(tmp_path, weights, family)
    assert stage.arithmetic == stage.part(1, 2).arithmetic == arithmetic


@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "mixtral"])
def test_passes_of_an_exact_stage_have_the_bits_of_its_sessions(family: str, tmp_path: Path) -> None:
    """A witness computes passes, and its outputs must equal those of a session."""
    stage = load(tmp_path, "int8", family)
    rows = torch.randn(POSITIONS, stage.hidden_size, generator=torch.Generator().manual_seed(0))
    for part in (stage, stage.part(1, 2)):
        expected: list[Any] = []
        for each in (rows[:9], rows[9:]):
            sequence = part.new_sequence()
            expected += [np.asarray(part.forward([(sequence, row[None])])[0]) for row in each]
        outputs = np.asarray(part.run_sequences(rows, (9, POSITIONS - 9)))
        assert np.array_equal(outputs, np.concatenate(expected))


@pytest.mark.parametrize("target", [each.name for each in native_code.targets()])
@pytest.mark.parametrize("weights", EXACT_1)
def test_exact_1_is_the_arithmetic_that_it_was(weights: str, target: str, tmp_path: Path) -> None:
    """Who changes a bit of it gives it another name: audits convict hosts that differ."""
    assert host_info.EXACT == "exact-1"
    save_tiny("llama-tied", tmp_path / "model", **SIZES)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        tensors[name] = (_numbers(tensor.numel(), number) / 2048 + (tensor.dim() == 1)).view_as(tensor)
    save_file(tensors, file, {"format": "pt"})
    stage = load(tmp_path, weights, target=target)
    rows = (_numbers(POSITIONS * stage.hidden_size, 99) / 256).view(POSITIONS, -1)
    outputs = np.asarray(stage.forward([(stage.new_sequence(), rows)])[0])
    assert np.isfinite(outputs).all()
    assert hashlib.sha256(outputs.tobytes()).hexdigest() == EXACT_1[weights]


def _numbers(count: int, seed: int) -> torch.Tensor:
    """Return integers from -510 to 510 that look random, the same on every machine."""
    return ((torch.arange(count) + 1000 * seed) ** 2 * 7919 % 1021 - 510).float()
