"""Blocks that are loaded onto another device than the CPU go there tensor by tensor. The meta
device stands for an accelerator."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.checkpoints.gguf.tensors import Recipe
from swarmnet_protocols.models.partial_model import build_span, weight_bytes
from swarmnet_protocols.quantization.packed_linear import PackedLinear
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from tests.support.models.tiny_models import save_tiny, write_gguf

META: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("meta")}


class Alive:
    """Counts the memory of tensors that were read: how many are alive at once, at most."""

    def __init__(self) -> None:
        self.most = 0
        self.read = 0
        self._seen: list[weakref.ref[torch.UntypedStorage]] = []

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        self.read += 1
        self._seen = [each for each in self._seen if each() is not None]
        self._seen.append(weakref.ref(tensor.untyped_storage()))
        self.most = max(self.most, len(self._seen))
        return tensor


class Watched:
    """A lazy slice of a safetensors file, as transformers reads it."""

    def __init__(self, slice_: Any, alive: Alive) -> None:
        self._slice, self._alive = slice_, alive

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._alive.see(self._slice[index])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)


@pytest.mark.parametrize("packed", [False, True])
def test_a_span_of_safetensors_is_never_whole_in_cpu_memory(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = resolve(str(save_tiny("llama-tied", tmp_path / "model")), cache_dir=tmp_path / "cache")
    checkpoint, alive = model._checkpoint, Alive()
    real = checkpoint.state_dict

    def watched(*args: Any, **options: Any) -> dict[str, Any]:
        return {name: Watched(each, alive) for name, each in real(*args, **options).items()}

    monkeypatch.setattr(checkpoint, "state_dict", watched)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # otherwise threads read ahead
    span = model.load_span(0, 5, packed=packed, **META)
    assert {each.device.type for each in (*span.parameters(), *span.buffers())} == {"meta"}
    assert alive.read == 5 * 9
    # A size that is computed without reading the file.
    assert build_span(model.config, 0, 5).weight_bytes(torch.float32) == weight_bytes(span)
    assert alive.most <= 2


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_packed_matrices_of_a_gguf_file_go_to_the_device_one_by_one(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = resolve(str(write_gguf(tmp_path / "tiny.gguf", architecture)), cache_dir=tmp_path / "cache")
    alive, packed_by = Alive(), Recipe.packed

    def watched(self: Recipe, matrices: Sequence[PackedTensor]) -> PackedTensor | None:
        found = packed_by(self, matrices)
        if found is not None:
            alive.see(found.segments[0].tensor)
        return found

    monkeypatch.setattr(Recipe, "packed", watched)
    span = model.load_span(0, 3, packed=True, **META)
    packed = [each.packed for each in span.modules() if isinstance(each, PackedLinear)]
    assert len(packed) == alive.read >= 12
    assert alive.most <= 2
    tensors = (*span.parameters(), *span.buffers(), *packed)
    assert {each.device.type for each in tensors} == {"meta"}
