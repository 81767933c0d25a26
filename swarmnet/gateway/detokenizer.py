"""Streaming text from tokens: incremental detokenization and stop strings."""

from collections.abc import Sequence
from typing import Any

MAX_HELD_TOKENS = 4
"""Most tokens held back for an incomplete character, which has at most four bytes in UTF-8."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """The text of a growing token sequence, in pieces that end between characters.

    Each piece is decoded together with the tokens of the piece before, because tokenizers decode the first word of a text differently.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix_start = 0
        self._prefix_end = 0
        self._prefix_text = ""

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while its last character is incomplete."""
        self._ids.append(token_id)
        return self._decode_new(max_held=MAX_HELD_TOKENS)

    def flush(self) -> str:
        """The text that was held back, complete or not."""
        return self._decode_new(max_held=0)

    def _decode_new(self, *, max_held: int) -> str:
        text = self._decode(self._prefix_start)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._prefix_end <= max_held:
            return ""
        new = text[len(self._prefix_text) :]
        if new:
            self._prefix_start, self._prefix_end = self._prefix_end, len(self._ids)
            self._prefix_text = self._decode(self._prefix_start)
        else:
            del self._ids[self._prefix_end :]  # special tokens, which would add spaces between words
        return new

    def _decode(self, start: int) -> str:
        text: str = self._tokenizer.decode(self._ids[start:], skip_special_tokens=True)
        return text


class StopStrings:
    """Passes text through up to the first stop string. An end that may begin a stop string is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """The text that may be shown after ``text`` has arrived; nothing after a stop string."""
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

    def flush(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    return next(
        (count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0
    )
