"""The order of computations on a worker's one computing thread, and the times of its passes."""

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Protocol, TypeVar

from swarmnet_protocols.machine.aio import loop_time

T = TypeVar("T")

KEEP = 0.9
"""Weight of the old usual time after another pass. With less, one slow pass turns work away from a
worker. With more, others learn late that a machine became slow."""


class Compute(Protocol):
    """Runs a function on the computing thread."""

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]: ...


class Pass(Enum):
    """A pass of a microbatch. Stage 0 has all but ``FORWARD``. Other stages have ``FORWARD`` and
    ``BACKWARD``."""

    BEGIN = auto()
    FORWARD = auto()
    END = auto()
    BACKWARD = auto()


class Turns:
    """Runs one computation at a time: losses first, all others in the order of asking.

    A loss sends a microbatch home, and all stages wait for it. Backward passes have no precedence:
    they would free memory sooner, but later stages would wait for inputs. The windows of the
    origins bound the memory.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._count = 0
        self._busy = False
        self._usual_s: dict[Pass, float] = {}

    @property
    def microbatch_s(self) -> float:
        """The usual seconds of all passes of a microbatch. 0 until a backward pass has ended."""
        return sum(self._usual_s.values()) if Pass.BACKWARD in self._usual_s else 0.0

    async def run(self, work: Callable[[], T], kind: Pass | None = None) -> T:
        """Run ``work`` on the computing thread when it is its turn.

        ``kind``: the pass of a microbatch, whose time counts in ``microbatch_s``.
        """
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._count += 1
            heapq.heappush(self._waiting, (kind is not Pass.END, self._count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._busy = True
        started_s = loop_time()
        try:
            result = await self.compute(work)
            if kind is not None:
                took_s = loop_time() - started_s
                usual_s = self._usual_s.get(kind, took_s)
                self._usual_s[kind] = KEEP * usual_s + (1 - KEEP) * took_s
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
