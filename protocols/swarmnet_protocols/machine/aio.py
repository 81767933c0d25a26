"""Helpers for asyncio: wait for the first or all of several coroutines, with deadlines and clean cancellation; a supervisor of loops."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

RESTART_S = 1.0
"""First pause before a loop that failed begins again. It doubles with each failure in a row."""
MAX_RESTART_S = 60.0
"""Longest pause before a loop begins again. A loop that ran for longer than this starts over with the first pause."""


async def race(*runners: Coroutine[Any, Any, T]) -> T:
    """Run all until the first ends, and cancel the others. Returns its result or raises its error.

    If several end at once, the first of the arguments counts.
    """
    tasks = [asyncio.ensure_future(runner) for runner in runners]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await cancel(*tasks)


async def until(when: float, attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of ``attempt`` by ``when`` on the clock of the loop. Raises ``TimeoutError``.

    A process that was stopped sees the timeout before it sees what arrived meanwhile, so ``attempt`` is called once more after it. It must
    lose nothing when it is cancelled.
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

    For loops that a process lives on: announcements, reservations, checks of limits. An unforeseen error, such as one from
    data of a peer, ends neither the loop for good nor the process.
    """
    clock, pause_s = asyncio.get_running_loop().time, RESTART_S
    while True:
        began = clock()
        try:
            return await loop()
        except Exception:  # noqa: BLE001 - the supervisor of the loop
            if clock() - began > MAX_RESTART_S:
                pause_s = RESTART_S
            _log.exception("%s failed and begins again in %g s", name, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_RESTART_S)


async def cancel(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel tasks and wait until they have ended. Their errors are ignored."""
    pending = [task for task in tasks if task is not None]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def start_on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> Callable[[], T]:
    """Start ``coroutine`` on ``loop`` from another thread; the function that is returned waits for its result and raises its error."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result
