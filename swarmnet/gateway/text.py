"""Tokens as they come turned into text that may be shown: no half letters, nothing from a stop string on."""

from collections.abc import Sequence
from typing import Any

MAX_HELD_TOKENS = 4
"""A letter has at most four bytes: whatever ends in a half one for longer is no letter at all."""
HALF = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of growing tokens. What is decoded begins a few tokens back, where tokenizers treat a first word specially."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = 0
        self._shown = 0
        self._shown_text = ""

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a letter is incomplete."""
        self._ids.append(token_id)
        return self._rest(held=MAX_HELD_TOKENS)

    def end(self) -> str:
        """What was held back, whole or not."""
        return self._rest(held=0)

    def _rest(self, *, held: int) -> str:
        text = self._decode(self._begin)
        if text.endswith(HALF) and len(self._ids) - self._shown <= held:
            return ""
        new = text[len(self._shown_text) :]
        if new:
            self._begin, self._shown = self._shown, len(self._ids)
            self._shown_text = self._decode(self._begin)
        else:
            del self._ids[self._shown :]  # such as special tokens, between which words have a space
        return new

    def _decode(self, begin: int) -> str:
        text: str = self._tokenizer.decode(self._ids[begin:], skip_special_tokens=True)
        return text


class StopStrings:
    """Passes text on up to the first stop string in it. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """What of all text so far may be shown now and was not before."""
        if self.found:
            return ""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    return next(
        (count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0
    )
