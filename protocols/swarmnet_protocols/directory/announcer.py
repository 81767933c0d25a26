"""The announcer: keeps a peer's announcements in the directory, where every record expires.

A peer has one ``Announcer`` for each thing that it announces: its blocks, its experts, its models,
its job, its process, itself as a relay or an issuer. The life of an announcer:

1. ``run`` announces at the start, then every ``every_s``, and at once when ``facts`` change. It
   skips announcements that readers do not need.
2. After a failure it tries again soon, and then less and less often. The record of the last
   announcement outlives a few failures.
3. ``withdraw`` announces the end, so that readers need not wait until the record expires.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import loop_time

RETRY_S = 1.0
"""Seconds until the first retry of a failed announcement.

The pause doubles with each failure, up to the usual period. With a shorter one, peers would flood a
directory that is recovering. With a longer one, a newcomer whose first announcement failed would
stay unknown.
"""


class Announcement(NamedTuple):
    """A record that this peer publishes."""

    topic: str
    body: bytes
    lifetime_s: float

    async def publish(self, directory: Directory) -> None:
        """Publish this record. Raises ``SwarmnetError`` if the directory does not take it."""
        await directory.publish(self.topic, self.body, lifetime_s=self.lifetime_s)


Compose = Callable[[], Iterable[Announcement]]
"""Returns what to announce now; nothing while there is nothing to announce."""


async def _always() -> bool:
    return True


@dataclass
class Announcer:
    """Announces what ``compose`` returns, again and again."""

    directory: Directory
    rng: random.Random
    compose: Compose
    every_s: float
    """Most seconds between two announcements. May change at any time."""
    facts: Callable[[], object] = lambda: None
    """Returns the facts behind the announcement. A change is announced at once."""
    check_s: float = math.inf
    """Seconds between two checks of ``facts``."""
    is_needed: Callable[[], Awaitable[bool]] = _always
    """Returns whether readers need the next announcement."""
    ending: Compose = lambda: ()
    """Returns what ``withdraw`` announces."""
    _announced: object = field(default=None, init=False)
    """The facts at the last announcement."""
    _due: float = field(default=-math.inf, init=False)
    """Time of the next announcement, on the clock of the loop."""
    _retry_s: float = field(default=RETRY_S, init=False)

    async def run(self) -> NoReturn:
        """Announce until cancelled."""
        while True:
            left_s = self._due - loop_time()
            if left_s > 0 and self.facts() == self._announced:
                await asyncio.sleep(min(left_s, self.check_s))
            else:
                await self.try_to_announce()

    async def try_to_announce(self) -> None:
        """Announce at once. If the directory does not answer, ``run`` tries again."""
        with contextlib.suppress(SwarmnetError):
            await self.announce()

    async def announce(self) -> None:
        """Announce at once. Raises ``SwarmnetError`` if the directory does not take the records."""
        self._announced = self.facts()
        try:
            announcements = list(self.compose())
            if announcements and await self.is_needed():
                for each in announcements:
                    await each.publish(self.directory)
        except SwarmnetError:
            self._pause(min(self._retry_s, self.every_s))
            self._retry_s = min(2 * self._retry_s, self.every_s)
            raise
        self._pause(self.every_s)
        self._retry_s = RETRY_S

    def _pause(self, pause_s: float) -> None:
        # Randomised, so that peers that started together do not announce together for ever.
        self._due = loop_time() + pause_s * self.rng.uniform(0.8, 1.0)

    async def withdraw(self, within_s: float | None = None) -> None:
        """Announce the end, or give up after ``within_s``: the records expire soon anyway."""
        with contextlib.suppress(SwarmnetError, TimeoutError):
            async with asyncio.timeout(within_s):
                for each in self.ending():
                    await each.publish(self.directory)
