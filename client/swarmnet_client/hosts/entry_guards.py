"""Entry guards: the few hosts that a client keeps as first and last hop for weeks, like Tor's
guards.

The first hop can read the prompt, and the last can compute the answer. A client that picks new ones
each time would sooner or later pick a hostile one. Clients draw different guards, so load spreads.
"""

import contextlib
import json
import math
import random
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

from swarmnet_protocols.machine.files import make_private, write_whole
from swarmnet_protocols.net import PeerId

WANTED = 2
"""Number of guards wanted online at each end. With fewer, another one is chosen."""
MOST = 4
"""Most guards kept for each end, online or not."""
LIFETIME_S = (14 * 86400.0, 42 * 86400.0)
"""Seconds that a guard is kept, drawn from this range, so that an observer cannot foresee the
end."""
ABSENT_S = 7 * 86400.0
"""Seconds offline after which a guard is given up."""
SEEN_EVERY_S = 3600.0
"""Seconds between two updates of a guard's last sighting in the file."""
MAX_FILE_BYTES = 16 << 10
_ENDS = ("first", "last")


@dataclass
class _Guard:
    until: float
    seen: float


class EntryGuards:
    """The guards of one client for one model. They are kept in the file at ``path``, if given and
    writable."""

    def __init__(self, path: Path | None, rng: random.Random, wall_clock: Callable[[], float]) -> None:
        self._path = path
        self._rng = rng
        self._clock = wall_clock
        self._ends: dict[str, dict[PeerId, _Guard]] = _read(path) if path else {end: {} for end in _ENDS}

    def peers(self) -> frozenset[PeerId]:
        """Return the present guards."""
        self._forget()
        return frozenset(peer for guards in self._ends.values() for peer in guards)

    def used(self, first: PeerId, last: PeerId, online: Container[PeerId]) -> None:
        """Note that a chain with these ends was opened while the hosts ``online`` were known.

        An end becomes a guard if too few guards are online.
        """
        self._forget()
        now, is_changed = self._clock(), False
        for end, peer in zip(_ENDS, (first, last), strict=True):
            guards = self._ends[end]
            for each, guard in guards.items():
                if each in online and now - guard.seen > SEEN_EVERY_S:
                    guard.seen, is_changed = now, True
            if peer not in guards and sum(each in online for each in guards) < WANTED:
                if len(guards) >= MOST:
                    del guards[min(guards, key=lambda each: guards[each].seen)]
                guards[peer], is_changed = _Guard(now + self._rng.uniform(*LIFETIME_S), now), True
        if is_changed:
            self._write()

    def _forget(self) -> None:
        now = self._clock()
        for guards in self._ends.values():
            for peer in [
                each
                for each, guard in guards.items()
                # A time in the future was written by a clock that was wrong.
                if not (now < guard.until <= now + LIFETIME_S[1] and now - ABSENT_S < guard.seen <= now)
            ]:
                del guards[peer]

    def _write(self) -> None:
        if self._path is None:
            return
        content = {
            end: {peer: [guard.until, guard.seen] for peer, guard in guards.items()}
            for end, guards in self._ends.items()
        }
        # Without a folder to write to, the guards last as long as the process.
        with contextlib.suppress(OSError):
            make_private(self._path.parent)
            write_whole(self._path, json.dumps(content).encode(), durable=False)


def _read(path: Path) -> dict[str, dict[PeerId, _Guard]]:
    """Return the guards in the file at ``path``; none if it is missing or damaged."""
    ends: dict[str, dict[PeerId, _Guard]] = {end: {} for end in _ENDS}
    try:
        with path.open("rb") as stream:
            content = json.loads(stream.read(MAX_FILE_BYTES))
        for end in _ENDS:
            for peer, (until, seen) in list(content[end].items())[:MOST]:
                if math.isfinite(until) and math.isfinite(seen):
                    ends[end][PeerId(peer)] = _Guard(float(until), float(seen))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {end: {} for end in _ENDS}
    return ends
