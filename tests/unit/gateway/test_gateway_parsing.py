"""Parsing request bodies: hostile ones cost little, long honest ones are accepted."""

import copy
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import SchemaValidator

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.parsing import MAX_TOKENS, BodyParser
from swarmnet.gateway.protocols.chat_completions import ChatBody
from swarmnet.gateway.protocols.completions import CompletionBody
from swarmnet.gateway.protocols.embeddings import EmbeddingBody
from swarmnet.gateway.protocols.messages import MessagesBody
from swarmnet.gateway.protocols.ollama import OllamaChatBody
from swarmnet.gateway.protocols.responses import ResponsesBody
from swarmnet.gateway.protocols.schemas import DetokenizeRequest, StrictModel
from swarmnet_client.model.sampling import Sampling
from tests.defences import defence, nothing, replacing

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
    "objects": (lambda size: filled(COMPLETION + b"[", b"{}", b"]}", size), CompletionBody),
    "lists": (lambda size: filled(COMPLETION + b"[", b"[]", b"]}", size), CompletionBody),
    "nulls": (lambda size: filled(COMPLETION + b"[", b"null", b"]}", size), CompletionBody),
    "wrong tokens": (lambda size: filled(COMPLETION + b"[[", b"-1", b"]]}", size), CompletionBody),
    "texts": (lambda size: filled(COMPLETION + b"[", b'""', b"]}", size), CompletionBody),
    "long numbers": (lambda size: filled(COMPLETION + b"[", b"9" * 4000, b"]}", size), CompletionBody),
    "depth": (
        lambda size: COMPLETION + b"[" * (size // 2) + b"]" * (size // 2 - 40) + b"}",
        CompletionBody,
    ),
    "unknown fields": (lambda size: b'{"model":"m",' + names(size) + b"}", CompletionBody),
    "biases": (lambda size: COMPLETION + b'"x","logit_bias":{' + names(size) + b"}}", CompletionBody),
    "stops": (lambda size: filled(COMPLETION + b'"x","stop":[', b'"a"', b"]}", size), CompletionBody),
    "tools": (lambda size: filled(COMPLETION + b'"x","tools":[', b'{"a":1}', b"]}", size), CompletionBody),
    "parts": (
        lambda size: filled(CHAT + b'[{"role":"user","content":[', b"{}", b"]}]}", size),
        ChatBody,
    ),
    "messages": (lambda size: filled(CHAT + b"[", b'{"role":"x"}', b"]}", size), ChatBody),
    "blocks": (
        lambda size: filled(CHAT + b'[{"role":"user","content":[', b"{}", b'],"x":0}],"max_tokens":1}', size),
        MessagesBody,
    ),
    "results": (
        lambda size: filled(CHAT + b"[", b'{"role":"user","content":[0]}', b'],"max_tokens":1}', size),
        MessagesBody,
    ),
    "items": (
        lambda size: filled(b'{"model":"m","input":[', b'{"role":0}', b"]}", size),
        ResponsesBody,
    ),
    "functions": (
        lambda size: filled(b'{"model":"m","input":"x","tools":[', b"{}", b"]}", size),
        ResponsesBody,
    ),
    "embedded texts": (lambda size: filled(b'{"model":"m","input":[', b"{}", b"]}", size), EmbeddingBody),
    "calls": (
        lambda size: filled(CHAT + b'[{"role":"user","tool_calls":[', b"{}", b"]}]}", size),
        OllamaChatBody,
    ),
    "one token": (lambda size: filled(b'{"tokens":[', b"-1", b"]}", size), DetokenizeRequest),
    "NaN": (lambda size: COMPLETION + b'"x","temperature":NaN}', CompletionBody),
    "not UTF-8": (lambda size: COMPLETION + b'"\xff"}', CompletionBody),
    "a long name": (lambda size: COMPLETION + b'"x","' + b"a" * (size - 60) + b'":1}', CompletionBody),
    "a long bias": (
        lambda size: COMPLETION + b'"x","logit_bias":{"' + b"a" * (size - 60) + b'":1}}',
        CompletionBody,
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


def validating_all_items(patch: pytest.MonkeyPatch) -> None:
    """Validate every item of a list, past the first invalid one."""
    schema = copy.deepcopy(CompletionBody.__pydantic_core_schema__)
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            part.pop("fail_fast", None)
            left.extend(part.values())
        elif isinstance(part, list | tuple):
            left.extend(part)
    patch.setattr(CompletionBody, "__pydantic_validator__", SchemaValidator(schema, _use_prebuilt=False))


@defence(
    "values of a body are counted before it is parsed",
    off=replacing(BodyParser, "_check_size", nothing),
    name="objects",
    size="most",
)
@defence(
    "a list is validated up to its first invalid item",
    off=validating_all_items,
    name="wrong tokens",
    size="some",
)
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
    error, memory = refusal(SMALL, b" " * (SMALL.max_bytes + 1), ChatBody)
    assert (error.status, error.code) == (413, "body_too_large")
    assert memory < 1 << 16


@pytest.mark.parametrize("context", [512, 8192, MAX_TOKENS])
def test_a_prompt_that_fills_the_context_is_accepted(context: int) -> None:
    parser = BodyParser(context)

    def parsed(schema: type[StrictModel], **fields: Any) -> Any:
        return parser.parse(json.dumps({"model": "m", **fields}).encode(), schema)

    cyrillic = "\N{CYRILLIC SMALL LETTER A}" * (4 * context)
    assert parsed(CompletionBody, prompt=cyrillic).prompt == [cyrillic]
    emoji = "\N{GRINNING FACE}" * (2 * context)
    said = parsed(ChatBody, messages=[{"role": "user", "content": emoji}]).messages[0]
    assert said.message().text == emoji
    quoted = '{"a": "\\"}' * (context // 8)
    assert parsed(CompletionBody, prompt=quoted).prompt == [quoted]
    ids = [100_000 + number for number in range(context - 1)]
    assert parsed(CompletionBody, prompt=ids).prompt == [ids]
    assert parsed(DetokenizeRequest, tokens=ids).tokens == ids


def test_a_long_chat_is_accepted() -> None:
    part = {"type": "text", "text": 'she said: "\\", [{,'}
    messages = [{"role": "user", "content": [part, part]}] * 4000
    body = json.dumps({"model": "m", "messages": messages}, indent=2).encode()
    assert len(LARGE.parse(body, ChatBody).messages) == 4000


def test_characters_in_strings_are_not_counted() -> None:
    for text in ('"' * 10_000, "\\" * 10_001 + '"[{', "{[,:" * 10_000, "9" * 10_000):
        assert SMALL.parse(json.dumps({"prompt": text, "model": "m"}).encode(), CompletionBody).prompt == [
            text
        ]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"cut \ud83d", "cut \ufffd"),
        (r"\udE00 cut", "\ufffd cut"),
        (r"\ud83d\ud83d\uDE00", "\ufffd\N{GRINNING FACE}"),
        (r"\\ud83d \ud83d", r"\ud83d " + "\ufffd"),
        (r"\ud83d\n", "\ufffd\n"),
    ],
)
def test_half_a_character_is_replaced(written: str, read: str) -> None:
    body = b'{"model":"m","prompt":"' + written.encode() + b'"}'
    assert SMALL.parse(body, CompletionBody).prompt == [read]


USER = {"role": "user", "content": "Hi"}
HARMLESS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"a": 1}}]}]},
    {"messages": [USER, {"role": "assistant", "content": "Ho", "refusal": None, "annotations": []}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "Ho", "tool_calls": []}, USER]},
    *(
        {"messages": [USER], name: value}
        for name, value in {
            "top_k": -1,
            "min_p": 0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [],
            "skip_special_tokens": True,
            "function_call": "none",
            "chat_template_kwargs": {},
            "min_tokens": 0,
            "prediction": {"type": "content", "content": "Hi"},
        }.items()
    ),
]


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda fields: [*fields][-1])
def test_what_cannot_change_an_answer_is_accepted(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", **fields}).encode()
    assert SMALL.parse(body, ChatBody).messages[0].message().text == "Hi"


@pytest.mark.parametrize(
    ("schema", "fields", "names"),
    [
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.image_url",
        ),
        (ChatBody, {"messages": [{"role": "user", "content": 5}]}, "a string or a list of parts"),
        (ChatBody, {"messages": [USER], "tfs_z": 0.5}, "'tfs_z'"),
        (CompletionBody, {"prompt": [1, -2]}, "prompt.0.tokens.1"),
    ],
)
def test_a_refusal_names_what_is_wrong(schema: type[StrictModel], fields: dict[str, Any], names: str) -> None:
    with pytest.raises(ApiError) as caught:
        SMALL.parse(json.dumps({"model": "m", **fields}).encode(), schema)
    assert names in caught.value.message


def test_samplings_of_ollama_and_anthropic_reach_the_core() -> None:
    options = {"top_k": 3, "min_p": 0.25, "repeat_penalty": 1.5}
    chat = json.dumps({"model": "m", "messages": [USER], "options": options}).encode()
    found = SMALL.parse(chat, OllamaChatBody).request(Sampling()).sampling
    assert (found.top_k, found.min_p, found.repetition_penalty) == (3, 0.25, 1.5)
    message = json.dumps({"model": "m", "messages": [USER], "max_tokens": 1, "top_k": 3}).encode()
    assert SMALL.parse(message, MessagesBody).request(Sampling()).sampling.top_k == 3
