"""Answering the lines of a batch, several at a time.

1. The file is read in windows. In a window, lines with a common beginning follow each other.
2. If a model cannot answer now, its lines are left out. Lines of other models go on.
3. The file is read again until no line is left out (``UnansweredLines``).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from swarmnet.gateway.accounts import Account, RunningRequest
from swarmnet.gateway.batches.journal import Journal
from swarmnet.gateway.batches.lines import ENDPOINTS, BatchLine, windows_by_prefix
from swarmnet.gateway.errors import NO_ROUTE, OVERLOADED, ApiError, api_error
from swarmnet.gateway.generation.answering import check_places, generating
from swarmnet.gateway.generation.requests import Prompt
from swarmnet.gateway.models import OpenedModel
from swarmnet.gateway.parsing import validated
from swarmnet.gateway.protocols.endpoint import GenerationEndpoint, ServedAs, whole_answer
from swarmnet_client.model.sampling import USUAL_SAMPLING
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import all_of, loop_time

PAUSE_S = 1.0
"""Seconds until a line is tried again, once more for each failure in a row."""
AWAY_S = 15.0
"""Seconds until a model that cannot answer is tried again. With less, large files are read again
too often. With more, lines wait longer for a model that has come back."""
PATIENCE_S = 600.0
"""Seconds without any answer until a batch stops. With less, hosts that restart would end a batch.
With more, its owner learns too late that the swarm is gone."""
TRIES = 3
"""Tries of a line in a row. With more, a line that always fails, or a busy model, delays others."""


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

        Waits for the quota of the account. Raises ``Unreachable`` if the model cannot answer now.
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
            async with self.account.admitted_later(wanted.choices):
                return _answered(line, 200, await self._insist(endpoint, body, wanted.prompt))
        except ApiError as refused:
            if refused.retry_after_s is not None:
                raise Unreachable(refused.message) from refused
            return _answered(line, refused.status, refused.body())

    async def _insist(self, endpoint: GenerationEndpoint[Any], body: Any, prompt: Prompt) -> dict[str, Any]:
        """Return the answer, even if it takes several tries. Raises ``ApiError``, with a time to
        try again if no line of the model can be answered now."""
        tries = 1
        while True:
            try:
                async with self.places:
                    return await self._generate(endpoint, body, prompt)
            except (ApiError, SwarmnetError) as error:
                refused = api_error(error)
            may_pass = refused.retry_after_s is None or refused.code in (OVERLOADED, NO_ROUTE)
            if refused.status < 500 or not may_pass or tries == TRIES:
                raise refused
            await asyncio.sleep(max(tries * PAUSE_S, refused.retry_after_s or 0))
            tries += 1

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


class UnansweredLines:
    """The lines that a journal lacks, in passes over the file.

    A pass leaves out the lines of models that cannot answer now. If a model could not answer, one
    of its lines is tried before the others.
    """

    def __init__(self, read: Callable[[], Iterable[BatchLine]], journal: Journal) -> None:
        """``read`` reads all lines from the beginning."""
        self._read = read
        self._journal = journal
        self._answered_s = loop_time()
        self._is_complete = False
        """True if the last pass has left no line out."""
        self._why = ""
        """The last reason why a model could not answer."""
        self._away: dict[str, float] = {}
        """Models that cannot answer, each with the loop time of its next try."""
        self._windows: Iterator[list[BatchLine]] = iter(())
        self._ready: deque[BatchLine] = deque()
        self._reading = asyncio.Lock()

    async def begin_pass(self) -> bool:
        """Begin a pass when a model may be tried. Return False if no line is left.

        Raises ``Unreachable`` if the last answer came ``PATIENCE_S`` ago.
        """
        if self._is_complete:
            return False
        if loop_time() - self._answered_s >= PATIENCE_S:
            raise Unreachable(
                f"the swarm has not answered for {PATIENCE_S / 60:g} minutes: {self._why}",
                hint="the same command continues where this one ended",
            )
        await asyncio.sleep(min(self._away.values(), default=0.0) - loop_time())
        self._is_complete, ids = True, self._journal.ids
        self._windows = windows_by_prefix(line for line in self._read() if line.custom_id not in ids)
        return True

    async def take(self) -> BatchLine | None:
        """Return the next line of a model that may be tried, or None at the end of the pass."""
        async with self._reading:
            while True:
                if not self._ready:  # in a thread, so that other lines are answered meanwhile
                    self._ready.extend(await asyncio.to_thread(next, self._windows, ()))
                if not self._ready:
                    return None
                line = self._ready.popleft()
                if self._away.get(line.model, 0.0) <= loop_time():
                    break
                self._is_complete = False
            if line.model in self._away:  # the model's other lines wait for this one
                self._away[line.model] = loop_time() + AWAY_S
            return line

    def answered(self, line: BatchLine) -> None:
        """Let the other lines of the model follow."""
        self._away.pop(line.model, None)
        self._answered_s = loop_time()

    def put_off(self, line: BatchLine, why: str) -> None:
        """Leave out the lines of the model until its next try."""
        self._away[line.model] = loop_time() + AWAY_S
        self._is_complete, self._why = False, why


async def answer_lines(
    read: Callable[[], Iterable[BatchLine]],
    journal: Journal,
    answerer: LineAnswerer,
    at_once: int,
    report: Callable[[], None],
) -> None:
    """Answer the lines that ``journal`` lacks, ``at_once`` at a time, and append the answers.

    ``read`` reads all lines from the beginning. ``report`` is called after each answer. Raises
    ``Unreachable`` after ``PATIENCE_S`` without an answer; a later call continues.
    """
    lines = UnansweredLines(read, journal)

    async def work() -> None:
        while (line := await lines.take()) is not None:
            try:
                answer = await answerer.answer(line)
            except Unreachable as error:
                lines.put_off(line, str(error))
                continue
            lines.answered(line)
            journal.append(answer)
            report()
            if journal.is_sync_due:
                await asyncio.to_thread(journal.sync)

    while await lines.begin_pass():
        await all_of(*(work() for _ in range(at_once)))
