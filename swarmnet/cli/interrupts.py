"""What Ctrl-C and a polite kill do to a command that has to end in good order."""

import asyncio
import signal
from collections.abc import Callable
from typing import Self


class Interrupts:
    """Whoever calls this, as signals do, interrupts: the first calls ``first``, every later one ``cancel``."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.first = cancel
        self._cancel = cancel

    @classmethod
    def catch(cls) -> Self:
        """From now on SIGINT and SIGTERM go here. Cancels the running task."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not running as a task")
        interrupts = cls(task.cancel)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupts)
        return interrupts

    def __call__(self) -> None:
        action, self.first = self.first, self._cancel
        action()
