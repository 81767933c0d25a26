"""Every family that C computes gives the same bits for every target, batch and chunk, on hosts that
differ, and errs little."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarmnet_node.engine import stage_loading
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.models import resolve
from swarmnet_protocols.quantization.packed_experts import compute_experts
from tests.support.compiled import compiled_backend
from tests.support.models.family_page import EXACT
from tests.support.models.hub_families import FAMILIES

TARGETS = [each.name for each in native_code.targets()]
POSITIONS = 40
pytestmark = pytest.mark.timeout(300)  # the first test compiles for each target


@pytest.mark.parametrize("family", sorted(EXACT))
def test_a_position_has_the_same_bits_however_it_is_computed(family: str, tmp_path: Path) -> None:
    model = resolve(str(FAMILIES[family].save(tmp_path / "model")), cache_dir=tmp_path / "cache")
    expected = before = None
    for number, target in enumerate(TARGETS):
        stage = load_stage(
            model,
            *(0, 4),
            dtype=torch.float32,
            device=torch.device("cpu"),
            backend=compiled_backend(target),
            packed=number % 2 == 1,  # where C knows the settings of the family: a stage without torch
        )
        assert stage.is_exact
        rows = torch.randn(POSITIONS, stage.hidden_size, generator=torch.Generator().manual_seed(0))
        for sizes in ([POSITIONS], [7, 1, 17, 2, 3, 10], [1] * POSITIONS)[: 2 if number else 3]:
            sequence, other = stage.new_sequence(), stage.new_sequence()
            chunks = [stage.forward([(other, rows[:3]), (sequence, chunk)])[1] for chunk in rows.split(sizes)]
            found = np.concatenate(chunks)
            expected = found if expected is None else expected
            assert np.array_equal(found, expected), (target, sizes)
        values = rows
        for hop in (stage.part(0, 1), (before or stage).part(1, 4)):
            [values] = hop.forward([(hop.new_sequence(), values)])
        assert np.array_equal(values, expected), f"{target}, and then another host"
        before = stage


@pytest.mark.parametrize(
    "family",
    [
        *("cohere2", "gemma3", "granite", "llama", "phi3", "starcoder2"),
        *("glm4_moe", "granitemoeshared", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    ],
)
def test_blocks_err_by_less_than_a_millionth(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 2 ** -20 of the norm of torch's outputs in float64. The bits are the same on every
    processor, and so is the error."""
    monkeypatch.setitem(stage_loading._ACTIVATIONS, "float64", "/f64")
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "grouped_mm", compute_experts)  # that one lacks float64
    model = resolve(str(FAMILIES[family].save(tmp_path / "model")), cache_dir=tmp_path / "cache")
    backend = compiled_backend()
    outputs = []
    for dtype, each in ((torch.float32, backend), (torch.float64, None)):
        stage = load_stage(model, 0, 4, dtype=dtype, device=torch.device("cpu"), backend=each)
        rows = torch.randn(POSITIONS, stage.hidden_size, generator=torch.Generator().manual_seed(0))
        outputs.append(stage.forward([(stage.new_sequence(), rows)])[0].double())
    assert (outputs[0] - outputs[1]).norm() <= 2.0**-20 * outputs[1].norm()
