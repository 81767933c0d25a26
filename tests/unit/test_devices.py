"""The limit on an accelerator's memory. Without an accelerator, the tests check the limit that PyTorch is given."""

from types import SimpleNamespace

import pytest
import torch

from swarmnet_protocols.machine.devices import limit_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("most", "share"), [(None, 0.95), (0.8, 0.8), (1.0, 1.0), (2 * GIB, 0.25), (99 * GIB, 1.0)]
)
@pytest.mark.parametrize(("name", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_pytorch_is_told_what_share_of_a_gpu_it_may_take(
    monkeypatch: pytest.MonkeyPatch, name: str, index: int, most: float | None, share: float
) -> None:
    told: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda which: SimpleNamespace(total_memory=8 * GIB)
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: told.append(args))
    limit_memory(torch.device(name), most)
    assert told == [(share, index)]


@pytest.mark.parametrize(("most", "share"), [(None, 0.95), (0.5, 0.5), (4 * GIB, 0.5)])
def test_metal_is_told_too(monkeypatch: pytest.MonkeyPatch, most: float | None, share: float) -> None:
    told: list[float] = []
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 8 * GIB)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", told.append)
    limit_memory(torch.device("mps"), most)
    assert told == [share]


def test_a_cpu_has_no_memory_of_its_own() -> None:
    limit_memory(torch.device("cpu"), 0.5)
