"""Detects a duplicate identity: another process that uses the same key on the network.

1. Each process publishes announcements with a random process number. Two processes with one key
   publish under the same signer and topic, so the directory returns the newer announcement.
2. A process that finds another number looks and announces more often for a while. So does a process
   that has just started. Both processes are then certain within seconds.
3. The owner is warned, and neither process stops. Nobody can decide which process is legitimate.
   Otherwise a thief of the key could stop the owner's node.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement, Announcer
from swarmnet_protocols.directory.host_announcements import MAX_ADDRESSES, listed
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel, persist
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.identity import peer_id_of
from swarmnet_protocols.net.refusal import printable
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import records_pb2 as pb

_log = logging.getLogger(__name__)

PROCESS_BYTES = 16
REMEMBERED_S = 600.0
"""Seconds after its last announcement until a duplicate counts as gone."""
SUSPECTED_FACTOR = 12
"""Factor by which a process looks and announces more often while it suspects a duplicate."""
SUSPECTED_AT_START, SUSPECTED = 0.25, 1.5
"""How long a process suspects a duplicate: after its start, after another's announcement.

In units of ``Timing.identity_announce_s``. Long enough for the other process to look, whether it
has just started or was already running.
"""


@dataclass(frozen=True)
class ProcessAnnouncement:
    """The number and addresses of a process. ``sequence`` grows with each of its announcements."""

    process: bytes
    addresses: tuple[str, ...]
    sequence: int


class Duplicate:
    """The evidence of another process with this identity. Pure: takes the time as an argument.

    One announcement may be left over from a process that ended. So only a second, newer
    announcement proves a duplicate.
    """

    def __init__(self, process: bytes, period_s: float, now: float) -> None:
        """Start for ``process`` at time ``now``.

        ``period_s``: seconds between two looks while no duplicate is suspected.
        """
        self._process = process
        self._period_s = period_s
        self._suspected_until = now + SUSPECTED_AT_START * period_s
        self._last: ProcessAnnouncement | None = None
        self._heard_at = -math.inf

    def look(self, found: ProcessAnnouncement, now: float) -> None:
        """Record the newest announcement of this identity, usually this process's own."""
        if found.process == self._process:
            return
        is_later = self._last is not None and found.sequence > self._last.sequence
        if self.at(now) is None and (self._last is None or is_later):
            self._suspected_until = now + SUSPECTED * self._period_s
        if is_later:
            self._heard_at = now
        self._last = found

    def at(self, now: float) -> ProcessAnnouncement | None:
        """Return the last announcement of a running duplicate; None if there is no duplicate."""
        return self._last if now < self._heard_at + REMEMBERED_S else None

    def every_s(self, now: float, rng: Random) -> float:
        """Return the most seconds until the next look and announcement."""
        if now < self._suspected_until:
            # Randomised: of two processes in step, one would only ever see its own announcements.
            return rng.uniform(0.5, 1.0) * self._period_s / SUSPECTED_FACTOR
        return self._period_s


def topic_of(peer: PeerId) -> str:
    """Return the topic of the announcements of a peer's processes."""
    return f"identity/{peer}"


class DuplicateWatch:
    """Announces this process and looks for a duplicate. :meth:`run` makes one."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        rng: Random,
        timing: Timing,
        changed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._changed = changed
        self._transport = transport
        self._directory = directory
        self._rng = rng
        self._timing = timing
        self._process = rng.randbytes(PROCESS_BYTES)
        self._duplicate = Duplicate(self._process, timing.identity_announce_s, self._now())
        self._was_found = False
        self._announcer = Announcer(
            directory, rng, self._announcements, timing.identity_announce_s, is_needed=self._look
        )

    @classmethod
    @asynccontextmanager
    async def run(
        cls,
        transport: Transport,
        directory: Directory,
        rng: Random,
        timing: Timing,
        changed: Callable[[str], None] = lambda _: None,
    ) -> AsyncIterator["DuplicateWatch"]:
        """Announce this process, and look for a duplicate, while the context is open.

        Logs a duplicate once. Then calls ``changed`` with the warning, and with "" when the
        duplicate has gone.
        """
        watch = cls(transport, directory, rng, timing, changed)
        watching = asyncio.create_task(
            persist("the watch for duplicates", watch._announcer.run), name="duplicate-watch"
        )
        try:
            yield watch
        finally:
            await cancel(watching)

    def warning(self) -> str:
        """The warning for the owner; empty while there is no duplicate."""
        duplicate = self._duplicate.at(self._now())
        if duplicate is None:
            return ""
        ours = self._transport.addresses()
        where = printable(", ".join(address for address in duplicate.addresses if address not in ours))
        return (
            f"another process is on the network as {self._transport.peer_id}{f', at {where}' if where else ''}: two machines "
            "have copies of one identity key, and clients reach either. Stop one of them and start it with another --data-dir; "
            "if you know of none, the key was stolen: stop this node too"
        )

    async def _look(self) -> bool:
        """Look for a duplicate before each announcement. The announcement is needed in any case."""
        with contextlib.suppress(SwarmnetError):  # the directory may answer next time
            await self._read()
        warning = self.warning()
        if warning and not self._was_found:
            _log.warning("%s", warning)
        if self._was_found != bool(warning):
            self._changed(warning)
        self._was_found = bool(warning)
        self._announcer.every_s = self._duplicate.every_s(self._now(), self._rng)
        return True

    async def _read(self) -> None:
        peer = self._transport.peer_id
        for record in await self._directory.lookup(topic_of(peer)):
            if peer_id_of(record.signer) == peer:  # any member may publish under the topic
                with contextlib.suppress(DecodeError):
                    body = pb.ProcessRecord.FromString(record.body)
                    found = ProcessAnnouncement(
                        body.process, tuple(body.addresses[:MAX_ADDRESSES]), record.sequence
                    )
                    self._duplicate.look(found, self._now())

    def _announcements(self) -> Iterable[Announcement]:
        body = pb.ProcessRecord(process=self._process, addresses=listed(self._transport.addresses()))
        lifetime_s = 3 * self._timing.identity_announce_s
        yield Announcement(topic_of(self._transport.peer_id), body.SerializeToString(), lifetime_s)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
