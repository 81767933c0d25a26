"""Detects a duplicate identity: another process that uses the same key on the network.

1. Each process announces its addresses with a number that grows, under a topic of its identity.
2. Before each announcement the process looks for the newest one. A higher number than its own last
   one comes from another process that runs now: earlier processes left lower numbers.
3. The owner is warned, and neither process stops. Nobody can decide which process is legitimate.
   Otherwise a thief of the key could stop the owner's node.
"""

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from random import Random

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement, Announcer
from swarmnet_protocols.directory.host_announcements import MAX_ADDRESSES, listed
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import in_background, loop_time, persist
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.identity import peer_id_of
from swarmnet_protocols.net.refusal import printable
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import records_pb2 as pb

_log = logging.getLogger(__name__)

REMEMBERED_S = 600.0
"""Seconds after its last announcement until a duplicate counts as gone."""


def topic_of(peer: PeerId) -> str:
    """Return the topic of the announcements of a peer's processes."""
    return f"identity/{peer}"


class DuplicateWatch:
    """Announces this process and looks for a duplicate, while :meth:`running`.

    ``changed`` is called with the warning about a duplicate, and with "" when it has gone.
    """

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
        self._lifetime_s = 3 * timing.identity_announce_s
        self._number = 0
        """The number of the next announcement."""
        self._highest = 0
        """The highest number announced by this process or found; 0 before the first look."""
        self._addresses: tuple[str, ...] = ()
        """Addresses where the duplicate was last found."""
        self._heard_at = -math.inf
        """Loop time at which its last announcement was found."""
        self._warned = ""
        self.announcer = Announcer(
            directory, rng, self._announcements, timing.identity_announce_s, is_needed=self._look
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["DuplicateWatch"]:
        """Announce this process, and look for a duplicate, while the context is open."""
        async with in_background(persist("the watch for duplicates", self.announcer.run)):
            yield self

    def warning(self) -> str:
        """Return the warning for the owner; empty while there is no duplicate."""
        if loop_time() >= self._heard_at + REMEMBERED_S:
            return ""
        ours = self._transport.addresses()
        where = printable(", ".join(address for address in self._addresses if address not in ours))
        return (
            f"another process is on the network as {self._transport.peer_id}{f', at {where}' if where else ''}: two machines "
            "have copies of one identity key, and clients reach either. Stop one of them and start it with another --data-dir; "
            "if you know of none, the key was stolen: stop this node too"
        )

    async def _look(self) -> bool:
        """Look for a duplicate before each announcement. The announcement is needed in any case."""
        with contextlib.suppress(SwarmnetError):  # the directory may answer next time
            await self._read()
        before, self._warned = self._warned, self.warning()
        if self._warned and not before:
            _log.warning("%s", self._warned)
        if bool(self._warned) != bool(before):
            self._changed(self._warned)
        self._highest = max(self._highest, self._number)
        return True

    async def _read(self) -> None:
        peer = self._transport.peer_id
        for record in await self._directory.lookup(topic_of(peer)):
            if peer_id_of(record.signer) == peer:  # any member may publish under the topic
                with contextlib.suppress(DecodeError):
                    self._found(pb.ProcessRecord.FromString(record.body))

    def _found(self, process: pb.ProcessRecord) -> None:
        # The first look proves nothing: an earlier process may have left a higher number, if the
        # clock was set back since.
        if 0 < self._highest < process.number:
            self._addresses = tuple(process.addresses[:MAX_ADDRESSES])
            self._heard_at = loop_time()
        self._highest = max(self._highest, process.number)

    def _announcements(self) -> Iterable[Announcement]:
        # Milliseconds, so that the first number is above all of an earlier process.
        self._number = int(self._directory.clock() * 1000)
        body = pb.ProcessRecord(number=self._number, addresses=listed(self._transport.addresses()))
        yield Announcement(topic_of(self._transport.peer_id), body.SerializeToString(), self._lifetime_s)
