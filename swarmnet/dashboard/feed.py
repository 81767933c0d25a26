"""The state as it changes: derived once a tick and shared by all viewers."""

import asyncio
import gzip
import json
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Protocol

from swarmnet.dashboard.history import DAY_S, History
from swarmnet.dashboard.observing.sightings import Look
from swarmnet.dashboard.sampling import Sampler
from swarmnet.dashboard.state.state import State, derive, merge_patch
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.machine.aio import cancel

TICK_S = 2.0
MAX_VIEWERS = 64
MAX_BEHIND = 8
"""Patches that wait for a slow viewer. Beyond these it is given the whole state in their place."""
RECENT = 4
"""States before the present one whose readers need only what changed since."""
THIN_EVERY_S = 600.0
PEAK_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class Source(Protocol):
    """Where looks come from."""

    def look(self) -> Look:
        """What is known now."""


@dataclass(frozen=True)
class Encoded:
    """A state as it is sent: encoded once, when first asked for."""

    body: Mapping[str, Any]
    etag: str
    media_type = "application/json"

    @cached_property
    def text(self) -> str:
        return encode(self.body)

    @property
    def content(self) -> bytes:
        return self.text.encode()

    @cached_property
    def zipped(self) -> bytes:
        return gzip.compress(self.content, compresslevel=5, mtime=0)


def encode(value: object) -> str:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class Viewer:
    """What one viewer has still to be sent: first ``patch``, or the whole state where there is none."""

    def __init__(self, patch: str | None) -> None:
        self._patches = deque([] if patch is None else [patch])
        self._behind = patch is None
        self._news = asyncio.Event()
        self._news.set()

    def offer(self, patch: str) -> None:
        if self._behind:
            return
        self._patches.append(patch)
        if len(self._patches) > MAX_BEHIND:
            self._patches.clear()
            self._behind = True
        self._news.set()

    async def next(self, feed: "Feed") -> tuple[str, str]:
        """The next event: its name, ``state`` or ``patch``, and its JSON."""
        await self._news.wait()
        if self._behind:
            self._behind = False
            self._news.clear()
            return "state", feed.now.text
        patch = self._patches.popleft()
        if not self._patches:
            self._news.clear()
        return "patch", patch


class Feed:
    """The present state of a swarm, and its history. Made by ``run``."""

    def __init__(self, source: Source, history: History) -> None:
        self.history = history
        self._source = source
        self._sampler = Sampler()
        self._viewers: set[Viewer] = set()
        self._peaks: dict[bytes, int] = {}
        self._peaks_at_s = 0.0
        self._thinned_at_s = 0.0
        events = tuple(history.events(limit=100))
        run = secrets.token_hex(8)
        self._etags = (f'"{run}-{number}"' for number in count())
        self._state = derive(source.look(), None, events)
        self.now = Encoded(self._state.body, next(self._etags))
        self._recent: deque[Encoded] = deque(maxlen=RECENT)

    @classmethod
    @asynccontextmanager
    async def run(cls, source: Source, history: History) -> AsyncIterator["Feed"]:
        """A feed that goes on for as long as the context."""
        feed = cls(source, history)
        ticking = asyncio.create_task(feed._keep_ticking(), name="dashboard")
        try:
            yield feed
        finally:
            await cancel(ticking)

    @property
    def now_s(self) -> float:
        """Unix time of the present state."""
        return float(self._state.body["swarm"]["now_s"])

    @property
    def is_full(self) -> bool:
        """Whether the number of viewers is at its limit."""
        return len(self._viewers) >= MAX_VIEWERS

    @asynccontextmanager
    async def watching(self, have: str = "") -> AsyncIterator[Viewer]:
        """A viewer, who sees every change since the state with the ETag ``have``, or, if that is long ago, since the present one.

        Raises ``OutOfResources`` when there are too many.
        """
        if self.is_full:
            raise OutOfResources(f"{MAX_VIEWERS} viewers watch already")
        viewer = Viewer(self._patch_since(have))
        self._viewers.add(viewer)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    async def tick(self) -> None:
        """Observe, send changes to all viewers, and record history."""
        look = self._source.look()
        look = replace(look, recent=self._sampler.recent(look), peak_sessions=self._peaks)
        before = self._state
        self._state = derive(look, before)
        self._recent.append(self.now)
        self.now = Encoded(self._state.body, next(self._etags))
        if self._viewers:
            patch = encode(merge_patch(before.body, self._state.body))
            for viewer in self._viewers:
                viewer.offer(patch)
        await self._remember(look, self._state)

    def _patch_since(self, etag: str) -> str | None:
        for known in (self.now, *self._recent):
            if known.etag == etag:
                return encode(merge_patch(known.body, self.now.body))
        return None

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
            except Exception:  # noqa: BLE001 - the supervisor: what cannot be shown now may be at the next tick, and a node goes on
                _log.exception("the dashboard could not be brought up to date")

    async def _remember(self, look: Look, state: State) -> None:
        samples: dict[str, Any] = {
            "models": self._sampler.models(look, state.body),
            "peers": self._sampler.peers(look, state.body),
            "jobs": self._sampler.jobs(look, state.body),
            "events": state.new_events,
        }
        if any(samples.values()):
            await asyncio.to_thread(self.history.add, **samples)
        if look.now_s - self._peaks_at_s >= PEAK_EVERY_S:
            self._peaks_at_s = look.now_s
            self._peaks = await asyncio.to_thread(self._read_peaks, look)
        if look.now_s - self._thinned_at_s >= THIN_EVERY_S:
            self._thinned_at_s = look.now_s
            await asyncio.to_thread(self.history.thin, look.now_s)

    def _read_peaks(self, look: Look) -> dict[bytes, int]:
        found = {
            model.manifest: self.history.peak_sessions(model.manifest.hex(), look.now_s - DAY_S)
            for model in look.models
        }
        return {manifest: peak for manifest, peak in found.items() if peak is not None}
