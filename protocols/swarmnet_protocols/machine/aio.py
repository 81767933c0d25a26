"""Small tools for conversations that wait for several things at once."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def race(*runners: Coroutine[Any, Any, T]) -> T:
    """Run all until the first ends; the others are cancelled and waited for. Its result or error is ours.

    Where several end at once, the first of the arguments counts.
    """
    tasks = [asyncio.ensure_future(runner) for runner in runners]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await cancel(*tasks)


async def until(when: float, attempt: Callable[[], Awaitable[T]]) -> T:
    """What ``attempt`` gives by ``when``, a time of the loop. It must lose nothing when it is cancelled. Raises ``TimeoutError``.

    A process that was held up sees that time is over before it sees what came meanwhile: so it looks once more.
    """
    try:
        async with asyncio.timeout_at(when):
            return await attempt()
    except TimeoutError:
        await asyncio.sleep(0)
    async with asyncio.timeout(0):
        return await attempt()


async def all_of(*runners: Coroutine[Any, Any, T]) -> list[T]:
    """Run all to their end and give their results. The first error cancels the others and is ours."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(runner) for runner in runners]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def cancel(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel tasks and wait until they have ended; their errors are theirs."""
    pending = [task for task in tasks if task is not None]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
