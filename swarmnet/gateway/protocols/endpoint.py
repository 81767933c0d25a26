"""An endpoint that generates, and the response to one request: whole, or as a stream.

A protocol is one module of this folder. It has

1. the body of its requests, a :class:`StrictModel`, with a function to the core's request;
2. an :class:`AnswerWriter`, which writes the core's events as the protocol's own;
3. a :class:`GenerationEndpoint` that names both. ``app.py`` lists the endpoints.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi.responses import Response, StreamingResponse
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from swarmnet.gateway.errors import ApiError, swarm_error
from swarmnet.gateway.generation.events import AnsweredChoice, Delta, Usage, whole_choices
from swarmnet.gateway.generation.generation import Generation
from swarmnet.gateway.generation.requests import GenerationRequest
from swarmnet.gateway.protocols.kept_responses import KeptResponses
from swarmnet.gateway.protocols.schemas import StrictModel
from swarmnet_client.batching.answers import Prefill
from swarmnet_client.model.sampling import Sampling
from swarmnet_protocols.errors import SwarmnetError

KEEP_ALIVE_S = 10.0
"""Seconds without an event after which a stream sends a comment, because proxies close idle
connections."""
B = TypeVar("B", bound=StrictModel)


@dataclass(frozen=True)
class ServedAs:
    """The model as a response names it, and the caller's kept responses.

    ``created``: seconds since the epoch.
    """

    model: str
    tokenizer: Any
    created: int
    fingerprint: str
    kept: KeptResponses


class AnswerWriter(ABC):
    """Writes the response to one request."""

    @abstractmethod
    def whole(self, choices: Sequence[AnsweredChoice], usage: Usage) -> dict[str, Any]:
        """Return the whole response."""

    def begin(self, usage: Usage) -> Iterable[bytes]:
        """Return what precedes the first event of a stream."""
        return ()

    @abstractmethod
    def event(self, event: Delta, usage: Usage) -> Iterable[bytes]:
        """Return an event of the core as a part of a stream. ``usage``: what was used so far."""

    def progress(self, prefill: Prefill) -> Iterable[bytes]:
        """Return how far a long prompt is; clients ignore comments."""
        return (f": prefill {prefill.done}/{prefill.total}\n\n".encode(),)

    @abstractmethod
    def end(self, usage: Usage) -> Iterable[bytes]:
        """Return the end of a stream whose choices have all ended."""

    @abstractmethod
    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Return the end of a stream that failed."""

    def response(self, parts: AsyncIterator[bytes], resources: AsyncExitStack) -> Response:
        """Return a streamed response. It closes ``resources`` when it ends."""
        return EventStreamResponse(parts, resources)


@dataclass(frozen=True)
class GenerationEndpoint(Generic[B]):
    """One way to ask for an answer.

    - ``body``: the schema of its requests.
    - ``request``: translates a body for the core. Its second argument is the sampling that the
      model's files state. Raises ``ApiError``.
    - ``writer``: makes the writer of the response to a body.
    """

    path: str
    body: type[B]
    request: Callable[[B, Sampling], GenerationRequest]
    writer: Callable[[B, ServedAs], AnswerWriter]


async def whole_answer(generation: Generation, writer: AnswerWriter) -> dict[str, Any]:
    """Wait for all choices; returns the complete response. Raises ``SwarmnetError`` when one
    fails."""
    events = [event async for event in generation if isinstance(event, Delta)]
    return writer.whole(whole_choices(events), generation.usage)


async def answer_parts(generation: Generation, writer: AnswerWriter) -> AsyncIterator[bytes]:
    """Yield the parts of a streamed response."""
    try:
        for part in writer.begin(generation.usage):
            yield part
        async for event in generation:
            if isinstance(event, Delta):
                written = writer.event(event, generation.usage)
            else:
                written = writer.progress(event) if event.done < event.total else ()
            for part in written:
                yield part
        for part in writer.end(generation.usage):
            yield part
    except SwarmnetError as error:
        for part in writer.failed(swarm_error(error)):
            yield part


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


class LineStreamResponse(StreamingResponse):
    """A streamed response of JSON lines that closes ``resources`` as soon as the client disconnects
    or the stream ends."""

    def __init__(self, lines: AsyncIterator[bytes], resources: AsyncExitStack) -> None:
        super().__init__(lines, media_type="application/x-ndjson")
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)


def server_sent(fields: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event with ``fields`` as JSON, and a ``name`` if the protocol has
    names."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(fields, separators=(',', ':'))}\n\n".encode()
