"""Responses in OpenAI's format: whole, or streamed as server-sent events."""

import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from swarmnet.gateway.detokenizer import TokenBytes
from swarmnet.gateway.errors import swarm_error
from swarmnet.gateway.generation import Delta, Generation
from swarmnet_client.batching.answers import Prefill
from swarmnet_client.model.sampling import Token
from swarmnet_protocols.errors import SwarmnetError

KEEP_ALIVE_S = 10.0
"""Seconds without an event after which a stream sends a comment, because proxies close idle
connections."""


class CompletionFormatter:
    """Formats the response of one request to ``/v1/completions``, whole or in chunks."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    continues_prompt = True
    """Whether the answer continues the text of the prompt; a chat's answer is a text of its own."""

    def __init__(self, model: str, tokenizer: Any, created: int, fingerprint: str) -> None:
        self._bytes = TokenBytes(tokenizer)
        self._chars: dict[int, int] = {}
        """Characters of each choice's tokens so far."""
        self._fields = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice of a whole response, made of all its deltas."""
        return self.chunk_choice(_concatenated(deltas))

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        """Return the choice of a chunk."""
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def first_chunk_choice(self, index: int) -> dict[str, Any] | None:
        """Return the choice of the chunk that precedes all text, if the format has one."""
        return None

    def response(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return {**self._fields, "object": self.object_name, "choices": choices, **fields}

    def chunk(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return {**self._fields, "object": self.chunk_object_name, "choices": choices, **fields}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        known = [token for token in delta.tokens if token.logprob is not None]
        if not known:
            return None
        return {
            "tokens": [_name(self._bytes.of(token.id)) for token in known],
            "token_logprobs": [token.logprob for token in known],
            "top_logprobs": [self._alternatives(token) for token in known],
            "text_offset": [self._count_chars(delta.index, self._bytes.of(token.id)) for token in known],
        }

    def _alternatives(self, token: Token) -> dict[str, float]:
        """Return the log probability of each alternative by its text. If two alternatives have the
        same text, the second one's id is added to its key."""
        found: dict[str, float] = {}
        for one, value in token.top:
            name = _name(self._bytes.of(one))
            found[f"{name} (token {one})" if name in found else name] = value
        return found

    def _count_chars(self, index: int, token: bytes) -> int:
        """Add a token's characters to a choice, and return how many it had before."""
        before = self._chars.get(index, 0)
        self._chars[index] = before + sum(byte & 0xC0 != 0x80 for byte in token)
        return before


class ChatFormatter(CompletionFormatter):
    """Formats the response of one request to ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    continues_prompt = False

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        delta = _concatenated(deltas)
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._choice(delta, "message", message)

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta, "delta", {"content": delta.text} if delta.text else {})

    def first_chunk_choice(self, index: int) -> dict[str, Any]:
        return self._choice(Delta(index, ""), "delta", {"role": "assistant", "content": ""})

    def _choice(self, delta: Delta, field: str, content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": delta.index,
            field: content,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        known = [token for token in delta.tokens if token.logprob is not None]
        if not known:
            return None
        content = []
        for token in known:
            begins = self._count_chars(delta.index, self._bytes.of(token.id)) == 0
            top = [self._entry(one, value, begins=begins) for one, value in token.top]
            content.append({**self._entry(token.id, token.logprob, begins=begins), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None, *, begins: bool) -> dict[str, Any]:
        spelled = self._bytes.of(token_id, begins=begins)
        return {"token": _name(spelled), "logprob": logprob, "bytes": list(spelled)}


def _name(token: bytes) -> str:
    """Return the text of a token. Bytes that are no text are written as in OpenAI's responses."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _concatenated(deltas: Sequence[Delta]) -> Delta:
    text = "".join(delta.text for delta in deltas)
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return Delta(deltas[0].index, text, tokens, deltas[-1].finish_reason)


def usage_of(generation: Generation, prompt_tokens: int) -> dict[str, Any]:
    """Return OpenAI's usage object of a generation, and the steps through chains (``trips``).

    All values are whole numbers: clients add them up.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generation.generated_tokens,
        "total_tokens": prompt_tokens + generation.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        "trips": generation.trips,
    }


async def whole_response(
    generation: Generation, formatter: CompletionFormatter, prompt_tokens: int
) -> dict[str, Any]:
    """Wait for all choices; returns the complete response. Raises ``SwarmnetError`` when one
    fails."""
    deltas: dict[int, list[Delta]] = defaultdict(list)
    async for delta in generation:
        if isinstance(delta, Delta):
            deltas[delta.index].append(delta)
    choices = [formatter.choice(deltas[index]) for index in sorted(deltas)]
    usage = usage_of(generation, prompt_tokens)
    return formatter.response(choices, usage=usage, precisions=generation.precisions)


async def event_stream(
    generation: Generation, formatter: CompletionFormatter, prompt_tokens: int, *, with_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the response as server-sent events. Comments say how far a long prompt is. A failure is
    sent as an error event before ``[DONE]``."""
    started = set()
    try:
        async for delta in generation:
            if isinstance(delta, Prefill):
                if delta.done < delta.total:
                    yield f": prefill {delta.done}/{delta.total}\n\n".encode()
                continue
            if delta.index not in started:
                started.add(delta.index)
                if first := formatter.first_chunk_choice(delta.index):
                    yield _event(formatter.chunk([first]))
            fields = {} if delta.finish_reason is None else {"precisions": generation.precisions}
            yield _event(formatter.chunk([formatter.chunk_choice(delta)], **fields))
        if with_usage:
            yield _event(formatter.chunk([], usage=usage_of(generation, prompt_tokens)))
    except SwarmnetError as error:
        yield _event(swarm_error(error).body())
    yield b"data: [DONE]\n\n"


class EventStreamResponse(EventSourceResponse):
    """A streamed response that closes ``resources`` as soon as the client disconnects or the stream
    ends."""

    def __init__(self, events: AsyncIterator[bytes], resources: AsyncExitStack) -> None:
        super().__init__(
            events,
            ping=KEEP_ALIVE_S,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            sep="\n",
            send_timeout=60.0,
        )
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)


def _event(fields: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(fields, separators=(',', ':'))}\n\n".encode()
