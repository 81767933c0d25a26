"""Rows of training data: checks the fields of a row, and tokenizes it.

A row is one of:

- ``{"text"}``;
- ``{"prompt", "completion"}``: the loss is on the completion;
- ``{"messages": [{"role", "content"}]}``: the loss is on the assistant's messages;
- ShareGPT's ``{"conversations": [{"from", "value"}]}``, which are messages;
- Alpaca's ``{"instruction", "input", "output"}``, with or without ``input``: a message of the user
  and one of the assistant. For a model without a chat template, a prompt in Alpaca's words;
- for a classifier ``{"text", "label"}``.

Other fields are ignored. Two steps check a row: ``row_of`` checks its fields before any model is
loaded, and ``Encoder`` checks its tokens. Fine-tuning and training jobs read the same rows.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from swarmnet_protocols.models.text.chat_template import TemplateRefused, render_chat
from swarmnet_protocols.models.text.data_files import json_lines, opened, parquet_rows

MAX_MESSAGES = 256

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


class BadRow(ValueError):
    """A row that cannot be used, with the reason."""


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

    @property
    def content(self) -> bytes:
        """The texts of the row, which identify it."""
        if self.text is not None and not self.label:
            return self.text.encode()
        return json.dumps([self.text, self.label, self.prompt, self.completion, self.messages]).encode()


def row_of(fields: Mapping[str, Any], *, labelled: bool) -> DataRow:
    """Return the row with these ``fields``. Raises ``BadRow`` unless they make one row."""
    kinds = _LABELLED if labelled else _PLAIN
    found = [kind for kind in kinds if all(name in fields for name in kind)]
    if _INSTRUCTED in found and ("text",) in found:  # Alpaca's own file also has all of it as a text
        found.remove(("text",))
    if len(found) != 1:
        wanted = " or ".join("{" + ", ".join(f'"{name}"' for name in kind) + "}" for kind in kinds)
        raise BadRow(f"a row has the fields {wanted}, this one has {_names(fields)}")
    match found[0]:
        case ("text", "label"):
            return DataRow(text_of(fields, "text"), _label(fields["label"]))
        case ("text",):
            return DataRow(text_of(fields, "text"))
        case ("prompt", "completion"):
            prompt = text_of(fields, "prompt", may_be_empty=True)
            return DataRow(prompt=prompt, completion=text_of(fields, "completion"))
        case ("instruction", "output"):
            return _alpaca(fields)
        case ("conversations",):
            return DataRow(messages=_messages(_sharegpt(fields["conversations"]), "conversations"))
        case _:
            return DataRow(messages=_messages(fields["messages"]))


def _alpaca(fields: Mapping[str, Any]) -> DataRow:
    instruction, output = text_of(fields, "instruction"), text_of(fields, "output")
    given = text_of(fields, "input", may_be_empty=True) if fields.get("input") is not None else ""
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

    def __init__(self, tokenizer: Any, max_length: int = sys.maxsize, *, labelled: bool = False) -> None:
        """``tokenizer`` is one of transformers, or has its call, end token and chat template."""
        self.has_chats = False
        """True once a row was a conversation in the chat template."""
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._labelled = labelled
        self._end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        marks = list(tokenizer("").input_ids)
        self._start = marks[: -len(self._end)] if self._end and marks[-1:] == self._end else marks

    def encode(self, line: int, fields: Mapping[str, Any]) -> Example:
        """Return the row with these ``fields``. Raises ``BadRow`` if it cannot be used."""
        row = row_of(fields, labelled=self._labelled)
        ids, learned = self.tokens(row)
        kept = learned[: self._max_length]
        # The first token has no predecessor that could predict it.
        if not row.label and not kept[1:].any():
            raise BadRow(
                f"nothing to learn in the first {self._max_length} of its {len(ids)} tokens"
                if len(ids) > self._max_length
                else "it has too few tokens to learn from"
            )
        if not len(ids):
            raise BadRow("its text has no tokens")
        return Example(line, ids[: self._max_length], kept, row.label, len(ids) > self._max_length)

    def tokens(self, row: "DataRow") -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return all token ids of ``row`` [n], and whether a token counts in the loss [n]. Raises
        ``BadRow`` for a conversation that the model's chat template cannot show."""
        start, end = self._start, [] if self._labelled else self._end
        if row.text is not None:
            parts = [(start, True), (self._ids(row.text), True), (end, True)]
        elif row.messages is not None and (row.prompt is None or self._tokenizer.chat_template):
            self.has_chats = True
            parts = [(self._ids(text), learned) for text, learned in self._turns(row.messages)]
        else:
            parts = [
                (start, False),
                (self._ids(row.prompt or ""), False),
                (self._ids(row.completion), True),
                (end, True),
            ]
        ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in parts])
        return ids, np.repeat([learned for _, learned in parts], [len(ids) for ids, _ in parts])

    def _ids(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
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
ROW_FIELDS = ("input", *dict.fromkeys(name for kind in (*_PLAIN, *_LABELLED) for name in kind))
"""Fields that a row may have."""


RawRow = bytes | dict[str, Any]
"""A row before its fields are checked: a line of JSON, or the values of a parquet file."""


def raw_rows(
    stream: BinaryIO, name: str, *, is_parquet: bool, columns: Sequence[str] = ROW_FIELDS
) -> Iterator[tuple[int, RawRow]]:
    """Yield each row of a file with its number, from 1.

    Only ``columns`` of a parquet file are read. Other files have JSON Lines, and may be compressed.
    Raises ``DataFileError``.
    """
    if is_parquet:
        yield from parquet_rows(stream, name, columns)
    else:
        yield from json_lines(opened(stream, name), name)


def fields_of(row: RawRow) -> dict[str, Any]:
    """Return the fields of a row. Raises ``BadRow`` if it is no object of JSON."""
    if isinstance(row, dict):
        return {name: value for name, value in row.items() if value is not None}
    try:
        fields = json.loads(row.decode())
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


def text_of(fields: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    """Return the text in a field. Raises ``BadRow`` if it is no text, or empty."""
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
