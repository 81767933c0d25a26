"""Requests to a model, and their answers as they are computed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from swarmnet_client.chain.hops import ChainReport
from swarmnet_client.chain.trace import TracedStep
from swarmnet_client.model.grammar import Grammar
from swarmnet_client.model.head import PromptReader
from swarmnet_client.model.sampling import Sampling, Token
from swarmnet_protocols.errors import SwarmnetError

if TYPE_CHECKING:
    from swarmnet_protocols.session.adapters import Adapter


@dataclass(frozen=True)
class Request:
    """A prompt of at least one token id, to be continued by at most ``max_tokens`` tokens or up to
    one of ``end_ids``.

    KV caches of other requests are reused only for the same ``owner``: the time of the first token
    tells whether the same prompt was sent before.
    """

    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: frozenset[int] = frozenset()
    owner: str = ""
    adapter: "Adapter | None" = None
    """An addition of the hosts to the model's weights, for this request. Requests with the same
    object share a chain."""
    speculate: bool = True
    """True if drafts are sent along with its newest token. The answer is the same."""
    grammar: Grammar | None = field(default=None, compare=False)
    """The grammar that the answer obeys. It ends the answer where nothing may follow."""
    traced: bool = False
    """True if the answer has the times of its steps."""
    reader: PromptReader | None = field(default=None, compare=False)
    """Reads the outputs of the last block at the prompt's positions, before the first token."""

    @property
    def wants_logprobs(self) -> bool:
        """True if each token needs its scores, so that forced tokens are computed, too."""
        return self.sampling.top_logprobs is not None

    @property
    def reads_all(self) -> bool:
        """True if the outputs of all positions are read, so that no KV caches can be reused."""
        return self.reader is not None and self.reader.reads_all


@dataclass
class AnswerStep:
    """A traced step of an answer, and the number of tokens that it brought."""

    step: TracedStep
    tokens: int = 0


@dataclass(frozen=True)
class Prefill:
    """The number of a prompt's tokens that the hosts have read."""

    done: int
    total: int


class Answer:
    """The tokens of one answer, as an asynchronous iterator. Iterating raises ``SwarmnetError`` if
    the answer fails."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ids: list[int] = []
        self.counts: Counter[int] = Counter()
        """Occurrences of each token id in the answer; empty unless its sampling has penalties."""
        self.reused = 0
        """Positions of the prompt whose KV caches were reused."""
        self.precisions: list[str] = []
        """Precisions of the hosts that have computed the answer so far; one if all had the same."""
        self.finish_reason: Literal["stop", "length"] | None = None
        """The reason why the answer ended. None until it is complete."""
        self.trips = 0
        """Steps that brought tokens of the answer."""
        self.steps: list[AnswerStep] = []
        """The steps of the answer, if its request is traced."""
        self.report = ChainReport()
        """The report of the chain that computed the answer last."""
        self.grammar = request.grammar.start() if request.grammar is not None else None
        self.prompt = frozenset(request.ids if request.sampling.repetition_penalty != 1 else ())
        """The tokens of the prompt, if they are penalised."""
        self._begun: list[Token] = []
        """Tokens of ``ids`` that the reader of the answer has not got yet."""
        self.retries = 0
        self.ids_at_retry = 0
        self._news: asyncio.Queue[Token | Prefill | SwarmnetError | None] = asyncio.Queue()
        if request.grammar is not None and not request.wants_logprobs:
            self.begin(request.grammar.first)

    def prefilled(self, done: int) -> None:
        """Note that the hosts have read the first ``done`` tokens of the prompt."""
        self._news.put_nowait(Prefill(done, len(self.request.ids)))

    def begin(self, ids: Sequence[int]) -> None:
        """Begin with tokens that need no choice, as many as fit. The reader of the answer gets them
        with the first chosen token, because the answer may fail before it."""
        for token in ids[: self.request.max_tokens - 1]:
            self._append(Token(token))
            self._begun.append(Token(token))

    def add(self, token: Token, *, is_last: bool = False) -> bool:
        """Add the next token. Returns whether the answer needs more."""
        for each in [*self._begun, token]:
            self._news.put_nowait(each)
        self._begun = []
        self._append(token)
        if is_last or token.id in self.request.end_ids:
            self.finish_reason = "stop"
        elif len(self.ids) >= self.request.max_tokens:
            self.finish_reason = "length"
        else:
            return True
        self._news.put_nowait(None)
        return False

    def _append(self, token: Token) -> None:
        self.ids.append(token.id)
        if self.request.sampling.penalises:
            self.counts[token.id] += 1

    def stop(self) -> None:
        """Complete the answer early: its reader has found a stop string."""
        self.finish_reason = "stop"

    def fail(self, error: SwarmnetError) -> None:
        self._news.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Token]:
        async for news in self.news():
            if isinstance(news, Token):
                yield news

    async def news(self) -> AsyncIterator[Token | Prefill]:
        """Yield the tokens, and before them the progress of the prompt. Raises ``SwarmnetError`` if
        the answer fails."""
        while (news := await self._news.get()) is not None:
            if isinstance(news, SwarmnetError):
                raise news
            yield news
