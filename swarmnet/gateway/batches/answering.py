"""Answering the lines of a batch, several at a time."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from swarmnet.gateway.accounts import Account, RunningRequest
from swarmnet.gateway.batches.journal import Journal
from swarmnet.gateway.batches.lines import ENDPOINTS, BatchLine, windows_by_prefix
from swarmnet.gateway.errors import ApiError, api_error
from swarmnet.gateway.generation.answering import check_places, generating
from swarmnet.gateway.generation.requests import GenerationRequest
from swarmnet.gateway.generation.tokenization import PromptTokenizer
from swarmnet.gateway.metrics import ModelMetrics
from swarmnet.gateway.parsing import validated
from swarmnet.gateway.protocols.endpoint import (
    AnswerWriter,
    GenerationEndpoint,
    ServedAs,
    whole_answer,
)
from swarmnet_client.batching.continuous_batching import BatchedModel
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import all_of

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""Longest pause before a line is tried again."""
PATIENCE_S = 600.0
"""Seconds for which a line is tried while the swarm does not answer. With less, hosts that restart
would end a batch. With more, its owner learns too late that the swarm is gone."""
TRIES = 3
"""Tries of a line after errors that a repetition rarely mends."""


@dataclass(frozen=True)
class LineAnswerer:
    """Answers single lines with a model.

    ``account``: pays for the answers, and owns the KV caches that prompts may share. ``places``:
    for answers that are computed at a time, also of other keys.
    """

    served: BatchedModel
    served_as: ServedAs
    tokenizer: PromptTokenizer
    metrics: ModelMetrics
    account: Account
    places: asyncio.Semaphore

    async def answer(self, line: BatchLine) -> dict[str, Any]:
        """Return the answer as a line of the journal. The refusal of a request is an answer, too.

        Waits for the quota of the account. Raises ``Unreachable`` if the swarm does not answer for
        ``PATIENCE_S``.
        """
        endpoint: GenerationEndpoint[Any] = ENDPOINTS[line.url]
        try:
            body = validated({"model": self.served_as.model, **line.body}, endpoint.body)
            wanted = self._wanted(endpoint.request(body, self.served.sampling))
        except ApiError as refused:
            async with self.account.admitted_later(1):
                return _answered(line, refused.status, refused.body())
        try:
            async with self.account.admitted_later(wanted.choices), self.places:
                writer = endpoint.writer(body, self.served_as)
                return _answered(line, 200, await self._insist(wanted, line.url, writer))
        except ApiError as refused:
            return _answered(line, refused.status, refused.body())

    def _wanted(self, wanted: GenerationRequest) -> GenerationRequest:
        """Return a request that a batch may make. Raises ``ApiError`` for any other."""
        if wanted.model != self.served_as.model:
            message = f"there is no model {wanted.model[:200]!r} here, only {self.served_as.model!r}"
            raise ApiError(404, message, "model_not_found", param="model")
        if wanted.stream:
            raise ApiError(400, "a batch has no streams", "invalid_value", param="stream")
        return wanted

    async def _insist(self, wanted: GenerationRequest, url: str, writer: AnswerWriter) -> dict[str, Any]:
        """Return the answer, even if it takes several tries. Raises ``ApiError``."""
        clock = asyncio.get_running_loop().time
        until_s, pause_s, tries = clock() + PATIENCE_S, FIRST_PAUSE_S, 1
        while True:
            try:
                return await self._generate(wanted, url, writer)
            except (ApiError, SwarmnetError) as error:
                refused = api_error(error)
            if refused.retry_after_s is None and (refused.status < 500 or tries == TRIES):
                raise refused
            if clock() >= until_s:
                raise Unreachable(
                    f"the swarm has not answered for {PATIENCE_S / 60:g} minutes: {refused.message}",
                    hint="the same command continues where this one ended",
                )
            tries += refused.retry_after_s is None
            await asyncio.sleep(max(pause_s, refused.retry_after_s or 0))
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _generate(self, wanted: GenerationRequest, url: str, writer: AnswerWriter) -> dict[str, Any]:
        check_places(self.served, wanted.choices)
        async with generating(
            wanted, self.served, self.tokenizer, self.metrics, self.account.name
        ) as generation:
            running = RunningRequest(url, self.served_as.model, 0, generation, is_listed=False)
            with self.account.running(running):
                return await whole_answer(generation, writer)


def _answered(line: BatchLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": line.id, "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


async def answer_lines(
    lines: Iterator[BatchLine],
    journal: Journal,
    answerer: LineAnswerer,
    at_once: int,
    report: Callable[[], None],
) -> None:
    """Answer the lines that ``journal`` lacks, ``at_once`` at a time, and append the answers.

    Lines with a common beginning follow each other. ``report`` is called after each answer. Raises
    ``Unreachable``; a later call continues.
    """
    windows = windows_by_prefix(line for line in lines if line.custom_id not in journal.ids)
    ready: deque[BatchLine] = deque()
    reading = asyncio.Lock()

    async def next_line() -> BatchLine | None:
        async with reading:
            if not ready:  # in a thread, so that other lines are answered meanwhile
                ready.extend(await asyncio.to_thread(next, windows, ()))
            return ready.popleft() if ready else None

    async def work() -> None:
        while (line := await next_line()) is not None:
            journal.append(await answerer.answer(line))
            report()
            if journal.is_sync_due:
                await asyncio.to_thread(journal.sync)

    await all_of(*(work() for _ in range(at_once)))
