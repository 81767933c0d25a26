"""An event loop that runs between the tests of a module, so that heartbeats and leases of peers
that serve all of them go on."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on an event loop of a thread, from a test that is not a coroutine itself."""

    def __init__(self, loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop) -> None:
        """``loop_factory``: uvloop's, as nodes use it, unless another one is given."""
        self._loop_factory = loop_factory
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="loop of the tests")

    def __enter__(self) -> "LoopThread":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of the coroutine, or its exception. The coroutine is cancelled if the test's
        timeout ends the wait."""
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return running.result()
        finally:
            running.cancel()

    def _serve(self) -> None:
        async def main() -> None:
            self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
            self._ready.set()
            await self._over.wait()

        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(main())
