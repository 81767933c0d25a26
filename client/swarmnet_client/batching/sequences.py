"""The sequences of one chain: each computes one answer at a time, and their decode steps are
batched.

A prompt starts from KV caches of earlier answers (``prefix_reuse.py``). When a host fails, all
caches of finished answers are given up. Otherwise running answers would wait until the new host has
recomputed them.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from swarmnet_client.batching.answers import Answer, AnswerStep, Request
from swarmnet_client.batching.prefix_reuse import (
    Origin,
    RunningSequence,
    begin_alike,
    find_origin,
    pick_sequence,
    to_drop,
)
from swarmnet_client.chain.chain import CHUNK, Chain
from swarmnet_client.chain.hops import ChainReport
from swarmnet_client.chain.steps_in_flight import GiveUpIdle
from swarmnet_client.chain.trace import KeepStep, TracedStep
from swarmnet_client.model.drafts.speculation import Speculator, StepTimes, common_prefix
from swarmnet_client.model.grammar import BadGrammar
from swarmnet_client.model.head import LmHead
from swarmnet_client.model.sampling import Draw, Sampling, Token
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.machine.aio import loop_time, race, within
from swarmnet_protocols.session.arrays import split
from swarmnet_protocols.session.steps import Row

if TYPE_CHECKING:
    from swarmnet_protocols.session.adapters import Adapter

OpenChain = Callable[["Adapter | None", GiveUpIdle, KeepStep | None], AbstractAsyncContextManager[Chain]]
"""Opens a chain whose hosts apply an adapter, or none. If the last argument is given, it gets the
traced steps of the chain."""
PREFILL = 2 * CHUNK
"""Prompt positions sent at a time. More would delay the next tokens of other answers, fewer leave
hops idle."""
KEPT_POSITIONS = 1 << 13
"""Positions of the KV caches of all chains; above this, caches of finished answers are dropped.

By default, one client has room for twice as many on three hosts of the default model.
"""
IDLE_S = 60.0
"""Seconds that a chain without answers stays open for the next turn of a chat, by default."""


@dataclass(frozen=True)
class _Part:
    """A sequence's part of a step: its next ``count`` ids and a draft. The first part of an answer
    has its origin.
    """

    sequence: RunningSequence
    count: int
    draft: tuple[int, ...] = ()
    origin: Origin | None = None


@dataclass(frozen=True)
class _Chosen:
    """The next tokens of an answer: ``valid`` choices of a step, then the tokens that its grammar
    forces.

    - ``is_last``: nothing may follow.
    - ``error``: the grammar reached a limit, so the answer fails.
    """

    tokens: Sequence[Token]
    valid: int
    is_last: bool = False
    error: BadGrammar | None = None


def _draws(answer: Answer, draft: Sequence[int]) -> list[Draw]:
    """Return how to choose the token after an answer and after each token of its draft. Raises
    ``BadGrammar``.

    A choice counts only if all draft tokens before it were right. So its penalties count those
    draft tokens as part of the answer.
    """
    sampling, counts, state = answer.request.sampling, answer.counts, answer.grammar
    longest = max(map(len, sampling.bad_words), default=0)
    last = [*answer.ids[-longest:], *draft] if longest else []
    known = len(last) - len(draft)
    masks: Sequence[Array | None] = [None] * (len(draft) + 1)
    if state is not None:
        state.follow(answer.ids)
        masks = state.masks(draft)
    draws = []
    for at, allowed in enumerate(masks):
        if at and sampling.penalises:
            counts = counts + Counter(draft[at - 1 : at])
        position, before = len(answer.ids) + at, last[: known + at]
        draws.append(Draw(sampling, position, counts, answer.prompt, before, allowed))
    return draws


def _allowed_drafts(
    answers: Sequence[Answer | None], drafts: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return the parts of drafts that the grammars of their answers allow."""
    found = [*drafts]
    for at, answer in enumerate(answers):
        if answer is not None and answer.grammar is not None and drafts[at]:
            with suppress(BadGrammar):  # raised again where the next token is chosen
                answer.grammar.follow(answer.ids)
                found[at] = answer.grammar.valid(drafts[at])
    return found


def _all_draws(asking: Sequence[tuple["_Part", Answer]]) -> tuple[list[Draw], dict[Answer, BadGrammar]]:
    """Return how to choose the tokens of a step, and the answers whose grammars reached a limit."""
    draws: list[Draw] = []
    errors: dict[Answer, BadGrammar] = {}
    for part, answer in asking:
        try:
            draws += _draws(answer, part.draft)
        except BadGrammar as error:
            errors[answer] = error
            draws += [Draw(Sampling(), 0)] * (len(part.draft) + 1)
    return draws, errors


def _accepted(answer: Answer, choices: Sequence[Token], draft: Sequence[int]) -> _Chosen:
    """Return the choices of a step, and the tokens that the grammar forces after them.

    The choices end with the first wrong token of a draft, or with the answer.
    """
    valid = common_prefix([token.id for token in choices], draft) + 1
    tokens = choices[:valid]
    if answer.grammar is None:
        return _Chosen(tokens, valid)
    can_force = not answer.request.wants_logprobs
    try:
        found = answer.grammar.accept([token.id for token in tokens], force=can_force)
    except BadGrammar as error:
        return _Chosen(tokens, valid, error=error)
    return _Chosen([*tokens[: found.count], *map(Token, found.forced)], found.count, found.is_last)


def share(room: int, wanted: Sequence[int]) -> list[int]:
    """Divide ``room`` positions among prompts of ``wanted`` positions: short ones whole, the rest
    equally.
    """
    given = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for done, index in enumerate(order):
        given[index] = min(wanted[index], room // (len(order) - done))
        room -= given[index]
    return given


def _gained(part: _Part) -> int:
    """Return how many positions a sequence gains or loses when an answer begins, before its first
    row.
    """
    if part.origin is None or part.origin.number == part.sequence.number:
        return 0
    return len(part.origin.ids) - len(part.sequence.held)


class SequenceGroup:
    """The sequences of one chain. The chain is open while ``run`` runs."""

    def __init__(
        self,
        size: int,
        head: LmHead,
        open_chain: OpenChain,
        request: Request,
        *,
        kept: Callable[[], int],
        idle_s: float | None,
    ) -> None:
        """``request`` is the first request. All later ones have its adapter. They are traced only
        if it is.

        ``kept`` returns the most positions of all KV caches. Above this, caches of finished answers
        are dropped. ``idle_s``: as in ``Batcher``.
        """
        self.adapter = request.adapter
        self.is_traced = request.traced
        self._idle_s = idle_s
        self.report = ChainReport()
        self._sequences = [RunningSequence(number) for number in range(size)]
        self._head = head
        self._open_chain = open_chain
        self._kept = kept
        self._turn = 0
        self._origins: Counter[int] = Counter()
        """For each sequence, the number of steps in flight that start from its KV caches."""
        self._times = StepTimes()
        self._traced: list[TracedStep] = []
        """Answered steps that no answer has got yet."""
        self._arrived = asyncio.Event()
        self._ready = asyncio.Event()
        self._left = asyncio.Event()
        self._is_closing = False

    @property
    def free(self) -> int:
        return 0 if self._is_closing else sum(sequence.answer is None for sequence in self._sequences)

    @property
    def held(self) -> int:
        """Positions of all KV caches."""
        return sum(len(sequence.held) for sequence in self._sequences)

    def close(self) -> None:
        """Take no more answers, and end when none is left."""
        self._is_closing = True
        self._left.set()

    @property
    def answers(self) -> list[Answer]:
        return [sequence.answer for sequence in self._sequences if sequence.answer is not None]

    def shared(self, request: Request) -> int:
        """Return the most positions of the request that a sequence holds or is about to hold."""
        return max(max(each.shared(request), each.will_share(request)) for each in self._sequences)

    def join(self, answer: Answer) -> None:
        """Start an answer on one of the free sequences."""
        request = answer.request
        sequence = pick_sequence(self._sequences, request)
        sequence.has_begun, sequence.start = False, 0
        sequence.todo = [*request.ids, *answer.ids]
        sequence.answer = answer
        sequence.is_decoding = False
        drafts = None
        if self._head.draft_model is not None and request.speculate:
            drafts = self._head.draft_model.sequence(sequence.todo)
        sequence.speculator = Speculator(sequence.todo, drafts)
        self._arrived.set()

    def leave(self, answer: Answer) -> None:
        """Free the sequence of an answer that was cancelled."""
        for sequence in self._sequences:
            if sequence.answer is answer:
                self._release(sequence)

    async def run(self) -> None:
        """Compute answers until there were none for ``idle_s``. Raises what ``Chain.forward``
        raises."""
        keep = self._traced.append if self.is_traced else None
        async with self._open_chain(self.adapter, self._give_up_idle, keep) as chain:
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
            await self._step(chain, self._prompt_parts(coming, is_alone=is_alone))

    def _prompt_parts(self, coming: Sequence[RunningSequence], *, is_alone: bool) -> list["_Part"]:
        """Return the parts of prompts for the next step, except prompts that wait for another
        prompt.
        """
        going: list[tuple[RunningSequence, Origin | None]] = []
        beginning: list[RunningSequence] = []
        for sequence in coming:
            answer = sequence.answer
            if sequence.has_begun or answer is None:
                going.append((sequence, None))
                continue
            origin = find_origin(sequence, self._sequences, answer.request)
            if origin is None or any(begin_alike(each, sequence, len(origin.ids)) for each in beginning):
                continue
            beginning.append(sequence)
            going.append((sequence, origin))
        lengths = [len(each.todo) - (len(origin.ids) if origin else 0) for each, origin in going]
        # the outputs of all positions of a long prompt would take too much memory at once
        in_parts = not is_alone or any(sequence.reads_all for sequence, _ in going)
        counts = share(PREFILL, lengths) if in_parts else lengths
        return [
            _Part(sequence, count, origin=origin)
            for (sequence, origin), count in zip(going, counts, strict=True)
            if count
        ]

    async def _send_tokens(self, chain: Chain) -> None:
        while True:
            await self._ready.wait()
            turn = [sequence for sequence in self._sequences if self._is_ready(sequence)]
            if not turn:
                self._ready.clear()
                continue
            parts = await self._with_drafts(turn)
            started = loop_time()
            if parts:
                await self._step(chain, parts)
                self._times.add(sum(1 + len(part.draft) for part in parts), loop_time() - started)

    async def _with_drafts(self, turn: Sequence[RunningSequence]) -> list["_Part"]:
        """Return the parts of one step: the newest tokens of each sequence, and a draft."""
        answers = [sequence.answer for sequence in turn]
        if self._head.draft_model is None:
            drafts = self._drafts(turn)
        else:
            drafts = await self._head.compute(partial(self._drafts, turn))
        if any(draft and answer and answer.grammar for draft, answer in zip(drafts, answers, strict=True)):
            drafts = await self._head.compute(partial(_allowed_drafts, answers, drafts))
        return [
            _Part(sequence, len(sequence.todo), draft)
            for sequence, answer, draft in zip(turn, answers, drafts, strict=True)
            if sequence.answer is answer  # an answer may have left while its draft was computed
        ]

    def _drafts(self, turn: Sequence[RunningSequence]) -> list[tuple[int, ...]]:
        """Return a draft for each sequence of one step.

        Drafts and newest tokens together have at most ``CHUNK`` positions.
        """
        drafts: list[tuple[int, ...]] = []
        newest = sum(len(sequence.todo) for sequence in turn)
        for sequence in turn:
            answer = sequence.answer
            if answer is None or not answer.request.speculate:
                drafts.append(())
                continue
            room = CHUNK - newest - sum(map(len, drafts))
            most = min(room, answer.request.max_tokens - len(answer.ids) - 1)
            drafts.append(sequence.speculator.draft(self._times, positions=newest, most=most))
        return drafts

    @staticmethod
    def _is_ready(sequence: RunningSequence) -> bool:
        """Return whether a sequence is past its prompt and has its newest tokens to send."""
        return sequence.is_decoding and bool(sequence.todo)

    async def _step(self, chain: Chain, parts: Sequence["_Part"]) -> None:
        """Send one step, and choose the next tokens of the answers whose newest token was in it."""
        rows, ids, asking = [], [], []
        coming = sum(part.count + len(part.draft) + _gained(part) for part in parts)
        used_now = {part.origin.number for part in parts if part.origin is not None}
        for sequence in to_drop(self._sequences, chain.lengths, coming, self._kept(), used_now):
            row, sent = sequence.drop()
            rows.append(row)
            ids.extend(sent)
        for part in parts:
            row, sent = part.sequence.row(part.count, part.draft, part.origin)
            if part.origin is not None and part.sequence.answer is not None:
                part.sequence.answer.reused = max(part.sequence.answer.reused, row.start)
            rows.append(row)
            ids.extend(sent)
            if row.outputs and part.sequence.answer is not None:
                asking.append((part, part.sequence.answer))
        self._origins.update(used_now)
        prompts = {
            len(rows) - len(parts) + at: part.sequence.answer
            for at, part in enumerate(parts)
            if part.sequence.answer is not None and not part.sequence.answer.trips
        }
        reached = {at: rows[at].start for at in prompts}

        def computed(row: int, positions: int) -> None:
            if (answer := prompts.get(row)) is not None:
                reached[row] += positions
                answer.prefilled(reached[row])

        # masks of grammars are computed while the hosts compute
        drawing = self._head.begin(partial(_all_draws, asking))
        try:
            hidden = await chain.forward(tuple(rows), np.array(ids, np.int64), computed)
        finally:
            self._origins.subtract(used_now)
        sent_now = {row.sequence for row in rows}
        traced = [step for step in self._traced if not sent_now.isdisjoint(step.sequences)]
        self._traced[:] = [step for step in self._traced if step not in traced]
        for part in parts:
            if (answer := part.sequence.answer) is not None and answer.request.traced:
                mine = [step for step in traced if part.sequence.number in step.sequences]
                answer.steps += map(AnswerStep, mine)
        hidden = await self._read_prompts(rows, prompts, hidden)
        if not asking:
            return
        found = await self._head.compute(partial(self._choose, hidden, asking, *await drawing))
        for (part, answer), chosen in zip(asking, found, strict=True):
            if part.sequence.answer is answer:  # else it left meanwhile
                self._add_tokens(part, answer, chosen)

    def _choose(
        self,
        hidden: Array,
        asking: Sequence[tuple["_Part", Answer]],
        draws: list[Draw],
        errors: Mapping[Answer, BadGrammar],
    ) -> list[_Chosen]:
        """Choose the next tokens of answers, on the thread that computes."""
        tokens = iter(self._head.choose(hidden, draws))
        choices = [list(itertools.islice(tokens, len(part.draft) + 1)) for part, _ in asking]
        return [
            _Chosen([], 0, error=errors[answer])
            if answer in errors
            else _accepted(answer, chosen, part.draft)
            for (part, answer), chosen in zip(asking, choices, strict=True)
        ]

    async def _read_prompts(self, rows: Sequence[Row], prompts: Mapping[int, Answer], hidden: Array) -> Array:
        """Give outputs of prompts to their readers. Return the outputs after which tokens are
        chosen."""
        if not any(answer.request.reader for answer in prompts.values()):
            return hidden
        pieces = split(hidden, [row.wanted for row in rows])
        for at, answer in prompts.items():
            if answer.request.reader is not None:
                await self._head.read(answer.request.reader, rows[at].end - len(pieces[at]), pieces[at])
        return np.concatenate([piece[row.first :] for row, piece in zip(rows, pieces, strict=True)])

    def _add_tokens(self, part: "_Part", answer: Answer, chosen: _Chosen) -> None:
        """Add tokens to an answer. Its last valid choice and the forced tokens are sent next."""
        sequence = part.sequence
        if chosen.error is not None:
            answer.fail(chosen.error)
            self._release(sequence)
            return
        tokens, valid = chosen.tokens, chosen.valid
        answer.trips += 1
        answer.report = self.report
        answer.precisions += [each for each in self.report.precisions if each not in answer.precisions]
        ids = [token.id for token in tokens]
        sequence.speculator.choose(ids[:valid], len(part.draft))
        sequence.speculator.extend(ids[valid:])
        last, before = len(tokens) - 1 if chosen.is_last else -1, len(answer.ids)
        needs_more = all(answer.add(token, is_last=at == last) for at, token in enumerate(tokens))
        if answer.steps:
            answer.steps[-1].tokens = len(answer.ids) - before
        sequence.start -= len(part.draft) + 1 - valid
        if needs_more:
            sequence.todo, sequence.is_decoding = ids[valid - 1 :], True
            self._ready.set()
        else:
            self._release(sequence)

    def _give_up_idle(self) -> set[int]:
        """Give up the KV caches of finished answers. Returns the numbers of their sequences."""
        idle = [
            each
            for each in self._sequences
            if each.answer is None and each.held and not self._origins[each.number]
        ]
        for sequence in idle:
            sequence.forget()
        return {sequence.number for sequence in idle}

    def _release(self, sequence: RunningSequence) -> None:
        self._turn += 1
        sequence.answer, sequence.todo, sequence.used = None, [], self._turn
        sequence.is_decoding = False
        sequence.speculator = Speculator()
        self._left.set()

    async def _idle(self) -> None:
        while not self._is_closing or self.answers:
            self._left.clear()
            if not await within(self._idle_s, self._left.wait()) and not self.answers:
                return
