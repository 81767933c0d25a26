"""The client's event loop: its thread owns the network, while the caller's thread computes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from swarmnet_protocols.errors import NetworkStopped, NotAuthorised, SwarmnetError
from swarmnet_protocols.machine import threads
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.machine.platform import new_event_loop
from swarmnet_protocols.net import Transport

T = TypeVar("T")


class OnSwarm(Protocol):
    """Something that is open while the client is in the swarm, like a model or its hosts."""

    @property
    def transport(self) -> Transport: ...


Opened = TypeVar("Opened", bound=OnSwarm)


class Runtime(Generic[Opened]):
    """A connection to a swarm on an event loop of its own, for synchronous callers. Close it, or
    use it as a context manager."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Opened]]) -> None:
        """Connect; raises what connecting raises."""
        self._connect = connect
        self._started: Future[Opened] = Future()
        self._over: Future[NoReturn] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        cores = threads.current()
        self._thread = threading.Thread(target=self._main, name="swarmnet-client", daemon=True)
        self._thread.start()
        try:
            self.opened = self._started.result()
        finally:
            threads.use(cores)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and wait for it. An interrupt of the caller cancels it.

        Raises ``SwarmnetError`` at once when the client is closed or its transport has died, before
        or meanwhile.
        """
        if self._loop is None or self._over.done():
            work.close()
            return self._over.result()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        either: tuple[Future[Any], ...] = (future, self._over)
        try:
            wait(either, return_when=FIRST_COMPLETED)
            return self._over.result() if self._over.done() else future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Leave the swarm; idempotent."""
        if self._loop is not None and self._stop is not None and not self._over.done():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> "Runtime[Opened]":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _main(self) -> None:
        threads.stay_serial()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._stay())

    async def _stay(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with self._connect() as opened:
                self._started.set_result(opened)
                refused: NotAuthorised | None = None
                try:
                    await race(self._stop.wait(), opened.transport.died())
                except NotAuthorised as error:
                    refused = error
                finally:
                    closed = self._stop.is_set()
                    hint = "connect again, with from_pretrained() or the same command"
                    over = SwarmnetError("this client is closed", hint=hint)
                    self._over.set_exception(refused or (over if closed else NetworkStopped(hint=hint)))
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
