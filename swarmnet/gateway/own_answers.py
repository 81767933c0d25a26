"""Answers for the commands of the user who runs the endpoint: with tokens, hosts and progress.

`swarmnet run` asks here instead of joining the swarm itself (``swarmnet/resident.py``). The
response is a stream of JSON lines:

1. ``{"done": 256, "total": 2048}`` while a long prompt is read;
2. ``{"token": 5, "text": " the"}`` for each token;
3. ``{"text": "", "prompt_tokens": 9, "report": {...}}``, or ``{"error": "...", "hint": "..."}``.
"""

import hmac
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.detokenizer import IncrementalDetokenizer
from swarmnet.gateway.generation.requests import ChatPrompt
from swarmnet.gateway.generation.tokenization import PromptTokenizer
from swarmnet.gateway.protocols.endpoint import LineStreamResponse
from swarmnet.gateway.protocols.schemas import (
    MAX_BIASES,
    BadWords,
    Bias,
    BiasedToken,
    Messages,
    MinP,
    RepetitionPenalty,
    StrictModel,
    Tokens,
    TopK,
    TopP,
    at_most,
)
from swarmnet_client.batching import answers
from swarmnet_client.batching.continuous_batching import BatchedModel
from swarmnet_client.model.sampling import sampling_of
from swarmnet_protocols.errors import SwarmnetError

OWNER = "this user"
"""Owner of the KV caches that these answers leave."""


class OwnRequest(StrictModel):
    """A prompt of `swarmnet run`: a text, the messages of a chat, or its tokens."""

    model: str = ""
    text: str | None = None
    ids: Tokens | None = None
    messages: Messages | None = None
    max_new_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: TopP = None
    seed: int | None = Field(None, ge=0)
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    bad_words: BadWords = Field(default_factory=list)
    biases: Annotated[list[tuple[BiasedToken, Bias]], at_most(MAX_BIASES)] = Field(default_factory=list)
    speculate: bool = True


def check_key(request: Request, key: str) -> None:
    """Raise ``ApiError`` unless the request has the secret of this endpoint."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not key or not hmac.compare_digest(given.encode(), key.encode()):
        raise ApiError(404, "there is nothing at this path", "not_found")


async def answer_own(
    served: BatchedModel, tokenizer: PromptTokenizer, body: OwnRequest, stack: AsyncExitStack
) -> StreamingResponse:
    """Answer a prompt; ``stack`` is closed when the stream ends. Raises ``ApiError`` if the prompt
    does not fit, and ``Overloaded``."""
    if body.ids is not None:
        ids = body.ids
        tokenizer.check_ids(ids, "ids")
    elif body.messages is None:
        ids = await tokenizer.encode(body.text or "", special_tokens=True)
    else:
        chat = ChatPrompt(tuple(message.message() for message in body.messages))
        ids = await tokenizer.encode_chat(chat, generation_prompt=True)
    room = served.context - len(ids)
    if room < 1 or not ids:
        message = f"the prompt has {len(ids)} tokens and the model takes {served.context}"
        raise ApiError(400, message, "context_length_exceeded")
    tokenizer.check_ids(dict(body.biases), "biases")
    sampling = await tokenizer.run(sampling_of, body, served.sampling, served.tokenizer)
    wanted = answers.Request(
        tuple(ids),
        min(body.max_new_tokens, room),
        sampling,
        served.end_ids,
        owner=OWNER,
        adapter=served.adapter,
        speculate=body.speculate and served.speculates,
    )
    answer = await stack.enter_async_context(served.batcher.answer(wanted))
    lines = _lines(served, answer, ids if body.messages is None else ())
    encoded = (json.dumps(line).encode() + b"\n" async for line in lines)
    return LineStreamResponse(encoded, stack.pop_all())


async def _lines(
    served: BatchedModel, answer: answers.Answer, prompt: Sequence[int]
) -> AsyncIterator[dict[str, Any]]:
    detokenizer = IncrementalDetokenizer(served.tokenizer, prompt)
    chain, before = answer.report, asdict(answer.report)
    try:
        async for news in answer.news():
            if isinstance(news, answers.Prefill):
                yield asdict(news)
                continue
            if answer.report is not chain:
                chain, before = answer.report, asdict(answer.report)
            yield {"token": news.id, "text": detokenizer.push(news.id)}
    except SwarmnetError as error:
        yield {"error": str(error), "hint": error.hint}
        return
    report = _since(before, asdict(answer.report)) | {"trips": answer.trips}
    yield {"text": detokenizer.flush(), "prompt_tokens": len(answer.request.ids), "report": report}


def _since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a chain's report ``now`` that is newer than ``before``: the chain has also
    computed earlier answers."""
    stall_s = now["longest_stall_s"] if now["longest_stall_s"] > before["longest_stall_s"] else 0.0
    return {
        **now,
        "failovers": now["failovers"] - before["failovers"],
        "audits": now["audits"] - before["audits"],
        "wrong": now["wrong"][len(before["wrong"]) :],
        "longest_stall_s": stall_s,
    }
