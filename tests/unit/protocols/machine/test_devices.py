"""The limit on an accelerator's memory. Without an accelerator, the tests check the limit that
PyTorch is given."""

import gc
from types import SimpleNamespace

import pytest
import torch

from swarmnet_node.owner.machine import release_memory
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.devices import Card, allowed_bytes, cards_of, limit_memory, pick_device

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
def test_a_memory_limit_is_passed_to_metal(
    monkeypatch: pytest.MonkeyPatch, most: float | None, share: float
) -> None:
    told: list[float] = []
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 8 * GIB)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", told.append)
    limit_memory(torch.device("mps"), most)
    assert told == [share]


def test_a_cpu_has_no_memory_of_its_own() -> None:
    limit_memory(torch.device("cpu"), 0.5)


def test_freed_memory_of_a_gpu_goes_back_to_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pause does it (``Machine.release``), after the last reference to blocks and caches is
    gone."""
    told: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: told.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("cuda"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: told.append("mps"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    release_memory()
    assert told == ["collect"]  # a process that has not used the GPU does not begin to
    told.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    release_memory()
    assert told == ["collect", "cuda"]


@pytest.mark.parametrize(("used", "most", "allowed"), [(3, None, 7.6), (3, 0.5, 4.0), (3, 2 * GIB, 2.0)])
def test_the_memory_of_a_card_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, used: int, most: float | None, allowed: float
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((8 - used) * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    device = torch.device("cuda:1")
    [card] = cards_of([torch.device("cpu"), device])
    assert card == Card(device, "cuda:1 (A card)", 8 * GIB, (8 - used) * GIB)
    assert allowed_bytes(most, card.total_bytes) == pytest.approx(allowed * GIB)


def test_a_device_that_is_not_there_is_refused() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no device mps"):
        pick_device("mps")
