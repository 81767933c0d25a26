"""The life of a model of a gateway: closed, opening, in use, idle, closing, and closed again.

1. The first request opens the model in a task of its own, so that a caller who leaves stops
   nothing. Requests that come meanwhile wait for the model.
2. The model is idle when its last request has ended.
3. :func:`to_close` chooses the idle models that close: after ``IDLE_S``, or earlier if another
   model needs their memory.
4. A request that comes while the model closes waits, and opens the model again.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, NamedTuple, TypeVar

from swarmnet.gateway.errors import RETRY_S, ApiError
from swarmnet_client.batching.continuous_batching import Overloaded
from swarmnet_protocols.machine.aio import loop_time

IDLE_S = 300.0
"""Seconds after its last request until a model closes, as Ollama's ``keep_alive``. With less, a
conversation waits for the model again. With more, memory is taken for longer."""
OPEN_S = 60.0
"""Seconds that a request waits for a model to open. Proxies close connections that are silent for
longer."""
MAX_WAITING = 64
"""Most requests that wait for one model to open."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Held(NamedTuple):
    """The memory of a model, and the loop time since when the model is idle.

    ``idle_since_s``: None while requests use the model, minus infinity while it closes.
    """

    memory_bytes: int
    idle_since_s: float | None


def to_close(models: Sequence[Held], now_s: float, limit: float, needed: int = 0) -> list[int] | None:
    """Return the indices of the models to close, the least recently used first.

    These are the models idle for ``IDLE_S``, and as many others as ``needed`` more bytes within
    ``limit`` require. None if the models in use leave too little.
    """
    idle = sorted((each.idle_since_s, at) for at, each in enumerate(models) if each.idle_since_s is not None)
    excess = sum(each.memory_bytes for each in models) + needed - limit
    closed = []
    for since_s, at in idle:
        if excess <= 0 and since_s > now_s - IDLE_S:
            break
        excess -= models[at].memory_bytes
        closed.append(at)
    return closed if excess <= 0 else None


class ModelLife(Generic[T]):
    """A model that its first request opens. ``opened``: None unless the model is open."""

    def __init__(self, name: str, opening: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self.opened: T | None = None
        self.memory_bytes = 0
        """Reserved for the model until it has closed."""
        self._name = name
        self._opening = opening
        self._users = 0
        """Requests that use the model or wait for it."""
        self._used_s = -math.inf
        """Loop time at the end of the last request."""
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[T] | None = None
        self._closing = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """True if the model is closed, and no request is about to open it."""
        return self._users == 0 and (self._task is None or self._task.done())

    @property
    def held(self) -> Held:
        is_idle = self.opened is not None and self._users == 0
        since_s = -math.inf if self._closing.is_set() else self._used_s if is_idle else None
        return Held(self.memory_bytes, since_s)

    @asynccontextmanager
    async def using(self) -> AsyncIterator[T]:
        """Open the model if it is closed, and keep it open while the context is.

        Raises ``Overloaded`` if too many requests wait for the model, ``ApiError`` if it opens too
        slowly, and the errors of opening it.
        """
        is_waiting = self.opened is None or self._closing.is_set()
        if is_waiting and self._users >= MAX_WAITING:
            raise Overloaded(RETRY_S)
        self._users += 1
        try:
            yield await self._open()
        finally:
            self._users -= 1
            self._used_s = loop_time()

    def close(self) -> "asyncio.Task[None] | None":
        """Begin to close an idle model. The returned task ends when it is closed; None if it was
        never open."""
        self._closing.set()
        return self._task

    async def _open(self) -> T:
        try:
            async with asyncio.timeout(OPEN_S):
                if self._closing.is_set() and self._task is not None:
                    await asyncio.wait([self._task])
                if self._ready is None or self._task is None or self._task.done():
                    self._closing.clear()
                    self._ready = asyncio.get_running_loop().create_future()
                    self._task = asyncio.create_task(self._live(self._ready), name=f"model {self._name}")
                return await asyncio.shield(self._ready)
        except TimeoutError:
            message = f"{self._name} is still being opened"
            raise ApiError(503, message, "model_loading", "server_error", retry_after_s=RETRY_S) from None

    async def _live(self, ready: asyncio.Future[T]) -> None:
        """Open the model, and keep it open until it is to close."""
        try:
            async with self._opening() as self.opened:
                ready.set_result(self.opened)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - requests that wait must learn of every failure
            if ready.done():
                _log.exception("the model %s did not close well", self._name)
            else:
                ready.set_exception(error)
                ready.exception()  # requests that wait raise it; there may be none left
        finally:
            ready.cancel()
            self.opened, self.memory_bytes = None, 0
