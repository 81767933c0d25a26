"""Tokens turned into text as they come: whole letters, no stop strings; keys and their allowances."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swarmnet.gateway.app import model_id
from swarmnet.gateway.text import HALF, MAX_HELD_TOKENS, Detokenizer, StopStrings

SPECIAL = 256


def byte_tokenizer() -> Any:
    """Every byte is a token, and one more is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


BYTES = byte_tokenizer()


@given(st.text(max_size=40))
def test_letters_come_whole_and_all_of_them_come(text: str) -> None:
    letters = Detokenizer(BYTES)
    pieces = [letters.push(token) for token in BYTES(text).input_ids]
    if HALF not in text:
        assert not any(HALF in piece for piece in pieces)
    assert "".join(pieces) + letters.end() == text


def test_bytes_that_are_no_letter_are_not_held_for_ever() -> None:
    letters = Detokenizer(BYTES)
    broken = BYTES("é").input_ids[0]
    pieces = [letters.push(broken) for _ in range(3 * MAX_HELD_TOKENS)]
    assert len("".join(pieces)) >= 2 * MAX_HELD_TOKENS


def test_special_tokens_say_nothing_and_leave_no_trace() -> None:
    letters = Detokenizer(BYTES)
    ids = BYTES("né").input_ids
    with_special = [SPECIAL, *ids[:1], SPECIAL, SPECIAL, *ids[1:], SPECIAL]
    assert "".join(letters.push(token) for token in with_special) + letters.end() == "né"


@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.integers(1, 4)
)
def test_text_goes_on_up_to_the_first_stop_string(text: str, stops: list[str], size: int) -> None:
    watch = StopStrings(stops)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    said = []
    for piece in pieces:
        said.append(watch.push(piece))
        if watch.found:
            break
    shown = "".join(said)
    if not watch.found:
        shown += watch.end()
    ends = [text.find(stop) for stop in stops if stop in text]
    if ends and not watch.found:
        pytest.fail("a stop string went by")
    if ends:
        # Of strings that end in one piece, the one that begins first counts.
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        assert any(text.startswith(stop, len(shown)) for stop in stops)
    else:
        assert shown == text


def test_only_what_may_become_a_stop_string_is_held() -> None:
    watch = StopStrings(["\n\nUser:", "END"])
    assert watch.push("well\n") == "well"
    assert watch.push("E") == "\n"
    assert watch.push("N") == ""
    assert watch.push("x") == "ENx"
    assert watch.push("y END z") == "y "
    assert watch.found
    assert watch.push("more") == ""


def test_a_model_on_this_machine_is_named_without_its_place(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert model_id(str(tmp_path / "my-model")) == "my-model"
    assert model_id("org/name@main") == "org/name@main"
