"""Long-running commands, and what SIGINT (Ctrl-C) and SIGTERM do to them."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Self, TextIO


def run_until_stopped(command: Coroutine[Any, Any, None]) -> None:
    """Run ``command`` on a uvloop event loop. Raises ``KeyboardInterrupt`` when ``Interrupts`` cancelled it."""
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(command)
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
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupts)
        return interrupts

    def catch_end_of(self, stdin: TextIO) -> None:
        """Handle the end of ``stdin`` as a signal: it is the end of the process that started this one."""
        loop, number = asyncio.get_running_loop(), stdin.fileno()

        def read() -> None:
            if not os.read(number, 4096):
                loop.remove_reader(number)
                self()

        loop.add_reader(number, read)

    def __call__(self) -> None:
        action, self.first = self.first, self._cancel
        action()
