"""The client's event loop: a thread that owns the network while the user's own thread runs torch and transformers."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import torch

from swarmnet_client.swarm import Swarm
from swarmnet_protocols.threads import stay_serial

T = TypeVar("T")
Connect = Callable[[], AbstractAsyncContextManager[Swarm]]


class Runtime:
    """A swarm connection on a loop of its own, for callers without one. Close it, or use it as a context manager."""

    def __init__(self, connect: Connect) -> None:
        """Connect; raises what connecting raises."""
        self._connect = connect
        self._started: concurrent.futures.Future[Swarm] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._main, name="swarmnet-client", daemon=True)
        self._thread.start()
        try:
            self.swarm = self._started.result()
        finally:
            torch.set_num_threads(threads)

    def run(self, conversation: Coroutine[Any, Any, T]) -> T:
        """Run ``conversation`` on the loop and wait for it. An interrupt of the caller cancels it."""
        if self._loop is None or not self._thread.is_alive():
            conversation.close()
            raise RuntimeError("this client is closed")
        future = asyncio.run_coroutine_threadsafe(conversation, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Leave the swarm; idempotent."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _main(self) -> None:
        import uvloop

        stay_serial()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._stay())

    async def _stay(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with self._connect() as swarm:
                self._started.set_result(swarm)
                await self._stop.wait()
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
