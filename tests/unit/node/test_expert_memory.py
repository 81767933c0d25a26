"""A node whose memory limit does not hold all experts of its blocks keeps as many as fit, and reads
the others from disk."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from swarmnet_node.config import NodeConfig
from swarmnet_node.engine.memory_account import MIB
from swarmnet_node.loading.fitting import footprints
from swarmnet_node.loading.loaded_model import LoadedModel
from swarmnet_node.loading.reading import read_model
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.fetching.peers import SwarmPeers
from swarmnet_protocols.joining.network import Network
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.timing import Timing
from tests.support.models.tiny import save_tiny_llama
from tests.support.swarm.expert_lab import NUM_EXPERTS, save_experts

BLOCKS = 4


@pytest.fixture(autouse=True)
def _resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has 100 MiB before blocks are loaded: what other tests have left does not
    count."""
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: SimpleNamespace(rss=100 * MIB))


def loaded(folder: Path, max_ram_bytes: int, **options: Any) -> LoadedModel:
    """A tiny mixture of experts, fitted to this limit on memory. The schedule keeps the node from
    loading its blocks."""
    model = folder / "model"
    config = NodeConfig(
        model=str(model if model.exists() else save_experts("mixtral", model)),
        network=Network(Rules(b"key", Admission.OPEN), P2pdConfig(folder / "identity.key", listen=())),
        swarm_name="lab",
        cache_dir=folder / "cache",
        folder=folder,
        device="cpu",
        limits=OwnerLimits(schedule="mon 00:00-00:01", max_ram_bytes=max_ram_bytes),
        **options,
    )
    return read_model(config, None, SwarmPeers(config.network.rules.pieces_hashes, Timing()))


def needed(folder: Path, blocks: int) -> tuple[int, int]:
    """The memory limits with which a node can host so many blocks: without experts in memory, and
    with all."""
    whole = loaded(folder, 1 << 40, blocks=(0, BLOCKS))
    footprint, bare = footprints(whole)
    assert bare.block_bytes < footprint.block_bytes
    return bare.min_ram_bytes(blocks), footprint.min_ram_bytes(blocks)


def test_what_fits_is_in_memory_as_a_whole(tmp_path: Path) -> None:
    _, whole = needed(tmp_path, BLOCKS)
    found = loaded(tmp_path, whole, blocks=(0, BLOCKS))
    assert found.cache is None
    assert found.experts is None


@pytest.mark.parametrize("options", [{"blocks": (0, BLOCKS)}, {"num_blocks": BLOCKS}])
def test_blocks_that_the_owner_chose_have_some_experts_on_disk(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    bare, whole = needed(tmp_path, BLOCKS)
    found = loaded(tmp_path, (bare + whole) // 2, **options)
    assert found.cache is not None
    assert 2 <= found.cache.capacity < BLOCKS * NUM_EXPERTS
    assert found.cache.max_bytes < (whole - bare) // 2
    assert {len(experts) for experts in found.cache.own.values()} == {NUM_EXPERTS}


def test_a_node_that_may_choose_takes_fewer_blocks_instead(tmp_path: Path) -> None:
    _, whole = needed(tmp_path, 2)
    found = loaded(tmp_path, whole)
    assert (found.num_blocks, found.cache) == (2, None)


def test_one_block_that_does_not_fit_has_some_experts_on_disk(tmp_path: Path) -> None:
    bare, whole = needed(tmp_path, 1)
    found = loaded(tmp_path, (bare + whole) // 2)
    assert found.num_blocks == 1
    assert found.cache is not None
    assert found.cache.capacity < NUM_EXPERTS


def test_blocks_that_do_not_fit_without_experts_are_refused(tmp_path: Path) -> None:
    bare, _ = needed(tmp_path, BLOCKS)
    with pytest.raises(OutOfResources, match="4 blocks do not fit"):
        loaded(tmp_path, bare - MIB, blocks=(0, BLOCKS))
    with pytest.raises(OutOfResources, match="left for experts") as refused:
        loaded(tmp_path, bare, blocks=(0, BLOCKS))
    assert "--max-ram" in refused.value.hint


def test_the_owner_may_say_how_much_memory_experts_have(tmp_path: Path) -> None:
    bare, whole = needed(tmp_path, BLOCKS)
    memory = (whole - bare) // 4
    found = loaded(tmp_path, bare + memory + MIB, blocks=(0, BLOCKS), expert_memory_bytes=memory)
    assert found.cache is not None
    assert memory // 2 < found.cache.max_bytes <= memory


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_block_is_loaded_once_to_know_how_many_experts_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    bare, whole = needed(tmp_path, BLOCKS)
    asked: list[tuple[int, int]] = []
    load = LoadedModel.load

    def counted(model: LoadedModel, start: int, end: int) -> Any:
        asked.append((start, end))
        return load(model, start, end)

    monkeypatch.setattr(LoadedModel, "load", counted)
    found = loaded(tmp_path, (bare + whole) // 2, blocks=(0, BLOCKS), dtype=dtype)
    assert found.cache is not None
    assert asked == [(0, 1)]


def test_weights_that_are_expanded_are_measured_without_loading_them(tmp_path: Path) -> None:
    whole = loaded(tmp_path, 1 << 40, blocks=(1, BLOCKS), dtype="float32")
    footprint, bare = footprints(whole)
    assert bare.block_bytes < footprint.block_bytes == whole.load(1, 2).weight_bytes


def test_the_experts_of_its_own_blocks_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare, whole = needed(tmp_path, 2)
    measured: list[int] = []
    load = LoadedModel.load_experts

    def counted(model: LoadedModel, block: int, experts: Any) -> Any:
        measured.append(block)
        return load(model, block, experts)

    monkeypatch.setattr(LoadedModel, "load_experts", counted)
    assert loaded(tmp_path, (bare + whole) // 2, blocks=(2, 4)).cache is not None
    assert set(measured) == {2}


def test_memory_for_experts_that_its_blocks_do_not_have_is_refused(tmp_path: Path) -> None:
    save_experts("deepseek_v3", tmp_path / "model")
    with pytest.raises(ConfigError, match="no routed experts in blocks 0:1 of") as refused:
        loaded(tmp_path, 1 << 40, blocks=(0, 1), expert_memory_bytes=1 << 30)
    assert "--expert-memory" in refused.value.hint


def test_a_node_without_experts_to_leave_on_disk_takes_fewer_blocks(
    tmp_path: Path,
) -> None:
    save_tiny_llama(tmp_path / "model")
    footprint, _ = footprints(loaded(tmp_path, 1 << 40, blocks=(0, 6)))
    limit_bytes = footprint.min_ram_bytes(3) + 1
    assert loaded(tmp_path, limit_bytes, num_blocks=5).num_blocks == 3
    with pytest.raises(OutOfResources, match="5 blocks do not fit") as refused:
        loaded(tmp_path, limit_bytes, blocks=(0, 5))
    assert "--num-blocks 3" in refused.value.hint
    with pytest.raises(OutOfResources, match="5 blocks do not fit"):
        loaded(tmp_path, footprint.min_ram_bytes(0), num_blocks=5)
