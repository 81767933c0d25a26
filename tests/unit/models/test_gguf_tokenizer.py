"""Tokenizers of gguf files give llama.cpp's ids, or are refused; ``tokenizer.model`` is read."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.checkpoints.gguf_tokenizer import read_tokenizer
from swarmnet_protocols.models.checkpoints.gguf_words import SPLITTINGS
from tests.support.tiny import save_tiny_llama

WORDS: dict[str, Any] = json.loads(Path(__file__).parents[2].joinpath("data/gguf_words.json").read_text())
IDS = {name: ids for names, ids in WORDS["ids"].items() for name in names.split()}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"


def write_vocabulary(path: Path, kind: str, tokens: list[str], types: list[int], **fields: Any) -> Path:
    """A gguf file with a tokenizer and no tensors. ``fields``: what follows ``tokenizer.ggml.``."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(path: Path, **fields: Any) -> Any:
    given = {"merges": WORDS["merges"], **fields}
    return read_tokenizer(write_vocabulary(path, "gpt2", WORDS["tokens"], WORDS["types"], **given), "a model")


def test_every_way_of_splitting_has_the_ids_of_llama_cpp() -> None:
    assert IDS.keys() == SPLITTINGS.keys()


@pytest.mark.parametrize("names", WORDS["ids"], ids=lambda names: names.split()[0])
def test_words_are_split_as_llama_cpp_splits_them(names: str, tmp_path: Path) -> None:
    for number, name in enumerate(names.split()):
        tokenizer = byte_level(tmp_path / f"{number}.gguf", pre=name)
        assert tokenizer(WORDS["text"], add_special_tokens=False).input_ids == WORDS["ids"][names], name
        assert tokenizer.decode(WORDS["ids"][names]) == WORDS["text"]


def test_without_a_name_words_are_split_as_llama_cpp_does_by_default(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "model.gguf")
    assert tokenizer(WORDS["text"], add_special_tokens=False).input_ids == IDS["default"]


@pytest.mark.parametrize("name", ["superbpe", "afmoe", "of-next-year"])
def test_a_way_of_splitting_that_is_not_known_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre") as caught:
        byte_level(tmp_path / "model.gguf", pre=name)
    assert "Hugging Face layout" in caught.value.hint


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'rwkv'"):
        read_tokenizer(write_vocabulary(tmp_path / "model.gguf", "rwkv", ["a"], [1]), "")


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        read_tokenizer(tmp_path / "model.gguf", "")


@pytest.mark.parametrize(("pre", "field", "expected"), [
    ("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True),
])  # fmt: skip
def test_prompts_begin_with_bos_as_the_file_says(
    pre: str, field: bool | None, expected: bool, tmp_path: Path
) -> None:
    fields = {} if field is None else {"add_bos_token": field}
    tokenizer = byte_level(tmp_path / "model.gguf", pre=pre, bos_token_id=2, **fields)
    assert (tokenizer("a").input_ids[0] == 2) is expected


def test_special_tokens_keep_their_ids_however_they_are_spelled(tmp_path: Path) -> None:
    """Full-width bars are no characters in which bytes are written."""
    tokens = [*WORDS["tokens"], "<｜User｜>", "<think>", " <two words>"]
    types = [*WORDS["types"], CONTROL, USER_DEFINED, USER_DEFINED]
    path = write_vocabulary(tmp_path / "m.gguf", "gpt2", tokens, types, pre="gpt-2", merges=WORDS["merges"])
    tokenizer = read_tokenizer(path, "")
    first = len(WORDS["tokens"])
    ids = tokenizer("<｜User｜><think> <two words>", add_special_tokens=False).input_ids
    assert ids == [first, first + 1, first + 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think> <two words>"


def sentencepiece(path: Path, name: str = "", **fields: Any) -> Any:
    words = [
        SPACE,
        SPACE * 2,
        *"Helo",
        "He",
        "Hel",
        f"{SPACE}H",
        f"{SPACE}He",
        "lo",
        f"{SPACE}Hello",
        "Hello",
        "Hell",
    ]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *dict.fromkeys(words),
        "<|end|>",
    ]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(dict.fromkeys(words)), CONTROL]
    scores = [float(len(token)) for token in tokens]
    given = {"scores": scores, "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **fields}
    return read_tokenizer(write_vocabulary(path, "llama", tokens, types, **given), name)


@pytest.mark.parametrize(("fields", "text", "pieces"), [
    ({}, "Hello", [f"{SPACE}Hello"]),
    ({}, " Hello", [SPACE * 2, "Hello"]),
    ({"add_space_prefix": False}, "Hello", ["Hello"]),
    ({"add_space_prefix": False}, " Hello", [f"{SPACE}Hello"]),
    ({}, "<|end|>Hello", ["<|end|>", f"{SPACE}Hello"]),
    ({}, "<|end|>\nHello", ["<|end|>", SPACE, "<0x0A>", "Hello"]),
])  # fmt: skip
def test_sentencepiece_puts_a_space_before_a_text_unless_the_file_says_otherwise(
    fields: dict[str, Any], text: str, pieces: list[str], tmp_path: Path
) -> None:
    tokenizer = sentencepiece(tmp_path / "model.gguf", **fields)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text or "<|end|>" in text
    assert tokenizer(text).input_ids == [1, *ids]


def test_special_tokens_of_phi_3_take_the_spaces_after_them(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path / "model.gguf", "Phi 3 mini (phi-3)")
    ids = tokenizer("<|end|>\n Hello", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|end|>", f"{SPACE}Hello"]


def test_a_folder_with_a_sentencepiece_model_only_has_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from transformers.convert_slow_tokenizer import convert_slow_tokenizer
    from transformers.utils import sentencepiece_model_pb2_new as pb

    # In a process that has not loaded that module, its name in the package is that of a function.
    monkeypatch.setattr(transformers, "convert_slow_tokenizer", convert_slow_tokenizer)
    save_tiny_llama(tmp_path / "model")
    model = pb.ModelProto()
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    words = [SPACE, *"Helo", "He", "Hel", "lo", f"{SPACE}H", f"{SPACE}Hel", f"{SPACE}Hello", "Hello"]
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]
    for rank, (piece, kind) in enumerate([*pieces, *((word, 1) for word in words)]):
        model.pieces.add(piece=piece, type=kind, score=-float(rank))
    (tmp_path / "model" / "tokenizer.model").write_bytes(model.SerializeToString())
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer: Any = resolve(str(tmp_path / "model"), cache_dir=tmp_path / "cache").tokenizer()
    ids = tokenizer("Hello Hel\n").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", f"{SPACE}Hello", f"{SPACE}Hel", "<0x0A>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello Hel\n"
