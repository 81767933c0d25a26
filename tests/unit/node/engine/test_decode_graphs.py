"""Stages whose caches are in an arena: batches in one call and recorded steps give what sequences
give one by one.

There is no GPU here. A recorder that calls the recorded function again stands for CUDA graphs, and
fails if anything but the memory of the recording has changed; attention of a batch is the padded
one, with which any device can compute.
"""

import inspect
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from swarmnet_node.engine.caches.kv_cache import SequenceCache
from swarmnet_node.engine.kernels import ranged_attention, torch_backend
from swarmnet_node.engine.kernels.ranged_attention import is_worth_padding
from swarmnet_node.engine.kernels.torch_backend import TorchBackend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.engine.torch_layers.attention import RangedBatch
from swarmnet_protocols.models import LocalModel, resolve
from tests.defences import defence, replacing
from tests.support.models.peft_oracle import random_tensors
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import FAMILIES, save_tiny
from tests.support.swarm.recording_backend import FakeRecorder, RecordingBackend

CPU = torch.device("cpu")
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
PROMPTS = (3, 29, 11, 5, 17, 2, 9)


def load(family: str, tmp_path: Path) -> LocalModel:
    return resolve(str(save_tiny(family, tmp_path / "model")), cache_dir=tmp_path / "cache")


def two_stages(
    family: str, tmp_path: Path, backend: TorchBackend, *, positions: int = 1024
) -> tuple[Stage, Stage]:
    """Two stages of the same blocks: with caches in an arena, and with contiguous caches."""
    model = load(family, tmp_path)
    mine, theirs = (load_stage(model, 0, 5, backend=backend, **FLOAT32) for _ in range(2))
    mine.preallocate(positions * mine.geometry.bytes_per_position)
    return mine, theirs


class Both:
    """Sequences on both stages, which get the same rows; on the second stage each sequence is
    computed alone."""

    def __init__(self, mine: Stage, theirs: Stage, count: int, adapter: Any = None) -> None:
        self.stages = mine, theirs
        adapters = [stage.load_adapter(adapter, 0) if adapter else None for stage in self.stages]
        self.sequences = [
            [stage.new_sequence(own) for _ in range(count)]
            for stage, own in zip(self.stages, adapters, strict=True)
        ]
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, counts: dict[int, int]) -> None:
        rows = [torch.randn(count, 32, generator=self.generator) for count in counts.values()]
        mine = self.stages[0].forward(
            [(self.sequences[0][i], row) for i, row in zip(counts, rows, strict=True)]
        )
        for index, row, got in zip(counts, rows, mine, strict=True):
            [expected] = self.stages[1].forward([(self.sequences[1][index], row)])
            assert_near(got, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_in_an_arena_gives_what_its_sequences_give_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"ranged": 0}
    attend = RangedBatch.attend

    def counted(self: RangedBatch, *arguments: Any) -> torch.Tensor:
        calls["ranged"] += 1
        return attend(self, *arguments)

    monkeypatch.setattr(RangedBatch, "attend", counted)
    both = Both(*two_stages(family, tmp_path, TorchBackend()), len(PROMPTS))
    both.forward(dict(enumerate(PROMPTS)))
    assert calls["ranged"] == 0  # prompts of several lengths: one by one, without a fused kernel
    order = random.Random(family)
    for _ in range(4):
        some = order.sample(range(len(PROMPTS)), 5)
        both.forward(dict.fromkeys(some, 1))
    both.forward({0: 1, 1: 40, 2: 1})
    both.forward(dict.fromkeys(range(len(PROMPTS)), 1))
    assert calls["ranged"] == 5 * 5


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "gemma2", "gemma3", "mistral", "starcoder2"])
def test_recorded_steps_give_what_steps_give(family: str, tmp_path: Path) -> None:
    backend = RecordingBackend()
    mine, theirs = two_stages(family, tmp_path, backend)
    both = Both(mine, theirs, 7)
    both.forward(dict(enumerate(PROMPTS)))
    assert backend.fake.recorded == 0
    for size in (1, 3, 4, 2, 7, 5, 7, 1, 3):
        both.forward(dict.fromkeys(random.Random(size).sample(range(7), size), 1))
    assert mine.has_recordings
    graphs: Any = mine._graphs
    assert [rows for rows, _ in graphs.sizes] == [1, 2, 4, 8]
    assert backend.fake.recorded == 4  # one recording for each size
    # one replay for the comparison, and one for each later step
    assert backend.fake.replayed == 4 + 5


def test_a_recording_for_longer_sequences_is_made_when_they_grow(tmp_path: Path) -> None:
    backend = RecordingBackend()
    both = Both(*two_stages("llama-tied", tmp_path, backend), 2)
    both.forward({0: 250, 1: 3})
    for _ in range(10):
        both.forward({0: 1, 1: 1})
    graphs: Any = both.stages[0]._graphs
    assert graphs.sizes == [(2, 256), (2, 512)]


def test_recordings_hold_while_sequences_move_and_end(tmp_path: Path) -> None:
    """The arena is small: growth moves the ranges of other sequences, to addresses that no
    recording has seen."""
    backend = RecordingBackend()
    both = Both(*two_stages("llama-tied", tmp_path, backend, positions=5 * 64), 4)
    both.forward({0: 60, 1: 62, 2: 10})
    starts = set()
    for _ in range(8):
        both.forward({0: 1, 1: 1, 2: 1})
        starts.add(tuple(sequence.start for sequence in both.sequences[0]))
    for sequences in both.sequences:
        sequences[0] = both.stages[both.sequences.index(sequences)].new_sequence()
    both.forward({0: 20})
    for _ in range(6):
        both.forward({0: 1, 1: 1, 2: 1})
        starts.add(tuple(sequence.start for sequence in both.sequences[0]))
    assert len(starts) > 1
    assert backend.fake.recorded == 1


def test_steps_with_adapters_are_not_recorded(tmp_path: Path) -> None:
    backend = RecordingBackend()
    mine, theirs = two_stages("llama-tied", tmp_path, backend)
    modules = [("self_attn.q_proj", 32, 32), ("mlp.down_proj", 32, 48)]
    both = Both(mine, theirs, 2, random_tensors(range(5), modules=modules, rank=2, seed=1))
    both.forward({0: 5, 1: 9})
    both.forward({0: 1, 1: 1})
    assert backend.fake.recorded == 0
    assert mine.has_recordings


def test_nan_in_the_first_step_of_a_size_does_not_end_recording(tmp_path: Path) -> None:
    """A client may send NaN in the first step of a size. Zeros, whose outputs are zeros, are
    recorded."""
    backend = RecordingBackend()
    both = Both(*two_stages("llama-tied", tmp_path, backend), 2)
    mine = both.stages[0]
    mine.forward([(mine.new_sequence(), torch.full((1, 32), torch.nan))])
    assert (mine.has_recordings, backend.fake.recorded) == (True, 0)
    mine.forward([(mine.new_sequence(), torch.zeros(1, 32))])
    assert (mine.has_recordings, backend.fake.recorded) == (True, 1)
    both.forward({0: 5, 1: 9})
    both.forward({0: 1})
    assert backend.fake.replayed == 2


def test_a_part_of_a_stage_shares_the_arena_and_is_not_recorded(tmp_path: Path) -> None:
    backend = RecordingBackend()
    mine, theirs = two_stages("llama-tied", tmp_path, backend)
    both = Both(mine.part(1, 4), theirs.part(1, 4), 3)
    both.forward({0: 5, 1: 9, 2: 4})
    both.forward({0: 1, 1: 1, 2: 1})
    assert not both.stages[0].has_recordings
    assert both.sequences[0][0].nbytes == mine.geometry.bytes_for(6)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda fake: setattr(fake, "broken", lambda outputs: outputs + 0.1),
        lambda fake: setattr(fake, "error", RuntimeError("operation not permitted when stream is capturing")),
        lambda fake: setattr(fake, "error", torch.OutOfMemoryError("no memory")),
    ],
    ids=["wrong", "refused", "no memory"],
)
def test_a_recording_that_fails_or_differs_is_not_used(
    spoil: Callable[[FakeRecorder], None], tmp_path: Path
) -> None:
    backend = RecordingBackend()
    both = Both(*two_stages("llama-tied", tmp_path, backend), 2)
    spoil(backend.fake)
    both.forward({0: 5, 1: 9})
    for _ in range(3):
        both.forward({0: 1, 1: 1})
    assert not both.stages[0].has_recordings
    assert backend.fake.recorded <= 1


@defence(
    "numbers of one client do not reach another through padding",
    off=replacing(ranged_attention, "_own_positions", lambda positions, lengths: positions + 0 * lengths),
)
def test_other_sequences_do_not_reach_a_sequence_through_padding(tmp_path: Path) -> None:
    """A client that sends NaN spoils only its own sequence."""
    mine, theirs = two_stages("llama-tied", tmp_path, TorchBackend())
    both = Both(mine, theirs, 3)
    both.forward({0: 40})
    mine.forward([(both.sequences[0][1], torch.full((70, 32), torch.nan))])
    both.forward({2: 45})
    rows = torch.randn(3, 32)
    got = mine.forward([(both.sequences[0][index], rows[index : index + 1]) for index in range(3)])
    for index in (0, 2):
        [expected] = theirs.forward([(both.sequences[1][index], rows[index : index + 1])])
        assert_near(got[index], expected)
    assert got[1].isnan().any()


def reference_varlen(*arguments: Any, **options: Any) -> torch.Tensor:
    """What the documentation of ``torch.nn.attention.varlen.varlen_attn`` says, one sequence after
    the other. Asserts what it asks for."""
    bound = inspect.signature(varlen_attn).bind(*arguments, **options)
    bound.apply_defaults()
    given = bound.arguments
    query, key, value = (given[name] for name in ("query", "key", "value"))
    assert given["cu_seq_q"].dtype == given["cu_seq_k"].dtype == given["seqused_k"].dtype == torch.int32
    first_queries, starts, used = (given[name].tolist() for name in ("cu_seq_q", "cu_seq_k", "seqused_k"))
    assert (first_queries[0], first_queries[-1]) == (0, len(query))
    assert starts == sorted(starts)
    assert starts[-1] == len(key)
    assert (given["enable_gqa"], given["num_splits"]) == (True, 1)
    assert max(end - begin for begin, end in pairwise(first_queries)) <= given["max_q"]
    assert max(used) <= given["max_k"]
    before, after = given["window_size"]
    outputs = []
    rows = zip(pairwise(first_queries), pairwise(starts), used, strict=True)
    for (begin, end), (start, following), length in rows:
        assert start + length <= following
        count = end - begin
        queries, keys = torch.arange(length - count, length)[:, None], torch.arange(length)
        visible = torch.ones(count, length, dtype=torch.bool)
        if after >= 0:
            visible &= keys <= queries + after
        if before >= 0:
            visible &= keys >= queries - before
        states = (query[begin:end], key[start : start + length], value[start : start + length])
        found = torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(0, 1)[None] for each in states),
            attn_mask=visible,
            scale=given["scale"],
            enable_gqa=True,
        )
        outputs.append(found[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3", "mistral", "granite", "mixtral"])
def test_the_fused_kernel_is_asked_for_the_whole_batch(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in checks each call against the kernel's signature and documentation. Prompts and
    steps share a call."""
    calls = {"fused": 0}

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        calls["fused"] += 1
        return reference_varlen(*arguments, **options)

    monkeypatch.setattr(torch_backend, "is_fused", lambda query, values, rule: True)
    monkeypatch.setattr(ranged_attention, "varlen_attention", lambda: counted)
    both = Both(*two_stages(family, tmp_path, RecordingBackend()), len(PROMPTS))
    calls["fused"] = 0
    both.forward(dict(enumerate(PROMPTS)))
    both.forward({3: 1, 0: 20, 5: 1})
    assert calls["fused"] == 2 * 5
    for size in (3, 7, 4):
        both.forward(dict.fromkeys(random.Random(size).sample(range(7), size), 1))
    graphs: Any = both.stages[0]._graphs
    assert both.stages[0].has_recordings
    assert graphs.sizes == [
        (4, 1024),
        (8, 1024),
    ]  # one recording for each number of rows, whatever the lengths


def raise_no_image(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


def scaled(*arguments: Any, **options: Any) -> torch.Tensor:
    return reference_varlen(*arguments, **options) * 1.1


@pytest.mark.parametrize("wrong", [raise_no_image, scaled])
def test_a_fused_kernel_that_fails_or_errs_is_not_used(
    wrong: Callable[..., torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "is_fused", lambda query, values, rule: True)
    monkeypatch.setattr(ranged_attention, "varlen_attention", lambda: wrong)
    mine, _ = two_stages("llama-tied", tmp_path, TorchBackend())
    assert not mine.method.is_fused


def test_padding_is_used_for_sequences_of_similar_length() -> None:
    assert not is_worth_padding([100])
    assert is_worth_padding([100, 30])
    assert is_worth_padding([100] * 32)
    assert not is_worth_padding([30_000, *[100] * 30])


def test_a_full_arena_is_reported_as_memory_that_is_used_up(tmp_path: Path) -> None:
    mine, _ = two_stages("llama-tied", tmp_path, TorchBackend(), positions=128)
    sequences: list[SequenceCache] = [mine.new_sequence(), mine.new_sequence()]
    mine.forward([(sequences[0], torch.randn(70, 32))])
    with pytest.raises(torch.OutOfMemoryError):
        mine.forward([(sequences[1], torch.randn(1, 32))])
    assert (sequences[0].length, sequences[1].length) == (70, 0)
