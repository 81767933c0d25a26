"""The account of each key: what it may use, what runs for it, what it has used, and what it keeps.

A key sees and changes its own account only.
"""

import asyncio
import hashlib
import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnet.gateway.batches.store import BatchStore
from swarmnet.gateway.errors import ApiError, RequestCancelled
from swarmnet.gateway.generation.events import Usage
from swarmnet.gateway.generation.generation import Generation
from swarmnet.gateway.protocols.kept_responses import KeptResponses
from swarmnet_protocols.machine.aio import loop_time, race
from swarmnet_protocols.net.limits.rate_limit import UNLIMITED, RateLimit, TokenBucket

MINUTE_S = 60.0
BATCHES_LEAVE = 0.5
"""Share of a quota that batches leave to other requests of their key. With less, the quota refuses
more requests of the key while a batch runs. With more, batches wait longer for the quota."""


@dataclass(frozen=True)
class Quota:
    """Limits of each key; None for no limit. Each choice of a request counts as one request."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    @property
    def max_choices(self) -> float:
        """Choices of the largest request that the limits admit at all."""
        return min(self.requests_per_minute or math.inf, self.concurrent or math.inf)


@dataclass(frozen=True, eq=False)
class RunningRequest:
    """A request that is being answered.

    ``path``: the path of its endpoint. ``created``: seconds since the epoch. ``is_listed``: False
    for a line of a batch, which ``/v1/usage`` leaves out.
    """

    path: str
    model: str
    created: int
    generation: Generation
    is_listed: bool = True
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


class Account:
    """The quota, the use, the running requests and the kept files of one key.

    1. ``check`` refuses a key that has used up its quota, before its request is read.
    2. ``admitted`` counts a request in the quota. ``admitted_later`` waits for the quota.
    3. ``running`` counts the request and its tokens as used.
    """

    def __init__(self, name: str, quota: Quota, kept: KeptResponses, files: BatchStore | None) -> None:
        """``name``: the name of the key. ``files``: None if the endpoint keeps no files."""
        self.name = name
        self.kept = kept
        self._files = files
        self._quota = quota
        self._choices = _bucket(quota.requests_per_minute)
        self._tokens = _bucket(quota.tokens_per_minute)
        self._begun = {True: 0, False: 0}
        """Choices that have begun and not ended: of batches, and of all other requests."""
        self._turn = asyncio.Lock()
        """Held by the one line of a batch that waits for the quota. Others wait for the lock."""
        self._released = asyncio.Event()
        self._requests = 0
        self._ended = Usage()
        """The tokens and trips of the requests that have ended."""
        self._running: dict[str, RunningRequest] = {}

    @property
    def files(self) -> BatchStore:
        """The files and batches of the key. Raises ``ApiError`` if this endpoint keeps none."""
        if self._files is None:
            message = "another endpoint of this user has these batches"
            raise ApiError(503, message, "batches_elsewhere", "server_error")
        return self._files

    def check(self) -> None:
        """Raise ``ApiError`` as ``admitted`` would for one choice."""
        if refusal := self._refusal(1):
            raise refusal

    @contextmanager
    def admitted(self, choices: int) -> Iterator[None]:
        """Count a request for ``choices`` choices as begun while the context is open.

        Raises ``ApiError``: 429 if the key's quota is used up, 400 if the request is larger than
        the quota.
        """
        self._check_size(choices)
        if refusal := self._refusal(choices):
            raise refusal
        with self._counted(choices):
            yield

    @asynccontextmanager
    async def admitted_later(self, choices: int) -> AsyncIterator[None]:
        """Wait until the quota has room for a line of a batch, then count it like ``admitted``.

        Other requests go first. Raises ``ApiError`` if the line is larger than the quota.
        """
        self._check_size(choices)
        with ExitStack() as stack:
            async with self._turn:
                while refusal := self._refusal(choices, BATCHES_LEAVE):
                    self._released.clear()
                    await race(self._released.wait(), asyncio.sleep(refusal.retry_after_s or 1, True))
                stack.enter_context(self._counted(choices, in_batch=True))
            yield

    @contextmanager
    def running(self, request: RunningRequest) -> Iterator[None]:
        """Count a request and its tokens. It runs while the context is open."""
        self._requests += 1
        self._running[request.id] = request
        self._tokens.spend(request.generation.sent_tokens, loop_time())
        try:
            yield
        finally:
            del self._running[request.id]
            usage = request.generation.usage
            self._ended.add(usage)
            self._tokens.spend(usage.completion_tokens, loop_time())

    def count(self, usage: Usage) -> None:
        """Count a request whose tokens are known before it runs."""
        self._requests += 1
        self._ended.add(usage)
        self._tokens.spend(usage.prompt_tokens, loop_time())

    def count_invalid(self) -> None:
        """Count an invalid request as one choice, because parsing it took time."""
        self._choices.spend(1, loop_time())

    def cancel(self, request_id: str) -> None:
        """End a running request with an error. Raises ``ApiError`` if this key runs no request with
        this id."""
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
            "running": [request.fields() for request in self._running.values() if request.is_listed],
        }

    def _check_size(self, choices: int) -> None:
        if choices > self._quota.max_choices:
            message = f"this key may have {self._quota.max_choices:g} choices at once, not {choices}"
            raise ApiError(400, message, "invalid_value", param="n")

    def _refusal(self, choices: int, leave: float = 0.0) -> ApiError | None:
        """Return why ``choices`` choices cannot begin now, or None if they can.

        ``leave``: the share of the quota to leave to other requests. Above 0 for a batch, which
        counts all choices that have begun. A request does not count the choices of batches.
        """
        most, begun = self._quota.concurrent, self._begun[False] + (self._begun[True] if leave else 0)
        if most is not None and begun + choices > most:
            message = f"this key may have {most} choices at a time, and has {begun}"
            return _rate_limited(message, "concurrency_limit_exceeded", 1.0)
        for bucket, amount, what in (
            (self._choices, choices, "ask for {:g} choices"),
            (self._tokens, 1, "use {:g} tokens"),
        ):
            full = bucket.limit.burst
            needed = min(full, amount + leave * full) if leave else amount
            if (wait_s := bucket.wait_s(loop_time(), needed)) > 0:
                message = f"this key may {what.format(full)} a minute"
                return _rate_limited(message, "rate_limit_exceeded", wait_s)
        return None

    @contextmanager
    def _counted(self, choices: int, *, in_batch: bool = False) -> Iterator[None]:
        self._choices.spend(choices, loop_time())
        self._begun[in_batch] += choices
        try:
            yield
        finally:
            self._begun[in_batch] -= choices
            self._released.set()


class KeyAccounts(dict[str, Account]):
    """The accounts by the names of their keys: the gateway's keys, and keys with files on disk."""

    def __init__(self, quota: Quota, clock: Callable[[], float]) -> None:
        """``clock``: seconds since the epoch."""
        self._quota = quota
        self._clock = clock
        self._folder: Path | None = None

    def __missing__(self, name: str) -> Account:
        return self._add(name)

    def _add(self, name: str) -> Account:
        files = None
        if self._folder is not None:
            place = self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]
            files = BatchStore(place, name, self._clock)
        account = self[name] = Account(name, self._quota, KeptResponses(self._clock), files)
        return account

    def keep_files(self, folder: Path) -> None:
        """Keep the files of all keys in ``folder`` from now on, and add the accounts with files
        there. No other process may use the folder."""
        self._folder = folder
        for path in folder.glob("*/key"):
            self._add(json.loads(path.read_text()))


def _bucket(per_minute: int | None) -> TokenBucket:
    return TokenBucket(RateLimit(per_minute / MINUTE_S, per_minute) if per_minute else UNLIMITED)


def _rate_limited(message: str, code: str, wait_s: float) -> ApiError:
    return ApiError(429, message, code, "rate_limit_error", retry_after_s=max(1, math.ceil(wait_s)))
