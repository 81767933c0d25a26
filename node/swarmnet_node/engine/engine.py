"""The engine: one loop that packs the waiting work of all sessions into forwards of the stage.

Sessions call ``compute``; the loop asks the scheduler what goes next, runs it on the one torch thread, and hands the
outputs back. While a forward runs, work gathers: batches form by themselves. Passes go when no session has work.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from swarmnet_node.engine.autograd_graphs import AutogradGraph, GraphCache, GraphKey
from swarmnet_node.engine.counters import EngineCounters
from swarmnet_node.engine.kv_cache import SequenceCache
from swarmnet_node.engine.scheduler import Waiting, schedule, worth_waiting_s
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.errors import Unreachable
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.machine.core_lock import ALONE, CoreLock, NoCoreLock
from swarmnet_protocols.machine.threads import on_half_the_cores
from swarmnet_protocols.net.resources import (
    RETRY_S,
    Reservation,
    Resource,
    ResourceLimitReached,
    ResourceManager,
    Scope,
)
from swarmnet_protocols.timing import Timing

BUDGET_TOKENS = 512
"""Positions in one forward: whoever waits for one token waits for all of these."""
CLIENT_SHARE = 2
"""One client's graphs take at most one part in this many of what caches may take."""
LATELY_S = 1.0
"""A lane that had work within this time is expected to have work again."""
SMOOTHING = 0.1
"""Weight of the newest measurement in the running mean of a time."""

T = TypeVar("T")


@dataclass(eq=False)
class _Work:
    """One lane's inputs [count, D] on their way through the stage."""

    sequence: SequenceCache
    inputs: torch.Tensor
    priority: int
    stage: Stage
    done: "asyncio.Future[torch.Tensor]"
    since: float
    outputs: list[torch.Tensor] = field(default_factory=list)
    computed: int = 0

    @property
    def waiting(self) -> Waiting:
        return Waiting(len(self.inputs) - self.computed, self.priority, id(self.stage))


@dataclass(eq=False)
class _Pass:
    """Something to compute that cannot be cut. It waits since ``since``, a time of the loop, and lets sessions go first for ``yields_s``."""

    start: Callable[[], Callable[[], Any]]
    positions: int
    done: "asyncio.Future[Any]"
    since: float
    yields_s: float


class Engine:
    """Computes on one stage for many sessions. Their caches are held in their scopes, graphs are kept where caches leave room."""

    def __init__(
        self,
        stage: Stage,
        executor: Executor,
        resources: ResourceManager,
        *,
        max_cache_bytes: int,
        core_lock: CoreLock | NoCoreLock,
        stopwatch: Callable[[], float],
    ) -> None:
        self.stage = stage
        self.max_cache_bytes = max_cache_bytes
        self.client_cache_bytes: Callable[[int], int] = int
        """What caches of one peer may take where those of all may take so much."""
        self._resources = resources
        self._in_all = resources.system
        self.forwards = 0
        self.tokens = 0
        self.token_s = 0.0
        self._forward_s = 0.0
        self.counters = EngineCounters()
        self.graph_cache = GraphCache(resources)
        self._pass_position_s = 0.0
        self._executor = executor
        self._core_lock = core_lock
        self._stopwatch = stopwatch
        self._waiting: list[_Work] = []
        self._passes: deque[_Pass] = deque()
        self._passed_at = -math.inf
        self._wake = asyncio.Event()
        self._stopped = False
        self._worked: dict[int, float] = {}
        """When a lane, by its id, last had work."""
        self._holds: dict[int, tuple[SequenceCache, Reservation]] = {}
        self.limit_caches(max_cache_bytes)

    @classmethod
    @asynccontextmanager
    async def run(
        cls,
        stage: Stage,
        executor: Executor,
        resources: ResourceManager,
        *,
        max_cache_bytes: int,
        core_lock: CoreLock | NoCoreLock = ALONE,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> AsyncIterator["Engine"]:
        """An engine whose loop runs for as long as the context, and which caches of all peers may take ``max_cache_bytes`` of.

        A forward is chosen and computed in one of the ``core_lock``, a pass beside those of other nodes; ``stopwatch`` gives the seconds forwards are timed by.
        """
        engine = cls(
            stage,
            executor,
            resources,
            max_cache_bytes=max_cache_bytes,
            core_lock=core_lock,
            stopwatch=stopwatch,
        )
        loop = asyncio.create_task(engine._loop(), name="engine")
        try:
            yield engine
        finally:
            await cancel(loop)
            engine._stop()
            engine.graph_cache.shrink(0)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches, those that are about to be allocated included."""
        return self._in_all.used[Resource.CACHE]

    @property
    def queue_s(self) -> float:
        """How long a session's new work would wait, by the measured times per token, and per position of a pass.

        It overtakes all passes but the one that may have begun.
        """
        tokens = sum(work.waiting.tokens for work in self._waiting)
        positions = self._passes[0].positions if self._passes else 0
        return self.token_s * tokens + self._pass_position_s * positions

    def limit_caches(self, max_bytes: int) -> None:
        """Let caches, and graphs where they leave room, take so much from now on. Caches that take more stay as they are."""
        self.max_cache_bytes = max_bytes
        self._resources.limit(Resource.CACHE, system=max_bytes, per_peer=self.client_cache_bytes(max_bytes))
        self._resources.limit(Resource.GRAPHS, per_peer=max_bytes // CLIENT_SHARE)
        self.graph_cache.shrink(max(0, self._room_bytes))

    def register(self, sequence: SequenceCache, scope: Scope) -> SequenceCache:
        """Count a lane's bytes in ``scope`` until ``release``. Raises ``OutOfResources`` when there is no room for what it has."""
        self._holds[id(sequence)] = sequence, scope.reserve(Resource.CACHE, sequence.nbytes)
        return sequence

    def release(self, sequence: SequenceCache) -> None:
        """Idempotent."""
        self._worked.pop(id(sequence), None)
        if id(sequence) in self._holds:
            _, hold = self._holds.pop(id(sequence))
            hold.release()

    def keep_graph(self, name: GraphKey, graph: AutogradGraph, *, for_s: float) -> None:
        """Keep a graph for a while, if there is room. ``graph_cache`` has it then."""
        self.graph_cache.keep(name, graph, room_bytes=self._room_bytes, for_s=for_s)

    @property
    def _room_bytes(self) -> int:
        """What sessions leave of the bytes for caches."""
        return self.max_cache_bytes - self.cache_bytes

    async def run_on_torch_thread(self, work: Callable[[], T]) -> T:
        """Do something short on the torch thread, between two forwards. What it raises is raised."""
        return await self._call(work)

    async def fork(self, sequences: Sequence[SequenceCache], scope: Scope) -> list[SequenceCache]:
        """Copies of lanes, registered. Raises ``OutOfResources``, before anything is copied, when there is no room for them."""
        with ExitStack() as holding:
            holds = [
                holding.enter_context(
                    scope.reserve(Resource.CACHE, sequence.geometry.bytes_for(sequence.length))
                )
                for sequence in sequences
            ]
            self.graph_cache.shrink(self._room_bytes)
            twins = await self.run_on_torch_thread(lambda: [sequence.fork() for sequence in sequences])
            holding.pop_all()
        self._holds.update({id(twin): (twin, hold) for twin, hold in zip(twins, holds, strict=True)})
        return twins

    async def compute(
        self, stage: Stage, rows: Sequence[tuple[SequenceCache, torch.Tensor]], *, priority: int = 0
    ) -> list[torch.Tensor]:
        """Run rows of (lane, inputs [count, D]) through our stage or a part of it; lanes grow by ``count``.

        Raises ``OutOfResources``, before anything is computed, when the caches may not grow so far. Kept graphs are dropped to make room.
        """
        for sequence, inputs in rows:
            _, hold = self._holds[id(sequence)]
            hold.resize(max(hold.amount, stage.geometry.bytes_for(sequence.length + len(inputs))))
        self.graph_cache.shrink(self._room_bytes)
        if self._stopped:
            raise Unreachable("this host has stopped")
        loop = asyncio.get_running_loop()
        works = [
            _Work(sequence, inputs, priority, stage, loop.create_future(), self._stopwatch())
            for sequence, inputs in rows
        ]
        self._waiting.extend(works)
        self._worked.update((id(sequence), loop.time()) for sequence, _ in rows)
        self._wake.set()
        return await asyncio.gather(*(work.done for work in works))

    async def compute_pass(
        self,
        start: Callable[[], Callable[[], T]],
        positions: int,
        *,
        yields_s: float = Timing.pass_wait_s,
    ) -> T:
        """Compute something of ``positions`` positions on the torch thread when no session has work, or when sessions have gone first
        for ``yields_s`` since it came, or since the one before it.

        First come, first served. At its turn ``start`` is called here and gives what is to be called there; what either
        raises is raised. A caller that is cancelled before its turn costs nothing more.
        """
        if self._stopped:
            raise Unreachable("this host has stopped")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        work = _Pass(start, positions, done, loop.time(), yields_s)
        self._passes.append(work)
        self._wake.set()
        try:
            return await done
        finally:
            self._remove_pass(work)

    async def _loop(self) -> None:
        while True:
            if not self._waiting and not self._passes:
                self._wake.clear()
                await self._wake.wait()
            if self._is_pass_next():
                async with self._core_lock.beside() as are_others:
                    if self._is_pass_next():
                        work = self._passes[0]
                        await self._run_pass(work, are_others=are_others)
                        self._passed_at = asyncio.get_running_loop().time()
                        self._remove_pass(work)
                continue
            async with self._core_lock.turn():
                await asyncio.sleep(0)  # whatever the network has already delivered joins this batch
                await self._gather()
                if self._waiting:  # whoever waited may be gone by now
                    await self._forward()

    async def _gather(self) -> None:
        """Let what comes right behind the work that waits join its forward."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._forward_s
        self._worked = {sequence: at for sequence, at in self._worked.items() if at > clock() - LATELY_S}
        while patience_s := worth_waiting_s(len(self._waiting), self._expected(clock()), self._forward_s):
            self._wake.clear()
            try:
                async with asyncio.timeout(min(patience_s, until - clock())):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _expected(self, now: float) -> int:
        """How many lanes had work lately, those that wait included."""
        return sum(at > now - LATELY_S for at in self._worked.values())

    def _is_pass_next(self) -> bool:
        """No session has work, or sessions have gone first for long enough."""
        if not self._passes or not self._waiting:
            return bool(self._passes)
        first = self._passes[0]
        return asyncio.get_running_loop().time() >= max(first.since, self._passed_at) + first.yields_s

    async def _forward(self) -> None:
        """One forward of what the scheduler picks among the sessions' work."""
        picked = schedule([work.waiting for work in self._waiting], BUDGET_TOKENS)
        batch = [(self._waiting[index], tokens) for index, tokens in picked]
        rows = [
            (work.sequence, work.inputs[work.computed : work.computed + tokens]) for work, tokens in batch
        ]
        started = self._stopwatch()
        for work, _ in batch:
            if not work.computed:
                self.counters.wait_s.observe(started - work.since)
        try:
            results = await self._call(partial(batch[0][0].stage.forward, rows))
        except Exception as error:  # noqa: BLE001 - the supervisor: a failed forward fails its sessions, not the node
            self._drop([work for work, _ in batch], error)
            return
        self._account(sum(tokens for _, tokens in batch), self._stopwatch() - started)
        for (work, count), result in zip(batch, results, strict=True):
            work.computed += count
            work.outputs.append(result)
            if work.computed == len(work.inputs):
                self._finish(work)

    async def _run_pass(self, work: _Pass, *, are_others: bool) -> None:
        if work.done.done():
            return
        started = self._stopwatch()
        try:
            compute = work.start()
            # Threads of several nodes wait for each other's at every product: half the cores give more than half.
            result = await self._call(partial(on_half_the_cores, compute) if are_others else compute)
        except Exception as error:  # noqa: BLE001 - the supervisor: a failed pass fails its client, not the node
            _fail(work.done, error)
            return
        self.forwards += 1
        self.tokens += work.positions
        elapsed_s = self._stopwatch() - started
        self.counters.pass_s.observe(elapsed_s)
        self._pass_position_s += SMOOTHING * (elapsed_s / work.positions - self._pass_position_s)
        if not work.done.done():
            work.done.set_result(result)

    async def _call(self, work: Callable[[], T]) -> T:
        """Call ``work`` on the torch thread. Raises ``ResourceLimitReached`` where its device has no room for what it computes."""
        with contextlib.suppress(torch.OutOfMemoryError):
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        # Out here nothing holds the error any longer, whose frames hold what was computed until then.
        self.graph_cache.shrink(0)
        raise ResourceLimitReached("this host's device has no memory left", RETRY_S)

    def _remove_pass(self, work: _Pass) -> None:
        if work in self._passes:
            self._passes.remove(work)

    def _account(self, tokens: int, elapsed_s: float) -> None:
        self.forwards += 1
        self.tokens += tokens
        self.counters.forward_s.observe(elapsed_s)
        self.counters.forward_positions.observe(tokens)
        self.token_s += SMOOTHING * (elapsed_s / tokens - self.token_s)
        self._forward_s += SMOOTHING * (elapsed_s - self._forward_s)

    def _finish(self, work: _Work) -> None:
        self._waiting.remove(work)
        if not work.done.done():
            work.done.set_result(work.outputs[0] if len(work.outputs) == 1 else torch.cat(work.outputs))

    def _stop(self) -> None:
        """Whoever waits for a forward that will not come is told."""
        self._stopped = True
        error = Unreachable("this host has stopped")
        self._drop(list(self._waiting), error)
        for work in self._passes:
            _fail(work.done, error)

    def _drop(self, works: Sequence[_Work], error: Exception) -> None:
        for work in works:
            self._waiting.remove(work)
            _fail(work.done, error)


def _fail(done: "asyncio.Future[Any]", error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
