"""The order of computations on a worker's one computing thread."""

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Protocol, TypeVar

T = TypeVar("T")

KEEP = 0.9
"""Weight of the old usual time after another computation. With less, one slow computation turns
work away from a worker. With more, others learn late that a machine became slow."""


class Compute(Protocol):
    """Runs a function on the computing thread."""

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]: ...


class Urgency(IntEnum):
    """A backward pass frees memory here and work elsewhere, so it comes before forward passes."""

    BACKWARD = 0
    FORWARD = 1
    BEGIN = 2


class Turns:
    """Runs one computation at a time, the most urgent one next."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0
        self._busy = False
        self._usual_s: dict[Urgency, float] = {}

    def usual_s(self, *urgencies: Urgency) -> float:
        """Return the usual seconds of one computation of each kind. 0 until all are known."""
        found = [self._usual_s.get(each, 0.0) for each in urgencies]
        return sum(found) if all(found) else 0.0

    async def run(self, urgency: Urgency, work: Callable[[], T]) -> T:
        """Run ``work`` on the computing thread when it is its turn."""
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._count += 1
            heapq.heappush(self._waiting, (urgency, self._count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._busy = True
        clock = asyncio.get_running_loop().time
        started_s = clock()
        try:
            result = await self.compute(work)
            took_s = clock() - started_s
            usual_s = self._usual_s.get(urgency, took_s)
            self._usual_s[urgency] = KEEP * usual_s + (1 - KEEP) * took_s
            return result
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
