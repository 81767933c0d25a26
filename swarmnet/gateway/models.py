"""The models that a gateway offers, by their names.

The table of a gateway of one model has one entry, which is always open. In the table of a swarm:

1. :meth:`ModelTable.watching` reads what hosts offer, again and again. A model with missing blocks
   is forming, and requests for it are refused.
2. The first request for a model opens it. Requests that come meanwhile wait for it.
3. A model without requests closes after ``IDLE_S``, or earlier if another one needs its memory.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from swarmnet.gateway.errors import RETRY_S, ApiError
from swarmnet.gateway.generation.tokenization import PromptTokenizer
from swarmnet.gateway.metrics import GatewayMetrics, ModelMetrics
from swarmnet.gateway.parsing import MAX_TOKENS
from swarmnet.gateway.routing.router import AUTO
from swarmnet_client.batching.continuous_batching import BatchedModel, Overloaded
from swarmnet_client.hosts.model_offers import ModelOffer
from swarmnet_protocols.errors import OutOfResources, SwarmnetError
from swarmnet_protocols.machine.aio import cancel, in_background, persist
from swarmnet_protocols.models.public_names import name_for_peers

if TYPE_CHECKING:
    from swarmnet_protocols.session.adapters import Adapter

IDLE_S = 300.0
"""Seconds after its last request until a model closes, as Ollama's ``keep_alive``. With less, a
conversation waits for the model again. With more, memory is taken for longer."""
LOOK_S = 15.0
"""Seconds between two looks at what hosts offer. With less, gateways load the directory. With more,
a new model is listed later."""
OPEN_S = 60.0
"""Seconds that a request waits for a model to open. Proxies close connections that are silent for
longer."""
MAX_WAITING = 64
"""Most requests that wait for one model to open."""
MAX_LISTED = 10
"""Most names in the message that a model is unknown."""
_log = logging.getLogger(__name__)

Opener = Callable[[ModelOffer, Callable[[int], Awaitable[None]]], AbstractAsyncContextManager[BatchedModel]]
"""Opens a model. Before it loads weights, it awaits its second argument with their bytes."""


@dataclass(frozen=True)
class OpenedModel:
    """An open model under one of its names."""

    name: str
    batched: BatchedModel
    tokenizer: PromptTokenizer
    metrics: ModelMetrics

    @property
    def offer(self) -> ModelOffer:
        """The model with the hosts that its client knows."""
        manifest, missing = self.batched.local.manifest, tuple(self.batched.missing)
        return ModelOffer(self.name, manifest.hash, manifest.blocks, self.batched.max_length, missing)


@dataclass
class ModelEntry:
    """A model of the table.

    ``opened``: None while the model is closed. ``closing`` is set when the model is to close.
    ``task``: keeps the model open, until it has closed. ``memory_bytes``: reserved for the model.
    """

    offer: ModelOffer
    opened: asyncio.Future[OpenedModel] | None = None
    parent: str | None = None
    """The name of the model that an adapter changes. None for a model without an adapter."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    memory_bytes: int = 0
    users: int = 0
    """Requests that use the model or wait for it."""
    used_s: float = 0.0
    """Loop time at the end of the last request."""

    @property
    def served(self) -> OpenedModel | None:
        """The open model. None while it is closed or opens."""
        future = self.opened
        is_open = future is not None and future.done() and not future.cancelled() and not future.exception()
        return future.result() if future is not None and is_open else None

    @property
    def is_idle(self) -> bool:
        return self.served is not None and self.users == 0 and not self.closing.is_set()

    def fields(self) -> dict[str, Any]:
        """Return the fields of this model in a list of models."""
        return {**self.offer.fields(), "loaded": self.served is not None, "parent": self.parent}


def to_close(entries: Sequence[ModelEntry], needed: int, limit: int) -> list[ModelEntry] | None:
    """Return the idle models to close, so that ``needed`` more bytes stay within ``limit``.

    The least recently used comes first. None if the models in use leave too little.
    """
    free = limit - sum(entry.memory_bytes for entry in entries)
    closed = []
    for entry in sorted((each for each in entries if each.is_idle), key=lambda each: each.used_s):
        if free >= needed:
            break
        free += entry.memory_bytes
        closed.append(entry)
    return closed if free >= needed else None


class ModelTable:
    """The models of a gateway. Made by :meth:`of` or :meth:`of_swarm`."""

    def __init__(self, opener: Opener | None = None, max_bytes: int = 0) -> None:
        """``opener``: None if the table has one model, which is always open."""
        self.metrics = GatewayMetrics()
        self.entries: dict[str, ModelEntry] = {}
        self._open = opener
        self._max_bytes = max_bytes

    @classmethod
    def of(
        cls, batched: BatchedModel, adapters: "Mapping[str, Adapter]" = MappingProxyType({})
    ) -> "ModelTable":
        """Return the table of one open model, and of the same model with each of its adapters."""
        table = cls()
        served = table._served(name_for_peers(batched.local.name), batched)
        table._add(served)
        for name, adapter in adapters.items():
            adapted = replace(
                served,
                name=f"{served.name}:{name}",
                batched=replace(batched, adapter=adapter),
                metrics=ModelMetrics(table.metrics, f"{served.name}:{name}"),
            )
            table._add(adapted, parent=served.name)
        return table

    def _add(self, served: OpenedModel, parent: str | None = None) -> None:
        """Add a model that stays open."""
        opened: asyncio.Future[OpenedModel] = asyncio.get_running_loop().create_future()
        opened.set_result(served)
        self.entries[served.name] = ModelEntry(served.offer, opened, parent)

    @classmethod
    @asynccontextmanager
    async def of_swarm(
        cls, read: Callable[[], Awaitable[Sequence[ModelOffer]]], opener: Opener, max_bytes: int
    ) -> AsyncIterator["ModelTable"]:
        """Offer the models that ``read`` returns, while the context is open.

        ``max_bytes``: most memory of all open models.
        """
        table = cls(opener, max_bytes)
        table.learn(await read())

        async def watch() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                await table._close_idle()
                with suppress(SwarmnetError):  # the directory may answer later
                    table.learn(await read())

        try:
            async with in_background(persist("the watch over models", watch)):
                yield table
        finally:
            await cancel(*(entry.task for entry in table.entries.values()))

    @property
    def only(self) -> ModelEntry | None:
        """The entry of the only model, without an adapter. None in the table of a swarm."""
        return None if self._open else next(iter(self.entries.values()))

    @property
    def usual_name(self) -> str:
        """The model of a request that names none; "" if there are several."""
        return self.only.offer.name if self.only is not None else ""

    @property
    def max_context(self) -> int:
        """Most positions of any model. It bounds a request before its model is known."""
        served = self.only.served if self.only is not None else None
        return MAX_TOKENS if served is None else served.batched.context

    def learn(self, offers: Sequence[ModelOffer]) -> None:
        """Replace what hosts offer. Models that are open stay until they close."""
        stay = {name: entry for name, entry in self.entries.items() if entry.opened or entry.users}
        for offer in offers:
            entry = stay.get(offer.name)
            if entry is None:
                stay[offer.name] = ModelEntry(offer)
            elif entry.offer.manifest == offer.manifest:
                entry.offer = offer
        self.entries = stay

    def listed(self) -> list[ModelEntry]:
        """Return all entries, by name."""
        if self.only is not None:
            for entry in self.entries.values():
                entry.offer = entry.served.offer if entry.served is not None else entry.offer
        return [self.entries[name] for name in sorted(self.entries)]

    def find(self, name: str) -> ModelEntry:
        """Return the entry of a model. Raises ``ApiError`` for an unknown name."""
        if (entry := self.entries.get(name)) is not None:
            return entry
        names = sorted(self.entries)
        here = ", ".join(repr(each) for each in names[:MAX_LISTED]) or "none: nobody hosts a model"
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        message = f"there is no model {name[:200]!r} here, only {here}{more}"
        message += "; a router chooses for it: serve --router FILE" if name == AUTO else ""
        raise ApiError(404, message, "model_not_found", param="model")

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[OpenedModel]:
        """Open a model if it is closed, and keep it open while the context is.

        Raises ``ApiError`` for an unknown or forming model, ``Overloaded`` if too many requests
        wait for the model, and the errors of opening it.
        """
        entry = self.find(name)
        if entry.served is None and entry.users >= MAX_WAITING:
            raise Overloaded(RETRY_S)
        entry.users += 1
        try:
            yield await self._opened(entry)
        finally:
            entry.users -= 1
            entry.used_s = asyncio.get_running_loop().time()

    def close(self) -> None:
        """Stop the tokenizer's thread of a table of one model."""
        if (only := self.only) is not None and only.served is not None:
            only.served.tokenizer.close()

    def _served(self, name: str, batched: BatchedModel) -> OpenedModel:
        metrics = self.metrics.opened(name, batched.batcher)
        return OpenedModel(name, batched, PromptTokenizer(batched), metrics)

    def left_s(self, entry: ModelEntry) -> float | None:
        """Return the seconds until an open model closes if no other request comes. None if it stays
        open, or is closed."""
        if self._open is None or entry.served is None:
            return None
        idle_s = 0.0 if entry.users else asyncio.get_running_loop().time() - entry.used_s
        return max(0.0, IDLE_S - idle_s)

    async def _opened(self, entry: ModelEntry) -> OpenedModel:
        name = entry.offer.name
        if entry.closing.is_set() and entry.task is not None:
            await asyncio.wait([entry.task])
        if (opened := entry.opened) is None:
            if entry.offer.missing or self._open is None:
                message = f"{name} is forming: {entry.offer.lack()}"
                raise ApiError(503, message, "model_forming", "server_error", retry_after_s=int(LOOK_S))
            entry.opened = opened = asyncio.get_running_loop().create_future()
            entry.closing = asyncio.Event()
            opening = self._keep_open(entry, self._open, opened)
            entry.task = asyncio.create_task(opening, name=f"model {name}")
        try:
            async with asyncio.timeout(OPEN_S):
                return await asyncio.shield(opened)
        except TimeoutError:
            message = f"{name} is still being opened"
            raise ApiError(503, message, "model_loading", "server_error", retry_after_s=RETRY_S) from None

    async def _keep_open(
        self, entry: ModelEntry, opener: Opener, opened: asyncio.Future[OpenedModel]
    ) -> None:
        """Open a model, and keep it open until ``entry.closing`` is set."""
        name = entry.offer.name
        try:
            async with opener(entry.offer, partial(self._reserve, entry)) as batched:
                served = self._served(name, batched)
                opened.set_result(served)
                try:
                    await entry.closing.wait()
                finally:
                    served.tokenizer.close()
                    self.metrics.closed(name)
        except Exception as error:  # noqa: BLE001 - requests that wait must learn of every failure
            if opened.done():
                _log.exception("the model %s did not close well", name)
            else:
                opened.set_exception(error)
                opened.exception()  # requests that wait raise it; there may be none left
        finally:
            opened.cancel()
            entry.opened, entry.memory_bytes = None, 0

    async def _reserve(self, entry: ModelEntry, needed: int) -> None:
        """Reserve memory for a model, and close idle ones for it. Raises ``OutOfResources``."""
        closed = to_close([*self.entries.values()], needed, self._max_bytes)
        if closed is None:
            fits = needed <= self._max_bytes
            hint = "try again when other models are idle, or " if fits else ""
            raise OutOfResources(
                f"{entry.offer.name} takes {needed / 1e9:.2g} GB of memory here, and "
                f"{'other models use' if fits else 'all models may take'} {self._max_bytes / 1e9:.2g} GB",
                hint=f"{hint}start the endpoint with a larger --max-memory",
            )
        entry.memory_bytes = needed
        await self._close(closed)

    async def _close_idle(self) -> None:
        least_s = asyncio.get_running_loop().time() - IDLE_S
        await self._close([each for each in self.entries.values() if each.is_idle and each.used_s <= least_s])

    async def _close(self, entries: Sequence[ModelEntry]) -> None:
        for entry in entries:
            entry.closing.set()
        if tasks := [entry.task for entry in entries if entry.task is not None]:
            await asyncio.wait(tasks)
