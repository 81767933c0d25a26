"""The choices of one request, generated side by side and given as text."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swarmnet.gateway.metrics import Meter
from swarmnet.gateway.text import Detokenizer, StopStrings
from swarmnet_client.batching.engine import Engine
from swarmnet_client.batching.sequences import Request
from swarmnet_client.model.sampling import Token
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel


@dataclass(frozen=True)
class Piece:
    """A part of choice ``index``: text, and the tokens since the piece before. The last one of a choice has its ``finish_reason``."""

    index: int
    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None


class Generation:
    """Iterate over the pieces of all choices, as they come. ``SwarmnetError`` is raised where one of them cannot go on."""

    def __init__(
        self, engine: Engine, requests: Sequence[Request], stops: Sequence[str], meter: Meter
    ) -> None:
        self.tokens = 0
        self.reused = 0
        self._engine = engine
        self._requests = requests
        self._stops = stops
        self._meter = meter
        self._left = len(requests)
        self._news: asyncio.Queue[Piece | SwarmnetError] = asyncio.Queue()
        self._begun = asyncio.Event()
        self._refusal: SwarmnetError | None = None
        self._started = asyncio.get_running_loop().time()

    @classmethod
    @asynccontextmanager
    async def run(
        cls, engine: Engine, requests: Sequence[Request], stops: Sequence[str], meter: Meter
    ) -> AsyncIterator["Generation"]:
        """Generates while the context is open; what is not complete at its end is given up, in the swarm too."""
        generation = cls(engine, requests, stops, meter)
        tasks = [asyncio.create_task(generation._answer(index)) for index in range(len(requests))]
        try:
            yield generation
        finally:
            await cancel(*tasks)

    async def begun(self) -> None:
        """Wait for the first piece. Raises ``SwarmnetError`` when what comes first is a refusal."""
        await self._begun.wait()
        if self._refusal is not None:
            raise self._refusal

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while self._left:
            news = await self._news.get()
            if isinstance(news, SwarmnetError):
                raise news
            self._left -= news.finish_reason is not None
            yield news

    def _put(self, news: Piece | SwarmnetError) -> None:
        if not self._begun.is_set() and isinstance(news, SwarmnetError):
            self._refusal = news
        self._news.put_nowait(news)
        self._begun.set()

    async def _answer(self, index: int) -> None:
        try:
            await self._generate(index)
        except SwarmnetError as error:
            self._put(error)
        except Exception as error:  # noqa: BLE001 - the supervisor: whoever waits must hear of it
            self._put(SwarmnetError(f"this should not have happened: {type(error).__name__}: {error}"))

    async def _generate(self, index: int) -> None:
        request = self._requests[index]
        letters, stops = Detokenizer(self._engine.tokenizer), StopStrings(self._stops)
        unsaid: list[Token] = []
        count = 0
        last = self._started
        async with self._engine.batcher.answer(request) as answer:
            async for token in answer:
                last = self._count(count, last)
                count += 1
                unsaid.append(token)
                if token.id in request.end_ids:
                    continue
                text = stops.push(letters.push(token.id))
                if stops.found:
                    answer.stop()
                    break
                if text:
                    self._put(Piece(index, text, tuple(unsaid)))
                    unsaid = []
            self.reused += answer.reused
        if not stops.found:
            text = stops.push(letters.end())
            text += stops.end()
        reason = answer.finish_reason or "stop"
        self._finish(request, count, answer.reused, reason)
        self._put(Piece(index, text, tuple(unsaid), reason))

    def _count(self, before: int, last: float) -> float:
        """Note that another token came; the time now."""
        now = asyncio.get_running_loop().time()
        self.tokens += 1
        self._meter.tokens.inc()
        spent_s = now - last
        (self._meter.between_tokens_s if before else self._meter.first_token_s).observe(spent_s)
        return now

    def _finish(self, request: Request, count: int, reused: int, reason: str) -> None:
        meter = self._meter
        meter.whole_s.observe(asyncio.get_running_loop().time() - self._started)
        meter.prompt_tokens.inc(len(request.ids))
        meter.prompt_lengths.observe(len(request.ids))
        meter.cached_tokens.inc(reused)
        meter.lengths.observe(count)
        meter.succeeded(reason)
