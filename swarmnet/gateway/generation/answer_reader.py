"""Reading an answer's text as events: thoughts, text for the user, calls of tools.

A reader follows the text of one choice. It holds an end of text back while that may begin a marker.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from swarmnet.gateway.generation.detokenizer import overlap
from swarmnet.gateway.generation.events import ArgumentsDelta, Delta, ReasoningDelta, TextDelta, ToolCallBegin
from swarmnet.gateway.generation.tool_formats import AnswerForm

State = Literal["start", "thoughts", "text", "name", "arguments", "after"]
_PYTHON: Mapping[str, Any] = {"True": True, "False": False, "None": None}
_DECODER = json.JSONDecoder()


class AnswerReader:
    """The text of one choice, read piece by piece.

    ``form``: None for a text without thoughts and calls. ``thinks``: the prompt ends within the
    thoughts. ``strings``: arguments by tool that are texts, for formats that do not quote them.
    """

    def __init__(
        self,
        index: int,
        form: AnswerForm | None,
        *,
        thinks: bool = False,
        calls: bool = False,
        strings: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        self.index = index
        self.calls = 0
        """Calls that have begun."""
        self._form = form or AnswerForm()
        self._can_call = calls
        self._strings = strings or {}
        self._state: State = "thoughts" if thinks else "start" if form is not None else "text"
        self._held = ""
        """Text that no event has brought yet."""
        self._skip = ""
        """The text before the next name."""
        self._name = ""
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._has_text = False

    @property
    def is_thinking(self) -> bool:
        return self._state == "thoughts"

    def push(self, text: str) -> Iterator[Delta]:
        """Yield what a piece of text tells."""
        self._held += text
        yield from self._read(is_end=False)

    def flush(self) -> Iterator[Delta]:
        """Yield what was held back at the end."""
        yield from self._read(is_end=True)

    def _read(self, *, is_end: bool) -> Iterator[Delta]:
        state = None
        while self._held and state != (self._state, len(self._held)):
            state = (self._state, len(self._held))
            yield from getattr(self, f"_read_{self._state}")(is_end)

    def _read_start(self, is_end: bool) -> Iterator[Delta]:
        tools, (think, _) = self._form.tools, self._form.think
        opening = tools.marker + tools.first + tools.begin if not tools.marker else tools.marker
        known: dict[str, State] = {think: "thoughts", self._form.text_open: "text"}
        if self._can_call:
            known[opening] = "name"
        text = self._held.lstrip() if think or not tools.marker else self._held
        for mark, state in known.items():
            if mark and text.startswith(mark):
                self._held = text[len(mark) :]
                self._go(state, tools.first + tools.begin if tools.marker else "")
                return
        if not is_end and any(mark.startswith(text) for mark in known if mark):
            return
        self._state = "text"
        yield from ()

    def _go(self, state: State, skipped: str) -> None:
        """Enter a state. ``skipped``: the text before a name."""
        self._state = state
        self._skip = skipped

    def _read_thoughts(self, is_end: bool) -> Iterator[Delta]:
        end = self._form.think[1]
        text, found = self._until(end, is_end=is_end)
        if text:
            yield ReasoningDelta(self.index, text)
        if found:
            self._held = self._held.lstrip("\n")
            self._state = "start"

    def _read_text(self, is_end: bool) -> Iterator[Delta]:
        marker = self._form.tools.marker if self._can_call else ""
        if self._form.think[1] and not self._has_text:
            self._held = self._held.lstrip("\n")
        text, found = self._until(marker, is_end=is_end)
        if text and not (found and not text.strip()):
            self._has_text = True
            yield TextDelta(self.index, text)
        if found:
            self._go("name", self._form.tools.first + self._form.tools.begin)

    def _read_name(self, is_end: bool) -> Iterator[Delta]:
        whole = self._held.removeprefix(self._skip)
        name, middle, rest = whole.partition(self._form.tools.middle)
        if not middle or (len(whole) == len(self._held) and self._skip):
            return
        self._name, self._held, self._state = name, rest, "arguments"
        self._depth, self._in_string, self._is_escaped = 0, False, False
        id_chars = self._form.tools.id_chars
        prefix = "call_" if id_chars > 9 else ""
        self.calls += 1
        yield ToolCallBegin(self.index, self.calls - 1, prefix + secrets.token_hex(id_chars)[:id_chars], name)

    def _read_arguments(self, is_end: bool) -> Iterator[Delta]:
        tools = self._form.tools
        if tools.arguments == "json":
            count, is_whole = self._json_chars()
            text, self._held = self._held[:count], self._held[count:]
            if text:
                yield ArgumentsDelta(self.index, self.calls - 1, text)
        else:
            if tools.arguments == "python":
                found = self._pythonic()
            else:
                found = self._tagged(self._strings.get(self._name, frozenset()))
            is_whole = found is not None
            if found is not None:
                values, self._held = found
                yield ArgumentsDelta(self.index, self.calls - 1, json.dumps(values, ensure_ascii=False))
        if is_whole:
            self._state = "after"

    def _read_after(self, is_end: bool) -> Iterator[Delta]:
        tools = self._form.tools
        between = tools.end + tools.separator + tools.begin
        if self._held.startswith(between):
            self._held = self._held[len(between) :]
            self._go("name", "")
        yield from ()

    def _until(self, mark: str, *, is_end: bool) -> tuple[str, bool]:
        """Take the text before ``mark`` and the mark, or the text that cannot belong to it."""
        if mark and (at := self._held.find(mark)) >= 0:
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            return text, True
        keep = overlap(self._held, mark) if mark and not is_end else 0
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text, False

    def _json_chars(self) -> tuple[int, bool]:
        """Return how many characters belong to the object, and whether it is whole."""
        for at, letter in enumerate(self._held):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif letter == "\\":
                    self._is_escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1, True
        return len(self._held), False

    def _tagged(self, strings: frozenset[str]) -> tuple[dict[str, Any], str] | None:
        """Return tagged arguments and the text after them; None until they are whole. Quoted values
        may contain any tag."""
        before, between, after = self._form.tools.tags
        values: dict[str, Any] = {}
        rest = self._held
        while not rest.startswith(self._form.tools.end):
            name, found, rest = rest.removeprefix(before).partition(between)
            if name in strings:
                values[name], ended, rest = rest.partition(after)
                if not ended:
                    return None
                continue
            try:
                values[name], end = _DECODER.raw_decode(rest)
            except ValueError:
                return None
            if not found or not rest.startswith(after, end):
                return None
            rest = rest[end + len(after) :]
        return values, rest

    def _pythonic(self) -> tuple[dict[str, Any], str] | None:
        """Return the arguments of a call in Python and the text after them; None until they are
        whole."""
        values: dict[str, Any] = {}
        rest = self._held
        while not rest.startswith(self._form.tools.end):
            name, found, rest = rest.removeprefix(", ").partition("=")
            word = re.match(r"True|False|None", rest)
            try:
                values[name], end = (_PYTHON[word[0]], word.end()) if word else _DECODER.raw_decode(rest)
            except ValueError:
                return None
            if not found or not rest[end:].startswith((",", self._form.tools.end)):
                return None
            rest = rest[end:]
        return values, rest
