"""Asyncio in virtual time: timers fire in the order of their deadlines, nothing sleeps, one seed
gives one trace."""

import asyncio
import itertools
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import Context
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Raised if every task waits for another one and no timer is pending."""


class _VirtualSelector(selectors.DefaultSelector):
    """Moves the clock where a real selector would wait."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError("every task is blocked and no timer is pending")
        self.now_s += max(timeout, 0.0)
        return []


class _NumberedTask(asyncio.Task[T]):
    """Hashed by number: task groups and ``asyncio.wait`` iterate over sets, whose order must not
    follow addresses."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class TimedExecutor(ThreadPoolExecutor):
    """An executor whose every call takes ``takes_s`` of virtual time."""

    def __init__(self, takes_s: float) -> None:
        super().__init__(1)
        self.takes_s = takes_s
        self.owed_s = 0.0
        """Virtual seconds that the work of a call adds to the time of the call."""


class WaitingExecutor(Executor):
    """An executor whose work may wait for coroutines of the loop, as :meth:`start_on_loop` starts
    them, while virtual time goes on.

    Its thread and the loop never run at the same time, so that one seed gives one trace.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1)
        self._control = threading.Semaphore(0)
        """Released when the thread gives control back to the loop."""

    def run(self, work: Callable[[], None]) -> None:
        """Call ``work``, which raises nothing, on the thread; returns when it has ended or waits
        for the loop."""

        def enter() -> None:
            try:
                work()
            finally:
                self._control.release()

        self._threads.submit(enter)
        self._control.acquire()

    def start_on_loop(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]
    ) -> Callable[[], T]:
        """As ``aio.start_on_loop``, for work on this executor."""
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)

        def wait() -> T:
            resumed = threading.Event()

            def resume(_: object) -> None:  # on the loop
                resumed.set()
                self._control.acquire()

            if not future.done():
                loop.call_soon_threadsafe(future.add_done_callback, resume)
                self._control.release()
                resumed.wait()
            return future.result()

        return wait

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Work for executors runs in place, at once or after the time of a
    ``TimedExecutor``."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        self._task_numbers = itertools.count()
        super().__init__(self._virtual)
        self.set_task_factory(self._numbered)

    def time(self) -> float:
        return self._virtual.now_s

    def hold_up(self, seconds: float) -> None:
        """Let time pass while this loop does nothing, like a stopped process."""
        self._virtual.now_s += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def compute() -> None:
            if future.cancelled():
                return
            try:
                done = partial(future.set_result, func(*args))
            except Exception as error:  # noqa: BLE001 - as an executor does
                done = partial(future.set_exception, error)
            if isinstance(executor, TimedExecutor) and executor.owed_s:
                owed_s, executor.owed_s = executor.owed_s, 0.0
                self.call_later(owed_s, lambda: None if future.done() else done())
            else:
                done()

        def compute_on_thread() -> None:
            try:
                done = partial(future.set_result, func(*args))
            except Exception as error:  # noqa: BLE001 - as an executor does
                done = partial(future.set_exception, error)
            self.call_soon_threadsafe(lambda: None if future.done() else done())

        if isinstance(executor, WaitingExecutor):
            executor.run(compute_on_thread)
        elif isinstance(executor, TimedExecutor):
            self.call_later(executor.takes_s, compute)
        else:
            compute()
        return future

    def _numbered(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        return _NumberedTask(next(self._task_numbers), coroutine, loop=loop, context=context, **options)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end in virtual time. Raises ``DeadlockError`` when no event can happen
    any more."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
