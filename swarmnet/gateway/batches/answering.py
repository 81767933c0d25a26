"""Answering the lines of a batch, several at a time."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from swarmnet.gateway.accounts import Account, RunningRequest
from swarmnet.gateway.batches.journal import Journal
from swarmnet.gateway.batches.lines import ENDPOINTS, BatchLine, windows_by_prefix
from swarmnet.gateway.errors import ApiError, api_error
from swarmnet.gateway.generation.answering import check_places, generating
from swarmnet.gateway.generation.requests import Prompt
from swarmnet.gateway.models import OpenedModel
from swarmnet.gateway.parsing import validated
from swarmnet.gateway.protocols.endpoint import GenerationEndpoint, ServedAs, whole_answer
from swarmnet_client.model.sampling import USUAL_SAMPLING
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
    """Answers single lines with the models that they name.

    - ``using``: opens a model by its name. For ``auto``, the prompt decides which model.
    - ``usual_name``: the model of lines that name none.
    - ``account``: pays for the answers, and owns the KV caches that prompts may share.
    - ``places``: bounds the answers that are computed at a time. Keys may share it.
    """

    using: Callable[[str, Callable[[], Prompt]], AbstractAsyncContextManager[OpenedModel]]
    served_as: Callable[[OpenedModel, Account], ServedAs]
    usual_name: str
    account: Account
    places: asyncio.Semaphore

    async def answer(self, line: BatchLine) -> dict[str, Any]:
        """Return the answer as a line of the journal. The refusal of a request is an answer, too.

        Waits for the quota of the account. Raises ``Unreachable`` if the swarm does not answer for
        ``PATIENCE_S``.
        """
        endpoint: GenerationEndpoint[Any] = ENDPOINTS[line.url]
        try:
            body = validated({"model": self.usual_name, **line.body}, endpoint.body)
            # checks the line before its model opens, which has a usual sampling of its own
            wanted = endpoint.request(body, USUAL_SAMPLING)
            if wanted.stream:
                raise ApiError(400, "a batch has no streams", "invalid_value", param="stream")
        except ApiError as refused:
            async with self.account.admitted_later(1):
                return _answered(line, refused.status, refused.body())
        try:
            async with self.account.admitted_later(wanted.choices), self.places:
                return _answered(line, 200, await self._insist(endpoint, body, wanted.prompt))
        except ApiError as refused:
            return _answered(line, refused.status, refused.body())

    async def _insist(self, endpoint: GenerationEndpoint[Any], body: Any, prompt: Prompt) -> dict[str, Any]:
        """Return the answer, even if it takes several tries. Raises ``ApiError``."""
        clock = asyncio.get_running_loop().time
        until_s, pause_s, tries = clock() + PATIENCE_S, FIRST_PAUSE_S, 1
        while True:
            try:
                return await self._generate(endpoint, body, prompt)
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

    async def _generate(self, endpoint: GenerationEndpoint[Any], body: Any, prompt: Prompt) -> dict[str, Any]:
        async with self.using(body.model, lambda: prompt) as model:
            batched = model.batched.for_batches()
            wanted = endpoint.request(body, batched.sampling)
            check_places(batched, wanted.choices)
            async with generating(
                wanted, batched, model.tokenizer, model.metrics, self.account.name
            ) as generation:
                running = RunningRequest(endpoint.path, model.name, 0, generation, is_listed=False)
                with self.account.running(running):
                    return await whole_answer(
                        generation, endpoint.writer(body, self.served_as(model, self.account))
                    )


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
