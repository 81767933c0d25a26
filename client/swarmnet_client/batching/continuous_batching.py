"""Continuous batching: the answers of many callers over a few chains of one model.

1. :meth:`BatchedModel.open` loads the local layers and starts a :class:`Batcher`.
2. The batcher queues requests and starts them while the limits allow.
3. Each answer runs on a chain (:class:`SequenceGroup`). If the chain fails, the batcher moves the
   answer to another chain. Each adapter has chains of its own: a host computes the steps of all its
   sessions in one forward, whatever their adapters (docs/decisions/0186).
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from swarmnet_client.batching.answers import Answer, Request
from swarmnet_client.batching.sequences import IDLE_S, KEPT_POSITIONS, OpenChain, SequenceGroup
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.steps_in_flight import GiveUpIdle
from swarmnet_client.chain.trace import KeepStep
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_client.model.head import LmHead, NormedLayers, open_layers
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.model.sampling import USUAL_SAMPLING, Sampling
from swarmnet_protocols.averages import averaged
from swarmnet_protocols.errors import (
    ConfigError,
    IntegrityError,
    NoRoom,
    NoRoute,
    NotAuthorised,
    OutOfResources,
    SwarmnetError,
)
from swarmnet_protocols.machine.aio import cancel, loop_time
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.machine.threads import compute_on
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.models.text.vocabulary import Vocabulary
from swarmnet_protocols.net import Transport
from swarmnet_protocols.routing.chain_search import uncovered

if TYPE_CHECKING:
    from swarmnet_client.model.drafts.draft_model import DraftModel
    from swarmnet_protocols.session.adapters import Adapter

SEQUENCES_PER_CHAIN = 32
"""Most sequences of one chain."""
RETRIES = 2
"""Times that an answer may be moved to another chain without a new token in between."""
EXPECTED_TOKENS = 1024
"""At most this many tokens are reserved for an answer. Few answers are longer."""
SMOOTHING = 0.2
"""Weight of the newest answer in the running mean of their durations."""


class Overloaded(OutOfResources):
    """Too many answers are being computed. A caller may try again after ``retry_after_s``."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("too many requests are being answered", hint=f"try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class BatchLimits:
    """Limits of one batcher.

    - ``active``: most answers computed at a time.
    - ``waiting``: most requests in the queue.
    - ``positions``: most positions that all active prompts and answers are expected to have
      together.
    """

    active: int = 32
    waiting: int = 32
    positions: int = 1 << 18


@dataclass(frozen=True)
class Load:
    """The present load of a batcher.

    - ``active``: answers being computed, which need ``positions`` positions together.
    - ``waiting``: queued requests.
    - ``room``: answers that recently fitted into the hosts' memory.
    - ``answer_s``: mean seconds of an answer.
    """

    active: int = 0
    waiting: int = 0
    positions: int = 0
    room: float = math.inf
    answer_s: float = 1.0


def may_start(load: Load, limits: BatchLimits, positions: int) -> bool:
    """Return whether an answer of ``positions`` may start now. If none is active, any may."""
    return load.active == 0 or (
        load.active < min(limits.active, load.room) and load.positions + positions <= limits.positions
    )


def may_wait(load: Load, limits: BatchLimits, answers: int = 1) -> bool:
    """Return whether ``answers`` more requests may be queued. Requests that can start at once do
    not count."""
    free = max(0, min(limits.active, load.room) - load.active - load.waiting)
    return load.waiting + max(1, answers - free) <= limits.waiting


def retry_after_s(load: Load) -> int:
    """Return the seconds after which a refused caller should try again: half of the present
    requests are done by then."""
    turns = (load.active + load.waiting) / max(1, load.active)
    return max(1, min(60, math.ceil(turns * load.answer_s / 2)))


class Batcher:
    """Answers requests in the order of their arrival. Answers of a failed chain continue on another
    one."""

    def __init__(
        self,
        head: LmHead,
        open_chain: OpenChain,
        limits: BatchLimits,
        room: Callable[[], float] = lambda: math.inf,
        idle_s: float | None = IDLE_S,
    ) -> None:
        """``open_chain`` opens chains whose sequences are long enough for every request.

        ``room`` returns how many positions of this client fit on the hosts. ``idle_s``: seconds
        that a chain without answers stays open; None for as long as the batcher runs.
        """
        self._hosts_room = room
        self._idle_s = idle_s
        self.limits = limits
        self._head = head
        self._open_chain = open_chain
        self._waiting: deque[Answer] = deque()
        self._groups: dict[SequenceGroup, asyncio.Task[None]] = {}
        self._room = math.inf
        self._kept = KEPT_POSITIONS
        self._answer_s = 0.0
        self._past_failovers = 0
        self._past_wrong_hosts = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Batcher"]:
        """Answer while the context is open."""
        try:
            yield self
        finally:
            await cancel(*self._groups.values())

    @property
    def load(self) -> Load:
        under_way = [answer.request for group in self._groups for answer in group.answers]
        positions = sum(_positions(request) for request in under_way)
        return Load(len(under_way), len(self._waiting), positions, self._room, self._answer_s)

    @property
    def failovers(self) -> int:
        """Times that a chain lost hops and was repaired."""
        return self._past_failovers + sum(group.report.failovers for group in self._groups)

    @property
    def wrong_hosts(self) -> int:
        """Hosts that audits convicted of wrong outputs."""
        return self._past_wrong_hosts + sum(len(group.report.wrong) for group in self._groups)

    def check_room(self, answers: int = 1) -> None:
        """Raise ``Overloaded`` if ``answers`` more requests may not be queued."""
        load = self.load
        if not may_wait(load, self.limits, answers):
            raise Overloaded(retry_after_s(load))

    @asynccontextmanager
    async def answer(self, request: Request) -> AsyncIterator[Answer]:
        """Yield the answer to a request; leaving the context cancels it. Raises ``Overloaded``."""
        self.check_room()
        answer = Answer(request)
        started = loop_time()
        self._waiting.append(answer)
        self._start_waiting()
        try:
            yield answer
            if answer.finish_reason is not None:
                took_s = loop_time() - started
                self._answer_s = averaged(self._answer_s, took_s, SMOOTHING)
                self._room += 1
        finally:
            if answer in self._waiting:
                self._waiting.remove(answer)
            for group in self._groups:
                group.leave(answer)
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Start as many queued requests as the limits allow."""
        while self._waiting and may_start(self.load, self.limits, _positions(self._waiting[0].request)):
            answer = self._waiting.popleft()
            self._group_for(answer.request).join(answer)

    def _group_for(self, request: Request) -> SequenceGroup:
        free = [
            group
            for group in self._groups
            if group.free and group.adapter is request.adapter and group.is_traced >= request.traced
        ]
        if free:
            return max(free, key=lambda group: (group.shared(request), group.free))
        if sum(group.held for group in self._groups) > self._most_kept // 2:
            for group in self._groups:  # their caches would leave no room for the new chain
                if not group.answers:
                    group.close()
        size = min(self.limits.active, SEQUENCES_PER_CHAIN)
        group = SequenceGroup(
            size,
            self._head,
            self._open_chain,
            request,
            kept=lambda: self._most_kept // max(1, len(self._groups)),
            idle_s=self._idle_s,
        )
        self._groups[group] = asyncio.create_task(self._run_group(group), name="sequences")
        return group

    @property
    def _most_kept(self) -> int:
        """Positions that all chains may keep: hosts count the chains of a client together."""
        return int(min(self._kept, self._hosts_room()))

    async def _run_group(self, group: SequenceGroup) -> None:
        """Run a group to its end. Its incomplete answers return to the queue."""
        why = SwarmnetError("the chain was closed")
        try:
            await group.run()
        except SwarmnetError as error:
            why = error
        except Exception as error:  # noqa: BLE001 - the supervisor: an answer must end, whatever broke
            why = SwarmnetError(f"this should not have happened: {type(error).__name__}: {error}")
        del self._groups[group]
        self._past_failovers += group.report.failovers
        self._past_wrong_hosts += len(group.report.wrong)
        left = group.answers
        if isinstance(why, OutOfResources):
            self._room = max(1.0, len(left) // 2)
            self._kept //= 2
        for answer in reversed(left):
            if _may_retry(answer, why):
                self._waiting.appendleft(answer)
            else:
                answer.fail(why)
        self._start_waiting()


def _positions(request: Request) -> int:
    return len(request.ids) + min(request.max_tokens, EXPECTED_TOKENS)


def _may_retry(answer: Answer, why: SwarmnetError) -> bool:
    """Return whether an answer continues on another chain after ``why``. Counts the attempt."""
    if isinstance(why, NoRoute | NotAuthorised | ConfigError | IntegrityError):
        return False
    if isinstance(why, NoRoom) and len(answer.request.ids) + len(answer.ids) > why.room:
        return False  # it would not fit alone either
    if len(answer.ids) > answer.ids_at_retry:
        answer.retries, answer.ids_at_retry = 0, len(answer.ids)
    answer.retries += 1
    return answer.retries <= RETRIES


def _loaded(local: LocalModel, options: LoadOptions) -> tuple[NormedLayers, Vocabulary]:
    return open_layers(local, options), local.vocabulary()


def _draft_model(local: LocalModel, options: LoadOptions) -> "DraftModel":
    import_transformers()
    from swarmnet_client.model.drafts.draft_model import DraftModel

    return DraftModel.load(local, options)


@dataclass(frozen=True)
class BatchedModel:
    """A model whose answers an endpoint serves. Made by :meth:`open`."""

    local: LocalModel
    layers: NormedLayers
    vocabulary: Vocabulary
    batcher: Batcher
    hosts: ModelHosts
    context: int
    """Most positions that the model takes."""
    speculates: bool
    """True if answers are decoded speculatively."""
    lowest: Batcher
    """The batcher of batches. Hosts compute its answers in the pauses of all others."""
    adapter: "Adapter | None" = None
    """An addition of the hosts to the model's weights. Requests of this model carry it."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        local: LocalModel,
        hosts: ModelHosts,
        options: LoadOptions,
        limits: BatchLimits,
        *,
        speculate: bool = True,
        idle_s: float | None = IDLE_S,
    ) -> AsyncIterator["BatchedModel"]:
        """Serve the CausalLM of ``local`` over ``hosts`` while the context is open.

        ``speculate``: decode speculatively, if the model's caches can go back. ``idle_s``: as in
        ``Batcher``.
        """
        computing = ThreadPoolExecutor(1, thread_name_prefix="head")
        draft_model = None
        try:
            await compute_on(computing, threads=None)
            loop = asyncio.get_running_loop()
            layers, vocabulary = await loop.run_in_executor(computing, _loaded, local, options)
            speculates = speculate and layers.can_rewind
            if speculates and options.draft:
                draft_model = await loop.run_in_executor(computing, _draft_model, local, options)
            spec = options.chain_spec(local)

            def open_chain(
                adapter: "Adapter | None", give_up_idle: GiveUpIdle, keep: KeepStep | None, *, is_batch: bool
            ) -> AbstractAsyncContextManager[Chain]:
                own = replace(spec, adapter=adapter, trace=keep or spec.trace, is_batch=is_batch)
                return Chain(hosts, own, layers.embed, layers.logits, give_up_idle).open()

            await hosts.refresh()
            head = LmHead(layers, computing, draft_model)

            def batcher(*, is_batch: bool) -> AbstractAsyncContextManager[Batcher]:
                opener = partial(open_chain, is_batch=is_batch)
                room = partial(hosts.room, (0, spec.blocks))
                return Batcher(head, opener, limits, room, idle_s).running()

            async with batcher(is_batch=False) as first, batcher(is_batch=True) as lowest:
                most = local.max_positions
                yield cls(local, layers, vocabulary, first, hosts, most, speculates, lowest)
        finally:
            computing.shutdown(wait=False)
            if draft_model is not None:
                draft_model.close()

    def for_batches(self) -> "BatchedModel":
        """Return this model with the batcher of batches."""
        return replace(self, batcher=self.lowest)

    @property
    def transport(self) -> Transport:
        return self.hosts.transport

    @property
    def tokenizer(self) -> Any:
        return self.vocabulary.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset(self.vocabulary.end_ids)

    @property
    def sampling(self) -> Sampling:
        """The usual choice of tokens, which the model's files state. Requests may replace it."""
        stated = self.vocabulary.sampling
        usual = USUAL_SAMPLING
        return Sampling(stated.get("temperature", usual.temperature), stated.get("top_p", usual.top_p))

    @property
    def max_length(self) -> int:
        """Most positions of a prompt and its answer: the model's, or fewer where the hosts have no
        room for them."""
        return int(min(self.context, self.hosts.room((0, self.local.manifest.blocks))))

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Ranges of blocks without a known host."""
        online = [host for host in self.hosts.known if host.online]
        return uncovered(online, (0, self.local.manifest.blocks))
