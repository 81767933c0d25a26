"""A stage whose layers are on several devices. Its second device is another name of the CPU: what
moves is seen, and outputs can be compared."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from swarmnet_node.engine.kernels.torch_backend import TorchBackend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine import devices
from swarmnet_protocols.machine.devices import pick_devices
from swarmnet_protocols.models import LocalModel, resolve
from tests.support.models.peft_oracle import random_tensors
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import save_tiny

FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 1)
SPREAD = (FIRST, FIRST, FIRST, SECOND, SECOND)
MODULES = [("self_attn.q_proj", 32, 32), ("mlp.down_proj", 32, 48)]


class Moves(TorchFunctionMode):
    """Counts the tensors [..., 32] of hidden states that are moved to the second device."""

    def __init__(self) -> None:
        self.hidden_states = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.to and SECOND in args[1:] and args[0].shape[-1] == 32:
            self.hidden_states += 1
        return func(*args, **(kwargs or {}))


def two_stages(family: str, folder: Path, *, arena: bool) -> tuple[Stage, Stage]:
    """Two stages of the same blocks: spread over two devices, and on one."""
    model: LocalModel = resolve(str(save_tiny(family, folder / "model")), cache_dir=folder / "cache")
    options: dict[str, Any] = {"dtype": torch.float32, "device": FIRST, "backend": TorchBackend()}
    mine, theirs = (load_stage(model, 0, 5, devices=each, **options) for each in (SPREAD, ()))
    if arena:
        mine.preallocate(512 * mine.geometry.bytes_per_position)
    return mine, theirs


@pytest.mark.parametrize("arena", [False, True], ids=["caches", "arena"])
@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "mixtral"])
def test_a_spread_stage_computes_what_one_device_computes(family: str, arena: bool, tmp_path: Path) -> None:
    mine, theirs = two_stages(family, tmp_path, arena=arena)
    assert mine.blocks == theirs.blocks == 5
    assert mine.weight_bytes == theirs.weight_bytes
    assert (mine.method.llama_layers is None) == (theirs.method.llama_layers is None)
    assert not mine.has_recordings
    generator = torch.Generator().manual_seed(0)
    tensors = random_tensors(range(5), modules=MODULES[:1], rank=2, seed=1)
    for adapter in (None, tensors):
        sequences = [
            [stage.new_sequence(stage.load_adapter(adapter, 0) if adapter else None) for _ in range(2)]
            for stage in (mine, theirs)
        ]
        for counts in ((9, 4), (1, 1), (5, 1)):
            rows = [torch.randn(count, 32, generator=generator) for count in counts]
            with Moves() as moved:
                found = mine.forward(list(zip(sequences[0], rows, strict=True)))
            assert moved.hidden_states >= 1
            expected = theirs.forward(list(zip(sequences[1], rows, strict=True)))
            for got, wanted in zip(found, expected, strict=True):
                assert_near(got, wanted)
    part, whole = mine.part(2, 5), theirs.part(2, 5)
    rows = [torch.randn(6, 32, generator=generator)]
    assert_near(
        part.forward([(part.new_sequence(), rows[0])])[0], whole.forward([(whole.new_sequence(), rows[0])])[0]
    )


def test_gradients_flow_between_devices(tmp_path: Path) -> None:
    stages = two_stages("llama-tied", tmp_path, arena=False)
    inputs, towards = (torch.randn(11, 32, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    tensors = random_tensors(range(5), modules=MODULES, rank=2, seed=1)
    found = []
    for stage in stages:
        outputs, graph = stage.record_sequences(inputs, [7, 4], stage.load_adapter(tensors, 0))
        gradients, own = stage.gradients(graph, towards)
        found.append([outputs, gradients, *(own[name] for name in sorted(own))])
    for mine, theirs in zip(*found, strict=True):
        assert_near(mine, theirs)


def test_caches_are_on_the_devices_of_their_layers(tmp_path: Path) -> None:
    """By shape and name only: both names mean the CPU."""
    mine, _ = two_stages("llama-tied", tmp_path, arena=False)
    assert mine.geometry.devices == SPREAD
    assert mine.part(2, 4).geometry.devices == (FIRST, SECOND)
    assert [target.device for target in mine._targets] == list(SPREAD)


@pytest.mark.parametrize("names", ["cpu,cpu", "cuda:0,cuda:0", "cuda:0,cpu"])
def test_only_several_gpus_are_several_devices(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "pick_device", torch.device)
    with pytest.raises(ConfigError, match="only different CUDA devices"):
        pick_devices(names)
    assert pick_devices("cuda:0,cuda:1") == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert pick_devices("cpu") == [devices.CPU]
