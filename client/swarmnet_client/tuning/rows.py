"""Reads a data file (JSON Lines): checks every row and tokenizes it, before anything is sent.

A row is one of:

- ``{"text"}``;
- ``{"prompt", "completion"}``: the loss is on the completion;
- ``{"messages": [{"role", "content"}]}``: the loss is on the assistant's messages;
- ShareGPT's ``{"conversations": [{"from", "value"}]}``, which are messages;
- Alpaca's ``{"instruction", "input", "output"}``, with or without ``input``: a message of the user
  and one of the assistant. For a model without a chat template, a prompt in Alpaca's words;
- for a classifier ``{"text", "label"}``.

Other fields are ignored. Two steps check a row: ``row_of`` checks its fields before any model is
loaded, and ``Encoder`` checks its tokens.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.text.chat_template import TemplateRefused, render_chat

MAX_ROWS = 1_000_000
MAX_LINE_BYTES = 4 << 20
MAX_MESSAGES = 256
MAX_SHOWN = 5
"""The most bad rows that an error lists."""

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}
"""Speakers in ShareGPT's rows → roles of messages."""
_ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """Token ids [n] int32, and ``learned`` [n], whether a token counts in the loss. ``label``:
    target of a classifier.

    ``line``: line number in the file, from 1. ``cut``: the row was longer than ``max_length`` and
    lost its end.
    """

    line: int
    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]
    label: str = ""
    cut: bool = False


@dataclass(frozen=True)
class RowFile:
    """The rows of a file without bad rows, and its SHA-256 in hexadecimal.

    ``has_chats``: some rows are conversations in the model's chat template.
    """

    path: Path
    rows: list[Example]
    sha256: str
    has_chats: bool = False

    @property
    def cut(self) -> int:
        """The number of rows that were longer than ``max_length`` and lost their end."""
        return sum(row.cut for row in self.rows)


class BadRow(ValueError):
    """A row that cannot be used, with the reason."""


def check_rows(path: Path, *, labelled: bool) -> None:
    """Check the fields of all rows of ``path``, which needs no model. Raises the errors of
    ``read_rows``."""

    def check(number: int, fields: dict[str, Any]) -> None:
        row_of(fields, labelled=labelled)

    _each_row(path, check)


def read_rows(path: Path, encoder: "Encoder") -> RowFile:
    """Return all rows of ``path``. Raises ``ConfigError`` if the file has no rows or has bad rows;
    the message lists the first bad rows."""
    rows, sha256 = _each_row(path, encoder.encode)
    return RowFile(path, rows, sha256, encoder.has_chats)


def _each_row(path: Path, take: Callable[[int, dict[str, Any]], T]) -> tuple[list[T], str]:
    """Return what ``take`` makes of each row from its line number and fields, and the SHA-256 of
    the file."""
    taken: list[T] = []
    shown: list[str] = []
    bad = 0
    digest = hashlib.sha256()
    try:
        for number, line in _lines(path):
            digest.update(line)
            if not line.strip():
                continue
            try:
                taken.append(take(number, _fields(line)))
            except BadRow as error:
                bad += 1
                if bad <= MAX_SHOWN:
                    shown.append(f"{path}:{number}: {error}")
            if len(taken) > MAX_ROWS:
                raise ConfigError(f"{path} has more than {MAX_ROWS} rows", hint="split the file")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="name a file of rows") from error
    if bad:
        more = f"\nand {bad - MAX_SHOWN} more" if bad > MAX_SHOWN else ""
        raise ConfigError(
            "\n".join(shown) + more, hint="correct or remove these lines; nothing was sent anywhere"
        )
    if not taken:
        raise ConfigError(f"{path} has no rows", hint='write one JSON object a line, such as {"text": "..."}')
    return taken, digest.hexdigest()


@dataclass(frozen=True)
class DataRow:
    """A row whose fields are sound.

    - ``text``: the text of a plain row, or of a classifier's row with the class ``label``.
    - ``prompt``, ``completion``: a text that is given, and its continuation that is learned.
    - ``messages``: a conversation.

    Alpaca's rows have both ``prompt`` and ``messages``.
    """

    text: str | None = None
    label: str = ""
    prompt: str | None = None
    completion: str = ""
    messages: list[dict[str, str]] | None = None


def row_of(fields: Mapping[str, Any], *, labelled: bool) -> DataRow:
    """Return the row with these ``fields``. Raises ``BadRow`` if they make no row, or several."""
    kinds = _LABELLED if labelled else _PLAIN
    found = [kind for kind in kinds if all(name in fields for name in kind)]
    if _INSTRUCTED in found and ("text",) in found:  # Alpaca's own file also has all of it as a text
        found.remove(("text",))
    if len(found) != 1:
        wanted = " or ".join("{" + ", ".join(f'"{name}"' for name in kind) + "}" for kind in kinds)
        raise BadRow(f"a row has the fields {wanted}, this one has {_names(fields)}")
    match found[0]:
        case ("text", "label"):
            return DataRow(_text(fields, "text"), _label(fields["label"]))
        case ("text",):
            return DataRow(_text(fields, "text"))
        case ("prompt", "completion"):
            prompt = _text(fields, "prompt", may_be_empty=True)
            return DataRow(prompt=prompt, completion=_text(fields, "completion"))
        case ("instruction", "output"):
            return _alpaca(fields)
        case ("conversations",):
            return DataRow(messages=_messages(_sharegpt(fields["conversations"]), "conversations"))
        case _:
            return DataRow(messages=_messages(fields["messages"]))


def _alpaca(fields: Mapping[str, Any]) -> DataRow:
    instruction, output = _text(fields, "instruction"), _text(fields, "output")
    given = _text(fields, "input", may_be_empty=True) if fields.get("input") is not None else ""
    if given.strip():
        asked, about = f"{instruction}\n\n{given}", f"\n\n### Input:\n{given}"
        begins = _ALPACA.format(", paired with an input that provides further context")
    else:
        asked, about, begins = instruction, "", _ALPACA.format("")
    return DataRow(
        prompt=f"{begins}\n\n### Instruction:\n{instruction}{about}\n\n### Response:\n",
        completion=output,
        messages=[{"role": "user", "content": asked}, {"role": "assistant", "content": output}],
    )


def _sharegpt(turns: object) -> object:
    """Return ShareGPT's turns as messages. Other values stay for ``_messages``, which refuses
    them."""
    if not isinstance(turns, list):
        return turns
    messages = []
    for number, turn in enumerate(turns[: MAX_MESSAGES + 1], 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise BadRow(f'turn {number} is not an object with a "from" and a "value" that is a text')
        if (role := _ROLES.get(str(turn.get("from")))) is None:
            raise BadRow(f'turn {number}: "from" is none of {", ".join(_ROLES)}')
        messages.append({"role": role, "content": turn["value"]})
    return messages


class Encoder:
    """Tokenizes rows. A row of more than ``max_length`` tokens loses its end."""

    def __init__(self, tokenizer: Any, max_length: int, *, labelled: bool = False) -> None:
        self.has_chats = False
        """True once a row was a conversation in the chat template."""
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._labelled = labelled
        self._end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        marks = tokenizer("").input_ids
        self._start = marks[: -len(self._end)] if self._end and marks[-1:] == self._end else marks

    def encode(self, line: int, fields: Mapping[str, Any]) -> Example:
        """Return the row with these ``fields``. Raises ``BadRow`` if it cannot be used."""
        row = row_of(fields, labelled=self._labelled)
        end = [] if self._labelled else self._end
        if row.text is not None:
            parts = [(self._start + self._tokens(row.text) + end, True)]
        elif row.messages is not None and (row.prompt is None or self._tokenizer.chat_template):
            self.has_chats = True
            parts = [(self._tokens(text), learned) for text, learned in self._turns(row.messages)]
        else:
            parts = [
                (self._start + self._tokens(row.prompt or ""), False),
                (self._tokens(row.completion) + end, True),
            ]
        return self._example(line, parts, row.label)

    def _example(self, line: int, parts: list[tuple[list[int], bool]], label: str) -> Example:
        ids = np.array([token for tokens, _ in parts for token in tokens], dtype=np.int32)
        learned = np.repeat([learned for _, learned in parts], [len(tokens) for tokens, _ in parts])
        kept = learned[: self._max_length]
        # The first token has no predecessor that could predict it.
        if not label and not kept[1:].any():
            raise BadRow(
                f"nothing to learn in the first {self._max_length} of its {len(ids)} tokens"
                if len(ids) > self._max_length
                else "it has too few tokens to learn from"
            )
        if not len(ids):
            raise BadRow("its text has no tokens")
        return Example(line, ids[: self._max_length], kept, label, len(ids) > self._max_length)

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def _turns(self, checked: list[dict[str, str]]) -> Iterator[tuple[str, bool]]:
        """Yield the rendered conversation in pieces, and whether a piece is an assistant's message,
        which counts in the loss."""
        whole = self._render(checked)
        written = 0
        for number, message in enumerate(checked):
            if message["role"] != "assistant":
                continue
            before = self._render(checked[:number], add_generation_prompt=True)
            so_far = self._render(checked[: number + 1])
            content = message["content"].strip()
            start = whole.find(content, len(before))
            # Not the last occurrence: the mark after the message may contain the same text.
            alone = so_far.find(content, len(before))
            closing = so_far[alone + len(content) :]
            end = start + len(content) + len(closing)
            are_found = start >= 0 and alone >= 0 and whole.startswith(before)
            if not are_found or whole[start + len(content) : end] != closing:
                raise BadRow(
                    f"the model's chat template does not show where message {number + 1} begins and ends"
                )
            yield whole[written : len(before)], False
            yield whole[len(before) : end], True
            written = end

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        if not self._tokenizer.chat_template:
            raise BadRow('the model has no chat template: write {"prompt", "completion"} instead of messages')
        try:
            return render_chat(self._tokenizer, messages, add_generation_prompt=add_generation_prompt)
        except TemplateRefused as error:
            raise BadRow(str(error)) from error


_INSTRUCTED = ("instruction", "output")
_PLAIN: tuple[tuple[str, ...], ...] = (
    ("text",),
    ("prompt", "completion"),
    ("messages",),
    _INSTRUCTED,
    ("conversations",),
)
_LABELLED: tuple[tuple[str, ...], ...] = (("text", "label"),)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError(
                    f"{path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB",
                    hint="split the row; nothing was sent anywhere",
                )
            yield number, line


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON that can be read: a number or a nesting is too large") from error
    if not isinstance(fields, dict):
        raise BadRow('not an object: write {"text": "..."}')
    return fields


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(f'"{name[:40]}"' for name in list(fields)[:8]) or "none"


def _text(fields: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise BadRow(f'"{name}" is not a text')
    if not value.strip() and not may_be_empty:
        raise BadRow(f'"{name}" is empty')
    return _sound(value, name)


def _sound(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f'"{name}" has half a character (a lone surrogate) at {error.start + 1}') from error
    return text


def _label(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow('"label" is neither a text nor a whole number')
    return _sound(str(value), "label")


def _messages(messages: object, name: str = "messages") -> list[dict[str, str]]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadRow(f'"{name}" is not a list of 1 to {MAX_MESSAGES} messages')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f'message {number} is not an object with a "role"')
        if not isinstance(message.get("content"), str):
            raise BadRow(f'message {number} has no "content" that is a text')
        if message["role"] == "assistant" and not message["content"].strip():
            raise BadRow(f'message {number}: "content" is empty')
        _sound(message["content"], "content")
    if all(message["role"] != "assistant" for message in messages):
        raise BadRow('no message has the role "assistant": there is nothing to learn')
    return [{"role": message["role"], "content": message["content"]} for message in messages]
