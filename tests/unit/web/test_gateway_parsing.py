"""Parsing request bodies: hostile ones cost little, long honest ones are accepted."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.parsing import MAX_TOKENS, BodyParser
from swarmnet.gateway.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, StrictModel

LARGE = BodyParser(MAX_TOKENS)
SMALL = BodyParser(8192)
MAX_MEMORY_BYTES = 32 << 20
MAX_ERRORS = 4
COMPLETION = b'{"model":"m","prompt":'
CHAT = b'{"model":"m","messages":'


def filled(head: bytes, item: bytes, tail: bytes, size: int) -> bytes:
    return head + b",".join([item] * ((size - len(head) - len(tail)) // (len(item) + 1))) + tail


def names(size: int) -> bytes:
    return b",".join(b'"%d":0' % number for number in range(size // 11))


ATTACKS: dict[str, tuple[Callable[[int], bytes], type[StrictModel]]] = {
    "objects": (lambda size: filled(COMPLETION + b"[", b"{}", b"]}", size), CompletionRequest),
    "lists": (lambda size: filled(COMPLETION + b"[", b"[]", b"]}", size), CompletionRequest),
    "nulls": (lambda size: filled(COMPLETION + b"[", b"null", b"]}", size), CompletionRequest),
    "wrong tokens": (lambda size: filled(COMPLETION + b"[[", b"-1", b"]]}", size), CompletionRequest),
    "texts": (lambda size: filled(COMPLETION + b"[", b'""', b"]}", size), CompletionRequest),
    "long numbers": (lambda size: filled(COMPLETION + b"[", b"9" * 4000, b"]}", size), CompletionRequest),
    "depth": (
        lambda size: COMPLETION + b"[" * (size // 2) + b"]" * (size // 2 - 40) + b"}",
        CompletionRequest,
    ),
    "unknown fields": (lambda size: b'{"model":"m",' + names(size) + b"}", CompletionRequest),
    "biases": (lambda size: COMPLETION + b'"x","logit_bias":{' + names(size) + b"}}", CompletionRequest),
    "stops": (lambda size: filled(COMPLETION + b'"x","stop":[', b'"a"', b"]}", size), CompletionRequest),
    "tools": (lambda size: filled(COMPLETION + b'"x","tools":[', b'{"a":1}', b"]}", size), CompletionRequest),
    "parts": (
        lambda size: filled(CHAT + b'[{"role":"user","content":[', b"{}", b"]}]}", size),
        ChatRequest,
    ),
    "messages": (lambda size: filled(CHAT + b"[", b'{"role":"x"}', b"]}", size), ChatRequest),
    "one token": (lambda size: filled(b'{"tokens":[', b"-1", b"]}", size), DetokenizeRequest),
    "NaN": (lambda size: COMPLETION + b'"x","temperature":NaN}', CompletionRequest),
    "half a character": (lambda size: COMPLETION + b'"\\ud800"}', CompletionRequest),
    "not UTF-8": (lambda size: COMPLETION + b'"\xff"}', CompletionRequest),
    "a long name": (lambda size: COMPLETION + b'"x","' + b"a" * (size - 60) + b'":1}', CompletionRequest),
    "a long bias": (
        lambda size: COMPLETION + b'"x","logit_bias":{"' + b"a" * (size - 60) + b'":1}}',
        CompletionRequest,
    ),
}


def refusal(parser: BodyParser, body: bytes, schema: type[StrictModel]) -> tuple[ApiError, int]:
    """The error for a body, and the peak memory of parsing it in bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            parser.parse(body, schema)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Small enough to reach the validation of single fields; the largest that is accepted.
SIZES = {"some": (SMALL, 30_000), "most": (LARGE, LARGE.max_bytes)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_body_costs_little_and_names_one_error(name: str, size: str) -> None:
    parser, length = SIZES[size]
    make, schema = ATTACKS[name]
    error, memory = refusal(parser, make(length), schema)
    assert error.status in {400, 413}
    assert len(json.dumps(error.body())) < 1000
    assert memory < MAX_MEMORY_BYTES
    if isinstance(error.__cause__, ValidationError):
        assert error.__cause__.error_count() <= MAX_ERRORS


def test_a_body_beyond_the_limit_is_not_parsed() -> None:
    error, memory = refusal(SMALL, b" " * (SMALL.max_bytes + 1), ChatRequest)
    assert (error.status, error.code) == (413, "body_too_large")
    assert memory < 1 << 16


@pytest.mark.parametrize("context", [512, 8192, MAX_TOKENS])
def test_a_prompt_that_fills_the_context_is_accepted(context: int) -> None:
    parser = BodyParser(context)

    def parsed(schema: type[StrictModel], **fields: Any) -> Any:
        return parser.parse(json.dumps({"model": "m", **fields}).encode(), schema)

    cyrillic = "\N{CYRILLIC SMALL LETTER A}" * (4 * context)
    assert parsed(CompletionRequest, prompt=cyrillic).prompt == [cyrillic]
    emoji = "\N{GRINNING FACE}" * (2 * context)
    assert parsed(ChatRequest, messages=[{"role": "user", "content": emoji}]).messages[0].content == emoji
    quoted = '{"a": "\\"}' * (context // 8)
    assert parsed(CompletionRequest, prompt=quoted).prompt == [quoted]
    ids = [100_000 + number for number in range(context - 1)]
    assert parsed(CompletionRequest, prompt=ids).prompt == [ids]
    assert parsed(DetokenizeRequest, tokens=ids).tokens == ids


def test_a_long_chat_is_accepted() -> None:
    part = {"type": "text", "text": 'she said: "\\", [{,'}
    messages = [{"role": "user", "content": [part, part]}] * 4000
    body = json.dumps({"model": "m", "messages": messages}, indent=2).encode()
    assert len(LARGE.parse(body, ChatRequest).messages) == 4000


def test_characters_in_strings_are_not_counted() -> None:
    for text in ('"' * 10_000, "\\" * 10_001 + '"[{', "{[,:" * 10_000, "9" * 10_000):
        assert SMALL.parse(json.dumps({"prompt": text, "model": "m"}).encode(), CompletionRequest).prompt == [
            text
        ]
