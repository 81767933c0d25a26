"""Streaming text from tokens: complete characters, and nothing from a stop string on."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swarmnet.gateway.detokenizer import MAX_HELD_TOKENS, REPLACEMENT, IncrementalDetokenizer, StopStrings

SPECIAL = 256


def byte_tokenizer() -> Any:
    """A tokenizer with one token for each byte and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


BYTES = byte_tokenizer()


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
