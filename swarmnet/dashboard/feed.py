"""The feed: derives the state from a snapshot every tick, sends the change to all viewers, and
records history."""

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
from swarmnet.dashboard.observing.observations import Snapshot
from swarmnet.dashboard.sampling import HistorySampler, ModelSample, PeerSample
from swarmnet.dashboard.state import State, derive, known_before, merge_patch
from swarmnet.web.pages import Content
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.machine.aio import in_background

TICK_S = 2.0
"""Seconds between two states."""
MAX_VIEWERS = 64
"""Most open event streams."""
MAX_QUEUED = 8
"""Most patches queued for a slow viewer; beyond that, they are replaced by the whole state."""
RECENT_STATES = 4
"""Number of earlier states kept. A viewer that has one of them receives a patch instead of the
whole state."""
DOWNSAMPLE_S = 600.0
"""Seconds between two calls of ``History.downsample``."""
_log = logging.getLogger(__name__)


class SnapshotSource(Protocol):
    """An ``Observer``, or a simulation of one in tests."""

    def snapshot(self) -> Snapshot:
        """Return all that the observer knows now."""


@dataclass(frozen=True)
class EncodedState:
    """A state as JSON. It is encoded and compressed at first use, once for all viewers."""

    body: Mapping[str, Any]
    etag: str

    @cached_property
    def text(self) -> str:
        return encode(self.body)

    @cached_property
    def content(self) -> Content:
        text = self.text.encode()
        return Content(text, gzip.compress(text, 5, mtime=0), self.etag, "application/json")


def encode(value: object) -> str:
    """Return ``value`` as compact JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class Viewer:
    """The queue of one viewer's events. The first event is ``patch``. If ``patch`` is None, it is
    the whole state."""

    def __init__(self, patch: str | None) -> None:
        self._patches = deque([] if patch is None else [patch])
        self._needs_state = patch is None
        self._ready = asyncio.Event()
        self._ready.set()

    def offer(self, patch: str) -> None:
        """Queue a patch."""
        if self._needs_state:
            return
        self._patches.append(patch)
        if len(self._patches) > MAX_QUEUED:
            self._patches.clear()
            self._needs_state = True
        self._ready.set()

    async def next(self, feed: "Feed") -> tuple[str, str]:
        """Wait for the next event; returns its name, ``state`` or ``patch``, and its JSON."""
        await self._ready.wait()
        if self._needs_state:
            self._needs_state = False
            self._ready.clear()
            return "state", feed.now.text
        patch = self._patches.popleft()
        if not self._patches:
            self._ready.clear()
        return "patch", patch


class Feed:
    """The current state of a swarm, its history, and its viewers."""

    def __init__(self, source: SnapshotSource, history: History) -> None:
        self.history = history
        self._source = source
        self._sampler = HistorySampler()
        self._viewers: set[Viewer] = set()
        self._peaks: dict[bytes, int] = {}
        self._downsampled_at_s = 0.0
        before = known_before(history.events(limit=100), history.jobs())
        run = secrets.token_hex(8)
        self._etags = (f'"{run}-{number}"' for number in count())
        self._snapshot = source.snapshot()
        self._state = derive(self._snapshot, before)
        self.now = EncodedState(self._state.body, next(self._etags))
        self._recent: deque[EncodedState] = deque(maxlen=RECENT_STATES)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Feed"]:
        """Tick while the context is open."""
        async with in_background(self._keep_ticking()):
            yield self

    @property
    def now_s(self) -> float:
        """Unix time of the current state."""
        return float(self._state.body["swarm"]["now_s"])

    def begun_models(self, model: str) -> list[ModelSample]:
        """Return a model's sample that is not in the history yet, or nothing."""
        samples = self._sampler.begun_models(self._snapshot, self._state.body)
        return [sample for sample in samples if sample.model == model]

    def begun_peers(self) -> dict[str, PeerSample]:
        """Return the samples of peers that are not in the history yet."""
        samples = self._sampler.begun_peers(self._snapshot, self._state.body)
        return {sample.peer: sample for sample in samples}

    def given(self, peer: str) -> dict[str, float] | None:
        """Return what a peer says it has given over restarts and updates, or None until it has
        reported."""
        for seen in self._snapshot.peers:
            if seen.peer == peer and seen.newest is not None:
                given = seen.newest.report.given
                return {each.name: getattr(given, each.name) for each in given.DESCRIPTOR.fields}
        return None

    @property
    def is_full(self) -> bool:
        """True if the number of viewers is at its limit."""
        return len(self._viewers) >= MAX_VIEWERS

    @asynccontextmanager
    async def watching(self, have: str = "") -> AsyncIterator[Viewer]:
        """Yield a viewer that receives all changes while the context is open.

        ``have`` is the ETag of the viewer's state. If that state is still kept, the first event is
        the patch from it, otherwise the whole state. Raises ``OutOfResources`` at ``MAX_VIEWERS``.
        """
        if self.is_full:
            raise OutOfResources(f"{MAX_VIEWERS} viewers are connected already")
        viewer = Viewer(self._patch_since(have))
        self._viewers.add(viewer)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    async def tick(self) -> None:
        """Derive the next state, send the change to all viewers, and record history."""
        snapshot = self._source.snapshot()
        snapshot = replace(snapshot, recent=self._sampler.recent(snapshot), peak_sessions=self._peaks)
        before, self._snapshot = self._state, snapshot
        self._state = derive(snapshot, before)
        self._recent.append(self.now)
        self.now = EncodedState(self._state.body, next(self._etags))
        if self._viewers:
            patch = encode(merge_patch(before.body, self._state.body))
            for viewer in self._viewers:
                viewer.offer(patch)
        await self._record(snapshot, before, self._state)

    def _patch_since(self, etag: str) -> str | None:
        for state in (self.now, *self._recent):
            if state.etag == etag:
                return encode(merge_patch(state.body, self.now.body))
        return None

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
            except Exception:  # noqa: BLE001 - one failed tick must end neither the dashboard nor the node it runs in
                _log.exception("cannot update the dashboard")

    async def _record(self, snapshot: Snapshot, before: State, state: State) -> None:
        jobs, known = state.body["jobs"], before.body["jobs"]
        samples: dict[str, Any] = {
            "models": self._sampler.models(snapshot, state.body),
            "peers": self._sampler.peers(snapshot, state.body),
            "jobs": self._sampler.jobs(snapshot, state.body),
            "job_entries": {job: entry for job, entry in jobs.items() if entry != known.get(job)},
            "events": state.new_events,
        }
        if any(samples.values()):
            await asyncio.to_thread(self.history.add, **samples, now_s=snapshot.now_s)
        if samples["models"] or not self._peaks:
            self._peaks = await asyncio.to_thread(self._read_peaks, snapshot)
        if snapshot.now_s - self._downsampled_at_s >= DOWNSAMPLE_S:
            self._downsampled_at_s = snapshot.now_s
            await asyncio.to_thread(self.history.downsample, snapshot.now_s)

    def _read_peaks(self, snapshot: Snapshot) -> dict[bytes, int]:
        found = {
            model.manifest: self.history.peak_sessions(model.manifest.hex(), snapshot.now_s - DAY_S)
            for model in snapshot.models
        }
        return {manifest: peak for manifest, peak in found.items() if peak is not None}
