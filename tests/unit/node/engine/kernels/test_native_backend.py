"""The decode step in C against the same layers by torch."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.caches.kv_cache import GROWTH_POSITIONS, SequenceCache
from swarmnet_node.engine.kernels import native_backend
from swarmnet_node.engine.kernels.backend import DecodeRow, Linear
from swarmnet_node.engine.kernels.native_backend import (
    MAX_POSITIONS,
    NativeBackend,
)
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.engine.torch_layers.torch_stage import TORCH
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.models import resolve
from swarmnet_protocols.quantization.products import Products
from tests.support.compiled import compiled_backend
from tests.support.models.peft_oracle import random_tensors
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import save_tiny

CPU = torch.device("cpu")
PLAIN = {"use_sliding_window": False}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-tied", {}),
    "llama, biases everywhere": ("llama-tied", {"attention_bias": True, "mlp_bias": True}),
    "llama, a key for every head": ("llama-tied", {"num_key_value_heads": 4}),
    "llama, one key for all heads": ("llama-tied", {"num_key_value_heads": 1}),
    "llama, odd sizes": (
        "llama-tied",
        {
            "hidden_size": 27,
            "intermediate_size": 37,
            "head_dim": 6,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "llama, wide heads, six of which share a key": (
        "llama-tied",
        {
            "hidden_size": 42,
            "intermediate_size": 70,
            "head_dim": 80,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
        },
    ),
    "llama3's rotary embedding": (
        "llama-tied",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2, biases": ("qwen2", PLAIN),
    "qwen2, windows in some layers": ("qwen2", {}),
    "qwen3, norms of heads": ("qwen3", {}),
    "mistral, a window": ("mistral", {}),
    "mistral, a window of one position": ("mistral", {"sliding_window": 1}),
    "granite, multipliers": ("granite", {}),
    "gemma2, capped scores, norms of outputs": ("gemma2", {}),
    "gemma3, two rotary embeddings": ("gemma3", {}),
    "starcoder2, LayerNorm, no gate": ("starcoder2", {}),
    "starcoder2, GELU": ("starcoder2", {"hidden_act": "gelu"}),
    "llama, squared ReLU": ("llama-tied", {"hidden_act": "relu2"}),
    "cohere, parallel, norms of each head": ("cohere", {"use_qk_norm": True}),
    "olmo2, norms of all heads together": ("olmo2", {}),
    "phi3, part of a head turns": ("phi3", {}),
    **{name: (name, {}) for name in ("arcee", "ernie4_5", "gemma", "glm", "glm4", "helium")},
    "qwen2-moe, a share of the MLP": ("qwen2-moe", {}),
    "qwen2-moe, weights of experts that sum to one": ("qwen2-moe", {"norm_topk_prob": True}),
}
ONLY_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, odd sizes": (
        "mixtral",
        {
            **{"hidden_size": 28, "intermediate_size": 36, "head_dim": 6, "num_local_experts": 5},
            **{"num_attention_heads": 9, "num_key_value_heads": 3},
        },
    ),
    "mixtral, all experts": ("mixtral", {"num_experts_per_tok": 4}),
    "qwen3-moe, an MLP in some layers": ("qwen3-moe", {}),
    "glm4-moe, sigmoids, an MLP in the first layer": ("glm4-moe", {}),
}
"""Some layers have no MLP that could be adapted."""
SHAPES |= ONLY_EXPERTS


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    return compiled_backend()


def load(tmp_path: Path, shape: str, native: NativeBackend | None) -> Stage:
    family, changes = SHAPES.get(shape, (shape, {}))
    directory = tmp_path / "model"
    if not directory.exists():
        save_tiny(family, directory, **changes)
    model = resolve(str(directory), cache_dir=tmp_path / "cache")
    return load_stage(model, 0, 5, dtype=torch.float32, device=CPU, backend=native or TORCH)


Loaded = Callable[[str, NativeBackend | None], Stage]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Stages by shape and backend. Tests share them, and must leave them as they are."""
    folder = tmp_path_factory.mktemp("stages")
    return functools.cache(lambda shape, native: load(folder / shape, shape, native))


def inputs(stage: Stage, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, stage.hidden_size, generator=torch.Generator().manual_seed(seed))


def one_by_one(stage: Stage, sequence: SequenceCache, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([stage.forward([(sequence, row[None])])[0] for row in rows])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_decode_step_matches_torch(
    shape: str, native: NativeBackend, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt by torch, then single positions until the buffers of the sequence have grown."""
    monkeypatch.setattr(native_backend, "MAX_POSITIONS", 6)
    expected, got = loaded(shape, None), loaded(shape, native)
    assert expected.method.decode_step is None
    assert got.method.decode_step is not None
    prompt, rows = inputs(got, 7), inputs(got, GROWTH_POSITIONS + 1, 1)
    sequences = [stage.new_sequence() for stage in (expected, got)]
    for stage, sequence in zip((expected, got), sequences, strict=True):
        stage.forward([(sequence, prompt)])

    outputs = [
        one_by_one(stage, sequence, rows) for stage, sequence in zip((expected, got), sequences, strict=True)
    ]
    assert_near(outputs[1], outputs[0])
    length = sequences[1].length
    for index in range(got.blocks):
        for mine, theirs in zip(sequences[1].layers[index], sequences[0].layers[index], strict=True):
            assert_near(mine[:, :, :length], theirs[:, :, :length])


@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_of_different_lengths_share_a_step(
    shape: str, native: NativeBackend, loaded: Loaded
) -> None:
    expected, got = loaded(shape, None), loaded(shape, native)
    for count in (2, 21):
        outputs = []
        for stage in (expected, got):
            sequences = [stage.new_sequence() for _ in range(count)]
            for index, sequence in enumerate(sequences):
                stage.forward([(sequence, inputs(stage, 5 * (index + 1), index))])
            rows = inputs(stage, count, 99)
            parts = stage.forward(
                [(sequence, row[None]) for sequence, row in zip(sequences, rows, strict=True)]
            )
            assert [sequence.length for sequence in sequences] == [
                5 * (index + 1) + 1 for index in range(count)
            ]
            outputs.append(torch.cat(parts))
        assert_near(outputs[1], outputs[0])


def test_gates_of_any_size_match_torch(native: NativeBackend, tmp_path: Path) -> None:
    """exp underflows for some gates and overflows float32 for others."""
    outputs = []
    for each in (None, native):
        stage = load(tmp_path, "llama", each)
        for layer in stage.method.llama_layers.layers:
            layer.gate_up.weight.mul_(1000)
        outputs.append(one_by_one(stage, stage.new_sequence(), inputs(stage, 3)))
    assert_near(outputs[1], outputs[0])


@pytest.mark.parametrize(
    "shape", ["llama", "mixtral, odd sizes", "glm4-moe, sigmoids, an MLP in the first layer"]
)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_stay_so(
    wrong: float, shape: str, native: NativeBackend, tmp_path: Path
) -> None:
    stage = load(tmp_path, shape, native)
    rows = inputs(stage, 3)
    rows[1, 7] = wrong
    [outputs] = stage.forward([(stage.new_sequence(), rows)])
    assert [row.isfinite().all().item() for row in outputs] == [True, False, False]


@pytest.mark.parametrize(
    "shape",
    ["llama", "llama, odd sizes", "llama, wide heads, six of which share a key", "mixtral, odd sizes"],
)
def test_a_sequence_gets_the_same_bits_in_any_batch(
    shape: str, native: NativeBackend, tmp_path: Path
) -> None:
    stage = load(tmp_path, shape, native)
    rows = inputs(stage, 20)
    alone = [stage.forward([(stage.new_sequence(), row[None])])[0] for row in rows]
    for count in range(2, len(rows) + 1):
        together = stage.forward([(stage.new_sequence(), row[None]) for row in rows[:count]])
        assert torch.equal(torch.cat(together), torch.cat(alone[:count])), count


@pytest.fixture(scope="module")
def targets() -> list[NativeBackend]:
    """The code for every target of this machine."""
    found = []
    for target in native_code.targets():
        found.append(compiled_backend(target.name))
        assert native_code.loaded_target(native_backend.SOURCE) == target.name
        assert found[-1].products.target == target.name
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_several_positions_of_a_sequence_match_torch(
    shape: str, targets: list[NativeBackend], loaded: Loaded
) -> None:
    """Chunks, single positions and first positions of sequences in one step; the sequences grow
    meanwhile."""

    def outputs(stage: Stage) -> list[torch.Tensor]:
        sequences, found = [stage.new_sequence() for _ in range(4)], []
        for step, counts in enumerate(
            [(7, 1, 30, 2), (1, 9, 1, GROWTH_POSITIONS), (1, 1, 1, 1), (3, 1, 40, 1)]
        ):
            rows = inputs(stage, sum(counts), step)
            found += stage.forward(list(zip(sequences, rows.split(counts), strict=True)))
        return found

    expected = outputs(loaded(shape, None))
    for native in targets:
        got = loaded(shape, native)
        assert got.method.decode_step is not None
        for theirs, mine in zip(expected, outputs(got), strict=True):
            assert_near(mine, theirs)


@pytest.mark.parametrize(
    "shape", ["llama", "llama, odd sizes", "llama, wide heads, six of which share a key"]
)
def test_a_chunk_gets_the_same_bits_as_its_positions_one_by_one(
    shape: str, native: NativeBackend, tmp_path: Path
) -> None:
    stage = load(tmp_path, shape, native)
    rows = inputs(stage, 40)
    [chunk] = stage.forward([(stage.new_sequence(), rows)])
    assert torch.equal(chunk, one_by_one(stage, stage.new_sequence(), rows))


PARTS = {"qkv": "q k v", "gate_up": "gate up", "c_fc": "up", "c": "down", "shared_expert_gate": "gate"}
"""Modules of some families, with the names that other families have for their parts."""


def pairs_of(stage: Stage, paths: Sequence[str], rank: int) -> dict[str, torch.Tensor]:
    """LoRA pairs for the linear modules of all layers, by the names of an uploaded adapter."""
    names = {path: path.rpartition(".")[2].removesuffix("_proj") for path in stage._targets[0].linears}
    modules = [
        (path, *shape)
        for path, shape in stage._targets[0].linears.items()
        if {*PARTS.get(names[path], names[path]).split()} & {*paths}
    ]
    assert modules
    return random_tensors(range(stage.blocks), modules=modules, rank=rank, seed=rank)


ADAPTERS = (
    (("q", "k", "v", "o"), 1),
    (("q", "v"), 4),
    ((), 0),
    (("up",), 7),
    (("k", "o", "gate", "down"), 3),
    (("q", "k", "v", "o", "gate", "up", "down"), 9),
    ((), 0),
)
"""For each sequence of a batch: the modules that have a LoRA pair, and its rank."""


@pytest.mark.parametrize(
    ("shape", "threads"),
    [
        *((shape, 1) for shape in SHAPES if shape not in ONLY_EXPERTS),
        ("llama, odd sizes", 3),
        ("qwen2, biases", 16),
    ],
)
def test_every_sequence_has_its_own_adapter(
    shape: str, threads: int, native: NativeBackend, loaded: Loaded
) -> None:
    """In stages and in parts of them, with sequences without an adapter, and alone."""
    expected, got = loaded(shape, None), loaded(shape, native)
    outputs: list[list[torch.Tensor]] = []
    torch.set_num_threads(threads)
    try:
        for stage in (expected, got):
            adapters = [
                stage.load_adapter(pairs_of(stage, *each), 0) if each[1] else None for each in ADAPTERS
            ]
            results = []
            for part in (stage, stage.part(2, 5)):
                sequences = [part.new_sequence(adapter) for adapter in adapters]
                for number, sequence in enumerate(sequences):
                    part.forward([(sequence, inputs(part, 3 + number, number))])
                for chosen in (sequences, sequences[1:2], sequences[2:4], sequences[:1] + sequences[5:]):
                    rows = inputs(part, len(chosen), 99)
                    results += part.forward(
                        [(sequence, row[None]) for sequence, row in zip(chosen, rows, strict=True)]
                    )
            outputs.append(results)
    finally:
        torch.set_num_threads(1)
    for theirs, mine in zip(*outputs, strict=True):
        assert_near(mine, theirs)


def test_any_number_of_positions_uses_the_decode_step(
    native: NativeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load(tmp_path, "llama", native)
    calls = []
    decode_step = native.decode
    monkeypatch.setattr(native, "decode", lambda *given: (calls.append(len(given)), decode_step(*given)))
    one, other = stage.new_sequence(), stage.new_sequence()

    stage.forward([(one, inputs(stage, 3)), (other, inputs(stage, 1))])
    stage.forward([(one, inputs(stage, 1))])
    stage.forward([(one, inputs(stage, 4)), (other, inputs(stage, MAX_POSITIONS))])
    assert len(calls) == 1 + 1 + 2


@pytest.mark.parametrize("shape", ["llama, odd sizes", "qwen2-moe, a share of the MLP"])
@pytest.mark.parametrize("threads", [2, 3, 64])
def test_any_number_of_threads_gives_the_same(
    threads: int, shape: str, native: NativeBackend, tmp_path: Path
) -> None:
    """Also more threads than heads, so that some have no share of a product."""
    stage = load(tmp_path, shape, native)
    rows = inputs(stage, 3)
    expected = one_by_one(stage, stage.new_sequence(), rows)
    torch.set_num_threads(threads)
    try:
        got = one_by_one(stage, stage.new_sequence(), rows)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(got, expected)


def test_decode_steps_and_packed_batches_share_sequences(
    native: NativeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions of a sequence are computed alone, in chunks and with another sequence, in parts
    that have caches of their own."""
    monkeypatch.setattr(native_backend, "MAX_POSITIONS", 3)
    stage = load(tmp_path, "llama", native)
    rows = inputs(stage, 12)
    [expected] = stage.forward([(stage.new_sequence(), rows)])
    parts = [stage.part(0, 2), stage.part(2, 5)]
    assert all(part.method.decode_step is not None for part in parts)
    sequences, others = ([part.new_sequence() for part in parts] for _ in range(2))

    outputs = []
    for chunk in rows.split([1, 3, 2, 1, 5]):
        states, beside = chunk, rows[:1]
        for part, sequence, other in zip(parts, sequences, others, strict=True):
            if len(chunk) == 3:
                states, beside = part.forward([(sequence, states), (other, beside)])
            else:
                [states] = part.forward([(sequence, states)])
        outputs.append(states)
    assert_near(torch.cat(outputs), expected)


def test_inputs_are_left_as_they_were(native: NativeBackend, tmp_path: Path) -> None:
    stage = load(tmp_path, "llama", native)
    row = inputs(stage, 1)
    kept = row.clone()
    [output] = stage.forward([(stage.new_sequence(), row)])

    assert torch.equal(row, kept)
    assert not torch.equal(output, kept)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt-oss", {}),
        ("glm4-moe", {"n_group": 2, "topk_group": 1}),
        ("olmoe", {"clip_qkv": 100.0}),
        ("cohere", {"hidden_act": "tanh"}),
    ],
    ids=["biases of experts", "groups of experts", "bounds of queries", "another activation"],
)
def test_layers_that_the_decode_step_lacks_are_left_to_torch(
    family: str, changes: dict[str, Any], native: NativeBackend, tmp_path: Path
) -> None:
    directory = save_tiny(family, tmp_path / "model", **changes)
    model = resolve(str(directory), cache_dir=tmp_path / "cache")
    stage = load_stage(model, 0, 5, dtype=torch.float32, device=CPU, backend=native)
    assert stage.method.decode_step is None


def test_experts_that_are_elsewhere_are_left_to_torch(native: NativeBackend, tmp_path: Path) -> None:
    """C would need all of them in memory."""
    model = resolve(str(save_tiny("mixtral", tmp_path / "model")), cache_dir=tmp_path / "cache")
    stages = [
        load_stage(
            *(model, 0, 5),
            dtype=torch.float32,
            device=CPU,
            backend=native,
            packed=True,
            experts={block: set(range(count)) for block in range(5)},
        )
        for count in (3, 4)
    ]
    assert [stage.arithmetic for stage in stages] == ["torch", "exact-1"]


def test_of_equal_experts_the_first_are_chosen(native: NativeBackend, tmp_path: Path) -> None:
    """All logits of experts are zero. Another choice would change the outputs."""
    stage = load(tmp_path, "mixtral, odd sizes", native)
    rows = inputs(stage, 3)
    for layer in stage.method.layers:
        layer.experts.router.weight.zero_()
    expected = one_by_one(stage, stage.new_sequence(), rows)
    for layer in stage.method.layers:
        for linear in layer.experts.gate_up[2:]:
            linear.weight.zero_()
    assert torch.equal(one_by_one(stage, stage.new_sequence(), rows), expected)
    for layer in stage.method.layers:
        layer.experts.gate_up[1].weight.zero_()
    assert not torch.equal(one_by_one(stage, stage.new_sequence(), rows), expected)


def test_a_row_goes_to_different_experts_if_numbers_are_nan(native: NativeBackend, tmp_path: Path) -> None:
    """A damaged file has no number for any expert but the second: the first comes next. A thread
    has no memory for an expert that a row chooses twice."""
    stage = load(tmp_path, "glm4-moe, sigmoids, an MLP in the first layer", native)
    rows = inputs(stage, 3)
    outputs = []
    for wrong in (-1e30, torch.nan):
        for layer in stage.method.layers[1:]:
            layer.experts.correction.fill_(wrong)
            layer.experts.correction[1] = 0
        outputs.append(one_by_one(stage, stage.new_sequence(), rows))
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)


def test_a_row_cannot_have_more_experts_than_there_are(native: NativeBackend, tmp_path: Path) -> None:
    layers = load(tmp_path, "mixtral, all experts", native).method.layers
    assert native.decode_step(layers) is not None
    layers[2] = replace(layers[2], shape=replace(layers[2].shape, chosen=5))
    assert native.decode_step(layers) is None


def test_a_step_without_packed_products_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step calls them by their address, which is 0 then."""
    monkeypatch.setattr(native_backend, "load_products", lambda *_: Products(None))
    assert NativeBackend.load(default_cache_dir()) is None


def test_other_precisions_are_left_to_torch(native: NativeBackend, tmp_path: Path) -> None:
    model = resolve(str(save_tiny("llama-tied", tmp_path / "model")), cache_dir=tmp_path / "cache")
    stage = load_stage(model, 0, 5, dtype=torch.bfloat16, device=CPU, backend=native)
    assert stage.method.llama_layers is not None
    assert stage.method.decode_step is None


def test_a_decode_step_that_computes_something_else_is_not_used(
    native: NativeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial finds it: here the code returns its input."""
    monkeypatch.setattr(native, "decode", lambda *_: None)
    stage = load(tmp_path, "llama", native)
    assert stage.method.llama_layers is not None
    assert stage.method.decode_step is None


def row_of(stage: Stage, sequence: SequenceCache) -> DecodeRow:
    return DecodeRow(sequence.length, 1, sequence.layers, sequence.lora)


def test_positions_beyond_the_capacity_of_a_cache_are_refused(native: NativeBackend, tmp_path: Path) -> None:
    stage = load(tmp_path, "llama", native)
    sequence = stage.new_sequence()
    sequence.reserve(GROWTH_POSITIONS)
    sequence.length = GROWTH_POSITIONS

    with pytest.raises(ValueError, match="no room"):
        stage.method.decode_step(inputs(stage, 1).numpy(), [row_of(stage, sequence)])


def test_sequences_of_another_stage_are_refused(native: NativeBackend, tmp_path: Path) -> None:
    stage = load(tmp_path, "llama", native)
    sequence = stage.part(0, 2).new_sequence()
    sequence.reserve(1)

    with pytest.raises(ValueError, match="another stage"):
        stage.forward([(sequence, inputs(stage, 1))])
    with pytest.raises(ValueError, match="caches of 2 layers for 5"):
        stage.method.decode_step(inputs(stage, 1).numpy(), [row_of(stage, sequence)])


def test_inputs_of_another_width_are_refused(native: NativeBackend, tmp_path: Path) -> None:
    stage = load(tmp_path, "llama", native)
    sequence = stage.new_sequence()
    sequence.reserve(1)

    with pytest.raises(ValueError, match="float32"):
        stage.method.decode_step(np.zeros((1, stage.hidden_size - 1), np.float32), [row_of(stage, sequence)])


def test_the_number_of_key_heads_must_divide_that_of_query_heads(
    native: NativeBackend, tmp_path: Path
) -> None:
    layers = load(tmp_path, "llama", native).method.layers
    assert native.decode_step(layers) is not None
    layer = layers[2]
    layers[2] = replace(
        layer,
        shape=replace(layer.shape, heads=3),
        qkv=Linear(layer.qkv.weight[: (3 + 2 * 2) * 8].contiguous()),
        output=Linear(layer.output.weight[:, : 3 * 8].contiguous()),
    )
    assert native.decode_step(layers) is None
