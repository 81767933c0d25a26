"""Streaming text from tokens: complete characters, and nothing from a stop string on."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swarmnet.gateway.generation.detokenizer import (
    MAX_HELD_TOKENS,
    REPLACEMENT,
    IncrementalDetokenizer,
    StopStrings,
    TokenBytes,
)

SPECIAL = 256


def byte_tokenizer() -> Any:
    """A tokenizer with one token for each byte and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def sentencepiece_tokenizer() -> Any:
    """Like Llama 2's: a block for a space, bytes as fallback, and no space at the beginning of a
    text."""
    words = ("is", "Paris", "not")
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    merges = []
    for letter in BLOCK + "".join(sorted({*"".join(words)})):
        vocabulary.setdefault(letter, len(vocabulary))
    for word in words:
        piece = BLOCK
        for letter in word:
            if piece + letter not in vocabulary:
                vocabulary[piece + letter] = len(vocabulary)
                merges.append((piece, letter))
            piece += letter
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(BLOCK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BLOCK = "\N{LOWER ONE EIGHTH BLOCK}"
BYTES = byte_tokenizer()
PIECES = sentencepiece_tokenizer()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])


@given(st.text(max_size=40))
def test_characters_come_complete(text: str) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    pieces = [detokenizer.push(token) for token in BYTES(text).input_ids]
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_invalid_utf8_is_not_held_back_forever() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    broken = BYTES("é").input_ids[0]
    pieces = [detokenizer.push(broken) for _ in range(3 * MAX_HELD_TOKENS)]
    assert len("".join(pieces)) >= 2 * MAX_HELD_TOKENS


@given(st.lists(st.sampled_from(BYTES.convert_tokens_to_ids(["å", "ī", "©", "Ð", "l"])), max_size=24))
@example(BYTES.convert_tokens_to_ids([*"éÐõåå", "ī", "©", "l"]))
def test_a_stream_is_the_text_of_its_tokens(ids: list[int]) -> None:
    """The letters stand for the bytes e5 89 a9 (a character), d0 (which begins another) and l."""
    detokenizer = IncrementalDetokenizer(BYTES)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == BYTES.decode(ids)


@TOKENIZERS
def test_an_answer_that_continues_a_prompt_keeps_its_first_space(tokenizer: Any) -> None:
    prompt = tokenizer("is", add_special_tokens=False).input_ids
    ids = tokenizer("is Paris not", add_special_tokens=False).input_ids[len(prompt) :]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == " Paris not"


@TOKENIZERS
@given(text=st.text(max_size=20))
def test_the_bytes_of_all_tokens_are_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    spelled = TokenBytes(tokenizer)
    joined = b"".join(spelled.of(token, begins=not place) for place, token in enumerate(ids))
    assert joined.decode() == tokenizer.decode(ids)


def test_a_token_of_a_text_has_its_space() -> None:
    spelled = TokenBytes(PIECES)
    paris = PIECES.convert_tokens_to_ids(BLOCK + "Paris")
    assert (spelled.of(paris), spelled.of(paris, begins=True)) == (b" Paris", b"Paris")


def test_special_tokens_add_no_text() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    ids = BYTES("né").input_ids
    with_special = [SPECIAL, *ids[:1], SPECIAL, SPECIAL, *ids[1:], SPECIAL]
    assert "".join(detokenizer.push(token) for token in with_special) + detokenizer.flush() == "né"


@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.integers(1, 4)
)
def test_text_passes_up_to_the_first_stop_string(text: str, stops: list[str], size: int) -> None:
    stop_strings = StopStrings(stops)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    pushed = []
    for piece in pieces:
        pushed.append(stop_strings.push(piece))
        if stop_strings.found:
            break
    shown = "".join(pushed)
    if not stop_strings.found:
        shown += stop_strings.flush()
    ends = [text.find(stop) for stop in stops if stop in text]
    if ends and not stop_strings.found:
        pytest.fail("a stop string was not found")
    if ends:
        # If several stop strings end in one piece, the one that begins first counts.
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        assert any(text.startswith(stop, len(shown)) for stop in stops)
    else:
        assert shown == text


def test_only_a_possible_stop_string_is_held_back() -> None:
    stop_strings = StopStrings(["\n\nUser:", "END"])
    assert stop_strings.push("well\n") == "well"
    assert stop_strings.push("E") == "\n"
    assert stop_strings.push("N") == ""
    assert stop_strings.push("x") == "ENx"
    assert stop_strings.push("y END z") == "y "
    assert stop_strings.found
    assert stop_strings.push("more") == ""
