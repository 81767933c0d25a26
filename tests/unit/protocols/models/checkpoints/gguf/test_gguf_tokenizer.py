"""Tokenizers of gguf files give llama.cpp's ids, or are refused; ``tokenizer.model`` is read."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import pytest
from transformers.tokenization_utils_base import generate_merges

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.checkpoints.gguf import tokenizer as gguf_tokenizer
from swarmnet_protocols.models.checkpoints.gguf.tokenizer import read_tokenizer
from swarmnet_protocols.models.checkpoints.gguf.words import SPLITTINGS
from tests.defences import defence, nothing, replacing
from tests.support.gguf.writing import add_key
from tests.support.house.source_code import ROOT
from tests.support.models.tiny import save_tiny_llama
from tests.support.models.tiny_models import write_gguf

WORDS: dict[str, Any] = json.loads(ROOT.joinpath("tests/data/gguf_words.json").read_text())
SPACES: dict[str, Any] = json.loads(ROOT.joinpath("tests/data/gguf_spaces.json").read_text())
IDS = {name: ids for names, ids in WORDS["ids"].items() for name in names.split()}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BOS = WORDS["tokens"].index("<|endoftext|>")
SPACE = "\u2581"


def write_vocabulary(
    path: Path,
    kind: str,
    tokens: list[str],
    types: list[int],
    *,
    name: str = "a model",
    architecture: str = "llama",
    **fields: Any,
) -> Path:
    """A gguf file with a tokenizer and no tensors. ``fields``: what follows ``tokenizer.ggml.``."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for field, value in fields.items():
        add_key(writer, f"tokenizer.ggml.{field}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_of(path: Path, rows: int | None = None) -> Any:
    return read_tokenizer(path, rows)


def byte_level(
    path: Path, more: Mapping[str, int] = MappingProxyType({}), rows: int | None = None, **fields: Any
) -> Any:
    """``more``: further tokens with their types. A field of None is left out."""
    given = {"merges": WORDS["merges"], "bos_token_id": BOS, **fields}
    given = {name: value for name, value in given.items() if value is not None}
    tokens, types = [*WORDS["tokens"], *more], [*WORDS["types"], *more.values()]
    return tokenizer_of(write_vocabulary(path, "gpt2", tokens, types, **given), rows)


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
        tokenizer_of(write_vocabulary(tmp_path / "model.gguf", "rwkv", ["a"], [1]))


@pytest.mark.parametrize("tokenizer", [("rwkv", "default"), ("gpt2", "of-next-year")])
def test_a_tokenizer_that_is_not_read_is_refused_before_a_node_starts(
    tokenizer: tuple[str, str], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=f"model.gguf: .*{'|'.join(tokenizer)}") as caught:
        resolve(str(path), cache_dir=tmp_path / "cache")
    assert "Hugging Face layout" in caught.value.hint


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        tokenizer_of(tmp_path / "model.gguf")


@pytest.mark.parametrize(("pre", "field", "expected"), [
    ("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True),
])  # fmt: skip
def test_prompts_begin_with_bos_as_the_file_says(
    pre: str, field: bool | None, expected: bool, tmp_path: Path
) -> None:
    fields = {} if field is None else {"add_bos_token": field}
    tokenizer = byte_level(tmp_path / "model.gguf", pre=pre, **fields)
    assert (tokenizer("a").input_ids[0] == BOS) is expected


def test_special_tokens_keep_their_ids_however_they_are_spelled(tmp_path: Path) -> None:
    """Full-width bars are no characters in which bytes are written."""
    more = {"<｜User｜>": CONTROL, "<think>": USER_DEFINED, " <two words>": USER_DEFINED}
    tokenizer = byte_level(tmp_path / "model.gguf", more, pre="gpt-2")
    first = len(WORDS["tokens"])
    ids = tokenizer("<｜User｜><think> <two words>", add_special_tokens=False).input_ids
    assert ids == [first, first + 1, first + 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think> <two words>"


def test_a_control_token_is_known_by_its_name(tmp_path: Path) -> None:
    """But ``</s>`` may be HTML."""
    more = {"<end_of_turn>": NORMAL, "<|eot_id|>": USER_DEFINED, "<fim_prefix>": NORMAL, "</s>": NORMAL}
    tokenizer = byte_level(tmp_path / "model.gguf", more, pre="gpt-2")
    first = len(WORDS["tokens"])
    ids = tokenizer("<end_of_turn><|eot_id|><fim_prefix></s>", add_special_tokens=False).input_ids
    assert ids[:3] == [first, first + 1, first + 2]
    assert first + 3 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "</s>"


def test_an_ordinary_token_stays_text_whatever_keys_name_it(tmp_path: Path) -> None:
    ids = {f"{key}_token_id": WORDS["tokens"].index("#") for key in ("bos", "unknown", "padding")}
    tokenizer = byte_level(tmp_path / "model.gguf", pre="gpt-2", **ids)
    assert tokenizer(WORDS["text"]).input_ids == IDS["gpt-2"]
    assert tokenizer.decode(IDS["gpt-2"], skip_special_tokens=True) == WORDS["text"]


def test_a_letter_that_is_a_token_of_its_own_stands_for_itself(tmp_path: Path) -> None:
    """DeepSeek's vocabularies have these. In others they are bytes that occur in no text."""
    letters = {letter: USER_DEFINED for letter in "ÀÿÖ" if letter not in WORDS["tokens"]}
    tokens = [token for token in WORDS["tokens"] if token not in "üö"]
    types = [CONTROL if "<|" in token else NORMAL for token in tokens]
    path = tmp_path / "model.gguf"
    more = {"ü": USER_DEFINED, "ö": USER_DEFINED, **letters}
    fields = {"pre": "deepseek-llm", "merges": WORDS["merges"]}
    tokenizer = tokenizer_of(
        write_vocabulary(path, "gpt2", [*tokens, *more], [*types, *more.values()], **fields)
    )
    ids = tokenizer("für große Öfen über", add_special_tokens=False).input_ids
    assert {len(tokens), len(tokens) + 1} & {*ids}
    assert tokenizer.decode(ids) == "für große Öfen über"


@pytest.mark.parametrize(("fields", "rows", "message"), [
    ({"pre": "llama-bpe", "bos_token_id": None}, None, "does not name"),
    ({"add_eos_token": True}, None, "does not name"),
    ({"bos_token_id": 4096}, None, "no tokenizer"),
    ({"more": {"!": NORMAL}}, None, "twice"),
    ({"merges": ["! !", "zz yy"]}, None, "lacks"),
    ({}, 1000, "1024 tokens, of which 1000 have embeddings"),
])  # fmt: skip
def test_a_vocabulary_that_does_not_fit_together_is_refused(
    fields: dict[str, Any], rows: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        byte_level(tmp_path / "model.gguf", rows=rows, **fields)


def test_tokens_without_a_text_have_names(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "model.gguf", {"": CONTROL})
    assert tokenizer.convert_ids_to_tokens(len(WORDS["tokens"])) == f"[EMPTY_{len(WORDS['tokens'])}]"


def sentencepiece(path: Path, **fields: Any) -> Any:
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
    given = {name: value for name, value in given.items() if value is not None}
    return tokenizer_of(write_vocabulary(path, "llama", tokens, types, **given))


@pytest.mark.parametrize(("fields", "text", "pieces"), [
    ({}, "Hello", [f"{SPACE}Hello"]),
    ({}, " Hello", [SPACE * 2, "Hello"]),
    ({"add_space_prefix": False}, "Hello", ["Hello"]),
    ({"add_space_prefix": False}, " Hello", [f"{SPACE}Hello"]),
    ({}, "<|end|>Hello", ["<|end|>", f"{SPACE}Hello"]),
    ({}, "<|end|>\nHello", ["<|end|>", SPACE, "<0x0A>", "Hello"]),
    ({"bos_token_id": None, "eos_token_id": None}, "Hello", [f"{SPACE}Hello"]),
])  # fmt: skip
def test_sentencepiece_puts_a_space_before_a_text_unless_told_not_to(
    fields: dict[str, Any], text: str, pieces: list[str], tmp_path: Path
) -> None:
    tokenizer = sentencepiece(tmp_path / "model.gguf", **fields)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text or "<|end|>" in text
    assert tokenizer(text).input_ids == [1, *ids]


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama without a space": {"add_space_prefix": False},
    "phi3": {"name": "Phi-3 mini"},
    "phi3 of another name": {"name": "Phi 3.5 mini", "architecture": "phi3"},
    "gemma2": {"architecture": "gemma2", "add_space_prefix": False},
    "gemma4": {"kind": "gemma4", "add_space_prefix": False},
}


def write_spaces(path: Path, pieces: list[str], variant: str, **changes: int) -> Path:
    """A vocabulary of ``pieces``, the best first, bytes and special tokens."""
    settings = {"kind": "llama", **VARIANTS[variant]}
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    chat = dict.fromkeys(("<|user|>", "<|assistant|>", "<start_of_turn>"), CONTROL)
    # Names of ends are control tokens of whatever type; <html> is not.
    chat |= {
        "<|end|>": USER_DEFINED,
        "<end_of_turn>": NORMAL,
        "<html>": USER_DEFINED,
        "<|endoftext|>": CONTROL,
    }
    bytes_ = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    spaces = {" " * count: USER_DEFINED for count in range(2, 9)} if variant == "gemma2" else {}
    types = special | bytes_ | spaces | dict.fromkeys(pieces, NORMAL) | chat
    scores = {piece: -float(rank) for rank, piece in enumerate(pieces)}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **changes}
    if settings["kind"] == "gemma4":
        settings["merges"] = [" ".join(pair) for pair in generate_merges(dict.fromkeys(pieces, 0), scores)]
    ranks = [scores.get(token, 0.0) for token in types]
    return write_vocabulary(path, tokens=[*types], types=[*types.values()], scores=ranks, **ids, **settings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_texts_with_spaces_and_chats_have_the_ids_of_llama_cpp(variant: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_spaces(tmp_path / "model.gguf", SPACES["pieces"], variant))
    ids_of_variant = SPACES["ids"][variant.removesuffix(" of another name")]
    for text, ids in zip(SPACES["texts"], ids_of_variant, strict=True):
        assert tokenizer(text, add_special_tokens=False).input_ids == ids
        assert tokenizer.decode(ids) == text or "<|" in text


@defence(
    "the tokenizer of a gguf file has no id beyond its vocabulary",
    off=replacing(gguf_tokenizer, "_check_ids", nothing),
)
def test_an_id_beyond_the_vocabulary_does_not_leave_a_tokenizer(tmp_path: Path) -> None:
    """The vocabulary of Gemma spells tokens of spaces in another way: as BOS, one would be new."""
    spaces = 3 + 256
    with pytest.raises(ConfigError, match="beyond its vocabulary"):
        tokenizer_of(write_spaces(tmp_path / "model.gguf", SPACES["pieces"], "gemma2", bos_token_id=spaces))


def test_special_tokens_of_phi_3_take_the_spaces_after_them(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path / "model.gguf", name="Phi 3 mini (phi-3)")
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
