"""What each key may use. Pure: takes the time as an argument."""

import math
from collections import defaultdict
from dataclasses import dataclass

from swarmnet.gateway.failures import ApiError
from swarmnet_protocols.net.rate_limit import RateLimit, TokenBucket

MINUTE_S = 60.0


@dataclass(frozen=True)
class Quota:
    """The most that one key may use; None: as much as there is. Every choice of a request counts as an answer."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    @property
    def most_at_once(self) -> float:
        """The most answers that a single request may ever ask for."""
        return min(self.requests_per_minute or math.inf, self.concurrent or math.inf)


def _bucket(per_minute: int) -> TokenBucket:
    return TokenBucket(RateLimit(per_minute / MINUTE_S, per_minute))


class _Account:
    def __init__(self, quota: Quota) -> None:
        self.running = 0
        self.requests = _bucket(quota.requests_per_minute) if quota.requests_per_minute else None
        self.tokens = _bucket(quota.tokens_per_minute) if quota.tokens_per_minute else None


class Quotas:
    """Counts what keys use. Whoever is let in has to be seen out."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._accounts: dict[str, _Account] = defaultdict(lambda: _Account(quota))

    def enter(self, key: str, answers: int, now: float) -> None:
        """Count a request for so many answers.

        Raises ``ApiError``: 429 when the key has used up what it may, 400 for more than it may ever have at once.
        """
        if answers > self._quota.most_at_once:
            message = f"this key may have {self._quota.most_at_once:g} answers at once, not {answers}"
            raise ApiError(400, message, "invalid_value", param="n")
        account = self._check(key, answers, now)
        if account.requests:
            account.requests.take(answers, now)
        account.running += answers

    def check(self, key: str, now: float) -> None:
        """Raise ``ApiError`` as ``enter`` would for a single answer. For requests whose body is not read yet."""
        self._check(key, 1, now)

    def count_wrong(self, key: str, now: float) -> None:
        """Count a request that was read and is wrong, as one answer: to find that out was work too."""
        account = self._accounts[key]
        if account.requests:
            account.requests.take(1, now)

    def _check(self, key: str, answers: int, now: float) -> _Account:
        account = self._accounts[key]
        limit = self._quota.concurrent
        if limit is not None and account.running + answers > limit:
            message = f"this key may have {limit} answers at a time, and has {account.running}"
            raise _refusal(message, "concurrency_limit_exceeded", 1.0)
        if account.requests and (wait_s := account.requests.wait_s(now, answers)) > 0:
            limit = self._quota.requests_per_minute
            raise _refusal(f"this key may ask for {limit} answers a minute", "rate_limit_exceeded", wait_s)
        if account.tokens and (wait_s := account.tokens.wait_s(now, 1.0)) > 0:
            limit = self._quota.tokens_per_minute
            raise _refusal(f"this key may use {limit} tokens a minute", "rate_limit_exceeded", wait_s)
        return account

    def use(self, key: str, tokens: int, now: float) -> None:
        """Count tokens of prompts and answers."""
        account = self._accounts[key]
        if account.tokens:
            account.tokens.take(tokens, now)

    def leave(self, key: str, answers: int) -> None:
        self._accounts[key].running -= answers


def _refusal(message: str, code: str, wait_s: float) -> ApiError:
    return ApiError(429, message, code, "rate_limit_error", retry_after_s=max(1, math.ceil(wait_s)))
