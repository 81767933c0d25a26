"""Responses in OpenAI's format: whole, or streamed as server-sent events."""

import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from swarmnet.gateway.errors import swarm_error
from swarmnet.gateway.generation import Delta, Generation
from swarmnet_client.model.sampling import Token
from swarmnet_protocols.errors import SwarmnetError

KEEP_ALIVE_S = 10.0
"""Seconds without an event after which a stream sends a comment, because proxies close idle connections."""


class CompletionFormatter:
    """Formats the response of one request to ``/v1/completions``, whole or in chunks."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, model: str, tokenizer: Any, created: int, fingerprint: str) -> None:
        self._tokenizer = tokenizer
        self._fields = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The choice of a whole response, made of all its deltas."""
        return self.chunk_choice(_concatenated(deltas))

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        """The choice of a chunk."""
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
        }

    def first_chunk_choice(self, index: int) -> dict[str, Any] | None:
        """The choice of the chunk that precedes all text, if the format has one."""
        return None

    def response(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return {**self._fields, "object": self.object_name, "choices": choices, **fields}

    def chunk(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return {**self._fields, "object": self.chunk_object_name, "choices": choices, **fields}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        known = [token for token in tokens if token.logprob is not None]
        if not known:
            return None
        return {
            "tokens": [self._text(token.id) for token in known],
            "token_logprobs": [token.logprob for token in known],
            "top_logprobs": [{self._text(one): value for one, value in token.top} for token in known],
        }

    def _text(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id])
        return text


class ChatFormatter(CompletionFormatter):
    """Formats the response of one request to ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

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
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        known = [token for token in tokens if token.logprob is not None]
        if not known:
            return None
        content = [
            {
                **self._entry(token.id, token.logprob),
                "top_logprobs": [self._entry(one, value) for one, value in token.top],
            }
            for token in known
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _concatenated(deltas: Sequence[Delta]) -> Delta:
    text = "".join(delta.text for delta in deltas)
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return Delta(deltas[0].index, text, tokens, deltas[-1].finish_reason)


def usage_of(generation: Generation, prompt_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object of a generation, with the steps through chains (``trips``) and the tokens that each gave on average."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generation.generated_tokens,
        "total_tokens": prompt_tokens + generation.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        "trips": generation.trips,
        "tokens_per_trip": round(generation.generated_tokens / max(1, generation.trips), 2),
    }


async def whole_response(
    generation: Generation, formatter: CompletionFormatter, prompt_tokens: int
) -> dict[str, Any]:
    """Wait for all choices; returns the complete response. Raises ``SwarmnetError`` when one fails."""
    deltas: dict[int, list[Delta]] = defaultdict(list)
    async for delta in generation:
        deltas[delta.index].append(delta)
    choices = [formatter.choice(deltas[index]) for index in sorted(deltas)]
    usage = usage_of(generation, prompt_tokens)
    return formatter.response(choices, usage=usage, precisions=generation.precisions)


async def event_stream(
    generation: Generation, formatter: CompletionFormatter, prompt_tokens: int, *, with_usage: bool
) -> AsyncIterator[bytes]:
    """The response as server-sent events. A failure is sent as an error event before ``[DONE]``."""
    started = set()
    try:
        async for delta in generation:
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
    """A streamed response that closes ``resources`` as soon as the client disconnects or the stream ends."""

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
