"""The sequences of one chain: each computes one answer at a time, and their decode steps are batched."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import torch

from swarmnet_client.chain.chain import CHUNK, Chain
from swarmnet_client.chain.hops import ChainReport
from swarmnet_client.model.local_layers import LmHead
from swarmnet_client.model.sampling import Draw, Sampling, Token
from swarmnet_client.model.speculation import Speculator, StepTimes
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.session.steps import MAX_SEQUENCE, Row

PREFILL = 2 * CHUNK
"""Prompt positions sent at a time. More would delay the next tokens of other answers, fewer leave hops idle."""
FRESH = MAX_SEQUENCE
"""The number of a sequence that is always empty. A row that starts from it gets fresh KV caches, and its old ones are freed."""
MIN_SHARED = 16
"""Least tokens that a request must share with old KV caches for these to be reused."""
IDLE_S = 60.0
"""Seconds that a chain without answers stays open for the next turn of a chat."""


@dataclass(frozen=True)
class Request:
    """A prompt of at least one token id, to be continued by at most ``max_tokens`` tokens or up to one of ``end_ids``.

    KV caches of earlier requests are reused only for the same ``owner``.
    """

    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: frozenset[int] = frozenset()
    owner: str = ""
    speculate: bool = True
    """Whether drafts are sent along with its newest token. The answer is the same."""


class Answer:
    """The tokens of one answer, as an asynchronous iterator. Iterating raises ``SwarmnetError`` if the answer fails."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ids: list[int] = []
        self.counts: Counter[int] = Counter()
        """Occurrences of each token id in the answer; empty unless its sampling has penalties."""
        self.reused = 0
        """Positions of the prompt whose KV caches were reused."""
        self.precisions: list[str] = []
        """Precisions of the hosts of its chains so far; one if they had the same."""
        self.finish_reason: str | None = None
        """``stop`` or ``length``, once the answer is complete."""
        self.trips = 0
        """Steps that brought tokens of the answer."""
        self.retries = 0
        self.ids_at_retry = 0
        self._news: asyncio.Queue[Token | SwarmnetError | None] = asyncio.Queue()

    def take(self, token: Token) -> bool:
        """Add the next token. Returns whether the answer needs more."""
        self.ids.append(token.id)
        if self.request.sampling.penalises:
            self.counts[token.id] += 1
        self._news.put_nowait(token)
        if token.id in self.request.end_ids:
            self.finish_reason = "stop"
        elif len(self.ids) >= self.request.max_tokens:
            self.finish_reason = "length"
        else:
            return True
        self._news.put_nowait(None)
        return False

    def stop(self) -> None:
        """Complete the answer early: its reader has found a stop string."""
        self.finish_reason = "stop"

    def fail(self, error: SwarmnetError) -> None:
        self._news.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Token]:
        while (news := await self._news.get()) is not None:
            if isinstance(news, SwarmnetError):
                raise news
            yield news


@dataclass(eq=False)
class RunningSequence:
    """One sequence of the chain. ``held``: the ids whose KV caches the hosts have; ``todo``: the ids to send for ``answer``."""

    number: int
    held: list[int] = field(default_factory=list)
    owner: str = ""
    used: int = 0
    answer: Answer | None = None
    todo: list[int] = field(default_factory=list)
    start: int = 0
    """The position of the first of ``todo``."""
    speculator: Speculator = field(default_factory=Speculator)

    def shared(self, request: Request) -> int:
        """Ids at the beginning of the prompt, without its last, whose KV caches are held for the same owner; 0 below ``MIN_SHARED``."""
        if self.owner != request.owner:
            return 0
        count = 0
        for held, wanted in zip(self.held, request.ids[:-1], strict=False):
            if held != wanted:
                break
            count += 1
        return count if count >= MIN_SHARED else 0

    def row(self, count: int, draft: Sequence[int] = ()) -> tuple[Row, list[int]]:
        """The next ``count`` ids to send and a draft after them, as a row and as ids. ``held`` is updated as if they had been computed."""
        ids, self.todo = [*self.todo[:count], *draft], self.todo[count:]
        source = FRESH if self.start == 0 and self.held else self.number
        rewrite = source == FRESH or self.start < len(self.held)
        row = Row(self.number, self.start, len(ids), 0 if self.todo else 1 + len(draft), source, rewrite)
        self.held = [*self.held[: self.start], *ids] if rewrite else self.held
        if not rewrite:
            self.held.extend(ids)
        self.start += len(ids)
        return row, ids


@dataclass(frozen=True)
class _Part:
    """A sequence's part of a step: the next ``count`` of its ids, and a draft of what may follow them."""

    sequence: RunningSequence
    count: int
    draft: tuple[int, ...] = ()


def _draws(answer: Answer, draft: Sequence[int]) -> list[Draw]:
    """The choices of one answer after each token of a step. If one is made, all of the draft before it was right, and so counts."""
    sampling, counts = answer.request.sampling, answer.counts
    draws = [Draw(sampling, len(answer.ids), counts)]
    for at in range(len(draft)):
        if sampling.penalises:
            counts = counts + Counter(draft[at : at + 1])
        draws.append(Draw(sampling, len(answer.ids) + at + 1, counts))
    return draws


def pick_sequence(sequences: Sequence[RunningSequence], request: Request) -> RunningSequence:
    """The free sequence whose KV caches hold most of the request; among equals, the one unused for longest."""
    free = [sequence for sequence in sequences if sequence.answer is None]
    return max(free, key=lambda sequence: (sequence.shared(request), -sequence.used))


def share(room: int, wanted: Sequence[int]) -> list[int]:
    """``room`` positions divided among prompts of ``wanted`` positions: short prompts whole, the rest in equal parts."""
    given = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for done, index in enumerate(order):
        given[index] = min(wanted[index], room // (len(order) - done))
        room -= given[index]
    return given


class SequenceGroup:
    """The sequences of one chain. The chain is open while ``run`` runs."""

    def __init__(
        self, size: int, head: LmHead, open_chain: Callable[[], AbstractAsyncContextManager[Chain]]
    ) -> None:
        self.report = ChainReport()
        self._sequences = [RunningSequence(number) for number in range(size)]
        self._head = head
        self._open_chain = open_chain
        self._turn = 0
        self._times = StepTimes()
        self._arrived = asyncio.Event()
        self._ready = asyncio.Event()
        self._left = asyncio.Event()

    @property
    def free(self) -> int:
        return sum(sequence.answer is None for sequence in self._sequences)

    @property
    def answers(self) -> list[Answer]:
        return [sequence.answer for sequence in self._sequences if sequence.answer is not None]

    def shared(self, request: Request) -> int:
        """The most positions of the request that a free sequence holds."""
        return pick_sequence(self._sequences, request).shared(request)

    def join(self, answer: Answer) -> None:
        """Start an answer on one of the free sequences."""
        request = answer.request
        sequence = pick_sequence(self._sequences, request)
        sequence.start = sequence.shared(request)
        answer.reused = max(answer.reused, sequence.start)
        sequence.owner = request.owner
        sequence.todo = [*request.ids, *answer.ids][sequence.start :]
        sequence.answer = answer
        sequence.speculator = Speculator([*request.ids, *answer.ids])
        self._arrived.set()

    def leave(self, answer: Answer) -> None:
        """Free the sequence of an answer that was cancelled."""
        for sequence in self._sequences:
            if sequence.answer is answer:
                self._release(sequence)

    async def run(self) -> None:
        """Compute answers until there were none for ``IDLE_S``. Raises what ``Chain.forward`` raises."""
        async with self._open_chain() as chain:
            self.report = chain.report
            await race(self._send_prompts(chain), self._send_tokens(chain), self._idle())

    async def _send_prompts(self, chain: Chain) -> None:
        while True:
            await self._arrived.wait()
            coming = [
                sequence for sequence in self._sequences if sequence.todo and not self._is_ready(sequence)
            ]
            if not coming:
                self._arrived.clear()
                continue
            is_alone = all(sequence in coming for sequence in self._sequences if sequence.answer is not None)
            lengths = [len(sequence.todo) for sequence in coming]
            counts = lengths if is_alone else share(PREFILL, lengths)
            await self._step(
                chain,
                [_Part(sequence, count) for sequence, count in zip(coming, counts, strict=True) if count],
            )

    async def _send_tokens(self, chain: Chain) -> None:
        while True:
            await self._ready.wait()
            turn = [sequence for sequence in self._sequences if self._is_ready(sequence)]
            if not turn:
                self._ready.clear()
                continue
            clock = asyncio.get_running_loop().time
            drafts, started = self._drafts(turn), clock()
            await self._step(
                chain, [_Part(sequence, 1, draft) for sequence, draft in zip(turn, drafts, strict=True)]
            )
            self._times.add(len(turn) + sum(map(len, drafts)), clock() - started)

    def _drafts(self, turn: Sequence[RunningSequence]) -> list[tuple[int, ...]]:
        """A draft for each of the sequences of one step, together at most ``CHUNK`` positions with their newest tokens."""
        drafts: list[tuple[int, ...]] = []
        for sequence in turn:
            answer = sequence.answer
            if answer is None or not answer.request.speculate:
                drafts.append(())
                continue
            room = CHUNK - len(turn) - sum(map(len, drafts))
            most = min(room, answer.request.max_tokens - len(answer.ids) - 1)
            drafts.append(sequence.speculator.draft(self._times, positions=len(turn), most=most))
        return drafts

    @staticmethod
    def _is_ready(sequence: RunningSequence) -> bool:
        """Whether a sequence is past its prompt and has its newest token to send."""
        return sequence.answer is not None and bool(sequence.answer.ids) and len(sequence.todo) == 1

    async def _step(self, chain: Chain, parts: Sequence["_Part"]) -> None:
        """Send one step, and choose the next tokens of the answers whose newest token was in it."""
        rows, ids, asking = [], [], []
        for part in parts:
            row, sent = part.sequence.row(part.count, part.draft)
            rows.append(row)
            ids.extend(sent)
            if row.outputs and part.sequence.answer is not None:
                asking.append((part, part.sequence.answer))
        hidden = await chain.forward(tuple(rows), torch.tensor(ids))
        if not asking:
            return
        draws = [draw for part, answer in asking for draw in _draws(answer, part.draft)]
        choices = iter(await self._head.choose(hidden, draws))
        for part, answer in asking:
            tokens = list(itertools.islice(choices, len(part.draft) + 1))
            if part.sequence.answer is answer:  # else it left meanwhile
                self._take(part, answer, tokens)

    def _take(self, part: "_Part", answer: Answer, tokens: Sequence[Token]) -> None:
        """Add the valid of ``tokens`` to an answer: those up to the first that differs from the draft."""
        sequence = part.sequence
        answer.trips += 1
        answer.precisions += [each for each in self.report.precisions if each not in answer.precisions]
        valid = sequence.speculator.choose([token.id for token in tokens], len(part.draft))
        needs_more = all(answer.take(token) for token in tokens[:valid])
        sequence.start -= len(part.draft) + 1 - valid
        if needs_more:
            sequence.todo = [answer.ids[-1]]
            self._ready.set()
        else:
            self._release(sequence)

    def _release(self, sequence: RunningSequence) -> None:
        self._turn += 1
        sequence.answer, sequence.todo, sequence.used = None, [], self._turn
        self._left.set()

    async def _idle(self) -> None:
        while True:
            self._left.clear()
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._left.wait()
            except TimeoutError:
                if not self.answers:
                    return
