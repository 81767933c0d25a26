"""A host whose memory holds some of its experts gives the outputs of one that holds all, and reads
experts before they are needed."""

import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.experts.expert_cache import MIN_CAPACITY, ExpertCache
from swarmnet_node.experts.trunk import CacheOptions, open_cache
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.checkpoints import safetensors_file
from swarmnet_protocols.models.checkpoints.safetensors_header import StoredTensor
from swarmnet_protocols.quantization.packed_experts import has_expert
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from tests.support.swarm.expert_lab import NUM_EXPERTS, save_experts

CPU = torch.device("cpu")
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "olmoe")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> LocalModel:
    return resolve(str(save_experts(request.param, tmp_path / "model")), cache_dir=tmp_path / "cache")


def cached(model: LocalModel, capacity: int) -> tuple[Stage, ExpertCache]:
    counts = model.expert_counts()
    blocks = model.manifest.blocks
    none: Any = {block: frozenset() for block in counts}
    stage = load_stage(model, 0, blocks, dtype=torch.float32, device=CPU, experts=none)
    options = CacheOptions(
        {block: frozenset(range(count)) for block, count in counts.items()},
        lambda block: model.expert_reader(block, device=CPU),
        capacity,
        0,
    )
    cache = open_cache(stage, 0, options)
    cache.install()
    return stage, cache


def in_memory(stage: Stage) -> int:
    return sum(
        has_expert(module, expert)
        for module in stage.experts.modules.values()
        for expert in range(NUM_EXPERTS)
    )


@pytest.mark.parametrize("capacity", [MIN_CAPACITY, NUM_EXPERTS])
def test_outputs_are_those_of_a_host_with_all_experts_in_memory(model: LocalModel, capacity: int) -> None:
    whole = load_stage(
        model,
        0,
        model.manifest.blocks,
        dtype=torch.float32,
        device=CPU,
        experts={block: range(count) for block, count in model.expert_counts().items()},
    )
    stage, cache = cached(model, capacity)
    generator = torch.Generator().manual_seed(0)
    sequences = [each.new_sequence() for each in (stage, whole)]
    most = 0
    for length in (7, 1, 1, 1, 5, 1):
        inputs = torch.randn(length, stage.hidden_size, generator=generator)
        [mine], [theirs] = (
            each.forward([(sequence, inputs)])
            for each, sequence in zip((stage, whole), sequences, strict=True)
        )
        assert torch.equal(mine, theirs)
        most = max(most, in_memory(stage) + len(cache._reading))
    assert 0 < most <= capacity
    counters = cache.counters
    assert counters.needed > counters.in_memory
    assert counters.predictable > 0
    assert counters.predicted > 0
    cache.close()


def test_experts_in_memory_and_in_reading_never_exceed_the_capacity(model: LocalModel) -> None:
    stage, cache = cached(model, MIN_CAPACITY)
    most = 0
    submit = cache._threads.submit

    def watching(read: Any, experts: Any) -> Any:
        nonlocal most
        most = max(most, in_memory(stage) + len(cache._reading) + 1)
        return submit(read, experts)

    with unittest.mock.patch.object(cache._threads, "submit", watching):
        stage.forward([(stage.new_sequence(), torch.randn(64, stage.hidden_size))])
    assert most == MIN_CAPACITY
    assert cache.counters.needed > 2 * MIN_CAPACITY
    cache.close()


def test_experts_used_long_ago_leave_memory_first(model: LocalModel) -> None:
    stage, cache = cached(model, NUM_EXPERTS)
    sequence = stage.new_sequence()
    for _ in range(12):
        stage.forward([(sequence, torch.randn(1, stage.hidden_size))])
    module = stage.experts.modules[max(stage.experts.modules)]
    used = [key for key in cache._used if key[0] == max(stage.experts.modules)]
    assert used
    assert all(has_expert(module, expert) for _, expert in used)
    assert in_memory(stage) == len(cache._used)
    cache.close()


def test_headers_are_read_again_only_when_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = resolve(str(save_experts("mixtral", tmp_path / "model")), cache_dir=tmp_path / "cache")
    opened: list[Path] = []
    really_read = safetensors_file.read_tensors

    def counting(path: Path) -> tuple[int, dict[str, StoredTensor]]:
        opened.append(path)
        return really_read(path)

    monkeypatch.setattr(safetensors_file, "read_tensors", counting)
    read = model.expert_reader(0, device=CPU)

    def numbers() -> list[torch.Tensor]:
        matrices = [each[1] for each in read([1]).values()]
        return [each.dequantize() if isinstance(each, PackedTensor) else each for each in matrices]

    first = numbers()
    for expert in range(NUM_EXPERTS):
        read([expert])
    assert not opened, "the model was resolved with the same headers"
    [path] = (tmp_path / "model").glob("*.safetensors")
    path.write_bytes(path.read_bytes())
    again = numbers()
    assert opened == [path]
    assert all(map(torch.equal, again, first))


def test_experts_have_memory_of_their_own(tmp_path: Path) -> None:
    model = resolve(str(save_experts("mixtral", tmp_path / "model")), cache_dir=tmp_path / "cache")
    matrices = [each[1] for each in model.expert_reader(0, device=CPU)([1]).values()]
    before = [each.dequantize() for each in matrices if isinstance(each, PackedTensor)]
    [path] = (tmp_path / "model").glob("*.safetensors")
    with path.open("r+b") as file:  # the same file, which a mapping would show
        file.write(bytes(path.stat().st_size))
    after = [each.dequantize() for each in matrices if isinstance(each, PackedTensor)]
    assert len(after) == len(matrices)
    assert all(map(torch.equal, after, before))
