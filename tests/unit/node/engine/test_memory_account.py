"""The memory account: its estimate of a forward against what a forward allocates."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarmnet_node.engine.memory_account import activation_bytes
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.models import resolve
from tests.support.models.tiny_models import save_tiny


class PeakBytes(TorchDispatchMode):
    """Bytes of the tensors that operations allocate while the mode is on: those alive at once, at
    most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        for output in outputs if isinstance(outputs, list | tuple) else [outputs]:
            if isinstance(output, torch.Tensor) and output.untyped_storage()._cdata not in known:
                storage = output.untyped_storage()
                if storage._cdata not in self._alive:
                    self._alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._alive.values()))
        return outputs


SHAPES = {
    "wide MLP": {"intermediate_size": 256},
    "narrow MLP": {"intermediate_size": 32},
    "a key for every head": {"intermediate_size": 64, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "mixtral", "granite"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_forward_allocates_about_what_is_estimated(family: str, shape: str, tmp_path: Path) -> None:
    directory = save_tiny(family, tmp_path / "model", **SHAPES[shape])
    model = resolve(str(directory), cache_dir=tmp_path / "cache")
    stage = load_stage(model, 0, 5, dtype=torch.float32, device=torch.device("cpu"))
    sequence, inputs = stage.new_sequence(), torch.randn(512, stage.hidden_size)
    sequence.reserve(512)
    with PeakBytes() as measured:
        stage.forward([(sequence, inputs)])
    estimate = activation_bytes(512, stage.widths, 4)
    assert estimate / 2 < measured.peak <= estimate
