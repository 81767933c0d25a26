"""Helpers for asyncio: races, deadlines, clean cancellation, and a supervisor of loops."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from swarmnet_protocols.errors import SwarmnetError

T = TypeVar("T")

_log = logging.getLogger(__name__)

RESTART_S = 1.0
"""Seconds until a failed loop restarts. The pause doubles with each failure in a row."""
MAX_RESTART_S = 60.0
"""Longest pause in seconds before a restart.

A loop that ran longer than this before it failed restarts after ``RESTART_S`` again.
"""


def loop_time() -> float:
    """Return the seconds on the clock of the event loop."""
    return asyncio.get_running_loop().time()


class News(asyncio.Condition):
    """Changes that several tasks wait for."""

    async def tell(self) -> None:
        """Wake all tasks that wait."""
        async with self:
            self.notify_all()

    async def until(self, is_so: Callable[[], bool], within_s: float | None = None) -> bool:
        """Wait until ``is_so()``. Return False if that takes longer than ``within_s``."""
        async with self:
            return await within(within_s, self.wait_for(is_so))


async def race(*runners: Awaitable[T]) -> T:
    """Run all until the first ends, and cancel the others. Returns its result or raises its error.

    If several end at once, the first of the arguments wins.
    """
    tasks = [asyncio.ensure_future(runner) for runner in runners]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await cancel(*tasks)


async def within(seconds: float | None, work: Awaitable[object]) -> bool:
    """Run ``work`` for at most ``seconds``; None for no limit. Return whether it ended in time.

    Work that takes longer is cancelled. A ``TimeoutError`` of ``work`` itself counts as too late.
    """
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True


async def until(when: float, attempt: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``attempt`` by ``when`` on the clock of the loop.

    A process that was suspended (SIGSTOP, a sleeping laptop) sees the timeout before the data that
    arrived meanwhile. So ``attempt`` is called once more after the timeout. A cancelled ``attempt``
    must lose nothing.

    Raises ``TimeoutError``.
    """
    try:
        async with asyncio.timeout_at(when):
            return await attempt()
    except TimeoutError:
        await asyncio.sleep(0)
    async with asyncio.timeout(0):
        return await attempt()


async def all_of(*runners: Coroutine[Any, Any, T]) -> list[T]:
    """Run all and return their results. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(runner) for runner in runners]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def persist(name: str, loop: Callable[[], Awaitable[T]]) -> T:
    """Run ``loop`` until it returns. After an error, log it under ``name`` and run the loop again.

    For loops that must never stop: announcements, reservations, checks of limits. An unforeseen
    error, for example from a peer's data, ends neither the loop nor the process. Only such an error
    has a traceback in the log.
    """
    clock, pause_s = asyncio.get_running_loop().time, RESTART_S
    while True:
        began = clock()
        try:
            return await loop()
        except Exception as error:  # noqa: BLE001 - the supervisor of the loop
            if clock() - began > MAX_RESTART_S:
                pause_s = RESTART_S
            unforeseen = None if isinstance(error, SwarmnetError) else error
            _log.error(
                "%s failed and begins again in %g s: %s", name, pause_s, str(error), exc_info=unforeseen
            )
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_RESTART_S)


async def cancel(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel tasks and wait until they have ended. Ignores their errors."""
    pending = [task for task in tasks if task is not None]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


@asynccontextmanager
async def in_background(*coroutines: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run ``coroutines`` while the context is open, and cancel them at its end.

    Unlike in a ``TaskGroup``, a coroutine that ends or fails stops neither the others nor the
    context.
    """
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield
    finally:
        await cancel(*tasks)


def start_on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> Callable[[], T]:
    """Start ``coroutine`` on ``loop`` from another thread.

    The returned function waits for the result, or raises the error.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result


def run_apart(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a new event loop: in another thread if this one already runs a loop, as in
    a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(lambda: asyncio.run(work())).result()
