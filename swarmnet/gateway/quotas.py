"""Rate and concurrency limits for each API key. Pure: the time is an argument."""

import math
from collections import defaultdict
from dataclasses import dataclass

from swarmnet.gateway.errors import ApiError
from swarmnet_protocols.net.limits.rate_limit import RateLimit, TokenBucket

MINUTE_S = 60.0


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


def _bucket(per_minute: int) -> TokenBucket:
    return TokenBucket(RateLimit(per_minute / MINUTE_S, per_minute))


class _Usage:
    """The use of one key."""

    def __init__(self, quota: Quota) -> None:
        self.running = 0
        self.requests = _bucket(quota.requests_per_minute) if quota.requests_per_minute else None
        self.tokens = _bucket(quota.tokens_per_minute) if quota.tokens_per_minute else None


class QuotaTracker:
    """The usage of all keys. Each ``admit`` needs one ``release``, when the request ends."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._keys: dict[str, _Usage] = defaultdict(lambda: _Usage(quota))

    def admit(self, key: str, choices: int, now: float) -> None:
        """Count a request for ``choices`` choices.

        Raises ``ApiError``: 429 if the key's quota is used up, 400 if the request is larger than
        the quota.
        """
        if choices > self._quota.max_choices:
            message = f"this key may have {self._quota.max_choices:g} choices at once, not {choices}"
            raise ApiError(400, message, "invalid_value", param="n")
        usage = self._check(key, choices, now)
        if usage.requests:
            usage.requests.spend(choices, now)
        usage.running += choices

    def check(self, key: str, now: float) -> None:
        """Raise ``ApiError`` as ``admit`` would for one choice. Called before the body of a request
        is read."""
        self._check(key, 1, now)

    def count_invalid(self, key: str, now: float) -> None:
        """Count an invalid request as one choice, because parsing it took time."""
        usage = self._keys[key]
        if usage.requests:
            usage.requests.spend(1, now)

    def use_tokens(self, key: str, tokens: int, now: float) -> None:
        """Count tokens of prompts and completions."""
        usage = self._keys[key]
        if usage.tokens:
            usage.tokens.spend(tokens, now)

    def release(self, key: str, choices: int) -> None:
        """End a request that was admitted with ``choices`` choices."""
        self._keys[key].running -= choices

    def _check(self, key: str, choices: int, now: float) -> _Usage:
        usage = self._keys[key]
        limit = self._quota.concurrent
        if limit is not None and usage.running + choices > limit:
            message = f"this key may have {limit} choices at a time, and has {usage.running}"
            raise _rate_limited(message, "concurrency_limit_exceeded", 1.0)
        if usage.requests and (wait_s := usage.requests.wait_s(now, choices)) > 0:
            limit = self._quota.requests_per_minute
            raise _rate_limited(
                f"this key may ask for {limit} choices a minute", "rate_limit_exceeded", wait_s
            )
        if usage.tokens and (wait_s := usage.tokens.wait_s(now, 1.0)) > 0:
            limit = self._quota.tokens_per_minute
            raise _rate_limited(f"this key may use {limit} tokens a minute", "rate_limit_exceeded", wait_s)
        return usage


def _rate_limited(message: str, code: str, wait_s: float) -> ApiError:
    return ApiError(429, message, code, "rate_limit_error", retry_after_s=max(1, math.ceil(wait_s)))
