"""Long-running commands, and what SIGINT (Ctrl-C) and SIGTERM do to them."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import Thread
from typing import Any, Self, TextIO, TypeVar

from swarmnet_protocols.machine.platform import new_event_loop, on_stop_signals

T = TypeVar("T")


def run_until_stopped(command: Coroutine[Any, Any, T]) -> T:
    """Run ``command`` on ``new_event_loop()``, and return its result.

    Raises ``KeyboardInterrupt`` if ``Interrupts`` cancels it.
    """
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(command)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class Interrupts:
    """A signal handler: the first signal calls ``first``, every later one ``cancel``."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.first = cancel
        self._cancel = cancel

    @classmethod
    def catch(cls) -> Self:
        """Handle SIGINT and SIGTERM. The default action cancels the task that calls this."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not running as a task")
        interrupts = cls(task.cancel)
        on_stop_signals(interrupts)
        return interrupts

    def catch_end_of(self, stdin: TextIO) -> None:
        """Handle the end of ``stdin`` like a signal. ``stdin`` ends when the parent process
        ends."""
        loop, number = asyncio.get_running_loop(), stdin.fileno()

        def read() -> None:
            while os.read(number, 4096):
                pass
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self)

        # A thread, because not every event loop can watch a pipe; a daemon, so that it does not
        # delay the end of the process.
        Thread(target=read, name="stdin", daemon=True).start()

    def __call__(self) -> None:
        action, self.first = self.first, self._cancel
        action()
