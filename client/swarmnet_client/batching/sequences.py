"""The lanes of one chain: each has one answer at a time, and all that are ready take their next step together."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import torch

from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.chunks import CHUNK
from swarmnet_client.chain.hops import ChainReport
from swarmnet_client.model.local_layers import LmHead
from swarmnet_client.model.sampling import Draw, Sampling, Token
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.session.steps import MAX_SEQUENCE, Row

PREFILL = 2 * CHUNK
"""Positions of prompts that travel ahead of the next tokens of answers: more would keep those waiting, fewer leave hops idle."""
FRESH = MAX_SEQUENCE
"""A lane that never holds anything: whoever starts from it gets new caches, and the old ones are freed."""
MIN_SHARED = 16
"""A beginning shorter than this is not worth to keep the old caches for."""
IDLE_S = 60.0
"""A chain without answers is kept this long, for the next turn of a conversation."""


@dataclass(frozen=True)
class Request:
    """What to answer: the prompt, [1, ...) token ids; at most ``max_tokens`` more, up to one of ``end_ids``.

    ``owner``: whose conversations may be continued from caches that are still there.
    """

    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: frozenset[int] = frozenset()
    owner: str = ""


class Answer:
    """The tokens of one answer as they come: iterate. ``SwarmnetError`` is raised where it cannot go on."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ids: list[int] = []
        self.counts: Counter[int] = Counter()
        """How often each token is in it, where its sampling asks."""
        self.reused = 0
        """Positions of the prompt whose caches were there already."""
        self.finish_reason: str | None = None
        """``stop`` or ``length`` once it is complete."""
        self.retries = 0
        self.ids_at_retry = 0
        self._news: asyncio.Queue[Token | SwarmnetError | None] = asyncio.Queue()

    def take(self, token: Token) -> bool:
        """Add the next token. True when more are wanted."""
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
        """Its reader has all it wanted: the answer is complete, whatever else would come."""
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
    """One row of the chain's steps. ``held``: the ids whose caches the hosts have; ``todo``: those to send for ``answer``."""

    number: int
    held: list[int] = field(default_factory=list)
    owner: str = ""
    used: int = 0
    answer: Answer | None = None
    todo: list[int] = field(default_factory=list)
    start: int = 0
    """Where in ``held`` the first of ``todo`` belongs."""

    def shared(self, request: Request) -> int:
        """How many ids of the prompt, short of its last, are held for the same owner."""
        if self.owner != request.owner:
            return 0
        count = 0
        for held, wanted in zip(self.held, request.ids[:-1], strict=False):
            if held != wanted:
                break
            count += 1
        return count if count >= MIN_SHARED else 0

    def row(self, count: int) -> tuple[Row, list[int]]:
        """The next ``count`` ids to send as a row, and the ids. What the lane holds is then what it will hold."""
        ids, self.todo = self.todo[:count], self.todo[count:]
        source = FRESH if self.start == 0 and self.held else self.number
        rewrite = source == FRESH or self.start < len(self.held)
        row = Row(self.number, self.start, len(ids), 0 if self.todo else 1, source, rewrite)
        self.held = [*self.held[: self.start], *ids] if rewrite else self.held
        if not rewrite:
            self.held.extend(ids)
        self.start += len(ids)
        return row, ids


def pick_sequence(sequences: Sequence[RunningSequence], request: Request) -> RunningSequence:
    """The free lane that holds most of the request; if none does, the one that was left longest ago."""
    free = [sequence for sequence in sequences if sequence.answer is None]
    return max(free, key=lambda sequence: (sequence.shared(request), -sequence.used))


def share(room: int, wanted: Sequence[int]) -> list[int]:
    """Positions for each prompt that wants so many: short ones whole, as far as ``room`` goes, long ones equally."""
    given = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for done, index in enumerate(order):
        given[index] = min(wanted[index], room // (len(order) - done))
        room -= given[index]
    return given


class SequenceGroup:
    """Some lanes, and the chain they are on. ``run`` it; the chain ends with that."""

    def __init__(
        self, size: int, head: LmHead, open_chain: Callable[[], AbstractAsyncContextManager[Chain]]
    ) -> None:
        self.report = ChainReport()
        self._sequences = [RunningSequence(number) for number in range(size)]
        self._head = head
        self._open_chain = open_chain
        self._turn = 0
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
        """The most of the request that a free lane holds."""
        return pick_sequence(self._sequences, request).shared(request)

    def join(self, answer: Answer) -> None:
        """Give an answer one of the free lanes."""
        request = answer.request
        sequence = pick_sequence(self._sequences, request)
        sequence.start = sequence.shared(request)
        answer.reused = max(answer.reused, sequence.start)
        sequence.owner = request.owner
        sequence.todo = [*request.ids, *answer.ids][sequence.start :]
        sequence.answer = answer
        self._arrived.set()

    def leave(self, answer: Answer) -> None:
        """Free the lane of an answer that nobody wants any more; nothing more is computed for it."""
        for sequence in self._sequences:
            if sequence.answer is answer:
                self._release(sequence)

    async def run(self) -> None:
        """Work until there was nothing to do for ``IDLE_S``. Raises what ``Chain.forward`` raises."""
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
                chain, [(sequence, count) for sequence, count in zip(coming, counts, strict=True) if count]
            )

    async def _send_tokens(self, chain: Chain) -> None:
        while True:
            await self._ready.wait()
            turn = [(sequence, 1) for sequence in self._sequences if self._is_ready(sequence)]
            if not turn:
                self._ready.clear()
                continue
            await self._step(chain, turn)

    @staticmethod
    def _is_ready(sequence: RunningSequence) -> bool:
        """Whether it has a token to send that follows what it holds, and no more of a prompt."""
        return sequence.answer is not None and bool(sequence.answer.ids) and len(sequence.todo) == 1

    async def _step(self, chain: Chain, parts: list[tuple[RunningSequence, int]]) -> None:
        """Send positions of these lanes, and give the answers that are not behind their next tokens."""
        rows, ids, asking = [], [], []
        for sequence, count in parts:
            row, sent = sequence.row(count)
            rows.append(row)
            ids.extend(sent)
            if row.outputs and sequence.answer is not None:
                asking.append((sequence, sequence.answer))
        hidden = await chain.forward(tuple(rows), torch.tensor(ids))
        if not asking:
            return
        draws = [Draw(answer.request.sampling, len(answer.ids), answer.counts) for _, answer in asking]
        for (sequence, answer), token in zip(asking, await self._head.choose(hidden, draws), strict=True):
            if sequence.answer is not answer:
                continue  # it left meanwhile
            if answer.take(token):
                sequence.todo = [token.id]
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
