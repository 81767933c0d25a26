"""The engine: continuous batching of the work of all sessions, on one thread.

There are two kinds of work:

1. Steps of sessions. :meth:`Engine.compute` queues new positions of some sequences. The loop takes
   waiting work as ``scheduler.py`` chooses, and computes it in one forward of the stage (Orca, Yu
   et al., 2022, section 3.2). Work that arrives during a forward joins the next one. Steps of
   batches are computed in the pauses of all others, or ride along where they cost little.
2. Passes for training. :meth:`Engine.compute_pass` queues a computation that cannot be split. A
   pass runs when no session has work, or when sessions have had priority for long enough.

Everything that touches tensors runs on one thread, the torch thread. So neither KV caches nor
graphs need locks. The loop decides on the asyncio thread, and hands over one computation at a time.

Memory: the bytes of each sequence's KV cache count in its client's scope, from
:meth:`Engine.register` to :meth:`Engine.release`. Saved autograd graphs use what caches leave free,
and make room for caches.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from swarmnet_node.engine.caches.kv_cache import SequenceCache
from swarmnet_node.engine.counters import LOAD_S, BusyShare, EngineCounters
from swarmnet_node.engine.scheduler import (
    BATCH_WAIT_S,
    SHORT_TOKENS,
    ClientShares,
    Rhythm,
    Waiting,
    batching_delay_s,
    schedule,
    shared_tokens,
)
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.torch_layers.autograd_graphs import AutogradGraph, GraphCache, GraphKey
from swarmnet_protocols.arrays import joined
from swarmnet_protocols.averages import averaged
from swarmnet_protocols.errors import StreamEnded, Unreachable
from swarmnet_protocols.machine.aio import in_background, loop_time, within
from swarmnet_protocols.machine.devices import is_out_of_memory
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import RETRY_S, ResourceLimitReached, ResourceManager, Scope
from swarmnet_protocols.timing import Timing

MAX_BATCH_TOKENS = 512
"""Most positions of one forward. With more, steps would wait longer. With fewer, prompts would be
computed more slowly."""
GRAPH_CLIENT_SHARE = 2
"""The graphs of one client take at most one part in this many of the memory for caches."""
GIVE_WAY_S = 0.1
"""Seconds between two checks whether waiting steps of batches may be computed. With less, the loop
wakes often for nothing. With more, pauses pass unused."""
RECENT_S = 1.0
"""Seconds after its last work while a sequence or session is expected to have more."""
SMOOTHING = 0.1
"""Weight of the newest measurement in an exponential moving average."""

T = TypeVar("T")


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class _StepWork:
    """Inputs [count, D] of one sequence. The first ``computed`` positions are done.

    After a rewind, ``behind`` earlier positions are computed again first. They count as work like
    others.
    """

    sequence: SequenceCache
    scope: Scope
    """The scope of its session."""
    inputs: Any
    stage: Stage
    since: float
    """Time of the engine's stopwatch when the work arrived."""
    behind: int
    started: Callable[[], None]
    """Called when its first forward begins."""
    is_batch: bool
    done: "asyncio.Future[Any]" = field(default_factory=_future)
    outputs: list[Any] = field(default_factory=list)
    computed: int = 0

    @property
    def waiting(self) -> Waiting:
        tokens = self.behind + len(self.inputs) - self.computed
        return Waiting(tokens, id(self.stage), self.scope.owner)

    def next_part(self, tokens: int) -> "_Part":
        """Return the next ``tokens`` positions."""
        again = min(self.behind, tokens)
        return _Part(self, again, self.inputs[self.computed : self.computed + tokens - again])


@dataclass(frozen=True, eq=False)
class _Part:
    """The part of ``work`` in one forward.

    ``inputs`` [count, D]: the new positions, possibly none. ``again``: earlier positions that
    recurrent states compute again after a rewind.
    """

    work: _StepWork
    again: int
    inputs: Any


def _compute(parts: Sequence[_Part]) -> list[Any]:
    """Compute the parts on the torch thread. Return the outputs of parts with inputs."""
    stage = parts[0].work.stage
    for part in parts:
        if part.again:
            stage.catch_up(part.work.sequence, part.again)
    return stage.forward([(part.work.sequence, part.inputs) for part in parts if len(part.inputs)])


@dataclass(eq=False)
class _PassWork:
    """A computation of ``positions`` positions through ``blocks`` blocks that cannot be split.

    ``prepare`` runs on the asyncio thread, and returns the function for the torch thread. Sessions
    have priority until ``max_delay_s`` after ``since``, a time of the event loop.
    """

    prepare: Callable[[], Callable[[], Any]]
    positions: int
    blocks: int
    since: float
    max_delay_s: float
    done: "asyncio.Future[Any]" = field(default_factory=_future)


class _Sessions:
    """The sessions of one kind: batches, or all others."""

    def __init__(self) -> None:
        self.last_work: dict[SequenceCache, float] = {}
        """Loop time of each registered sequence's last work."""
        self.active: dict[Scope, float] = {}
        """Loop time of each session's last work, by its scope."""
        self.shares = ClientShares()

    def set_active(self, scopes: Iterable[Scope]) -> None:
        """Count these as active, and forget those without work for ``RECENT_S``.

        A client between two tokens has no work at this moment. It stays active, so that it keeps
        its counter and the limit for shared forwards holds.
        """
        now = loop_time()
        self.active |= dict.fromkeys(scopes, now)
        self.active = {scope: at for scope, at in self.active.items() if at > now - RECENT_S}
        self.shares.set_active({scope.owner for scope in self.active})

    def delay_s(self, steps: Sequence[_StepWork], forward_s: float) -> float:
        """Return how long ``steps`` should wait for sequences that are expected soon."""
        since = loop_time() - RECENT_S
        self.last_work = {each: at for each, at in self.last_work.items() if at > since}
        expected = len(self.last_work.keys() | {work.sequence for work in steps})
        lead = self.shares.lead({work.scope.owner for work in steps})
        return batching_delay_s(len(steps), expected, forward_s, lead=lead)

    def pick(self, steps: Sequence[_StepWork], most: int) -> list[tuple[_StepWork, int]]:
        """Choose at most ``most`` positions of ``steps``, and charge their clients."""
        waiting = [work.waiting for work in steps]
        picked = schedule(waiting, most, self.shares.served)
        if picked:
            self.shares.charge(((waiting[index].client, tokens) for index, tokens in picked), most)
        return [(steps[index], tokens) for index, tokens in picked]


class Engine:
    """Computes for many clients on one stage."""

    def __init__(  # noqa: PLR0913 - where it computes, its limits and its clock
        self,
        stage: Stage,
        executor: Executor,
        resources: ResourceManager,
        *,
        max_cache_bytes: int,
        client_cache_bytes: Callable[[int], int] = int,
        counters: EngineCounters | None = None,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make an engine that computes inside :meth:`running`.

        - ``executor``: has one thread, the torch thread.
        - ``max_cache_bytes``: most bytes for the KV caches of all clients.
        - ``client_cache_bytes``: takes this limit, and returns the limit for one client.
        - ``counters``: those of the engine that this one replaces, if any.
        - ``stopwatch``: returns seconds, and times forwards.
        """
        self.stage = stage
        """The stage that computes new work. It may be replaced by a part of it. Work that has begun
        then ends on the old stage."""
        self.max_cache_bytes = max_cache_bytes
        self.counters = counters or EngineCounters()
        self.busy = BusyShare()
        self.load = BusyShare(LOAD_S)
        """Load by the stopwatch, averaged over ``LOAD_S``."""
        self.graph_cache = GraphCache(resources)
        self.token_s = 0.0
        """Seconds for one position in a forward, averaged. 0 until the first forward."""
        self.position_s = 0.0
        """Seconds for one position in a forward of many, averaged. 0 until the first such
        forward."""
        # Nearly 0, which means unmeasured: the first forward is usually a prompt. If it counted
        # whole, steps of one token would wait that long for each other.
        self._forward_s = 1e-9
        """Seconds for one forward, averaged."""
        self._pass_position_s = 0.0
        """Seconds for one position of a pass, averaged."""
        self._client_cache_bytes = client_cache_bytes
        self._resources = resources
        self._executor = executor
        self.stopwatch = stopwatch
        self._steps: list[_StepWork] = []
        self._passes: deque[_PassWork] = deque()
        self._last_pass_at = -math.inf
        self._wake = asyncio.Event()
        self._stopped = False
        self._urgent, self._batches = _Sessions(), _Sessions()
        self._rhythm = Rhythm()
        self.limit_caches(max_cache_bytes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Engine"]:
        """Compute while the context is open. At its end, waiting work fails."""
        try:
            async with in_background(self._loop()):
                yield self
        finally:
            self._stop()

    def _stop(self) -> None:
        """Fail waiting work, and take no more."""
        self._stopped = True
        waiting: list[_StepWork | _PassWork] = [*self._steps, *self._passes]
        for work in waiting:
            _fail(work.done, Unreachable("this host has stopped"))
        self._steps.clear()
        self.graph_cache.shrink(0)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all KV caches, including caches that are about to be allocated."""
        return self._resources.system.used[Resource.CACHE]

    @property
    def queue_s(self) -> float:
        """Seconds that new work of a session would wait, estimated from average durations.

        Sessions overtake batches, and passes except one that may already run.
        """
        tokens = sum(work.waiting.tokens for work in self._steps if not work.is_batch)
        positions = self._passes[0].positions if self._passes else 0
        return self.token_s * tokens + self._pass_position_s * positions

    @property
    def room(self) -> int:
        """Positions that one client may have in KV caches of all blocks of the stage."""
        return self.stage.geometry.positions_in(self._client_cache_bytes(self.max_cache_bytes))

    def limit_caches(self, max_bytes: int) -> None:
        """Set the limit on the bytes of all KV caches.

        Existing caches stay even above the limit. Graphs are dropped to fit.
        """
        self.max_cache_bytes = max_bytes
        self._resources.limit(Resource.CACHE, system=max_bytes, per_peer=self._client_cache_bytes(max_bytes))
        self._resources.limit(Resource.GRAPHS, per_peer=max_bytes // GRAPH_CLIENT_SHARE)
        self.graph_cache.shrink(max(0, self._free_bytes))

    def register(self, sequence: SequenceCache, scope: Scope) -> SequenceCache:
        """Count a sequence's KV cache in ``scope`` until ``release``.

        Raises ``OutOfResources`` if ``scope`` has no room for its current size.
        """
        sequence.reservation = scope.reserve(Resource.CACHE, sequence.nbytes)
        return sequence

    def release(self, sequence: SequenceCache) -> None:
        """Give back the reservation of a sequence's KV cache. Idempotent."""
        for sessions in (self._urgent, self._batches):
            sessions.last_work.pop(sequence, None)
        if sequence.reservation is not None:
            sequence.reservation.release()
            sequence.reservation = None

    def keep_graph(self, key: GraphKey, graph: AutogradGraph, *, for_s: float) -> None:
        """Keep a graph in ``graph_cache`` for ``for_s`` seconds, if KV caches leave room for it."""
        self.graph_cache.put(key, graph, max_bytes=self._free_bytes, for_s=for_s)

    @property
    def _free_bytes(self) -> int:
        """Bytes of the limit that KV caches do not use."""
        return self.max_cache_bytes - self.cache_bytes

    async def run_on_torch_thread(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the torch thread between two forwards. Raises its errors.

        Raises ``ResourceLimitReached`` if the device runs out of memory.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Not in an except clause: there, the error's frames would keep the tensors of the failed
        # work alive.
        self.graph_cache.shrink(0)
        raise ResourceLimitReached("this host's device has no memory left", RETRY_S)

    async def fork(self, sources: Sequence[tuple[SequenceCache, int]], scope: Scope) -> list[SequenceCache]:
        """Register and return copies of (sequence, number of its first positions to copy).

        Raises ``OutOfResources``, before anything is copied, if ``scope`` has no room for the
        copies.
        """
        with ExitStack() as stack:
            reservations = [
                stack.enter_context(scope.reserve(Resource.CACHE, sequence.geometry.bytes_for(length)))
                for sequence, length in sources
            ]
            self.graph_cache.shrink(self._free_bytes)
            twins = await self.run_on_torch_thread(
                lambda: [sequence.fork(length) for sequence, length in sources]
            )
            stack.pop_all()
        for twin, reservation in zip(twins, reservations, strict=True):
            twin.reservation = reservation
        return twins

    async def compute(
        self,
        stage: Stage,
        rows: Sequence[tuple[SequenceCache, Any]],
        started: Callable[[], None] = lambda: None,
        *,
        is_batch: bool = False,
    ) -> list[Any]:
        """Compute outputs [count, D] for rows of (sequence, inputs [count, D]) on ``stage``.

        ``stage`` is this engine's stage or a part of it. Each sequence grows by ``count``.
        ``started`` is called for each row when its first forward begins. Graphs are dropped to make
        room. ``is_batch``: whether the rows wait for the pauses of all others.

        Raises, before anything is computed, ``OutOfResources`` if the KV caches may not grow that
        far. Raises ``StreamEnded`` if a sequence was released, and ``Unreachable`` if the engine
        has stopped.
        """
        since, works = self.stopwatch(), []
        for sequence, inputs in rows:
            reservation = sequence.reservation
            if reservation is None:
                raise StreamEnded("the session of this sequence has ended")
            needed = stage.geometry.bytes_for(sequence.length + len(inputs))
            reservation.resize(max(reservation.amount, needed))
            scope, behind = reservation.scope, sequence.behind
            works.append(_StepWork(sequence, scope, inputs, stage, since, behind, started, is_batch))
        self.graph_cache.shrink(self._free_bytes)
        if self._stopped:
            raise Unreachable("this host has stopped")
        self._steps.extend(works)
        sessions = self._batches if is_batch else self._urgent
        sessions.last_work |= dict.fromkeys((sequence for sequence, _ in rows), loop_time())
        if not is_batch:
            self._rhythm.came(since)
        self._wake.set()
        return await asyncio.gather(*(work.done for work in works))

    async def compute_pass(
        self,
        prepare: Callable[[], Callable[[], T]],
        positions: int,
        *,
        blocks: int | None = None,
        max_delay_s: float = Timing.pass_wait_s,
    ) -> T:
        """Compute a pass of ``positions`` positions on the torch thread, in order of arrival.

        It goes through ``blocks`` blocks, by default all of the stage.

        1. The pass waits until no session has work, or until sessions have had priority for
           ``max_delay_s`` since it arrived or since the last pass, whichever was later.
        2. ``prepare`` runs here, and returns a function.
        3. The function runs on the torch thread. Its result is returned.

        Raises the errors of both, and ``Unreachable`` if the engine has stopped. If the caller is
        cancelled before step 2, the pass is not computed.
        """
        if self._stopped:
            raise Unreachable("this host has stopped")
        blocks = self.stage.blocks if blocks is None else blocks
        work = _PassWork(prepare, positions, blocks, loop_time(), max_delay_s)
        self._passes.append(work)
        self._wake.set()
        try:
            result: T = await work.done
            return result
        finally:
            self._remove_pass(work)

    async def _loop(self) -> None:
        try:
            while True:
                await self._compute_next()
        except Exception:
            self._stop()  # clients go to other hosts; otherwise they would wait for ever
            raise

    async def _compute_next(self) -> None:
        if not self._steps and not self._passes:
            self._wake.clear()
            await self._wake.wait()
        if self._is_pass_next():
            work = self._passes[0]
            await self._run_pass(work)
            self._last_pass_at = loop_time()
            self._remove_pass(work)
            return
        await self._wait_for_more()
        if self._steps:  # clients may have left meanwhile
            await self._forward()

    async def _wait_for_more(self) -> None:
        """Wait for sequences that are expected soon, so that they join the next forward.

        Waits at most as long as a forward takes.
        """
        until = loop_time() + self._forward_s
        while delay_s := self._delay_s():
            self._wake.clear()
            if not await within(min(delay_s, until - loop_time()), self._wake.wait()):
                return

    def _delay_s(self) -> float:
        steps = [work for work in self._steps if not work.is_batch]
        sessions = self._urgent if steps else self._batches
        return sessions.delay_s(steps or self._steps, self._forward_s)

    def _is_pass_next(self) -> bool:
        """Return whether a pass runs next.

        It does if no session has work, or if sessions have had priority for long enough.
        """
        if not self._passes or not self._steps:
            return bool(self._passes)
        first = self._passes[0]
        return loop_time() >= max(first.since, self._last_pass_at) + first.max_delay_s

    def _pick(self) -> list[tuple[_StepWork, int]]:
        """Choose the steps of the next forward. There may be none while batches wait."""
        steps = [work for work in self._steps if not work.is_batch]
        batches = [work for work in self._steps if work.is_batch]
        self._urgent.set_active(work.scope for work in steps)
        self._batches.set_active(work.scope for work in batches)
        is_shared = bool(batches) or len(self._urgent.active) > 1
        most = shared_tokens(self.position_s, MAX_BATCH_TOKENS) if is_shared else MAX_BATCH_TOKENS
        picked = self._urgent.pick(steps, most)
        if picked:
            batches = [work for work in batches if work.stage is picked[0][0].stage]
        now = self.stopwatch()
        spare_s = self._rhythm.spare_s(now, waits=bool(picked))
        if any(now - work.since >= BATCH_WAIT_S for work in batches):
            spare_s = math.inf
        position_s = self.position_s or self.token_s
        room = min(most, spare_s / position_s) if position_s else most
        room = int(min(room, MAX_BATCH_TOKENS - sum(tokens for _, tokens in picked)))
        return picked + (self._batches.pick(batches, room) if room > 0 else [])

    async def _forward(self) -> None:
        """Compute one forward of the steps that the scheduler chooses."""
        picked = self._pick()
        if not picked:
            # batches wait until other steps come, or have stayed away for long enough
            self._wake.clear()
            await within(GIVE_WAY_S, self._wake.wait())
            return
        parts = [work.next_part(tokens) for work, tokens in picked]
        started = self.stopwatch()
        for part in parts:
            if not part.work.computed and len(part.inputs):
                self.counters.wait_s.observe(started - part.work.since)
                part.work.started()
        try:
            results = await self.run_on_torch_thread(partial(_compute, parts))
        except Exception as error:  # noqa: BLE001 - a failed forward ends its sessions, not the node
            for part in parts:
                self._steps.remove(part.work)
                _fail(part.work.done, error)
            return
        self._measure(sum(tokens for _, tokens in picked), started, parts[0].work.stage.blocks)
        # Once more with the present time: a forward of a long prompt may take longer than RECENT_S.
        for part in parts:
            self._sessions_of(part.work).active[part.work.scope] = loop_time()
        if any(not part.work.is_batch for part in parts):
            now = self.stopwatch()
            self._rhythm.computed(now, now - started)
        for part in parts:
            part.work.behind -= part.again
        for part, result in zip((part for part in parts if len(part.inputs)), results, strict=True):
            part.work.computed += len(part.inputs)
            part.work.outputs.append(result)
            if part.work.computed == len(part.work.inputs):
                self._finish(part.work)

    async def _run_pass(self, work: _PassWork) -> None:
        if work.done.done():
            return
        started = self.stopwatch()
        try:
            result = await self.run_on_torch_thread(work.prepare())
        except Exception as error:  # noqa: BLE001 - a failed pass fails for its client, not for the node
            _fail(work.done, error)
            return
        elapsed_s = self._count(work.positions, started, work.blocks)
        self.counters.pass_s.observe(elapsed_s)
        self._pass_position_s = averaged(self._pass_position_s, elapsed_s / work.positions, SMOOTHING)
        if not work.done.done():
            work.done.set_result(result)

    def _remove_pass(self, work: _PassWork) -> None:
        if work in self._passes:
            self._passes.remove(work)

    def _count(self, positions: int, started: float, blocks: int) -> float:
        """Count a forward or pass through ``blocks`` that began at ``started``. Return its
        seconds."""
        now = self.stopwatch()
        gpu_s = now - started if self.stage.is_on_accelerator else 0.0
        self.counters.given.computed(positions, blocks, gpu_s)
        self.counters.forwards += 1
        self.counters.positions += positions
        self.busy.computed(now - started, now)
        self.load.computed(now - started, now)
        return now - started

    def _measure(self, tokens: int, started: float, blocks: int) -> None:
        """Count a forward of ``tokens`` positions, and average its times."""
        elapsed_s = self._count(tokens, started, blocks)
        self.counters.forward_s.observe(elapsed_s)
        self.counters.forward_positions.observe(tokens)
        self.token_s = averaged(self.token_s, elapsed_s / tokens, SMOOTHING)
        if tokens >= SHORT_TOKENS:
            self.position_s = averaged(self.position_s, elapsed_s / tokens, SMOOTHING)
        self._forward_s = averaged(self._forward_s, elapsed_s, SMOOTHING)

    def _sessions_of(self, work: _StepWork) -> _Sessions:
        return self._batches if work.is_batch else self._urgent

    def _finish(self, work: _StepWork) -> None:
        self._steps.remove(work)
        if work.sequence.reservation is not None:  # not released meanwhile
            self._sessions_of(work).last_work[work.sequence] = loop_time()
        if not work.done.done():
            work.done.set_result(joined(work.outputs))


def _fail(done: "asyncio.Future[Any]", error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
