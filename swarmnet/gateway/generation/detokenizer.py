"""Streaming text from tokens: incremental detokenization, the bytes of tokens, and stop strings."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

MAX_HELD_TOKENS = 4
"""Most tokens held back for an incomplete character, which has at most four bytes in UTF-8."""
MAX_WINDOW = 64
"""Most tokens without valid text that are decoded again together with the next token. More would
take more time. With fewer, a character after that much invalid text would be lost."""
PROMPT_TOKENS = 16
"""Last tokens of a prompt that decide how the text after it begins."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """The text of a growing token sequence, in pieces that end between characters.

    Special tokens have no text, except those in ``marks``.

    Each piece is decoded together with the tokens of the piece before, because tokenizers decode
    the first word of a text differently. ``tokenizers.decoders.DecodeStream`` does so, too, but
    holds back all text after invalid UTF-8, and has no end at which it gives that back.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int] = (), marks: Mapping[int, str] | None = None
    ) -> None:
        """``prompt``: the tokens that the text continues; none if it is a text of its own."""
        self._tokenizer = tokenizer
        self._marks = marks or {}
        self._ids = list(prompt[-PROMPT_TOKENS:])
        self._prefix_start = 0
        self._prefix_end = len(self._ids)
        self._shown = len(self._decode(0)) if self._ids else 0
        """Number of characters of the decoded text that were returned, or belong to the prompt."""

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes; empty while its last character is
        incomplete."""
        if token_id in self._marks:
            return self.flush() + self._marks[token_id]
        self._ids.append(token_id)
        return self._decode_new(is_end=False)

    def flush(self) -> str:
        """Return the text that was held back, complete or not."""
        return self._decode_new(is_end=True)

    def _decode_new(self, *, is_end: bool) -> str:
        text = self._decode(self._prefix_start)
        held = len(self._ids) - self._prefix_end
        if text.endswith(REPLACEMENT) and not is_end:
            if held <= MAX_HELD_TOKENS:
                return ""
            # invalid, but the next tokens may still complete the last character
            if held <= MAX_WINDOW:
                new, self._shown = text[self._shown : -1], max(self._shown, len(text) - 1)
                return new
        new = text[self._shown :]
        if new:
            self._prefix_start, self._prefix_end = self._prefix_end, len(self._ids)
            self._shown = len(self._decode(self._prefix_start))
        else:
            # special tokens, which would add spaces between words
            del self._ids[self._prefix_end :]
        return new

    def _decode(self, start: int) -> str:
        text: str = self._tokenizer.decode(self._ids[start:], skip_special_tokens=True)
        return text


class TokenBytes:
    """The bytes that each token of a tokenizer adds to a text. The bytes of a partial character are
    not valid text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        kinds = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
        self._letters = _byte_letters() if "ByteLevel" in kinds else {}
        self._has_bytes = "ByteFallback" in kinds

    def of(self, token_id: int, *, begins: bool = False) -> bytes:
        """Return the bytes of a token within a text, or of the first token if it ``begins`` the
        text."""
        found = self._within(token_id)
        if begins and found[:1] == b" " and not self._decode([token_id]).startswith(" "):
            return found[1:]
        return found

    def _within(self, token_id: int) -> bytes:
        if self._letters or self._has_bytes:
            name = self._tokenizer.convert_ids_to_tokens(token_id) or ""
            if self._letters:
                return b"".join(self._letters.get(letter) or letter.encode() for letter in name)
            if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
                return bytes([int(match[1], 16)])
        # A decoder may drop the space at the beginning of a text.
        return self._decode([token_id, token_id])[len(self._decode([token_id])) :].encode(errors="replace")

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text


@cache
def _byte_letters() -> dict[str, bytes]:
    """Return the byte that each letter of a byte-level vocabulary encodes (GPT-2's
    ``bytes_to_unicode``)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): bytes([byte]) for byte in shown}
    others = [byte for byte in range(256) if byte not in shown]
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


class StopStrings:
    """Passes text through up to the first stop string. An end that may begin a stop string is held
    back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that may be shown after ``text`` has arrived; nothing after a stop
        string."""
        if self.found:
            return ""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    return next(
        (count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0
    )
