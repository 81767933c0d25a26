"""The use of each key since the gateway started, and its running requests.

A key sees and cancels its own requests only.
"""

import secrets
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from swarmnet.gateway.errors import ApiError, RequestCancelled
from swarmnet.gateway.generation.events import Usage
from swarmnet.gateway.generation.generation import Generation


@dataclass(frozen=True, eq=False)
class RunningRequest:
    """A request that is being answered.

    ``path``: the endpoint it came to. ``created``: seconds since the epoch.
    """

    path: str
    model: str
    created: int
    generation: Generation
    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")

    def fields(self) -> dict[str, Any]:
        usage = self.generation.usage
        return {
            "id": self.id,
            "object": "request",
            "endpoint": self.path,
            "model": self.model,
            "created": self.created,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        }


class KeyUsage:
    """The use of one key."""

    def __init__(self) -> None:
        self._requests = 0
        self._ended = Usage()
        """The tokens and trips of the requests that have ended."""
        self._running: dict[str, RunningRequest] = {}

    @contextmanager
    def running(self, request: RunningRequest) -> Iterator[None]:
        """Count a request, which runs while the context is open."""
        self._requests += 1
        self._running[request.id] = request
        try:
            yield
        finally:
            del self._running[request.id]
            self._ended.add(request.generation.usage)

    def answered(self, usage: Usage) -> None:
        """Count a request that has been answered."""
        self._requests += 1
        self._ended.add(usage)

    def cancel(self, request_id: str) -> None:
        """End a running request with an error. Raises ``ApiError`` if this key has none with this
        id."""
        if (found := self._running.get(request_id)) is None:
            message = f"this key has no running request {request_id[:64]!r}: GET /v1/usage lists them"
            raise ApiError(404, message, "request_not_found")
        found.generation.fail(RequestCancelled())

    def fields(self) -> dict[str, Any]:
        """Return the object that ``/v1/usage`` answers."""
        total = Usage()
        for each in (self._ended, *(running.generation.usage for running in self._running.values())):
            total.add(each)
        return {
            "object": "usage",
            "requests": self._requests,
            "prompt_tokens": total.prompt_tokens,
            "completion_tokens": total.completion_tokens,
            "cached_tokens": total.cached_tokens,
            "trips": total.trips,
            "running": [request.fields() for request in self._running.values()],
        }


class UsageByKey(defaultdict[str, KeyUsage]):
    """The use of all keys by their names. There are as many as the gateway was given keys."""

    def __init__(self) -> None:
        super().__init__(KeyUsage)
