"""Answering the lines of a batch, several at a time."""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from swarmnet.gateway.batches.journal import Journal
from swarmnet.gateway.batches.lines import ENDPOINTS, BatchLine, windows_by_prefix
from swarmnet.gateway.errors import ApiError, api_error
from swarmnet.gateway.generation.answering import check_places, generating
from swarmnet.gateway.generation.events import Usage
from swarmnet.gateway.generation.tokenization import PromptTokenizer
from swarmnet.gateway.metrics import ModelMetrics
from swarmnet.gateway.parsing import BodyParser
from swarmnet.gateway.protocols.endpoint import GenerationEndpoint, ServedAs, whole_answer
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

    ``key``: the owner of the KV caches that prompts may share. ``used`` is called with the usage of
    each answered line.
    """

    served: BatchedModel
    served_as: ServedAs
    tokenizer: PromptTokenizer
    parser: BodyParser
    metrics: ModelMetrics
    key: str = ""
    used: Callable[[Usage], None] = lambda _: None

    async def answer(self, line: BatchLine) -> dict[str, Any]:
        """Return the answer as a line of the journal. The refusal of a request is an answer, too.

        Raises ``Unreachable`` if the swarm does not answer for ``PATIENCE_S``.
        """
        clock = asyncio.get_running_loop().time
        until_s, pause_s, tries = clock() + PATIENCE_S, FIRST_PAUSE_S, 1
        while True:
            try:
                return _answered(line, 200, await self._generate(line))
            except (ApiError, SwarmnetError) as error:
                refused = api_error(error)
            if refused.status < 500 and refused.retry_after_s is None:
                return _answered(line, refused.status, refused.body())
            if refused.retry_after_s is None and tries == TRIES:
                return _answered(line, refused.status, refused.body())
            if clock() >= until_s:
                raise Unreachable(
                    f"the swarm has not answered for {PATIENCE_S / 60:g} minutes: {refused.message}",
                    hint="the same command continues where this one ended",
                )
            tries += refused.retry_after_s is None
            await asyncio.sleep(max(pause_s, refused.retry_after_s or 0))
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _generate(self, line: BatchLine) -> dict[str, Any]:
        endpoint: GenerationEndpoint[Any] = ENDPOINTS[line.url]
        body = self.parser.parse(
            json.dumps({"model": self.served_as.model, **line.body}).encode(), endpoint.body
        )
        wanted = endpoint.request(body, self.served.sampling)
        if wanted.model != self.served_as.model:
            message = f"there is no model {wanted.model[:200]!r} here, only {self.served_as.model!r}"
            raise ApiError(404, message, "model_not_found", param="model")
        if wanted.stream:
            raise ApiError(400, "a batch has no streams", "invalid_value", param="stream")
        check_places(self.served, wanted.choices)
        async with generating(wanted, self.served, self.tokenizer, self.metrics, self.key) as generation:
            fields = await whole_answer(generation, endpoint.writer(body, self.served_as))
            self.used(generation.usage)
            return fields


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
    """Answer the lines that ``journal`` lacks, and append the answers as they come.

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
