"""The decode step gives the same bits for every target, batch, chunk and number of threads."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarmnet_node.engine.caches.kv_cache import SequenceCache
from swarmnet_node.engine.exact_stage import ExactStage
from swarmnet_node.engine.kernels import native_backend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.arrays import as_tensor
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.models import resolve
from swarmnet_protocols.quantization.formats import PRECISIONS
from tests.support.compiled import compiled_backend
from tests.support.models.peft_oracle import random_tensors
from tests.support.models.tiny_models import save_tiny

TARGETS = [each.name for each in native_code.targets()]
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2}
ODD_SIZES = {
    "hidden_size": 42,
    "intermediate_size": 70,
    "head_dim": 22,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
EXPERTS = {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 3}
ALL_EXPERTS = {**EXPERTS, "num_local_experts": 3}
POSITIONS = 40


def load(folder: Path, sizes: dict[str, int], weights: str, target: str) -> Stage:
    native = compiled_backend(target)
    directory = folder / "model"
    has_experts = "num_local_experts" in sizes
    if not directory.exists():
        save_tiny("mixtral" if has_experts else "llama-tied", directory, **sizes)
    model = resolve(str(directory), cache_dir=folder / "cache")
    stage = load_stage(
        model,
        *(0, 2),
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=native,
        packed=weights in PRECISIONS,
        quantized=PRECISIONS.get(weights),
    )
    assert stage.is_exact
    assert isinstance(stage, ExactStage) == (weights in PRECISIONS and not has_experts)
    return stage


def in_chunks(
    stage: Stage, sequence: SequenceCache, rows: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    chunks = rows.split(list(sizes))
    return torch.cat([as_tensor(stage.forward([(sequence, chunk)])[0]) for chunk in chunks])


def in_a_batch(stage: Stage, sequence: SequenceCache, rows: torch.Tensor) -> torch.Tensor:
    """Compute the rows in a batch with shorter and longer sequences."""
    others = [stage.new_sequence() for _ in range(3)]
    sizes = [5, 1, 1, 20, 1, len(rows) - 28]
    outputs = []
    for number, chunk in enumerate(rows.split(sizes)):
        besides = [(other, rows[: 1 + index * number]) for index, other in enumerate(others)]
        outputs.append(as_tensor(stage.forward([*besides[:2], (sequence, chunk), *besides[2:]])[2]))
    return torch.cat(outputs)


@contextmanager
def threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        *((SIZES, "float32"), (SIZES, "int8"), (SIZES, "int4"), (ODD_SIZES, "float32")),
        *((EXPERTS, "float32"), (EXPERTS, "int8"), (EXPERTS, "int4")),
    ],
    ids=[
        *("float32", "int8", "int4", "odd sizes"),
        *("experts in float32", "experts in int8", "experts in int4"),
    ],
)
def test_a_position_has_the_same_bits_however_it_is_computed(
    sizes: dict[str, int], weights: str, tmp_path: Path
) -> None:
    expected = None
    for target in TARGETS:
        stage = load(tmp_path, sizes, weights, target)
        rows = torch.randn(POSITIONS, stage.hidden_size, generator=torch.Generator().manual_seed(0))
        found = [
            in_chunks(stage, stage.new_sequence(), rows, each)
            for each in ([POSITIONS], [1] * POSITIONS, [7, 1, 17, 2, 3, 10])
        ]
        found.append(in_a_batch(stage, stage.new_sequence(), rows))
        with threads(2):
            found.append(in_chunks(stage, stage.new_sequence(), rows, [POSITIONS - 3, 3]))
        expected = found[0] if expected is None else expected
        for number, each in enumerate(found):
            assert torch.equal(each, expected), (target, number)


def test_packed_weights_compute_prompts_of_any_length_in_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load(tmp_path, SIZES, "int8", TARGETS[0])
    rows = torch.randn(POSITIONS, stage.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = in_chunks(stage, stage.new_sequence(), rows, [POSITIONS])
    monkeypatch.setattr(native_backend, "MAX_POSITIONS", 7)
    assert torch.equal(in_chunks(stage, stage.new_sequence(), rows, [30, 10]), expected)
    assert torch.equal(in_a_batch(stage, stage.new_sequence(), rows), expected)


@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_an_expert_computes_any_number_of_rows(weights: str, tmp_path: Path) -> None:
    """Three experts of five compute 120 of 200 rows each, in two tiles of at most 64."""
    stage = load(tmp_path, EXPERTS, weights, TARGETS[0])
    rows = torch.randn(200, stage.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([as_tensor(stage.forward([(stage.new_sequence(), row[None])])[0]) for row in rows])
    for count in (1, 2, 4):
        with threads(count):
            found = stage.forward([(stage.new_sequence(), row[None]) for row in rows])
        assert torch.equal(torch.cat(list(map(as_tensor, found))), expected), count


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [(SIZES, "int8"), (ODD_SIZES, "float32"), (ALL_EXPERTS, "float32"), (ALL_EXPERTS, "int8")],
    ids=["int8", "odd sizes", "experts in float32", "experts in int8"],
)
def test_a_step_stays_within_its_scratch_memory(
    sizes: dict[str, int], weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python computes the sizes of the parts that C divides. Here a guard follows each part."""
    monkeypatch.setattr(native_backend, "_whole_cache_lines", lambda floats: floats)
    stage: Any = load(tmp_path, sizes, weights, TARGETS[0])
    backend = (stage._step if isinstance(stage, ExactStage) else stage.method.decode_step)._backend
    guard, untouched, decode, parts = 64, np.float32(7e30), backend.decode, []

    def guarded(step: Any, layers: Any, positions: Any, _: int, hidden: int) -> None:
        wider = type(step._obj).from_buffer_copy(step._obj)
        wider.shared_floats += guard
        wider.thread_floats += guard
        memory = np.full(wider.shared_floats + wider.threads * wider.thread_floats, untouched)
        decode(ctypes.byref(wider), layers, positions, memory.ctypes.data, hidden)
        parts.extend([memory[: wider.shared_floats], *np.split(memory[wider.shared_floats :], wider.threads)])

    monkeypatch.setattr(backend, "decode", guarded)
    rows = torch.randn(70, stage.hidden_size, generator=torch.Generator().manual_seed(0))
    for count in (1, 3):
        with threads(count):
            stage.forward([(stage.new_sequence(), rows)])
    assert len(parts) == 2 + 4
    assert all((part[-guard:] == untouched).all() for part in parts)


def test_adapters_have_the_same_bits_for_every_target(tmp_path: Path) -> None:
    expected = None
    for target in TARGETS:
        stage = load(tmp_path, SIZES, "float32", target)
        modules = [(path, *shape) for path, shape in stage._targets[0].linears.items()]
        adapter = stage.load_adapter(random_tensors(range(2), modules=modules, rank=5, seed=1), 0)
        rows = torch.randn(POSITIONS, stage.hidden_size, generator=torch.Generator().manual_seed(0))
        for sizes in ([POSITIONS], [1] * 7 + [POSITIONS - 7]):
            found = in_chunks(stage, stage.new_sequence(adapter), rows, sizes)
            expected = found if expected is None else expected
            assert torch.equal(found, expected), target
