"""Every family that C computes gives the same bits for every target, batch and chunk."""

from pathlib import Path

import pytest
import torch

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels.native_backend import NativeBackend
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.models import resolve
from tests.support.models.family_page import EXACT
from tests.support.models.hub_families import FAMILIES

TARGETS = [each.name for each in native_code.targets()]
POSITIONS = 40
pytestmark = pytest.mark.timeout(300)  # the first test compiles for each target


@pytest.mark.parametrize("family", sorted(EXACT))
def test_a_position_has_the_same_bits_however_it_is_computed(family: str, tmp_path: Path) -> None:
    model = resolve(str(FAMILIES[family].save(tmp_path / "model")), cache_dir=tmp_path / "cache")
    expected = None
    for target in TARGETS:
        backend = NativeBackend.load(default_cache_dir(), target)
        assert backend is not None
        stage = load_stage(model, 0, 4, dtype=torch.float32, device=torch.device("cpu"), backend=backend)
        assert stage.method.decode_step is not None
        rows = torch.randn(POSITIONS, stage.hidden_size, generator=torch.Generator().manual_seed(0))
        for sizes in ([POSITIONS], [7, 1, 17, 2, 3, 10], [1] * POSITIONS):
            sequence, other = stage.new_sequence(), stage.new_sequence()
            chunks = [stage.forward([(other, rows[:3]), (sequence, chunk)])[1] for chunk in rows.split(sizes)]
            found = torch.cat(chunks)
            expected = found if expected is None else expected
            assert torch.equal(found, expected), (target, sizes)
