"""A file that is no model for text is refused with what it is and what to do, before a node
starts."""

from pathlib import Path
from struct import pack
from typing import Any

import gguf
import numpy as np
import pytest

from swarmnet_protocols.errors import ConfigError, IntegrityError, SwarmnetError
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.checkpoints.gguf import file as gguf_file
from swarmnet_protocols.models.checkpoints.safetensors_header import read_header
from tests.defences import defence, nothing, replacing
from tests.support.gguf.writing import add_key
from tests.support.models.tiny_models import save_tiny, write_gguf


def refusal(path: Path, tmp_path: Path) -> SwarmnetError:
    with pytest.raises(SwarmnetError) as caught:
        resolve(str(path), cache_dir=tmp_path / "cache")
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).count(str(path)) == 1
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(("content", "kind", "what", "hint"), [
    (b"", IntegrityError, "is empty", "again"),
    (b"\n<!doctype html><html>Not found</html>", IntegrityError, "web page", "the file itself"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", IntegrityError, "pointer of Git LFS", "git lfs pull"),
    (b'{"error": "Repository not found"}', IntegrityError, "a text", "again"),
    (bytes(4096), IntegrityError, "zeros", "again"),
    (b"any other bytes than those", IntegrityError, "not a gguf file", "again"),
    (b"GG", IntegrityError, "not a gguf file", "again"),
    (b"GGUF" + pack(">I", 3) + bytes(64), ConfigError, "big-endian", "little-endian"),
    (b"GGUF" + pack("<I", 1) + bytes(64), ConfigError, "another version than 2 and 3", "newer"),
    (b"tjgg" + bytes(64), ConfigError, "before gguf", "download a gguf file"),
    (b"PK\3\4" + bytes(64), ConfigError, "PyTorch", "Hugging Face layout"),
    (pack("<Q", 40) + b'{"a": {}}', ConfigError, "safetensors", "its folder"),
])  # fmt: skip
def test_a_file_that_is_not_gguf_is_known_by_its_first_bytes(
    content: bytes, kind: type, what: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    error = refusal(path, tmp_path)
    assert type(error) is kind
    assert what in str(error)
    assert hint in error.hint


@pytest.mark.parametrize("share", [0.001, 0.01, 0.5, 0.999])
def test_a_file_that_ends_too_early_is_to_be_downloaded_again(share: float, tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "whole.gguf", "llama").read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: int(len(content) * share)])
    error = refusal(path, tmp_path)
    assert "is incomplete" in str(error)
    assert "download it again" in error.hint


def write(path: Path, architecture: str, tensors: dict[str, tuple[int, ...]], **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"tokenizer__ggml__model": "gpt2", **fields}.items():
        add_key(writer, key.replace("__", "."), value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ONE = {"token_embd.weight": (64, 64)}
LORA = {"blk.0.attn_q.weight.lora_a": (8, 64), "blk.0.attn_q.weight.lora_b": (64, 8)}


@defence(
    "a file that is no model for text is refused by what it is",
    off=replacing(gguf_file, "check_kind", nothing),
    what="embedding model",
)
@pytest.mark.parametrize(("architecture", "tensors", "fields", "what"), [
    ("llama", {}, {}, "vocabulary and no weights"),
    ("llama", LORA, {"general__type": "adapter"}, "LoRA adapter"),
    ("llama", LORA, {}, "LoRA adapter"),
    ("llama", ONE, {"adapter__type": "lora"}, "LoRA adapter"),
    ("clip", {"v.blk.0.attn_q.weight": (64, 64)}, {"general__type": "mmproj"}, "mmproj"),
    ("clip", {"v.blk.0.attn_q.weight": (64, 64)}, {}, "mmproj"),
    ("llama", {"blk.0.attn_q.weight.in_sum2": (1, 64)}, {"general__type": "imatrix"}, "imatrix"),
    ("", {"blk.0.attn_q.weight.in_sum2": (1, 64)}, {}, "imatrix"),
    ("controlvector", {"direction.1": (64,)}, {}, "control vector"),
    ("llama", ONE, {"general__type": "of-next-year"}, "'of-next-year'"),
    ("bert", ONE, {}, "embedding model"),
    ("nomic-bert-moe", ONE, {}, "embedding model"),
    ("gemma-embedding", ONE, {}, "embedding model"),
    ("qwen3", ONE, {"qwen3__pooling_type": 3}, "embedding model"),
    ("llada", ONE, {}, "diffusion"),
    ("llama", ONE, {"tokenizer__ggml__model": "none"}, "no tokenizer"),
])  # fmt: skip
def test_a_gguf_file_of_something_else_says_what_it_is(
    architecture: str, tensors: Any, fields: Any, what: str, tmp_path: Path
) -> None:
    error = refusal(write(tmp_path / "model.gguf", architecture, tensors, **fields), tmp_path)
    assert isinstance(error, ConfigError)
    assert what in str(error)


def test_a_file_without_a_tokenizer_is_refused_before_a_node_starts(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.other"))
    assert "has no tokenizer" in str(refusal(path, tmp_path))


@pytest.mark.parametrize(("kind", "what"), [
    (4, "Q4_2, which llama.cpp has removed"), (31, "Q4_0_4_4, which llama.cpp has removed"), (99, "a type that is not known here, number 99"),
    (gguf.GGMLQuantizationType.Q8_K, "Q8_K, which is not read"), (gguf.GGMLQuantizationType.I32, "I32, which is not read"),
])  # fmt: skip
def test_a_type_that_is_not_read_is_named(kind: int, what: str, tmp_path: Path) -> None:
    name = "blk.0.attn_q.weight"
    path = write_gguf(tmp_path / "tiny.gguf", "llama", extra={"last": (256,)})
    content = bytearray(path.read_bytes())
    at = content.index(b"last") + 4 + 4 + 8  # after the name: dimensions, their sizes, the type
    content[at : at + 4] = pack("<I", kind)
    path.write_bytes(content)
    error = refusal(path, tmp_path)
    assert isinstance(error, ConfigError), name
    assert f"has the tensor 'last' stored as {what}" in str(error)
    assert "Q4_K_M" in error.hint


@pytest.mark.parametrize(("content", "what"), [
    (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"), (b"<html>" + bytes(64), "web page"), (b"", "empty"),
])  # fmt: skip
def test_safetensors_of_a_failed_download_are_known(content: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=what) as caught:
        read_header(path)
    assert caught.value.hint


def test_safetensors_that_end_too_early_are_to_be_downloaded_again(tmp_path: Path) -> None:
    path = next(save_tiny("llama-tied", tmp_path).glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError) as caught:
        read_header(path)
    assert "download it again" in caught.value.hint


def test_the_folder_of_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    error = refusal(tmp_path, tmp_path)
    assert "is an adapter" in str(error)
    assert "--adapter" in error.hint
