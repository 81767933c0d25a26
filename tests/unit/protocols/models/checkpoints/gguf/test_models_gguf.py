"""Weights, config and tokenizer of a gguf file, and the refusal of damaged files."""

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarmnet.paths import default_cache_dir
from swarmnet_protocols.errors import ConfigError, IntegrityError, OutOfResources
from swarmnet_protocols.models import DEFAULT_MODEL, LocalModel, resolve
from swarmnet_protocols.models.checkpoints.gguf import file as gguf_file
from swarmnet_protocols.models.checkpoints.gguf import header as gguf_header
from swarmnet_protocols.models.checkpoints.gguf.header import read_header
from tests.defences import defence, nothing, replacing
from tests.support.models.tiny_models import write_gguf

CPU = torch.device("cpu")
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": CPU}


def load(path: Path, tmp_path: Path) -> LocalModel:
    return resolve(str(path), cache_dir=tmp_path / "cache")


def dequantised_by_transformers(model: LocalModel) -> dict[str, torch.Tensor]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(model.config)
    tensors: dict[str, torch.Tensor] = load_gguf_checkpoint(
        model.path, return_tensors=True, model_to_load=empty
    )["tensors"]
    return tensors


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_gguf_tensors_match_those_that_transformers_dequantises(architecture: str, tmp_path: Path) -> None:
    model = load(write_gguf(tmp_path / "tiny.gguf", architecture), tmp_path)
    expected = dequantised_by_transformers(model)
    assert_gguf_parts_are(model, expected, (1, 3))


def assert_gguf_parts_are(
    model: LocalModel, expected: dict[str, torch.Tensor], blocks: tuple[int, int]
) -> None:
    start, end = blocks
    span = model.load_span(start, end, **FLOAT32)
    seen = set()
    for name, tensor in span.state_dict().items():
        _, block, rest = name.split(".", 2)
        seen.add(f"model.layers.{int(block) + start}.{rest}")
        assert torch.equal(tensor, expected[f"model.layers.{int(block) + start}.{rest}"]), name
        assert tensor.is_contiguous()
    assert seen == {
        name for name in expected if name.startswith(tuple(f"model.layers.{b}." for b in range(start, end)))
    }
    local_layers: Any = model.load_local_layers(lambda layers: layers, **FLOAT32)
    assert torch.equal(local_layers.model.embed_tokens.weight, expected["model.embed_tokens.weight"])
    assert torch.equal(local_layers.model.norm.weight, expected["model.norm.weight"])
    assert local_layers.lm_head.weight is local_layers.model.embed_tokens.weight


def test_a_gguf_span_dequantises_only_its_own_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_gguf(tmp_path / "tiny.gguf", "llama"), tmp_path)
    read: list[int] = []
    real = gguf.dequantize

    def counting(data: Any, kind: gguf.GGMLQuantizationType) -> Any:
        read.append(data.nbytes)
        return real(data, kind)

    monkeypatch.setattr(gguf, "dequantize", counting)
    model.load_span(1, 2, **FLOAT32)
    assert len(read) == len(model.manifest.tensors[1]) == 9
    assert sum(read) == (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) * 34 // 32 + 2 * 64 * 4


def test_gguf_config_and_tokenizer_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    first = load(path, tmp_path)
    words = first.tokenizer()("A!").input_ids
    monkeypatch.setattr(gguf, "GGUFReader", None)

    again = load(path, tmp_path)
    assert again.config.to_dict() == first.config.to_dict()
    assert again.tokenizer()("A!").input_ids == words
    assert again.max_positions == 128
    again.load_span(0, 1, **FLOAT32)


def test_a_full_disk_is_reported_before_anything_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda where: shutil._ntuple_diskusage(10**9, 10**9, 0))  # type: ignore[attr-defined]
    with pytest.raises(OutOfResources, match="too little free space") as caught:
        load(path, tmp_path)
    assert "--cache-dir" in caught.value.hint
    monkeypatch.undo()
    assert load(path, tmp_path).max_positions == 128


@pytest.mark.parametrize("buffered_bytes", [0, 3, 23, 400, -1])
def test_a_truncated_gguf_is_named(buffered_bytes: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    path.write_bytes(path.read_bytes().rstrip(b"\0")[:buffered_bytes])
    with pytest.raises(IntegrityError, match=r"tiny\.gguf"):
        load(path, tmp_path)


def test_a_gguf_architecture_that_is_unknown_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such"):
        load(write_gguf(tmp_path / "tiny.gguf", "no-such"), tmp_path)


def test_the_default_model_matches_what_transformers_dequantises(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers makes the same map of names for each of its 397 modules.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    model = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir())
    assert (model.manifest.blocks, model.manifest.hidden_size, model.max_positions) == (30, 576, 8192)
    assert_gguf_parts_are(model, dequantised_by_transformers(model), (10, 14))
    assert (
        model.tokenizer().decode(model.tokenizer()("The capital of France").input_ids)
        == "The capital of France"
    )


def number(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def entry(name: bytes, offset: int, *shape: int) -> bytes:
    """The entry of a tensor of float32."""
    sizes = b"".join(number(size, 8) for size in shape)
    return number(1, 8) + name + number(len(shape), 4) + sizes + number(0, 4) + number(offset, 8)


def write_raw(path: Path, tensors: Sequence[bytes], fields: bytes = b"", count: int = 0) -> Path:
    head = b"GGUF" + number(3, 4) + number(len(tensors), 8) + number(count, 8) + fields + b"".join(tensors)
    path.write_bytes(head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(96))
    return path


@defence(
    "tensors of a gguf file do not overlap",
    off=replacing(gguf_header, "_check_overlap", nothing),
    second=16,
    is_good=False,
)
@pytest.mark.parametrize(("second", "is_good"), [(32, True), (64, True), (16, False), (0, False)])
def test_tensors_of_a_gguf_file_do_not_overlap(second: int, is_good: bool, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "model.gguf", [entry(b"a", 0, 8), entry(b"b", second, 8)])
    if is_good:
        assert read_header(path)[1].keys() == {"a", "b"}
    else:
        with pytest.raises(IntegrityError, match="overlaps"):
            read_header(path)


@defence(
    "tensors of a gguf file are within it",
    off=replacing(gguf_header, "_check_within", nothing),
    offset=0,
    shape=(25,),
)
@pytest.mark.parametrize(
    ("offset", "shape"),
    [
        (96, (8,)),
        (1 << 62, (8,)),
        (0, (25,)),
        (0, (1 << 40, 1 << 20)),
        (0, (1 << 63, 1 << 63, 1 << 63, 1 << 63)),
    ],
)
def test_tensors_of_a_gguf_file_are_within_it(offset: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    assert read_header(write_raw(tmp_path / "good.gguf", [entry(b"a", 0, 24)]))[1].keys() == {"a"}
    with pytest.raises(IntegrityError, match=r"beyond the end|shape"):
        read_header(write_raw(tmp_path / "model.gguf", [entry(b"a", offset, *shape)]))


@defence(
    "the header of a gguf file has an end", off=replacing(gguf_header, "_longest_header", lambda size: size)
)
def test_a_header_does_not_go_on_in_the_holes_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array of as many strings as there are, in a file of which only the beginning is here."""
    monkeypatch.setattr(gguf_header, "MAX_HEAD_BYTES", 1 << 16)
    strings = number(1, 8) + b"k" + number(9, 4) + number(8, 4) + number(1 << 60, 8)
    path = write_raw(tmp_path / "model.gguf", [], strings, 1)
    with path.open("r+b") as file:
        file.truncate(1 << 24)
    read = 0

    def counting(self: Any, size: int) -> int:
        nonlocal read
        read += 1
        return skip(self, size)

    skip = gguf_header._Cursor.skip
    monkeypatch.setattr(gguf_header._Cursor, "skip", counting)
    with pytest.raises(IntegrityError, match="too long"):
        read_header(path)
    assert read < 20_000


def test_a_layout_is_parsed_again_when_the_header_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    checkpoint = gguf_file.GgufCheckpoint([path], tmp_path / "metadata")
    layout = checkpoint.layout(path.name)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "layout_of", None)
        assert checkpoint.layout(path.name) is layout
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.attn_q.weight", b"blk.9.attn_q.weight"))
    assert "blk.9.attn_q.weight" in checkpoint.layout(path.name).spans
