"""Answers in the forms of OpenAI's two endpoints: whole, or in chunks as they come."""

import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from swarmnet.gateway.failures import of_swarm
from swarmnet.gateway.generation import Generation, Piece
from swarmnet_client.model.sampling import Token
from swarmnet_protocols.errors import SwarmnetError

KEEP_ALIVE_S = 10.0
"""A stream that says nothing gets a comment this often, so that nobody on the way takes it for dead."""


class Form:
    """What is common to all chunks of one answer, and to the whole of it."""

    prefix = "cmpl"
    whole = "text_completion"
    chunk = "text_completion"

    def __init__(self, model: str, tokenizer: Any, created: int, fingerprint: str) -> None:
        self._tokenizer = tokenizer
        self._fields = {
            "id": f"{self.prefix}-{secrets.token_hex(16)}",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def to_choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A choice of which these are all pieces."""
        return self.to_delta(_joined(pieces))

    def to_delta(self, piece: Piece) -> dict[str, Any]:
        """A choice of a chunk."""
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": piece.finish_reason,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        """The choice of a chunk that comes before any text, if there is one."""
        return None

    def to_whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._fields, "object": self.whole, "choices": choices, "usage": usage}

    def to_chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._fields, "object": self.chunk, "choices": choices, **more}

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


class ChatForm(Form):
    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def to_choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        piece = _joined(pieces)
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(piece, "message", message)

    def to_delta(self, piece: Piece) -> dict[str, Any]:
        return self._choice(piece, "delta", {"content": piece.text} if piece.text else {})

    def first(self, index: int) -> dict[str, Any]:
        return self._choice(Piece(index, ""), "delta", {"role": "assistant", "content": ""})

    def _choice(self, piece: Piece, name: str, said: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": piece.index,
            name: said,
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": piece.finish_reason,
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


def _joined(pieces: Sequence[Piece]) -> Piece:
    text = "".join(piece.text for piece in pieces)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Piece(pieces[0].index, text, tokens, pieces[-1].finish_reason)


def usage_of(generation: Generation, prompt_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generation.tokens,
        "total_tokens": prompt_tokens + generation.tokens,
        "prompt_tokens_details": {"cached_tokens": generation.reused},
    }


async def collect(generation: Generation, form: Form, prompt_tokens: int) -> dict[str, Any]:
    """The whole answer. Raises what iterating over ``generation`` raises."""
    pieces: dict[int, list[Piece]] = defaultdict(list)
    async for piece in generation:
        pieces[piece.index].append(piece)
    choices = [form.to_choice(pieces[index]) for index in sorted(pieces)]
    return form.to_whole(choices, usage_of(generation, prompt_tokens))


async def chunks(
    generation: Generation, form: Form, prompt_tokens: int, *, with_usage: bool
) -> AsyncIterator[bytes]:
    """The answer as server-sent events. What fails on the way is the last event but one."""
    introduced = set()
    try:
        async for piece in generation:
            if piece.index not in introduced:
                introduced.add(piece.index)
                if first := form.first(piece.index):
                    yield _event(form.to_chunk([first]))
            yield _event(form.to_chunk([form.to_delta(piece)]))
        if with_usage:
            yield _event(form.to_chunk([], usage=usage_of(generation, prompt_tokens)))
    except SwarmnetError as error:
        yield _event(of_swarm(error).body())
    yield b"data: [DONE]\n\n"


class EventStream(EventSourceResponse):
    """Server-sent events that own what they come from: it is given up as soon as nobody listens."""

    def __init__(self, events: AsyncIterator[bytes], owned: AsyncExitStack) -> None:
        super().__init__(
            events,
            ping=KEEP_ALIVE_S,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            sep="\n",
            send_timeout=60.0,
        )
        self._owned = owned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._owned:
            await super().__call__(scope, receive, send)


def _event(fields: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(fields, separators=(',', ':'))}\n\n".encode()
