"""The models that a gateway offers, by their names.

The table of a gateway of one model has the model, which stays open, and its adapters. In the table
of a swarm:

1. :meth:`ModelTable.of_swarm` reads what hosts offer, again and again. A model with missing blocks
   is forming, and requests for it are refused.
2. A request names a model, a model with an adapter, or a job. The name of a job means its newest
   revision that hosts offer.
3. The model opens, and closes when it is idle or another one needs its memory (``model_life.py``).
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.tokenization import PromptTokenizer
from swarmnet.gateway.metrics import GatewayMetrics, ModelMetrics
from swarmnet.gateway.model_life import IDLE_S, ModelLife, to_close
from swarmnet.gateway.parsing import MAX_TOKENS
from swarmnet.gateway.routing.router import AUTO
from swarmnet_client.batching.continuous_batching import BatchedModel
from swarmnet_client.hosts.model_offers import ModelOffer
from swarmnet_protocols.directory.revisions import revisions
from swarmnet_protocols.errors import ConfigError, OutOfResources, SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import cancel, in_background, loop_time, persist
from swarmnet_protocols.models.public_names import name_for_peers

if TYPE_CHECKING:
    from swarmnet_protocols.session.adapters import Adapter

LOOK_S = 15.0
"""Seconds between two looks at what hosts offer. With less, gateways load the directory. With more,
a new model is listed later."""
MAX_LISTED = 10
"""Most names in the message that a model is unknown."""
Reserve = Callable[[int], Awaitable[None]]
"""Reserves the bytes of a model. Raises ``OutOfResources``."""
Opener = Callable[
    [ModelOffer, Reserve], AbstractAsyncContextManager[tuple[BatchedModel, Mapping[str, "Adapter"]]]
]
"""Opens a model with its adapters, by name. Reserves its memory before it loads weights."""


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


@dataclass(frozen=True)
class ModelEntry:
    """A name of the table.

    ``parent``: the model that an adapter changes, which has the same life. None for a model without
    an adapter.
    """

    offer: ModelOffer
    life: ModelLife[dict[str, OpenedModel]]
    parent: str | None = None

    @property
    def served(self) -> OpenedModel | None:
        """The open model. None unless it is open."""
        return (self.life.opened or {}).get(self.offer.name)

    def fields(self) -> dict[str, Any]:
        """Return the fields of this model in a list of models."""
        return {**self.offer.fields(), "loaded": self.served is not None, "parent": self.parent}


class ModelTable:
    """The models of a gateway. Made by :meth:`of` or :meth:`of_swarm`."""

    def __init__(
        self, opener: Opener, adapters: Mapping[str, Iterable[str]], *, max_bytes: float, usual_name: str = ""
    ) -> None:
        """``adapters``: the names of each model's adapters. ``max_bytes``: most memory of all open
        models. ``usual_name``: the model of a request that names none."""
        self.metrics = GatewayMetrics()
        self.entries: dict[str, ModelEntry] = {}
        self.usual_name = usual_name
        self._opener = opener
        self._adapters = adapters
        self._max_bytes = max_bytes

    @classmethod
    @asynccontextmanager
    async def of(
        cls, batched: BatchedModel, adapters: "Mapping[str, Adapter]" = MappingProxyType({})
    ) -> AsyncIterator["ModelTable"]:
        """Offer one open model, alone and with each of its adapters, while the context is open."""

        @asynccontextmanager
        async def opener(*_: Any) -> AsyncIterator[tuple[BatchedModel, Mapping[str, "Adapter"]]]:
            yield batched, adapters

        manifest, name = batched.local.manifest, name_for_peers(batched.local.name)
        table = cls(opener, {name: adapters}, max_bytes=math.inf, usual_name=name)

        async def only() -> list[ModelOffer]:
            return [ModelOffer(name, manifest.hash, manifest.blocks)]

        async with table._reading(only), table.using(name):
            yield table

    @classmethod
    @asynccontextmanager
    async def of_swarm(
        cls,
        read: Callable[[], Awaitable[Sequence[ModelOffer]]],
        opener: Opener,
        max_bytes: int,
        adapters: Mapping[str, Iterable[str]] = MappingProxyType({}),
    ) -> AsyncIterator["ModelTable"]:
        """Offer the models that ``read`` returns, while the context is open."""
        table = cls(opener, adapters, max_bytes=max_bytes)

        async def watch() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                await _close(table._to_close() or ())
                with suppress(SwarmnetError):  # the directory may answer later
                    table.learn(await read())

        async with table._reading(read), in_background(persist("the watch over models", watch)):
            yield table

    @asynccontextmanager
    async def _reading(self, read: Callable[[], Awaitable[Sequence[ModelOffer]]]) -> AsyncIterator[None]:
        self._read = read
        self.learn(await read())
        try:
            yield
        finally:
            await cancel(*(life.close() for life in self._lives))

    @property
    def _lives(self) -> list[ModelLife[dict[str, OpenedModel]]]:
        return [entry.life for entry in self.entries.values() if entry.parent is None]

    @property
    def max_context(self) -> int:
        """Most positions of any model. It bounds a request before its model is known."""
        only = self.entries[self.usual_name].served if self.usual_name else None
        return MAX_TOKENS if only is None else only.batched.context

    def learn(self, offers: Sequence[ModelOffer]) -> None:
        """Replace what hosts offer. Models that are not closed stay."""
        entries = {name: entry for name, entry in self.entries.items() if not entry.life.is_closed}
        adapted = {f"{name}:{each}" for name, adapters in self._adapters.items() for each in adapters}
        for offer in offers:
            known = entries.get(offer.name)
            if offer.name in adapted or (known is not None and known.offer.manifest != offer.manifest):
                continue  # hosts choose any name
            life = ModelLife(offer.name, partial(self._opening, offer.name)) if known is None else known.life
            entries[offer.name] = ModelEntry(offer, life)
            for adapter in self._adapters.get(offer.name, ()):
                name = f"{offer.name}:{adapter}"
                entries[name] = ModelEntry(replace(offer, name=name), life, offer.name)
        self.entries = entries

    def listed(self) -> list[ModelEntry]:
        """Return all entries, by name."""
        return [self.find(name) for name in sorted(self.entries)]

    def find(self, name: str) -> ModelEntry:
        """Return the entry of a model, or of the newest revision of a job, available ones first.

        Raises ``ApiError`` for an unknown name.
        """
        if (entry := self.entries.get(name)) is not None:
            client = entry.served if self.usual_name else None  # it knows more than the table
            return entry if client is None else replace(entry, offer=client.offer)
        try:
            found = revisions((entry.offer for entry in self.entries.values()), name)
        except ConfigError as error:
            raise ApiError(404, f"{error}: {error.hint}", "model_not_found", param="model") from error
        if found:
            return self.entries[min(found, key=lambda offer: bool(offer.missing)).name]
        names = sorted(self.entries)
        here = ", ".join(repr(each) for each in names[:MAX_LISTED])
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        known = f"only {here}{more}" if names else "because nobody hosts a model now"
        message = f"there is no model {name[:200]!r} here, {known}"
        message += "; it needs a router: serve --router FILE" if name == AUTO else ""
        raise ApiError(404, message, "model_not_found", param="model")

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[OpenedModel]:
        """Open a model if it is closed, and keep it open while the context is.

        Raises ``ApiError`` for an unknown or forming model, and as ``ModelLife.using``.
        """
        entry = self.find(name)
        async with entry.life.using() as opened:
            yield opened[entry.offer.name]

    def left_s(self, entry: ModelEntry) -> float | None:
        """Return the seconds until an open model closes if no other request comes. None if it stays
        open, or is closed."""
        if self.usual_name or entry.served is None:
            return None
        now_s = loop_time()
        since_s = entry.life.held.idle_since_s
        return IDLE_S if since_s is None else max(0.0, IDLE_S - (now_s - since_s))

    @asynccontextmanager
    async def _opening(self, name: str) -> AsyncIterator[dict[str, OpenedModel]]:
        async with AsyncExitStack() as stack:
            batched, adapters = await self._open(name, stack)
            metrics = self.metrics.opened(name, batched.batcher)
            stack.callback(self.metrics.closed, name)
            plain = OpenedModel(name, batched, PromptTokenizer(batched), metrics)
            stack.callback(plain.tokenizer.close)
            opened = {name: plain}
            for each, adapter in adapters.items():
                own, metrics = f"{name}:{each}", ModelMetrics(self.metrics, f"{name}:{each}")
                adapted = replace(batched, adapter=adapter)
                opened[own] = replace(plain, name=own, batched=adapted, metrics=metrics)
            yield opened

    async def _open(self, name: str, stack: AsyncExitStack) -> tuple[BatchedModel, "Mapping[str, Adapter]"]:
        """Open a model until ``stack`` is closed.

        If its hosts do not answer, look again, and open it once more or tell what is missing.
        """
        try:
            return await self._try(name, stack)
        except Unreachable:
            self.learn(await self._read())
            return await self._try(name, stack)

    async def _try(self, name: str, stack: AsyncExitStack) -> tuple[BatchedModel, "Mapping[str, Adapter]"]:
        offer, life = self.entries[name].offer, self.entries[name].life
        if offer.missing:
            message = f"{name} is forming: {offer.lack()}"
            raise ApiError(503, message, "model_forming", "server_error", retry_after_s=int(LOOK_S))

        async def reserve(needed: int) -> None:
            closed = self._to_close(needed)
            if closed is None:
                raise _no_memory(name, needed, self._max_bytes)
            life.memory_bytes = needed
            await _close(closed)

        return await stack.enter_async_context(self._opener(offer, reserve))

    def _to_close(self, needed: int = 0) -> list[ModelLife[dict[str, OpenedModel]]] | None:
        """Return the models to close: those idle for long, and others for ``needed`` more bytes.
        None if the bytes find no room."""
        lives, now_s = self._lives, loop_time()
        found = to_close([life.held for life in lives], now_s, self._max_bytes, needed)
        return None if found is None else [lives[at] for at in found]


async def _close(lives: Iterable[ModelLife[Any]]) -> None:
    if tasks := [task for life in lives if (task := life.close()) is not None]:
        await asyncio.wait(tasks)


def _no_memory(name: str, needed: int, limit: float) -> OutOfResources:
    fits = needed <= limit
    hint = "try again when other models are idle, or " if fits else ""
    return OutOfResources(
        f"{name} takes {needed / 1e9:.2g} GB of memory here, and "
        f"{'other models use' if fits else 'all models may take'} {limit / 1e9:.2g} GB",
        hint=f"{hint}start the endpoint with a larger --max-memory",
    )
