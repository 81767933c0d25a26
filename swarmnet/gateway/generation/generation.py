"""Generating the choices of one request concurrently, as one stream of events."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from swarmnet.gateway.generation.answer_reader import AnswerReader
from swarmnet.gateway.generation.answer_trace import AnswerTrace
from swarmnet.gateway.generation.detokenizer import IncrementalDetokenizer, StopStrings
from swarmnet.gateway.generation.events import ChoiceEnd, Delta, TextDelta, Usage
from swarmnet.gateway.generation.tokenization import PreparedPrompt
from swarmnet.gateway.metrics import ModelMetrics
from swarmnet_client.batching.answers import Prefill, Request
from swarmnet_client.batching.continuous_batching import BatchedModel
from swarmnet_client.model.head import PromptScores
from swarmnet_client.model.sampling import Token
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import in_background, loop_time


class Generation:
    """The choices of one request, as an async iterator over the events of all, and over the
    progress of long prompts before them. It raises ``SwarmnetError`` when one choice fails.

    Each choice is a task that reads its tokens from the batcher; all put their events into one
    queue.
    """

    def __init__(
        self,
        served: BatchedModel,
        choices: Sequence[tuple[Request, PreparedPrompt]],
        stops: Sequence[str],
        metrics: ModelMetrics,
        *,
        prompt_tokens: int,
    ) -> None:
        """``choices``: the request of each choice, and its prompt. ``prompt_tokens``: tokens of all
        prompts, each counted once."""
        traced = any(request.traced for request, _ in choices)
        self.usage = Usage(prompt_tokens, trace=AnswerTrace() if traced else None)
        """Tokens and hosts of the choices so far."""
        self._served = served
        self._choices = choices
        self._stops = stops
        self._metrics = metrics
        self._unfinished = len(choices)
        self._queue: asyncio.Queue[Delta | Prefill | SwarmnetError] = asyncio.Queue()
        self._started = asyncio.Event()
        self._first_error: SwarmnetError | None = None
        self._start_s = loop_time()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Generation"]:
        """Generate one choice for each of ``choices`` while the context is open.

        Leaving it cancels the unfinished ones.
        """
        async with in_background(*map(self._run_choice, range(len(self._choices)))):
            yield self

    async def wait_started(self) -> None:
        """Wait for the first event. Raises ``SwarmnetError`` if a choice fails before it."""
        await self._started.wait()
        if self._first_error is not None:
            raise self._first_error

    async def __aiter__(self) -> AsyncIterator[Delta | Prefill]:
        while self._unfinished:
            item = await self._queue.get()
            if isinstance(item, SwarmnetError):
                raise item
            if isinstance(item, Prefill):
                if self._queue.empty():  # otherwise it is out of date
                    yield item
                continue
            self._unfinished -= isinstance(item, ChoiceEnd)
            yield item

    @property
    def sent_tokens(self) -> int:
        """Tokens of the prompts, each counted once for each of its choices."""
        return sum(len(request.ids) for request, _ in self._choices)

    def fail(self, error: SwarmnetError) -> None:
        """End the generation with an error, as if a choice had failed."""
        self._put(error)

    def _put(self, item: Delta | SwarmnetError) -> None:
        if not self._started.is_set() and isinstance(item, SwarmnetError):
            self._first_error = item
        self._queue.put_nowait(item)
        self._started.set()

    async def _run_choice(self, index: int) -> None:
        try:
            await self._generate(index)
        except SwarmnetError as error:
            self._put(error)
        except Exception as error:  # noqa: BLE001 - the reader of the queue must learn of every failure
            self._put(SwarmnetError(f"this should not have happened: {type(error).__name__}: {error}"))

    async def _generate(self, index: int) -> None:
        request, prepared = self._choices[index]
        prompt = request.ids if prepared.continues else ()
        detokenizer = IncrementalDetokenizer(self._served.tokenizer, prompt, prepared.marks)
        teller = _Teller(prepared.reader(index), self._stops, self._put)
        count = 0
        last_s = self._start_s
        async with self._served.batcher.answer(request) as answer:
            if self.usage.trace is not None:
                self.usage.trace.add(answer)
            async for token in answer.news():
                if isinstance(token, Prefill):
                    self._queue.put_nowait(token)
                    continue
                if prepared.echo is not None and count == 0:
                    self._put(TextDelta(index, prepared.echo, tokens=_scored(request)))
                    if prepared.is_empty:
                        answer.finish_reason = "length"
                        break
                last_s = self._observe_token(count, last_s)
                count += 1
                teller.pending.append(token)  # the end has no text, but a log probability
                if token.id in request.end_ids and token.id not in prepared.marks:
                    continue
                self.usage.reasoning_tokens += teller.reader.is_thinking
                teller.tell(detokenizer.push(token.id))
                if teller.is_stopped:
                    answer.stop()
                    break
            usage = self.usage
            usage.cached_tokens += answer.reused
            usage.precisions += [each for each in answer.precisions if each not in usage.precisions]
            usage.trips += answer.trips
        if self.usage.trace is not None:
            await self.usage.trace.complete()
        teller.end(detokenizer.flush())
        reason = answer.finish_reason or "stop"
        self._observe_choice(request, count, answer.reused, reason)
        is_call = reason == "stop" and teller.reader.calls > 0
        self._put(ChoiceEnd(index, "tool_calls" if is_call else reason, tokens=tuple(teller.pending)))

    def _observe_token(self, tokens_before: int, last_s: float) -> float:
        """Count one token in the metrics; returns its time."""
        now = loop_time()
        self.usage.completion_tokens += 1
        metrics = self._metrics
        metrics.generated_tokens.inc()
        (metrics.inter_token_latency if tokens_before else metrics.time_to_first_token).observe(now - last_s)
        return now

    def _observe_choice(self, request: Request, count: int, cached: int, reason: str) -> None:
        metrics = self._metrics
        metrics.request_latency.observe(loop_time() - self._start_s)
        metrics.prompt_tokens.inc(len(request.ids))
        metrics.prompt_length.observe(len(request.ids))
        metrics.cached_tokens.inc(cached)
        metrics.completion_length.observe(count)
        metrics.count_success(reason)


def _scored(request: Request) -> tuple[Token, ...]:
    """Return the tokens of a prompt with their log probabilities, if the request asks for them."""
    return tuple(request.reader.tokens) if isinstance(request.reader, PromptScores) else ()


class _Teller:
    """Tells what the text of one choice says, up to a stop string in the text for the user.

    ``pending``: tokens that no event has brought yet.
    """

    def __init__(self, reader: AnswerReader, stops: Sequence[str], put: Callable[[Delta], None]) -> None:
        self.reader = reader
        self.pending: list[Token] = []
        self._stops = StopStrings(stops)
        self._put = put

    @property
    def is_stopped(self) -> bool:
        return self._stops.found

    def tell(self, text: str) -> None:
        """Tell the next text."""
        for event in self.reader.push(text):
            self._tell(event)

    def end(self, text: str) -> None:
        """Tell the last text, unless a stop string came before it."""
        if self.is_stopped:
            return
        self.tell(text)
        for event in self.reader.flush():
            self._tell(event)
        if rest := self._stops.flush():
            self._send(TextDelta(self.reader.index, rest))

    def _tell(self, event: Delta) -> None:
        if isinstance(event, TextDelta):
            if text := self._stops.push(event.text):
                self._send(TextDelta(event.index, text))
        elif not self.is_stopped:
            self._send(event)

    def _send(self, event: Delta) -> None:
        self._put(replace(event, tokens=tuple(self.pending)))
        self.pending = []
